"""One rank's side of the rounds of its group: what was heard goes in, what is to be done comes out. No clock, no loop.

A round has one number on all ranks, above all before. Its coordinator is the lowest member of the view.

1. Whoever wants a round says so (WANT); the coordinator declines, or begins one. Who wants one while a round runs is
   served by it if this rank's loads are not in yet, and by the next otherwise. One round serves all.
2. The coordinator asks all (ASK), and each answers with its loads (LOADS) or says why not (REFUSED), which ends it.
3. It decides, and tells all (VERDICT): once for each round, also where it failed.
4. Each rank moves. One that does not, although it has sent its loads or was told to, says so to all (REFUSED), and
   they stop: they may wait for it by now.

A round that is not decided ends with its view: loads and members are of one term. What moves then ends by itself, as
every migration does. Whatever is late, doubled or from the wrong rank is counted and dropped.

Mail may be lost, around a change of the view above all. So WANT and ASK are said again until they are answered, and
LOADS with them. A verdict is said once: who waits for it in vain says so to all. Every wait has a deadline; that of the
migration is its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from eplb_async.service.actions import Action, Collect, Decide, End, Move, Send, Stop
from eplb_async.service.payloads import Ask, Declined, Loads, Message, Refused, Verdict, Want, Why
from eplb_async.service.report import Outcome

__all__ = ["AUTOMATIC", "Rounds"]

AUTOMATIC = 0
"""The ticket of a round that nobody waits for."""

_LEAP = 1 << 40
_RENUMBERINGS = 3
_TIMES = 5
"""How often within the timeout something is said that may be lost."""
_OPEN_THERE = "see whether an EplbService is open there, and its loop runs"


@dataclass(slots=True)
class _Round:
    """The round that runs here.

    Attributes:
        number: Its number.
        stage: ``asking``, ``deciding`` (coordinator), ``asked`` (the others), ``moving``.
        began: When.
        deadline: When this stage is over; not used while moving.
        waiting: Ranks that have not answered.
        tickets: Whom it serves.
        force: Whether it moves for any gain.
        loads: Answers so far.
        again: When those that have not answered are asked again.
        answer: This rank's loads, once they are in.
        renumbered: How often its number was one that a member had seen.
        refusal: A rank that will not move, and why, heard before the verdict.
        verdict: What was decided.
    """

    number: int
    stage: str
    began: float
    deadline: float
    waiting: set[int]
    tickets: list[int]
    force: bool = False
    loads: dict[int, Loads] = field(default_factory=dict)
    again: float = float("inf")
    answer: Loads | None = None
    renumbered: int = 0
    refusal: tuple[int, str] | None = None
    verdict: Verdict | None = None


class Rounds:
    """One rank's rounds. Every method takes the time, in seconds, and returns what is to be done.

    Args:
        rank: This rank.
        timeout: Seconds that loads, and then the policy, may take.
        min_interval: Seconds from the end of a migration to the next round that is not forced.
        first_want: Number of the first want; above those of an earlier service of this rank.

    Attributes:
        term: Number of the view.
        members: Ranks of the view.
        number: The highest round seen.
        paused: Whether this rank takes no part.
        dropped: Messages that were dropped, by reason.
    """

    def __init__(self, rank: int, *, timeout: float, min_interval: float, first_want: int = 1) -> None:
        self.rank = rank
        self.timeout = timeout
        self.min_interval = min_interval
        self.term = -1
        self.members: tuple[int, ...] = ()
        self.number = 0
        self.paused = False
        self.dropped: Counter[str] = Counter()
        self._round: _Round | None = None
        self._wants: dict[int, bool] = {}  # by ticket: forced or not; not served by the round that runs
        self._want_number = first_want - 1
        self._want_deadline: float | None = None
        self._want_again = 0.0
        self._want_forced = False
        self._taken: dict[int, int] = {}  # by sender, the want that was last taken up
        self._wanted_by: dict[int, Want] = {}  # as coordinator, while a round runs
        self._held: tuple[int, Ask] | None = None
        self._not_before = float("-inf")
        self._gave_up = 0
        self._over = False
        self._out: list[Action] = []

    # ------------------------------------------------------------------------------------- where it stands
    @property
    def coordinator(self) -> int | None:
        """The rank that begins rounds; ``None`` if this rank is no member."""
        return min(self.members) if self.rank in self.members else None

    @property
    def stage(self) -> str:
        """``idle``, ``asking``, ``deciding``, ``asked`` or ``moving``."""
        return "idle" if self._round is None else self._round.stage

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Ranks whose answer is waited for."""
        current = self._round
        if current is not None and current.stage in ("asking", "asked"):
            return tuple(sorted(current.waiting.copy()))  # any thread may look
        if current is None and self._want_deadline is not None and self.coordinator is not None:
            return (self.coordinator,)
        return ()

    @property
    def next_wakeup(self) -> float | None:
        """When a ``tick`` is wanted."""
        current = self._round
        times = [] if current is None or current.stage == "moving" else [current.deadline, current.again]
        if self._want_deadline is not None:
            times += [self._want_deadline, self._want_again]
        return min(times, default=None)

    def open_before(self, now: float) -> float:
        """Seconds until a round that is not forced may begin."""
        return max(0.0, self._not_before - now)

    # ------------------------------------------------------------------------------------------ what goes in
    def pause(self) -> list[Action]:
        """This rank takes part in no round that begins from now on; set `paused` to False to end that."""
        self.paused = True
        why = f"rank {self.rank} is paused"
        self._decline_all("paused", why)
        self._end_wants("paused", why, (self.rank,))
        return self._take()

    def view(self, term: int, members: Iterable[int], now: float) -> list[Action]:
        """There is another view."""
        chosen = tuple(sorted(members))
        if self._over or (term, chosen) == (self.term, self.members):
            return []
        gone = sorted(set(self.members) - set(chosen))
        self.term, self.members = term, chosen
        self._held, self._want_deadline = None, None
        self._wanted_by.clear()
        if self._round is not None and self._round.stage != "moving":
            lost = f": without ranks {gone}" if gone else ""
            self._end("failed", f"the view changed{lost}", now, ranks=gone)
        else:
            self._launch(now)
        return self._take()

    def want(self, ticket: int, now: float, *, force: bool = False) -> list[Action]:
        """Somebody here wants a round; ends with an :class:`End` that has the ticket."""
        current = self._round
        if self._over:
            self._none((ticket,), "failed", "the service is closed")
        elif self.coordinator is None:
            self._none((ticket,), "failed", "this rank is out of the group")
        elif self.paused:
            self._none((ticket,), "paused", f"rank {self.rank} is paused", (self.rank,))
        elif current is not None and current.stage in ("asking", "asked") and current.answer is None:
            current.tickets.append(ticket)
            current.force |= force
            if force and current.stage == "asked":
                self._send_want(force=True)
        else:
            self._wants[ticket] = force
            if current is None:
                self._launch(now)
        return self._take()

    def receive(self, sender: int, message: Message, now: float) -> list[Action]:
        """Another member said something."""
        if self._over or self.coordinator is None:
            self._drop("over")
        elif message.term != self.term:
            self._drop("another term")
        elif sender not in self.members or sender == self.rank:
            self._drop("foreign")
        else:
            self._on(sender, message, now)
        return self._take()

    def damaged(self, sender: int, reason: str, now: float) -> list[Action]:
        """A member sent what cannot be; if it was waited for, that ends the round."""
        self._drop("damaged")
        current = self._round
        if not self._over and current is not None and current.stage != "moving" and sender in current.waiting:
            why = f"rank {sender} sent {reason}"
            if current.stage == "asking":
                self._conclude("failed", why, now, ranks=(sender,))
            else:
                self._refuse(current.number, Why.FAILED, why, all_members=True)
                self._end("failed", why, now, ranks=(sender,))
        return self._take()

    def collected(self, number: int, answer: Loads, now: float) -> list[Action]:
        """This rank's loads, for a round that may be over; term and round are filled in."""
        current = self._round
        if current is not None and current.number == number and current.answer is None:
            current.answer = answer = replace(answer, term=self.term, round=number)
            if current.stage == "asking":
                self._take_loads(current, self.rank, answer, now)
            elif current.stage == "asked" and self.coordinator is not None:
                self._send(self.coordinator, answer)
        return self._take()

    def decided(self, number: int, verdict: Verdict, now: float) -> list[Action]:
        """The policy is done, or has failed: a verdict without number and term."""
        current = self._round
        if current is not None and current.stage == "deciding" and current.number == number:
            self._tell(current, verdict, now)
        return self._take()

    def moved(self, number: int, now: float) -> list[Action]:
        """This rank's migration is done."""
        current = self._round
        if current is not None and current.stage == "moving" and current.number == number:
            self._end("moved", "", now)
        return self._take()

    def failed(self, number: int, reason: str, now: float, *, tell: bool) -> list[Action]:
        """This rank's loads, policy or migration failed.

        Args:
            number: The round.
            reason: Why.
            now: The time.
            tell: Whether the others wait for this rank without knowing; they are told.
        """
        current = self._round
        if current is None or current.number != number:
            return []
        if current.stage in ("asking", "deciding"):
            self._conclude("failed", f"rank {self.rank}: {reason}", now, ranks=(self.rank,))
        else:
            if tell:
                self._refuse(number, Why.FAILED, reason, all_members=current.stage == "moving")
            self._end("failed", reason, now, ranks=(self.rank,))
        return self._take()

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        current = self._round
        if current is not None and current.stage != "moving" and now >= current.deadline:
            late = sorted(current.waiting)
            if current.stage == "asking":
                why = f"ranks {late} did not answer within {self.timeout:g} s: {_OPEN_THERE}"
                self._conclude("failed", why, now, ranks=late)
            elif current.stage == "deciding":
                self._conclude("failed", f"the policy took longer than {self.timeout:g} s", now, ranks=(self.rank,))
            else:
                self._gave_up = current.number
                why = f"rank {late[0]}, the coordinator, sent no verdict within {now - current.began:.1f} s"
                self._refuse(current.number, Why.FAILED, why, all_members=True)
                self._end("failed", f"{why}: {_OPEN_THERE}", now, ranks=late)
        elif current is not None and current.stage == "asking" and now >= current.again:
            current.again = now + self.timeout / _TIMES
            for member in sorted(current.waiting - {self.rank}):
                self._send(member, Ask(term=self.term, round=current.number))
        if self._want_deadline is not None and now >= self._want_deadline:
            self._want_deadline = None
            who = self.coordinator
            why = f"rank {who}, the coordinator, began no round within {self.timeout:g} s: {_OPEN_THERE}"
            self._end_wants("failed", why, () if who is None else (who,))
        elif self._want_deadline is not None and now >= self._want_again and self.coordinator is not None:
            self._want_again = now + self.timeout / _TIMES
            self._send(self.coordinator, Want(term=self.term, round=self._want_number, force=self._want_forced))
        return self._take()

    def close(self, reason: str, now: float) -> list[Action]:
        """This rank takes no part any more."""
        current = self._round
        self._held = None
        self._decline_all("failed", f"rank {self.rank}: {reason}")
        self._end_wants("failed", reason)
        if current is not None and self.coordinator is not None:
            if current.stage in ("asking", "deciding"):
                self._conclude("failed", f"rank {self.rank}: {reason}", now, ranks=(self.rank,))
            else:
                self._refuse(current.number, Why.CLOSING, reason, all_members=True)
        if self._round is not None:
            self._stop(now, reason, ())
        self._over = True
        return self._take()

    # ------------------------------------------------------------------------------------- what others said
    def _on(self, sender: int, message: Message, now: float) -> None:
        current = self._round
        match message:
            case Want():
                self._on_want(sender, message, now)
            case Ask():
                self._on_ask(sender, message, now)
            case Loads() if self._runs(message, "asking") and current is not None and sender in current.waiting:
                self._take_loads(current, sender, message, now)
            case Verdict() if sender == self.coordinator and self._runs(message, "asked"):
                self._on_verdict(message, now)
            case Verdict(outcome="moved") if sender == self.coordinator and self._missed(message.round):
                self._gave_up, self.number = 0, max(self.number, message.round)
                self._refuse(message.round, Why.FAILED, "it does not wait for this round", all_members=True)
            case Declined() if sender == self.coordinator and message.round == self._want_number and self._wants:
                self._want_deadline = None
                self._end_wants(message.outcome, message.reason, (sender,))
            case Refused() if current is not None and message.round == current.number:
                self._on_refused(current, sender, message, now)
            case _:
                self._drop("late")

    def _runs(self, message: Message, stage: str) -> bool:
        return self._round is not None and (self._round.number, self._round.stage) == (message.round, stage)

    def _missed(self, number: int) -> bool:
        return number == self._gave_up or self.number < number <= self.number + _LEAP

    def _on_want(self, sender: int, want: Want, now: float) -> None:
        current = self._round
        if self.coordinator != self.rank:
            self._drop("foreign")
        elif want.round <= self._taken.get(sender, 0):
            self._drop("late")
        elif self.paused:
            self._decline(sender, want, "paused", f"rank {self.rank} is paused")
        elif current is None and not want.force and now < self._not_before:
            self._decline(sender, want, "too_soon", self._too_soon(now))
        else:
            self._taken[sender] = want.round
            if current is None:
                self._begin(now, force=want.force)
            elif current.stage == "asking" and sender in current.waiting:
                current.force |= want.force
            else:
                self._wanted_by[sender] = want

    def _on_ask(self, sender: int, ask: Ask, now: float) -> None:
        current = self._round
        if sender != self.coordinator or ask.round > self.number + _LEAP:
            self._drop("foreign")
        elif ask.round <= self.number:
            if current is not None and current.number == ask.round:
                if current.stage == "asked" and current.answer is not None:
                    self._send(sender, current.answer)  # it may be lost
            else:
                self._refuse(ask.round, Why.STALE, f"round {self.number} was seen already")
        elif current is not None and current.stage == "moving":
            self._held = (sender, ask)
        else:
            self.number = ask.round
            before = [] if current is None else current.tickets  # of one that was begun anew
            tickets, self._round = [*before, *self._wants], None
            self._wants.clear()
            self._want_deadline = None
            if self.paused:
                self._refuse(ask.round, Why.PAUSED, f"rank {self.rank} is paused")
                self._none(tuple(tickets), "paused", f"rank {self.rank} is paused", (self.rank,))
                return
            # Loads and policy have a timeout each at the coordinator; the rest is for the way.
            began = now if current is None else current.began
            self._round = _Round(ask.round, "asked", began, now + 2.5 * self.timeout, {sender}, tickets)
            self._out.append(Collect(ask.round))

    def _on_verdict(self, verdict: Verdict, now: float) -> None:
        current = self._round
        assert current is not None
        current.verdict = verdict
        if verdict.outcome != "moved":
            self._end(verdict.outcome, verdict.reason, now)
        elif current.refusal is not None:
            sender, reason = current.refusal
            self._end("failed", f"rank {sender} does not move: {reason}", now, ranks=(sender,))
        else:
            self._move(current, verdict)

    def _on_refused(self, current: _Round, sender: int, message: Refused, now: float) -> None:
        if current.stage == "asking" and message.why is Why.STALE:
            self._renumber(current, sender, message, now)
        elif current.stage in ("asking", "deciding"):
            outcome: Outcome = "paused" if message.why is Why.PAUSED else "failed"
            reason = message.reason if message.why is Why.PAUSED else f"rank {sender}: {message.reason}"
            self._conclude(outcome, reason, now, ranks=(sender,))
        elif current.stage == "asked":
            current.refusal = (sender, message.reason)
        else:
            self._stop(now, f"rank {sender} does not move: {message.reason}", (sender,))

    # ------------------------------------------------------------------------------------ as coordinator
    def _launch(self, now: float) -> None:
        """Nothing runs: begin a round if somebody wants one."""
        if self._round is not None or self._over or not (self._wants or self._wanted_by):
            return
        if self.coordinator is None:
            self._end_wants("failed", "this rank is out of the group")
        elif self.coordinator != self.rank:
            force = any(self._wants.values())
            if self._want_deadline is None:
                self._want_deadline, self._want_forced = now + self.timeout, force
                self._want_again = now + self.timeout / _TIMES
                self._send_want(force=force)
            elif force and not self._want_forced:
                self._want_forced = True
                self._send_want(force=True)
        else:
            force = any(self._wants.values()) or any(want.force for want in self._wanted_by.values())
            if force or now >= self._not_before:
                self._begin(now, force=force)
                return
            self._decline_all("too_soon", self._too_soon(now))
            self._end_wants("too_soon", self._too_soon(now))

    def _begin(self, now: float, *, force: bool) -> None:
        tickets = list(self._wants)
        self._wants.clear()
        self._wanted_by.clear()
        again = now + self.timeout / _TIMES
        self._round = _Round(self.number, "asking", now, now + self.timeout, set(), tickets, force, again=again)
        self._ask(self._round)

    def _ask(self, current: _Round) -> None:
        self.number += 1
        current.number, current.waiting, current.answer = self.number, set(self.members), None
        current.loads.clear()
        for member in self._others():
            self._send(member, Ask(term=self.term, round=self.number))
        self._out.append(Collect(self.number))

    def _renumber(self, current: _Round, sender: int, message: Refused, now: float) -> None:
        """A member has seen that number: this rank's service is younger than the group's rounds."""
        current.renumbered += 1
        if not self.number <= message.seen <= self.number + _LEAP or current.renumbered > _RENUMBERINGS:
            self._conclude("failed", f"rank {sender} takes every round for an old one", now, ranks=(sender,))
        else:
            self.number = message.seen
            self._ask(current)

    def _take_loads(self, current: _Round, sender: int, answer: Loads, now: float) -> None:
        current.waiting.discard(sender)
        current.loads[sender] = answer
        if not current.waiting:
            current.stage, current.deadline, current.again = "deciding", now + self.timeout, float("inf")
            self._out.append(Decide(current.number, current.force, dict(current.loads)))
            current.loads.clear()

    def _conclude(self, outcome: Outcome, reason: str, now: float, *, ranks: Iterable[int] = ()) -> None:
        current = self._round
        assert current is not None
        self._tell(current, Verdict(term=0, round=0, outcome=outcome, reason=reason), now, ranks)

    def _tell(self, current: _Round, verdict: Verdict, now: float, ranks: Iterable[int] = ()) -> None:
        verdict = replace(verdict, term=self.term, round=current.number)
        current.verdict = verdict
        for member in self._others():
            self._send(member, verdict)
        if verdict.outcome == "moved":
            self._move(current, verdict)
        else:
            self._end(verdict.outcome, verdict.reason, now, ranks=ranks)

    def _decline(self, sender: int, want: Want, outcome: Outcome, reason: str) -> None:
        self._send(sender, Declined(term=self.term, round=want.round, outcome=outcome, reason=reason))

    def _decline_all(self, outcome: Outcome, reason: str) -> None:
        for sender, want in self._wanted_by.items():
            self._decline(sender, want, outcome, reason)
        self._wanted_by.clear()

    def _too_soon(self, now: float) -> str:
        return (
            f"the last migration ended less than {self.min_interval:g} s ago; {self._not_before - now:.1f} s are left"
        )

    # --------------------------------------------------------------------------------------- on any rank
    def _move(self, current: _Round, verdict: Verdict) -> None:
        current.stage = "moving"
        current.waiting.clear()
        self._out.append(Move(current.number, verdict))

    def _stop(self, now: float, reason: str, ranks: Iterable[int]) -> None:
        current = self._round
        assert current is not None
        if current.stage == "moving":
            self._out.append(Stop(current.number, reason))
        self._end("failed", reason, now, ranks=ranks)

    def _end(self, outcome: Outcome, reason: str, now: float, *, ranks: Iterable[int] = ()) -> None:
        """The round is over here; what was held up by it goes on."""
        current = self._round
        assert current is not None
        self._round = None
        if outcome == "moved":
            self._not_before = now + self.min_interval
        seconds = now - current.began
        tickets = tuple(current.tickets)
        self._out.append(End(current.number, tickets, outcome, reason, tuple(ranks), current.verdict, seconds))
        held, self._held = self._held, None
        if held is not None:
            self._on_ask(*held, now)
        self._launch(now)

    def _end_wants(self, outcome: Outcome, reason: str, ranks: Iterable[int] = ()) -> None:
        tickets = tuple(self._wants)
        self._wants.clear()
        self._want_deadline = None
        self._none(tickets, outcome, reason, ranks)

    def _none(self, tickets: tuple[int, ...], outcome: Outcome, reason: str, ranks: Iterable[int] = ()) -> None:
        if tickets:
            self._out.append(End(0, tickets, outcome, reason, tuple(ranks)))

    def _send_want(self, *, force: bool) -> None:
        assert self.coordinator is not None
        self._want_number += 1
        self._send(self.coordinator, Want(term=self.term, round=self._want_number, force=force))

    def _refuse(self, number: int, why: Why, reason: str, *, all_members: bool = False) -> None:
        if self.coordinator is None:
            return
        message = Refused(term=self.term, round=number, why=why, reason=reason, seen=self.number)
        for member in self._others() if all_members else {self.coordinator} - {self.rank}:
            self._send(member, message)

    def _others(self) -> list[int]:
        return [member for member in self.members if member != self.rank]

    def _send(self, to: int, message: Message) -> None:
        self._out.append(Send(to, message))

    def _drop(self, why: str) -> None:
        self.dropped[why] += 1

    def _take(self) -> list[Action]:
        out, self._out = self._out, []
        return out
