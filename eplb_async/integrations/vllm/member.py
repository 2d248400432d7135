"""Each rank's part of a round. Pure: messages in, messages out; see :mod:`.coordinator` for the rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from eplb_async.integrations.vllm.messages import Cause, Kind, Message

__all__ = ["Member", "Outcome", "Phase"]


class Phase(Enum):
    """Where this rank's call stands."""

    IDLE = "idle"
    JOINED = "waits until all ranks have come"
    READING = "reads"
    DONE = "waits until all ranks have read"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended.

    Attributes:
        cause: ``NONE`` if well.
        origin: Rank that the failure is due to, or -1.
        text: Why.
    """

    cause: Cause
    origin: int = -1
    text: str = ""


class Member:
    """One rank's calls.

    Args:
        rank: It.

    Attributes:
        phase: Where the call stands.
        outcome: How the last call ended; ``None`` while one runs.
        waiting_for: What the coordinator said of whom it waits for.
    """

    def __init__(self, rank: int) -> None:
        self.phase = Phase.IDLE
        self.outcome: Outcome | None = None
        self.waiting_for = ""
        self._rank = rank
        self._attempt = 0
        self._round = 0
        self._said: Message | None = None
        self._lost: Outcome | None = None

    def join(self, layer: int, digest: bytes) -> Message | None:
        """Begin a call; ``None`` where it has ended already, because a rank is gone."""
        assert self.phase is Phase.IDLE
        self._attempt += 1
        self.waiting_for = ""
        self.outcome = self._lost
        if self._lost is not None:
            return None
        self.phase = Phase.JOINED
        return self._say(Message(Kind.JOIN, self._rank, self._attempt, layer=layer, digest=digest))

    def done(self) -> Message:
        """This rank's READs are over."""
        assert self.phase is Phase.READING
        self.phase = Phase.DONE
        return self._say(Message(Kind.DONE, self._rank, self._attempt, self._round))

    def fail(self, cause: Cause, text: str, origin: int = -1) -> Message:
        """Leave the call that runs, or one that fails before it has begun."""
        if self.phase is Phase.IDLE:
            self._attempt += 1
        return self._leave(Outcome(cause, origin, text))

    def gone(self, rank: int, text: str) -> Message | None:
        """The coordinator is gone, or another rank is: no call can end well any more."""
        self._lost = self._lost or Outcome(Cause.GONE, rank, text)
        return None if self.phase is Phase.IDLE else self._leave(self._lost)

    def again(self) -> Message | None:
        """What to say again from time to time while this rank waits for the coordinator."""
        return self._said if self.phase in (Phase.JOINED, Phase.DONE) else None

    def handle(self, message: Message) -> Message | None:
        """Take a message of the coordinator; returns the answer, if there is one."""
        if message.kind is Kind.LEAVE:
            self.gone(message.sender, f"rank {message.sender} closed its communicator")
            return None
        if message.attempt != self._attempt or self.phase is Phase.IDLE:
            return self._about_the_past(message)
        if message.kind is Kind.WAIT:
            self.waiting_for = message.text
        elif message.kind is Kind.BEGIN:
            if self.phase is Phase.JOINED:
                self.phase, self._round, self.waiting_for = Phase.READING, message.round, ""
            elif self.phase is Phase.DONE:
                return self._said
        elif message.kind is Kind.END and (message.cause is not Cause.NONE or self.phase is Phase.DONE):
            self.outcome = Outcome(message.cause, message.origin, message.text)
            if message.cause is Cause.GONE:
                self._lost = self.outcome
            self.phase = Phase.IDLE
            return self._about_the_past(message)
        return None

    def _leave(self, outcome: Outcome) -> Message:
        self.phase, self.outcome = Phase.IDLE, outcome
        return self._say(
            Message(
                Kind.FAIL,
                self._rank,
                self._attempt,
                self._round,
                cause=outcome.cause,
                origin=outcome.origin,
                text=outcome.text,
            )
        )

    def _about_the_past(self, message: Message) -> Message | None:
        """The answer to what is said of a call that has ended here, or never was."""
        if message.attempt > self._attempt:
            return None
        if message.kind is Kind.END and message.cause is Cause.NONE:
            return Message(Kind.SEEN, self._rank, message.attempt)
        return self._has_left(message.attempt) if message.kind is Kind.BEGIN else None

    def _has_left(self, attempt: int) -> Message:
        """A BEGIN of a call that has ended here: what ended it was lost, or the BEGIN is late."""
        outcome = self.outcome
        text = outcome.text if outcome is not None and outcome.text else "it has left this call"
        return Message(Kind.FAIL, self._rank, attempt, cause=Cause.FAILED, text=text)

    def _say(self, message: Message) -> Message:
        self._said = message
        return message
