"""Runs the rounds of one rank on the user's loop: mail in, actions out, one task for each piece of work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from eplb_async.communicator import AsyncEplbCommunicator, MigrationReport
from eplb_async.communicator.loading import LoadExpert
from eplb_async.errors import CommunicatorBusy, CommunicatorClosed, EplbError, MigrationError, describe
from eplb_async.service.actions import Action, Collect, Decide, End, Move, Send, Stop
from eplb_async.service.decision import Policy, decide
from eplb_async.service.payloads import TOPIC, Loads, PayloadError, Verdict, decode
from eplb_async.service.rounds import Rounds
from eplb_async.service_settings import ServiceSettings

__all__ = ["Owner", "Runner"]

T = TypeVar("T")
_log = logging.getLogger("eplb_async.service")


class Owner(Protocol):
    """Whose rounds are run."""

    def loads(self) -> tuple[NDArray[np.float64], int]:
        """This rank's loads and the steps they are of; called in a thread."""

    def began(self) -> None:
        """A round was begun."""

    def ended(self, end: End, cause: Exception | None, migration: MigrationReport | None) -> None:
        """A round, or the wish for one, is over; with the error of this rank that ended it."""

    def viewed(self, *, changed: bool) -> None:
        """There may be another view; whether it has other members."""

    def note(self) -> None:
        """Where the rounds stand has changed, or not."""

    def lost(self) -> None:
        """The communicator is out of the group."""


class Runner:
    """Drives `Rounds`. Everything but :meth:`heard` runs on the loop.

    Args:
        comm: The communicator.
        owner: Whose rounds they are.
        rank: This rank.
        settings: Timeouts and gates.
        policy: The policy, or ``None`` for the default one.
        load_expert: For ``comm.migrate``.
        workers: Runs the policy and sums loads.
    """

    def __init__(
        self,
        comm: AsyncEplbCommunicator,
        owner: Owner,
        *,
        rank: int,
        settings: ServiceSettings,
        policy: Policy | None,
        load_expert: LoadExpert | None,
        workers: Executor,
    ) -> None:
        self.rounds = Rounds(
            rank,
            timeout=settings.round_timeout,
            min_interval=settings.min_interval,
            first_want=time.time_ns(),  # the others may know those of a service that was here before
        )
        self.loop = asyncio.get_running_loop()
        self._comm = comm
        self._owner = owner
        self._settings = settings
        self._policy = policy
        self._load_expert = load_expert
        self._workers = workers
        self._queue: deque[Action] = deque()
        self._draining = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._moving: asyncio.Task[None] | None = None
        self._deciding: tuple[int, asyncio.Future[Verdict]] | None = None
        self._causes: dict[int, Exception] = {}  # by round, of the one that runs
        self._migration: MigrationReport | None = None
        self._removers: list[Callable[[], None]] = []

    def start(self) -> None:
        """Hear what the others say, from now on.

        Raises:
            CommunicatorBusy: There is a service of this communicator already.
        """
        mail = self._comm.mail
        if mail.wants(TOPIC):
            raise CommunicatorBusy("a service runs on this communicator already; close that one first")
        me = weakref.ref(self)  # the communicator must not keep a service alive that was dropped

        def heard(sender: int, payload: bytes) -> None:
            if (runner := me()) is not None:
                runner.heard(sender, payload)

        def viewed() -> None:
            if (runner := me()) is not None:
                runner.post(runner.viewed)

        self._removers = [mail.subscribe(TOPIC, heard), mail.on_view(viewed)]
        self.look()

    # ------------------------------------------------------------------------------------------ what goes in
    def heard(self, sender: int, payload: bytes) -> None:
        """A member's service said something; on the engine thread."""
        self.post(lambda: self._hear(sender, payload))

    def post(self, callback: Callable[[], object]) -> None:
        """Run something on the loop, from any thread; nothing happens once it is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback)

    def viewed(self) -> None:
        """The communicator says that there is another view, or that this rank is in none."""
        self.look()
        self._owner.viewed(changed=False)

    def look(self) -> None:
        """See whether there is another view."""
        view, known = self._comm.view, self.rounds.members
        self.do(self.rounds.view(view.term, view.members, self.loop.time()))
        if view.members != known:
            self._owner.viewed(changed=bool(known))

    def want(self, ticket: int, *, force: bool = False) -> None:
        """Somebody wants a round."""
        self.look()
        self.do(self.rounds.want(ticket, self.loop.time(), force=force))

    def do(self, actions: list[Action]) -> None:
        """Do what the rounds say, one thing after the other, also where one of them leads to more."""
        self._queue += actions
        if self._draining:
            return
        self._draining = True
        try:
            while self._queue:
                self._act(self._queue.popleft())
        finally:
            self._draining = False
        self._set_timer()
        self._owner.note()

    async def close(self, reason: str) -> None:
        """End what runs, tell the others, and wait until this rank's migration has let go."""
        self.do(self.rounds.close(reason, self.loop.time()))
        self.forget()
        self._set_timer()
        for task in self._tasks - {self._moving}:  # which was stopped, and says why
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def forget(self) -> None:
        """Hear nothing any more; from any thread."""
        for remove in self._removers:
            remove()
        self._removers.clear()

    # --------------------------------------------------------------------------------------------- within
    def _hear(self, sender: int, payload: bytes) -> None:
        self.look()
        try:
            message = decode(payload, self._comm.placement)
        except PayloadError as error:
            _log.warning(
                "rank %d: the service of rank %d sent what it should not: %s; does it run the same version?",
                self.rounds.rank,
                sender,
                error,
            )
            self.do(self.rounds.damaged(sender, str(error), self.loop.time()))
        else:
            self.do(self.rounds.receive(sender, message, self.loop.time()))

    def _act(self, action: Action) -> None:
        match action:
            case Send(to, message):
                try:
                    self._comm.mail.send(to, TOPIC, message.encode())
                except CommunicatorClosed:
                    self._owner.lost()
                except CommunicatorBusy as error:  # a rank that is silent; it is waited for, and named in time
                    self.rounds.dropped["unsendable"] += 1
                    _log.warning("rank %d: %s", self.rounds.rank, error)
            case Collect(number):
                self._causes.clear()
                self._migration = None
                self._owner.began()
                self._spawn(self._collect(number), number, f"loads of round {number}")
            case Decide():
                self._spawn(self._decide(action), action.round, f"policy of round {action.round}")
            case Move(number, verdict):
                self._moving = self._spawn(self._move(number, verdict), number, f"migration of round {number}")
            case Stop(_, reason):
                if self._moving is not None:
                    self._moving.cancel(reason)
            case End(number):
                self._owner.ended(action, self._causes.get(number), self._migration if number else None)

    async def _collect(self, number: int) -> None:
        try:
            loads, steps = await self._off(self._owner.loads)
        except Exception as error:
            self._causes[number] = error
            why = f"its loads cannot be read: {describe(error)}"
            self.do(self.rounds.failed(number, why, self.loop.time(), tell=True))
        else:
            answer = Loads(term=self.rounds.term, round=number, loads=loads, steps=steps)
            self.do(self.rounds.collected(number, answer, self.loop.time()))

    async def _decide(self, action: Decide) -> None:
        if self._deciding is not None and not self._deciding[1].done():
            why = f"the policy of round {self._deciding[0]} still runs; make it faster, or raise round_timeout"
            self._decided(action.round, Verdict(term=0, round=0, outcome="failed", reason=why))
            return
        placement, members = self._comm.placement, self.rounds.members
        running = self._off(
            lambda: decide(
                action.loads,
                placement,
                members=members,
                policy=self._policy,
                settings=self._settings,
                force=action.force,
            )
        )
        self._deciding = (action.round, running)
        try:
            verdict = await asyncio.shield(running)
        except Exception as error:
            self._causes[action.round] = error
            if self._policy is not None or not isinstance(error, EplbError):  # else the reason says it all
                _log.exception("rank %d: the policy failed in round %d", self.rounds.rank, action.round)
            why = f"the policy failed: {describe(error)}"
            verdict = Verdict(term=0, round=0, outcome="failed", reason=why)
        self._decided(action.round, verdict)

    def _decided(self, number: int, verdict: Verdict) -> None:
        self.do(self.rounds.decided(number, verdict, self.loop.time()))

    async def _move(self, number: int, verdict: Verdict) -> None:
        assert verdict.placement is not None
        try:
            migration = await self._comm.migrate(
                verdict.placement, timeout=self._settings.migrate_timeout, load_expert=self._load_expert
            )
        except asyncio.CancelledError:
            # Stopped: the round is over here. Else by somebody: the others may wait for a rank that has not joined yet.
            self.do(self.rounds.failed(number, "its migration was cancelled", self.loop.time(), tell=True))
            raise
        except Exception as error:
            self._causes[number] = error
            known = isinstance(error, MigrationError) and error.epoch > 0  # to all, by the end of that epoch
            self.do(self.rounds.failed(number, describe(error), self.loop.time(), tell=not known))
            if isinstance(error, CommunicatorClosed):
                self._owner.lost()
        else:
            self._migration = migration
            self.do(self.rounds.moved(number, self.loop.time()))

    def _off(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return self.loop.run_in_executor(self._workers, _tamed, work)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], number: int, name: str) -> asyncio.Task[None]:
        task = self.loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._reap(task, number))
        return task

    def _reap(self, task: asyncio.Task[None], number: int) -> None:
        """See that the round hears of its task's end also where that was cancelled, perhaps before it ran at all."""
        self._tasks.discard(task)
        if task.cancelled():
            why = "the task was cancelled by somebody"
        elif (error := task.exception()) is not None:
            why = f"the task failed: {describe(error)}"
            _log.error("%s failed; please report it", task.get_name(), exc_info=error)
        else:
            return
        self.do(self.rounds.failed(number, why, self.loop.time(), tell=True))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wakeup = self.rounds.next_wakeup if self._removers else None
        self._timer = None if wakeup is None else self.loop.call_at(wakeup, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.loop.call_soon(self._due)  # uvloop runs timers before what came while the loop was blocked (I-11)

    def _due(self) -> None:
        self.look()
        self.do(self.rounds.tick(self.loop.time()))


def _tamed(work: Callable[[], T]) -> T:
    """Run work of the caller's; what no future can carry, and what would end the loop, is raised as another error."""
    try:
        return work()
    except (StopIteration, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError) as error:
        raise RuntimeError(f"it raised {describe(error)}") from error
