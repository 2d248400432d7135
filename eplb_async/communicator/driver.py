"""Drives ``core.protocol`` on the engine loop: messages in, commands out, one attempt at a time.

The protocol decides, this does: it sends what the protocol says, starts and ends the epoch's data movement,
keeps the timers, and turns outcomes into results and errors. Everything here runs on the engine loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from eplb_async.communicator.attempt import Attempt
from eplb_async.communicator.chatter import Chatter
from eplb_async.communicator.degraded import Degraded
from eplb_async.communicator.early import Early
from eplb_async.communicator.members import Identity, Member, Roster, start_of
from eplb_async.communicator.post import Post
from eplb_async.communicator.report import View
from eplb_async.communicator.standing import Standing, standing_of
from eplb_async.communicator.steps import Steps
from eplb_async.communicator.strides import Strides
from eplb_async.communicator.using import Users
from eplb_async.communicator.wakeups import Wakeups
from eplb_async.communicator.watch import Watch
from eplb_async.core import events, messages
from eplb_async.core.events import Phase, Proof
from eplb_async.core.protocol import Protocol
from eplb_async.core.wire import Codec, WireError
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
        self.users = users
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
        self.close_by: float | None = None
        self._early = Early()
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
        self.post = Post(self, engine)
        self.wakeups = Wakeups(self, engine.loop)
        self.strides = Strides(self, engine.loop)
        self.watch = Watch(
            engine.loop,
            idle_tick=settings.idle_tick,
            members=self._watched,
            greet=self._greet,
            ping=self.ping,
            degraded=self.degraded,
        )
        self._chatter = Chatter(settings.ping_interval)
        self._changed = asyncio.Event()
        self.on_standing: Callable[[Standing], object] = lambda _: None
        self.standing = standing_of(self, None, engine.loop.time())

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
        elif not self._early.keep(message):
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
        for message in self._early.take():
            self._hear(message)

    def _hear(self, message: messages.Message) -> None:
        if self.roster.same_start(message.sender, message.sender_incarnation):
            self._chatter.heard(message.sender)
            self.watch.heard(message.sender)
            self.post.outbox.heard(message.sender)
            if isinstance(message, messages.Word):
                self.post.take(message)
                return
            if isinstance(message, messages.Ping | messages.Pong):
                self.strides.heard[message.sender] = message.stride
            self.feed(events.Received(message))
        else:
            self.dropped["another incarnation"] += 1

    def disconnected(self, agent: str) -> None:
        """NIXL says that an agent is gone: proof, if it is its rank's current one."""
        member = self.roster.by_agent(agent)
        if member is not None and self.degraded.get(member.rank) != _DISCONNECTED:
            self.degraded[member.rank] = _DISCONNECTED
            _log.warning(
                "rank %d (%s) disconnected; its process died or closed, or its host is cut off. Next: see its own log; "
                "to have it back, start it again and await reconnect(%d) on every rank of the view meanwhile",
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
        self.settle()
        self.note()

    def settle(self) -> None:
        """Set the timers by how things stand now."""
        if self.steps is not None:
            self.strides.settle()
        self.wakeups.settle()

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

    def ping(self, to: int) -> None:
        """Ask a rank whether it is there."""
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
                        self.wakeups.linger(1.0)  # peers may still read from us (I-17)
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
                self.post.clear()
                self.view = View(term, tuple(sorted(members)))
                self.post.tell_view()
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
            self.settle()
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
        if self.users is not None:
            self.users.end(why)
        if why != "closed":
            self.last_error = why
            _log.error("this rank is out of the group, which goes on without it: %s", why)
        if self.attempt is not None:
            self.attempt.fail(CommunicatorClosed(f"the communicator is {why}"))
        self.post.tell_view()
        self.note()

    def note(self) -> None:
        """Something happened: say where this rank stands, and wake whoever waits."""
        self.standing = standing_of(self, self.standing, self._engine.loop.time())
        self.on_standing(self.standing)
        self._changed.set()

    def stop(self) -> None:
        """No more timers."""
        self.watch.stop()
        self.post.outbox.stop()
        self.strides.stop()
        self.wakeups.stop()
