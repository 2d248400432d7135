"""The lowest rank's part of a round: it hears from all, and says when READs begin and when the round is over. Pure.

A round is one call of ``execute`` on every rank. The rules:

1. A rank's calls are numbered by itself (attempts). Of each rank only what is newer than the last counts; what is
   said again is answered again.
2. BEGIN when all have joined with the same layer and indices: all rows may be read, until the round is over.
3. END without a cause when all are DONE: nobody reads any more, so all may overwrite their rows. It is the fence.
4. A rank that fails ends the round for all that are in it. A rank that has not come yet gets that end when it does,
   unless the cause was that somebody waited too long for it: then it may be one that never came, and whose next call
   is a new one.
5. A rank that is gone (NIXL says so, or it closed) is gone for good: every call ends at once, naming it.
"""

from __future__ import annotations

from dataclasses import replace

from eplb_async.core.spelling import spell_ranks
from eplb_async.integrations.vllm.messages import Cause, Kind, Message

__all__ = ["Coordinator"]

Mail = list[tuple[int, Message]]
"""What to send: receiver and message."""


class Coordinator:
    """Whose rounds of one communicator begin and end when.

    Args:
        size: Number of ranks.
        rank: The rank that it runs on.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size = size
        self._rank = rank
        self._round = 0
        self._running = False
        self._joined: dict[int, Message] = {}
        self._done: set[int] = set()
        self._last = [0] * size
        self._ended: dict[int, Message] = {}
        self._owed: dict[int, Message] = {}
        self._gone: dict[int, str] = {}
        self._unseen: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether somebody is in a round."""
        return bool(self._joined)

    @property
    def missing(self) -> list[int]:
        """Ranks that the round waits for."""
        there = self._done if self._running else self._joined
        return [rank for rank in range(self._size) if rank not in there] if self._joined else []

    def handle(self, message: Message) -> Mail:
        """Take a message of a member; returns what to send."""
        if message.kind is Kind.SEEN:
            ended = self._ended.get(message.sender)
            if ended is not None and ended.attempt == message.attempt:
                self._unseen.discard(message.sender)
            return []
        if message.kind is Kind.LEAVE:
            return self.gone(message.sender, f"rank {message.sender} closed its communicator")
        takes = {Kind.JOIN: self._join, Kind.DONE: self._is_done, Kind.FAIL: self._fail}.get(message.kind)
        return takes(message) if takes is not None else []

    def gone(self, rank: int, why: str) -> Mail:
        """A rank is gone for good."""
        if rank in self._gone:
            return []
        self._gone[rank] = why
        self._joined.pop(rank, None)
        self._unseen.discard(rank)
        return self._end(Cause.GONE, rank, why)

    @property
    def unseen(self) -> Mail:
        """The good ENDs that nobody has said to have seen: to be sent again before this rank's agent goes."""
        return [(rank, self._ended[rank]) for rank in sorted(self._unseen)]

    def again(self) -> Mail:
        """What to send from time to time to those that are waited for: a rank that is gone is noticed by that."""
        if not self._running:
            return [(rank, Message(Kind.PING, self._rank)) for rank in self.missing]
        return [(rank, self._begin(self._joined[rank])) for rank in self.missing]

    def _join(self, message: Message) -> Mail:
        rank, attempt = message.sender, message.attempt
        if attempt < self._last[rank]:
            return []
        if attempt == self._last[rank]:
            return self._joined_again(rank, attempt)
        self._last[rank] = attempt
        self._unseen.discard(rank)
        out: Mail = []
        if self._running:
            self._joined.pop(rank)
            out = self._end(Cause.FAILED, rank, f"rank {rank} has left round {self._round} and begun another")
        if self._gone:
            lost = min(self._gone)
            return [*out, self._ends(message, Cause.GONE, lost, self._gone[lost])]
        if (owed := self._owed.pop(rank, None)) is not None:
            return [*out, self._ends(message, owed.cause, owed.origin, owed.text)]
        self._joined[rank] = message
        return [*out, *self._begin_all()]

    def _joined_again(self, rank: int, attempt: int) -> Mail:
        if (mine := self._joined.get(rank)) is not None and mine.attempt == attempt:
            return [(rank, self._begin(mine))] if self._running else [(rank, self._wait(attempt, "begin"))]
        return self._ended_again(rank, attempt)

    def _ended_again(self, rank: int, attempt: int) -> Mail:
        ended = self._ended.get(rank)
        return [(rank, ended)] if ended is not None and ended.attempt == attempt else []

    def _begin_all(self) -> Mail:
        if len(self._joined) < self._size:
            return []
        self._round += 1
        calls = {(message.layer, message.digest) for message in self._joined.values()}
        if len(calls) > 1:
            return self._end(Cause.FAILED, -1, _differences(self._joined))
        self._running, self._done = True, set()
        self._owed.clear()
        return [(rank, self._begin(message)) for rank, message in self._joined.items()]

    def _is_done(self, message: Message) -> Mail:
        rank, mine = message.sender, self._joined.get(message.sender)
        if mine is None or mine.attempt != message.attempt or not self._running:
            return self._ended_again(rank, message.attempt)
        if message.round != self._round:
            return []
        if rank in self._done:
            return [(rank, self._wait(message.attempt, "end their READs"))]
        self._done.add(rank)
        return self._end(Cause.NONE, -1, "") if len(self._done) == self._size else []

    def _fail(self, message: Message) -> Mail:
        rank, attempt = message.sender, message.attempt
        if attempt < self._last[rank] or (attempt == self._last[rank] and rank not in self._joined):
            return []
        self._last[rank] = attempt
        mine = self._joined.pop(rank, None)
        if message.cause is Cause.GONE and message.origin not in (-1, rank):
            return self.gone(message.origin, message.text)
        if mine is None and self._owed.pop(rank, None) is not None:
            return []  # its call in a round that has ended for the others
        absent = [] if self._running else [other for other in range(self._size) if other not in self._joined]
        text = f"rank {rank}: {message.text}"
        if message.cause is not Cause.TIMEOUT:
            for other in absent:
                if other != rank:
                    self._owed[other] = replace(message, text=text, origin=rank)
        return self._end(Cause.FAILED if message.cause is Cause.GONE else message.cause, rank, text)

    def _end(self, cause: Cause, origin: int, text: str) -> Mail:
        """End the round for all that are in it."""
        ended = [self._ends(message, cause, origin, text) for message in self._joined.values()]
        self._joined.clear()
        self._done = set()
        self._running = False
        return ended

    def _ends(self, message: Message, cause: Cause, origin: int, text: str) -> tuple[int, Message]:
        end = Message(
            Kind.END, self._rank, message.attempt, self._round, message.layer, cause=cause, origin=origin, text=text
        )
        self._ended[message.sender] = end
        if cause is Cause.NONE and message.sender != self._rank:
            self._unseen.add(message.sender)
        return message.sender, end

    def _begin(self, message: Message) -> Message:
        return Message(Kind.BEGIN, self._rank, message.attempt, self._round, message.layer)

    def _wait(self, attempt: int, what: str) -> Message:
        return Message(Kind.WAIT, self._rank, attempt, self._round, text=f"{spell_ranks(self.missing)} to {what}")


def _differences(joined: dict[int, Message]) -> str:
    layers = {layer: [rank for rank, m in joined.items() if m.layer == layer] for layer in _all(joined, "layer")}
    if len(layers) > 1:
        parts = [f"layer {layer} on {spell_ranks(sorted(ranks))}" for layer, ranks in sorted(layers.items())]
        return f"ranks move different layers: {', '.join(parts)}"
    groups = [sorted(rank for rank, m in joined.items() if m.digest == digest) for digest in _all(joined, "digest")]
    groups.sort(key=lambda ranks: (-len(ranks), ranks))
    parts = [spell_ranks(ranks) for ranks in groups]
    return f"ranks have different old_indices of layer {next(iter(layers))}: {' against '.join(parts)}"


def _all(joined: dict[int, Message], field: str) -> set[object]:
    return {getattr(message, field) for message in joined.values()}
