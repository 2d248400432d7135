"""The migration protocol of one rank: events in, commands out, no I/O, no clock.

A *view* is a term and its members; its coordinator is the lowest of them and keeps the books. One migration
is one *epoch*; a rank's wish for one is an *attempt*.

An epoch:

1.  A rank that wants one sends JOIN. Attempts count up; one not newer than the last seen of that rank is
    stale. A JOIN of a rank that has an epoch open ends that epoch first.
2.  All members have joined with equal digests: the coordinator numbers the epoch, one more than any that any
    member has seen, and sends BEGIN. Unequal: END for all who joined, naming who differs in what.
3.  Layers are staged in order; PREPARED votes for all layers below one. No vote is cast after a newer term
    was promised or the end was asked for.
4.  All have prepared a layer: COMMIT. Each rank applies it on COMMIT, END or INSTALL and on nothing else.
5.  A rank that wants out sends ABORT?. With a vote outstanding it waits for END or a new view; without one it
    leaves at once. END says the last layer committed; all end exactly there. Who waits asks again with its pings,
    and an ABORT? of the epoch before is answered with how that ended: either message may have been lost.

A member is gone:

6.  Gone is proof, never silence. Whoever waits, pings whom it waits for, because a killed process is noticed
    only by the next message to it. A ping says whom its sender knows gone, so that others look for their own
    proof; a caller's word spreads as it is.
7.  The lowest member that stays opens a term of its own with VIEW. Who answers (STATE) promises: nothing of
    an older term is accepted or sent any more. It decides when *all* who remain have answered, agree on who
    is gone, and are more than half of the old view (not counting who left or was excluded by word). INSTALL
    carries the END if any knows it, else the highest COMMIT that any knows.
8.  Whoever speaks in an old term without being a member gets INSTALL back, and is fenced by it.
9.  A rank that asked for the end and hears nothing until its deadline, or has no majority left, is in doubt;
    the next END or INSTALL that reaches it resolves that.
10. Closing is LEAVE: it gives up, is announced, answers still, and ends with the view of those who stay. It is said
    again with the pings.

Steps (``steps`` has the other half):

11. PREPARED carries the first step that the voter does not begin undecided, COMMIT the largest of these: each rank
    applies the layer before that step. END and INSTALL carry it too, so a new view switches at the same step.

A rank is back:

12. Who wants a rank back, and has met its new start, says so (MET), and says it again with its pings. When all
    members have met the same start, mean the same by having it back, and none is gone or leaves, the coordinator
    opens a term, and its INSTALL has that rank in addition; one rank at a time. Until then the rank only answers.
    All members tell it of the view, in case the opener died first, and no migration is begun before it has spoken
    in the view.

Upheld here: I-6 (COMMIT before a row changes), I-7 (one end for all), I-8 (what is stale or impossible is
counted and dropped), I-9 (every attempt ends idle or in doubt), I-10 (giving up always works), I-19 (nothing
decided is undone).

Beyond the rules' own words: the coordinator is never in doubt about its own decision. Losing its majority is
a reason for it to give up like any other, and END, which it may still send, is final in its term. A
``Migrate`` while the view changes is ended by the new view, because its digests speak of the old one; where no
member of the new view has begun it, it says so, and all of them may make it again. VIEW of
a rank known gone is not answered: it could never agree, and two openers would outbid each other for ever. Who
had promised to an opener that then died tells the next one so (TERM), which may wait with a lower term.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from eplb_async.core import events, messages
from eplb_async.core.events import Command, Event, Phase, Proof
from eplb_async.core.member import Member
from eplb_async.core.messages import Message, Steps
from eplb_async.core.returns import NOT_MET, Meeting
from eplb_async.core.transitions import check_move
from eplb_async.core.views import Contradiction, Ignored, bit, clip, each, names

_LEAP = 1 << 40
"""No term or epoch of a peer is that far ahead of ours; one that says so is wrong, and must not be counted on from."""


class Protocol(Member):
    """One rank's state machine.

    Args:
        rank: This rank.
        ep_size: Number of ranks; all are members of the first view, term 0.
        num_layers: Layers of a migration.
        settle_timeout: Seconds from giving up with a vote outstanding until that is doubt.
        ping_interval: Seconds between two pings to a rank that is waited for.
        majority_rule: Whether those who remain must be a majority of the old view. Switch it off only where
            something proves deaths.

    """

    __slots__ = ("_now", "_ping_at", "ping_interval", "settle_timeout")

    def __init__(
        self,
        *,
        rank: int,
        ep_size: int,
        num_layers: int,
        settle_timeout: float,
        ping_interval: float,
        majority_rule: bool = True,
    ) -> None:
        super().__init__(rank=rank, ep_size=ep_size, num_layers=num_layers, majority_rule=majority_rule)
        self.settle_timeout = settle_timeout
        self.ping_interval = ping_interval
        self._ping_at: float | None = None
        self._now = 0.0

    def handle(self, event: Event, now: float) -> tuple[Command, ...]:
        """Takes one event and returns what is to be done, in order.

        Args:
            event: What happened.
            now: Monotonic seconds.

        Raises:
            ValueError: The caller's mistake: ``Migrate`` when not idle, a rank or layer that does not exist.
        """
        before = self.phase
        self._now = now
        self._out = []
        kind: type[Any] = type(event)
        match event:
            case events.Received(message):
                kind = type(message)
                if message.sender == self.rank:  # what this rank tells itself does not come from outside
                    self.dropped["foreign"] += 1
                else:
                    self._receive(message)
            case events.Staged(upto, holds):
                self._staged(upto, holds)
            case events.Migrate(digests):
                self._migrate(digests)
            case events.GiveUp(reason):
                self._give_up(reason)
            case events.Gone(rank, proof):
                self._gone(rank, proof)
            case events.Suspect(rank):
                self._suspect(rank)
            case events.Met(rank, start, digest):
                self._check_other(rank)
                self._met(rank, Meeting(start, digest))
            case events.Returning():
                self._view.outside = self._view.installed == 0
            case events.Close():
                self._close()
            case events.Tick():
                self._tick()
        check_move(before, kind, self.phase)
        if not self._waits:
            self._ping_at = None
        elif self._ping_at is None:
            self._ping_at = now + self.ping_interval
        commands, self._out = tuple(self._out), []
        return commands

    @property
    def phase(self) -> Phase:
        """Where this rank stands."""
        return self._over or self._part.phase

    @property
    def term(self) -> int:
        """Term of the installed view."""
        return self._view.installed

    @property
    def promised(self) -> int:
        """The highest term answered or opened; above ``term`` while the view changes."""
        return self._view.promised

    @property
    def epoch(self) -> int:
        """The highest epoch seen; the open one while there is one."""
        return self._part.epoch

    @property
    def attempt(self) -> int:
        """Number of the latest ``Migrate``."""
        return self._part.attempt

    @property
    def members(self) -> frozenset[int]:
        """Members of the installed view."""
        return frozenset(each(self._view.members))

    @property
    def gone(self) -> frozenset[int]:
        """Ranks that this rank has proof are gone."""
        return frozenset(each(self._view.gone))

    @property
    def leaving(self) -> frozenset[int]:
        """Members that said LEAVE; this rank too when it closes."""
        return frozenset(each(self._view.leaving))

    @property
    def committed(self) -> int:
        """Layers of the open epoch known committed."""
        return self._part.committed

    @property
    def prepared(self) -> int:
        """Layers of the open epoch voted for."""
        return self._part.prepared

    @property
    def coordinator(self) -> int:
        """The lowest member of the installed view."""
        return self._view.coordinator

    @property
    def view_changing(self) -> bool:
        """Whether a new view is under way, or due and possible; it would end a ``Migrate`` made now."""
        view = self._view
        due = not view.settled or bool(view.broken and view.majority())
        return not self._over and (due or bool(view.arriving & view.remaining))

    @property
    def arriving(self) -> frozenset[int]:
        """Members that came back and have not spoken in the view yet."""
        return frozenset(each(self._view.arriving))

    @property
    def suspects(self) -> frozenset[int]:
        """Members that are pinged because somebody takes them for gone."""
        return frozenset(each(self._view.suspects & self._view.remaining))

    @property
    def outside(self) -> bool:
        """Whether this rank opens into a group that runs, and no view has it yet."""
        return self._view.outside

    @property
    def has_majority(self) -> bool:
        """Whether those who stay may make a view."""
        return self._view.majority()

    @property
    def waiting_for(self) -> frozenset[int]:
        """Ranks whose message this rank waits for; empty while it waits for its own READs. Safe from any thread."""
        part, view = self._part, self._view
        waited = self._waited()
        if part.phase is Phase.OPEN and not part.bound and self._lead is None and view.settled and not view.broken:
            waited &= ~bit(view.coordinator)
        return frozenset(each(waited))

    @property
    def next_wakeup(self) -> float | None:
        """When a ``Tick`` is wanted."""
        times = [at for at in (self._ping_at, self._part.deadline) if at is not None]
        return min(times, default=None)

    def snapshot(self) -> Hashable:
        """Everything that decides what happens next, as a value: equal states have equal snapshots."""
        change = self._change and self._change.freeze()
        lead = self._lead and self._lead.freeze()
        returns = self._returns.freeze()
        told = (self._install_message, self._ping_at)
        return (self._over, self._view.freeze(), self._part.freeze(), lead, change, returns, *told)

    def _migrate(self, digests: messages.Digests) -> None:
        if self.phase is not Phase.IDLE or self._view.leaving & bit(self.rank) or self._view.outside:
            raise ValueError(f"rank {self.rank} cannot migrate while {self.phase.value} or closing")
        part, view = self._part, self._view
        part.join()
        self._returns.own.clear()  # who wants an epoch waits for nobody's return
        if view.settled:  # else the view that is under way ends this attempt: its digests are of the old one
            self._send(
                view.coordinator,
                messages.Join(
                    term=view.installed,
                    attempt=part.attempt,
                    sender=self.rank,
                    digests=digests,
                    last_epoch=part.epoch,
                ),
            )

    def _staged(self, upto: int, holds: Steps | None) -> None:
        if not 0 <= upto <= self.num_layers or (holds is not None and len(holds) != self.num_layers):
            raise ValueError(f"staged up to {upto} with holds {holds}: there are {self.num_layers} layers")
        part, view = self._part, self._view
        # Rule 3: no vote after a promise, or once out was asked for (I-19: a vote can be counted on).
        if part.phase is not Phase.OPEN or not view.accepts(view.installed) or upto <= part.prepared:
            return
        part.vote(upto, holds or (0,) * self.num_layers)
        self._send(
            view.coordinator,
            messages.Prepared(term=view.installed, epoch=part.epoch, sender=self.rank, upto=upto, holds=part.holds),
        )

    def _give_up(self, reason: str) -> None:
        """Rule 5; works in any phase, and never takes an attempt back twice (I-10)."""
        part, view = self._part, self._view
        if not part.active or part.asked is not None:
            return
        part.asked = reason = clip(reason)
        if part.bound or self._lead is not None:
            part.deadline = self._now + self.settle_timeout
        else:
            self._finish(self.rank, reason)
        if view.settled:
            self._ask_out(reason)
        elif not part.bound:
            self._finish(self.rank, reason)
        self._doubt_without_majority()

    def _ask_out(self, reason: str) -> None:
        part, view = self._part, self._view
        self._send(
            view.coordinator,
            messages.AbortRequest(
                term=view.installed, epoch=part.epoch, attempt=part.attempt, sender=self.rank, reason=reason
            ),
        )

    def _close(self) -> None:
        view = self._view
        if self._over or view.leaving & bit(self.rank):
            return
        view.leaving |= bit(self.rank)
        if view.outside:
            self._shut(Phase.CLOSED, "this rank closes")
            return
        self._give_up("this rank closes")
        for rank in each(view.remaining & ~bit(self.rank)):
            self._send(rank, messages.Leave(term=view.installed, sender=self.rank))
        self._leave_if_alone()

    def _gone(self, rank: int, proof: Proof) -> None:
        view = self._view
        self._check_other(rank)
        if self._over:
            return
        self._met(rank, NOT_MET)
        known = (view.gone, view.declared, view.leaving)
        view.gone |= bit(rank)
        view.suspects &= ~bit(rank)
        if proof is Proof.LEFT:
            view.leaving |= bit(rank) & view.members
        if proof is Proof.EXCLUDED:
            self._declare(bit(rank))
        if (view.gone, view.declared, view.leaving) == known:
            return
        self._members_changed()
        if not self._over and self._part.active and not view.majority():
            self._give_up(f"no majority of {names(view.members)} remains; say which are dead with exclude()")
            self._doubt_without_majority()

    def _suspect(self, rank: int) -> None:
        view = self._view
        self._check_other(rank)
        if not self._over and view.remaining & bit(rank):
            view.suspect(bit(rank))
            self._send(rank, self._ping())

    def _check_other(self, rank: int) -> None:
        if not 0 <= rank < self._view.ep_size or rank == self.rank:
            raise ValueError(f"rank {rank} cannot be gone or back for rank {self.rank} of {self._view.ep_size}")

    def _ping(self) -> messages.Ping:
        view = self._view
        return messages.Ping(
            term=view.installed,
            sender=self.rank,
            gone=view.gone & view.members,
            declared=view.declared & view.members,
        )

    def _tick(self) -> None:
        part, view = self._part, self._view
        if part.deadline is not None and self._now >= part.deadline:
            self._doubt(f"no END and no new view within {self.settle_timeout:g} s")
        if self._ping_at is not None and self._now >= self._ping_at and self._waits:
            self._ping_at = self._now + self.ping_interval
            ping = self._ping()
            for rank in each(self._waited()):
                self._send(rank, ping)
                if view.leaving & bit(self.rank):  # who came back since may open the next view, and has not heard it
                    self._send(rank, messages.Leave(term=view.installed, sender=self.rank))
            if self._change is not None:
                self._say_view(self._change.missing(view))
            self._say_met()
            if part.active and part.asked is not None and view.settled and self._lead is None:
                self._ask_out(part.asked)  # asked again: the first, or its answer, may be lost

    def _doubt(self, why: str) -> None:
        """Rule 9: says once that it does not know."""
        part = self._part
        part.deadline = None
        if not part.active or part.doubt:
            return
        part.doubt = True
        self._out.append(
            events.InDoubt(
                f"{why}: rank {self.rank} voted for {part.prepared} layers of epoch {part.epoch} and knows"
                f" {part.committed} committed; it gave up because: {part.asked}"
            )
        )

    def _doubt_without_majority(self) -> None:
        view = self._view
        if self._part.active and not view.leaving & bit(self.rank) and not view.majority():
            self._doubt(
                f"{names(view.members & view.gone)} gone, and {names(view.staying)} are no majority of"
                f" {names(view.members)}; say which are dead with exclude()"
            )

    def _receive(self, message: Message) -> None:
        sender, view = message.sender, self._view
        if not self._over and 0 <= sender < view.ep_size:
            self._heard_of(message)
        try:
            match message:
                case _ if self._over:
                    raise Ignored("over")
                case _ if not 0 <= sender < view.ep_size:
                    raise Ignored("foreign")
                case _ if self._leaps(message):
                    raise Ignored("leap")
                case messages.View():
                    self._on_view(message)
                case messages.State():
                    self._on_state(message)
                case messages.Install():
                    self._on_install(message)
                case messages.Term():
                    self._on_term(message)
                case messages.Hello() | messages.Introduce():
                    raise Ignored("handshake")
                case _ if not view.members & bit(sender):
                    if message.term < view.installed or isinstance(message, messages.Leave):
                        self._tell_view(sender)
                    raise Ignored("foreign")
                case messages.Leave():
                    view.leaving |= bit(sender)
                    self._leave_if_alone()
                    self._try_view()
                case messages.Ping():
                    self._on_ping(message)
                case messages.Pong():
                    view.suspects &= ~bit(sender)
                case _ if not view.accepts(message.term):
                    raise Ignored("stale" if message.term < view.promised else "early")
                case messages.Join() | messages.AbortRequest() | messages.Prepared():
                    self._on_bookkeeping(message)
                case messages.Met():
                    self._on_met(message)
                case messages.Begin() | messages.Commit() | messages.End() if sender == view.coordinator:
                    self._on_decision(message)
                case _:
                    raise Ignored("foreign")
        except Ignored as ignored:
            self.dropped[ignored.why] += 1  # I-8: counted, and nothing else

    def _leaps(self, message: Message) -> bool:
        """Whether a term or epoch is further ahead than any group gets: counted on from, it would be the last."""
        terms, epochs = [message.term], [message.epoch]
        match message:
            case messages.Join():
                epochs.append(message.last_epoch)
            case messages.View():
                terms.append(message.installed_term)
            case messages.State():
                terms.append(message.installed_term)
                epochs += (message.last_epoch, message.highest_epoch)
            case messages.Install():
                epochs.append(message.next_epoch)
        return max(terms) > self._view.promised + _LEAP or max(epochs) > self._part.epoch + _LEAP

    def _on_ping(self, message: messages.Ping) -> None:
        view = self._view
        self._send(message.sender, messages.Pong(term=view.installed, sender=self.rank))
        if message.term == view.installed:
            view.suspect(message.gone & view.remaining)
            if message.declared & ~view.declared & ~bit(self.rank):
                self._declare(message.declared)
                self._members_changed()

    def _on_bookkeeping(self, message: messages.Join | messages.AbortRequest | messages.Prepared) -> None:
        """Rules 1, 2, 4 and 5, as coordinator."""
        lead = self._lead
        if lead is None:
            raise Ignored("foreign")
        match message:
            case messages.Join():
                self._returns.forget(message.sender)
                sends = lead.join(message, self._part.epoch)
            case messages.AbortRequest():
                sends = lead.abort(message)
            case messages.Prepared():
                sends = lead.prepared(message)
        for rank, answer in sends:
            self._send(rank, answer)

    def _on_decision(self, message: messages.Begin | messages.Commit | messages.End) -> None:
        part = self._part
        match message:
            case messages.Begin():
                if part.begun or not part.active or message.attempt != part.attempt:
                    raise Ignored("stale")
                if message.epoch <= part.epoch:
                    raise Contradiction("an epoch below one already seen")
                part.begin(message.epoch)
                if part.asked is None:
                    self._out.append(events.Begin(part.epoch, self.members))
            case messages.Commit():
                if not part.begun or message.epoch != part.epoch:
                    raise Ignored("stale")
                if message.upto <= part.committed:
                    raise Ignored("duplicate")
                part.check(message.upto)
                self._out += part.commit(message.upto, message.at)
                if part.committed == self.num_layers:
                    self._finish(-1, "")
            case messages.End():
                if not part.active or message.attempt != part.attempt:
                    raise Ignored("stale")
                if part.begun:
                    part.check(message.upto)
                    self._out += part.commit(message.upto, message.at)
                self._finish(message.origin, message.reason)
