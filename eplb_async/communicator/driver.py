"""Drives ``core.protocol`` on the engine loop: messages in, commands out, one attempt at a time.

The protocol decides, this does: it sends what the protocol says, starts and ends the epoch's data movement,
keeps the timers, and turns outcomes into results and errors. Everything here runs on the engine loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol as Interface

from eplb_async.communicator.attempt import Attempt
from eplb_async.communicator.chatter import Chatter
from eplb_async.communicator.degraded import Degraded
from eplb_async.communicator.members import Identity, Member, Roster, start_of
from eplb_async.communicator.outbox import Outbox
from eplb_async.communicator.report import View
from eplb_async.communicator.steps import Steps
from eplb_async.communicator.using import Users
from eplb_async.communicator.watch import Watch
from eplb_async.communicator.watchdog import Standing
from eplb_async.core import events, messages
from eplb_async.core.events import Phase, Proof
from eplb_async.core.protocol import Protocol
from eplb_async.core.wire import Codec, WireError
from eplb_async.core.words import Assembly
from eplb_async.engine import LoopEngine
from eplb_async.errors import (
    CommunicatorClosed,
    MigrationInDoubt,
    NixlPeerDisconnected,
    NixlTransferFailed,
    describe,
)
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.settings import Settings
from eplb_async.telemetry.emitter import Emit

_log = logging.getLogger("eplb_async.communicator")
_DISCONNECTED = "disconnected"
_MAX_EARLY = 16  # of each rank
_NOT_KEPT = (messages.Ping, messages.Pong, messages.Word)  # they are sent again, or nobody can have subscribed yet
_QUIET = (Phase.IDLE, Phase.CLOSED, Phase.FENCED)
_LASTING = ("idle", "closed", "fenced")


class Reader(Interface):
    """Takes mail."""

    def wants(self, topic: int) -> bool:
        """Whether it takes what is about that topic."""

    def deliver(self, sender: int, topic: int, payload: bytes) -> int:
        """Takes a message; returns how many failed at it."""

    def view_changed(self) -> None:
        """There is another view, or this rank is in none any more."""


class Driver:
    """One rank's protocol, connected.

    Args:
        identity: Who this rank is; :attr:`identity` changes when the agent is recycled.
        engine: The engine loop.
        settings: Timeouts.
        key: Authenticates control messages.
        roster: Members introduced so far.
        num_layers: Layers of a migration.
        emit: Told of what happens; ``None`` if nobody wants to know.
        steps: Where the engine stands, if layers are applied at its steps; ``None`` if at once.
        users: Who uses which layer, if an apply waits for them.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        engine: LoopEngine,
        settings: Settings,
        key: bytes,
        roster: Roster,
        num_layers: int,
        emit: Emit | None = None,
        steps: Steps | None = None,
        users: Users | None = None,
    ) -> None:
        self.identity = identity
        self.steps = steps
        self._users = users
        self.roster = roster
        self.settings = settings
        self.degraded = Degraded(emit)
        self.emit = emit
        self.last_error = ""
        self.attempt: Attempt | None = None
        self.over: str = ""
        self.dropped: Counter[str] = Counter()
        self.endpoint: Endpoint | None = None
        self.on_introduction: Callable[[messages.Hello | messages.Introduce], object] = lambda _: None
        self.on_installed: Callable[[frozenset[int]], object] = lambda _: None
        self.has_met: Callable[[Member], bool] = lambda _: True
        self.opened = False
        self.returning = False
        self._early: list[messages.Message] = []
        self._early_of: Counter[int] = Counter()
        self._engine = engine
        self._codec = Codec(key, ep_size=identity.ep_size, num_layers=num_layers)
        self.protocol = Protocol(
            rank=identity.rank,
            ep_size=identity.ep_size,
            num_layers=num_layers,
            settle_timeout=settings.settle_timeout,
            ping_interval=settings.ping_interval,
            majority_rule=settings.majority_rule,
        )
        self.view = View(0, tuple(range(identity.ep_size)))
        self.reader: Callable[[], Reader | None] = lambda: None
        self.outbox = Outbox(engine, send=self._say, ping=self._ping, interval=settings.ping_interval / 4)
        self.watch = Watch(
            engine.loop,
            idle_tick=settings.idle_tick,
            members=self._watched,
            greet=self._greet,
            ping=self._ping,
            degraded=self.degraded,
        )
        self._assembly = Assembly(self.dropped)
        self._chatter = Chatter(settings.ping_interval)
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at: float | None = None
        self._serving = contextlib.ExitStack()
        self._served: Endpoint | None = None
        self._linger_until = 0.0
        self._changed = asyncio.Event()
        self._strides: dict[int, int] = {}
        self._asking: asyncio.TimerHandle | None = None
        self.close_by: float | None = None
        self.on_standing: Callable[[Standing], object] = lambda _: None
        self.standing = self._stand()

    # -------------------------------------------------------------------------------------- what goes in
    def notification(self, agent: str, data: bytes) -> bool:
        """A notification came: drop it and count why, or hand it on (I-8).

        Returns:
            Whether nothing is likely to follow: somebody is here.
        """
        try:
            message = self._codec.decode(data)
        except WireError as error:
            self.dropped[error.kind] += 1
            return False
        me = self.identity
        if message.sender == me.rank or start_of(message.receiver_incarnation) != start_of(me.incarnation):
            self.dropped["another incarnation"] += 1
        elif isinstance(message, messages.Hello | messages.Introduce):
            self.on_introduction(message)
        elif self.opened or self.returning:
            self._hear(message)
        elif not isinstance(message, _NOT_KEPT) and self._early_of[message.sender] < _MAX_EARLY:
            self._early.append(message)
            self._early_of[message.sender] += 1
        else:
            self.dropped["early"] += 1
        return isinstance(message, messages.Pong)

    def start(self) -> None:
        """This rank has met its peers: from now on it counts what they say, and what became of them.

        Until then a peer may start again, as after a cancelled ``open``, and is nobody who is gone.
        """
        self.opened = True
        self._hear_early()
        for member in self.roster:
            if member.peer.gone:
                self.lost(member.peer.name)

    def _hear_early(self) -> None:
        early, self._early = self._early, []
        self._early_of.clear()
        for message in early:
            self._hear(message)

    def _hear(self, message: messages.Message) -> None:
        if self.roster.same_start(message.sender, message.sender_incarnation):
            self._chatter.heard(message.sender)
            self.watch.heard(message.sender)
            self.outbox.heard(message.sender)
            if isinstance(message, messages.Word):
                self._hear_word(message)
                return
            if isinstance(message, messages.Ping | messages.Pong):
                self._strides[message.sender] = message.stride
            self.feed(events.Received(message))
        else:
            self.dropped["another incarnation"] += 1

    def _hear_word(self, word: messages.Word) -> None:
        """A part of mail: it moves nothing of the protocol."""
        view, reader = self.view, self.reader()
        if self.over:
            self.dropped["over"] += 1
        elif word.sender not in view.members:
            self.dropped["foreign"] += 1
        elif word.term != view.term:
            self.dropped["stale" if word.term < view.term else "early"] += 1
        elif reader is None or not reader.wants(word.topic):
            self.dropped["unsubscribed"] += 1
        else:
            self._stay_awake()
            if (payload := self._assembly.add(word)) is not None:
                self.dropped["subscriber failed"] += reader.deliver(word.sender, word.topic, payload)

    def disconnected(self, agent: str) -> None:
        """NIXL says that an agent is gone: proof, if it is its rank's current one."""
        member = self.roster.by_agent(agent)
        if member is not None and self.degraded.get(member.rank) != _DISCONNECTED:
            self.degraded[member.rank] = _DISCONNECTED
            _log.warning(
                "rank %d (%s) disconnected; its process died or closed. Next: see its own log; to have it back, start "
                "it again and await reconnect(%d) on every rank of the view meanwhile",
                member.rank,
                agent,
                member.rank,
            )
            # Not from within a send of the protocol's own commands.
            self._engine.loop.call_soon(self.lost, agent)

    def lost(self, agent: str) -> None:
        """An agent that is gone: proof, if it is its rank's current one and we have met it."""
        member = self.roster.by_agent(agent)
        # While opening, an introduction may be left from an earlier run: nobody is gone whom we have not met.
        if member is not None and (self.opened or (self.returning and self.has_met(member))):
            self.gone(member.rank, Proof.DISCONNECTED)

    def found_running(self) -> None:
        """While this rank opens, a peer says that its group runs already: it is to come back (rule 12)."""
        if not self.opened and not self.returning:
            self.returning = True
            self.feed(events.Returning())
            self._hear_early()

    def gone(self, rank: int, proof: Proof) -> None:
        """A rank is gone, with proof."""
        if proof is Proof.EXCLUDED:
            before = self.degraded.get(rank)
            self.degraded[rank] = "excluded by the caller" + (f" ({before} before)" if before else "")
        self.feed(events.Gone(rank, proof))

    def feed(self, event: events.Event) -> None:
        """Give the protocol an event and do what it says."""
        for command in self.protocol.handle(event, self._engine.loop.time()):
            self._do(command)
        if self.steps is not None and self.protocol.prepared <= self.protocol.committed:
            self.steps.decide()
        self._settle_timers()
        self.note()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` holds; it is looked at after every event."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # ------------------------------------------------------------------------------------------- attempt
    @property
    def settled(self) -> bool:
        """Whether nothing of an earlier attempt is under way, and the view is whole; of one that closes: it is over."""
        protocol = self.protocol
        closing = self.identity.rank in protocol.leaving
        idle = protocol.phase is Phase.IDLE and not protocol.view_changing and not closing
        return self.attempt is None and (bool(self.over) or idle)

    def begin(self, attempt: Attempt, digests: messages.Digests) -> None:
        """Send JOIN for an attempt."""
        self.attempt = attempt
        self.feed(events.Migrate(digests))

    def give_up(self, attempt: Attempt, reason: str) -> None:
        """This rank wants out of an attempt (rule 5)."""
        if self.attempt is attempt:
            self.feed(events.GiveUp(reason))

    def send(self, to: int, message: messages.Message) -> None:
        """Send a control message; a failure to is no error here, a disconnect is proof (rule 6)."""
        if self._chatter.is_due(to, message, self._engine.loop.time()):
            self._hand_over(to, message)

    def _hand_over(self, to: int, message: messages.Message) -> None:
        member = self.roster.get(to)
        if member is None or self.endpoint is None or self.endpoint.closed:
            self.dropped["unsendable"] += 1
            return
        small_talk = isinstance(message, messages.Ping | messages.Pong)
        if self.steps is not None and isinstance(message, messages.Ping | messages.Pong):
            message = replace(message, stride=self.steps.come)
        try:
            data = self._codec.address(
                message,
                sender=self.identity.rank,
                sender_incarnation=self.identity.incarnation,
                receiver_incarnation=member.incarnation,
            )
            self.endpoint.notify(member.peer, data, stir=not small_talk)
        except NixlPeerDisconnected:
            self.disconnected(member.peer.name)
        except (NixlTransferFailed, WireError) as error:
            self.dropped["unsendable"] += 1
            self.last_error = str(error)
            _log.warning("cannot send %s to rank %d: %s", type(message).__name__, to, error)

    def _say(self, to: int, word: messages.Word) -> bool:
        """Send a part of mail, in this view; returns False if that rank gets none."""
        here = self.identity.rank
        if self.over or to not in self.view.members or to in self.protocol.gone:
            self.dropped["unsendable"] += 1
            return False
        word = replace(word, term=self.view.term, sender=here)
        if to == here:
            self.outbox.heard(here)
            self._hear_word(word)
        else:
            self._stay_awake()
            self.send(to, word)
        return True

    def _ping(self, to: int) -> None:
        self.send(to, messages.Ping(term=self.protocol.term))

    def _greet(self, to: int) -> None:
        """Say that this rank is here; unlike an answer, which may be spared, that is always sent."""
        self._hand_over(to, messages.Pong(term=self.protocol.term))

    def watch_every(self, seconds: float) -> None:
        """Ping all members at this interval; 0 for never."""
        if not self.over:
            self.watch.set(seconds)

    def _watched(self) -> frozenset[int]:
        """Whom the watch pings."""
        protocol = self.protocol
        return frozenset() if self.over else protocol.members - protocol.gone - {self.identity.rank}

    def _stay_awake(self) -> None:
        """Mail is answered: look for it often, for as long as an idle rank may take to see what it was sent."""
        until = self._engine.loop.time() + 2 * self.settings.idle_tick
        if until > self._linger_until + self.settings.idle_tick / 2 and not self.over:
            self._linger_until = until
            self._settle_timers()

    # -------------------------------------------------------------------------------------- what comes out
    def _do(self, command: events.Command) -> None:
        attempt = self.attempt
        match command:
            case events.Send(to, message):
                self.send(to, message)
            case events.Begin(epoch, members):
                if attempt is not None:
                    attempt.begin(epoch, members)
            case events.Commit(_, _, upto, at):
                if attempt is not None and attempt.run is not None:
                    attempt.commit(upto, at)
            case events.Ended():
                if attempt is not None:
                    if not command.complete:
                        # Peers may still read from us (I-17).
                        self._linger_until = max(self._linger_until, self._engine.loop.time() + 1.0)
                    self._engine.spawn(self._finish(attempt, command), "end of an epoch")
            case events.InDoubt(reason):
                self.last_error = reason
                _log.error("in doubt: %s", reason)
                if attempt is not None:
                    attempt.fail(
                        MigrationInDoubt(
                            f"migration in doubt: {reason}",
                            epoch=self.protocol.epoch,
                            origin=self.identity.rank,
                            reason=reason,
                            committed_layers=self.protocol.committed,
                        )
                    )
            case events.Installed(term, members):
                _log.info("view %d: members %s", term, sorted(members))
                self._assembly.clear()
                self.dropped["unsendable"] += self.outbox.clear()
                self.view = View(term, tuple(sorted(members)))
                self._tell_view()
                if self.steps is not None:
                    self.steps.term = term
                self.on_installed(members)
                if self.emit is not None:
                    self.emit("view_changed", term=term, members=tuple(sorted(members)))
            case events.Fenced(reason):
                if self.emit is not None:
                    self.emit("fenced", reason=reason)
                self._end_for_good(f"fenced: {reason}")
            case events.Closed():
                self._end_for_good("closed")

    async def _finish(self, attempt: Attempt, ended: events.Ended) -> None:
        try:
            await attempt.finish(ended)
        except Exception as error:  # rows of a committed layer are neither old nor new: not to be used (I-7)
            self.break_off(f"a committed layer could not be applied: {describe(error)}")
        finally:
            if self.attempt is attempt:
                self.attempt = None
            if attempt.cause is not None:
                self.last_error = describe(attempt.cause)
            self._settle_timers()
            self.note()
        if attempt.told and self.emit is not None:
            layers = attempt.plan.new.num_layers
            self.emit("migration_settled", epoch=ended.epoch, layers_committed=ended.committed, num_layers=layers)

    def break_off(self, why: str) -> None:
        """This rank's rows cannot be trusted any more: it is out, and leaves."""
        if self.emit is not None:
            self.emit("broken", reason=why)
        self._end_for_good(f"broken: {why}")
        self.feed(events.Close())

    def _end_for_good(self, why: str) -> None:
        self.over = why
        if self.steps is not None:
            self.steps.end(why)
        if self._users is not None:
            self._users.end(why)
        if why != "closed":
            self.last_error = why
            _log.error("this rank is out of the group, which goes on without it: %s", why)
        if self.attempt is not None:
            self.attempt.fail(CommunicatorClosed(f"the communicator is {why}"))
        self._tell_view()
        self.note()

    def _tell_view(self) -> None:
        if (reader := self.reader()) is not None:
            reader.view_changed()

    def behind(self) -> tuple[int, ...]:
        """Members that have come least far among the steps, this rank included, and those not heard of yet."""
        assert self.steps is not None
        heard = dict(self._strides)
        strides = {rank: heard.get(rank, -1) for rank in self.protocol.members - self.protocol.gone}
        strides[self.identity.rank] = self.steps.come
        least = min(stride for stride in strides.values() if stride >= 0)
        return tuple(sorted(rank for rank, stride in strides.items() if stride <= least))

    def _ask_strides(self) -> None:
        """While a layer waits for its step: ask the others where they stand, again and again."""
        self._asking = None
        if self.steps is None or not self.steps.waiting or self.over:
            return
        for rank in self.protocol.members - {self.identity.rank}:
            self._ping(rank)
        self._asking = self._engine.loop.call_later(self.settings.ping_interval, self._ask_strides)

    def _settle_timers(self) -> None:
        if self.steps is not None and self._asking is None and self.steps.waiting:
            self._strides.clear()
            self._asking = self._engine.loop.call_later(self.settings.ping_interval, self._ask_strides)
        now = self._engine.loop.time()
        wakeup = self.protocol.next_wakeup
        lingers = now < self._linger_until
        at = self._linger_until if wakeup is None and lingers else wakeup
        if at != self._wakes_at:  # a coordinator is fed once for each vote: most leave the time as it is
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if at is None else self._engine.loop.call_at(max(at, now), self._wake)
            self._wakes_at = at
        busy = self.protocol.phase not in _QUIET or self.attempt is not None or wakeup is not None or lingers
        wanted = self.endpoint if busy and self.endpoint is not None and not self.endpoint.closed else None
        if wanted is not self._served:
            self._serving.close()
            if wanted is not None:
                self._serving.enter_context(wanted.serving())
            self._served = wanted

    def _wake(self) -> None:
        self._timer = self._wakes_at = None
        if self.protocol.next_wakeup is None:
            self._settle_timers()
        else:
            self.feed(events.Tick())

    def note(self) -> None:
        """Something happened: say where this rank stands, and wake whoever waits."""
        self.standing = self._stand()
        self.on_standing(self.standing)
        self._changed.set()

    def _stand(self) -> Standing:
        attempt, phase = self.attempt, self._phase()
        before: Standing | None = getattr(self, "standing", None)
        since = self._engine.loop.time() if before is None or before.phase != phase else before.since
        if phase in _LASTING:
            deadline = None
        elif phase == "closing":
            deadline = self.close_by
        elif attempt is not None and phase in ("joined", "open", "activating"):
            deadline = attempt.deadline
            if phase == "activating" and deadline <= since:  # of an epoch that ended at its deadline
                deadline = since + self.settings.activation_timeout
        else:
            deadline = since + self.settings.settle_timeout
        return Standing(phase=phase, since=since, deadline=deadline)

    def _phase(self) -> str:
        protocol, phase = self.protocol, self.protocol.phase
        if phase not in (Phase.CLOSED, Phase.FENCED):
            if self.over:
                phase = Phase.CLOSED
            elif self.identity.rank in protocol.leaving:
                return "closing"
            elif phase is Phase.IDLE and self.attempt is not None:
                if (self.steps is not None and self.steps.waiting) or (self._users is not None and self._users.waiting):
                    return "activating"
                phase = Phase.SETTLING
            elif phase is Phase.IDLE and protocol.view_changing:
                return "view_change"
        return str(phase.value)

    def stop(self) -> None:
        """No more timers."""
        self.watch.stop()
        self.outbox.stop()
        for timer in (self._timer, self._asking):
            if timer is not None:
                timer.cancel()
        self._serving.close()
