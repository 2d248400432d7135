"""What the owner of the weights does with them: rewrites them, or puts them to sleep. All on the engine loop.

The owner may touch the rows only while no epoch is open here. So it ends the one that runs, and holds the next
one off: peers cannot begin one without this rank's JOIN.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections.abc import Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from eplb_async.communicator.agents import Agents
from eplb_async.communicator.driver import Driver
from eplb_async.engine import LoopEngine
from eplb_async.errors import CommunicatorBusy, CommunicatorClosed, MigrationAborted, WeightsError
from eplb_async.weights import DIGEST_BYTES, MAX_VERSION, Copier, Digester, ExpertWeights, Staging

if TYPE_CHECKING:
    from eplb_async.communicator.session import Session


class Owner:
    """The owner's turns with the weights of one session.

    Args:
        session: The session.
        engine: The engine loop.
        driver: Ends migrations.
        agents: Gives way to an agent without memory, and back.
        weights: The rows and their entries.
        staging: Let go of while suspended.
        copier: Knows when what the server has queued is done.
        digester: Digests rows, where digests are kept.

    Attributes:
        suspended: Whether the memory of weights and staging is let go of, or being let go of.
        half_written: Layers whose update did not end well; the user's loop adds to it before they are written.
    """

    def __init__(
        self,
        session: Session,
        *,
        engine: LoopEngine,
        driver: Driver,
        agents: Agents,
        weights: ExpertWeights,
        staging: Staging,
        copier: Copier,
        digester: Digester | None,
    ) -> None:
        self.suspended = False
        self.half_written: frozenset[int] = frozenset()
        self.digester = digester
        self._session = session
        self._engine = engine
        self._driver = driver
        self._agents = agents
        self._weights = weights
        self._staging = staging
        self._copier = copier
        self._updating = False
        self._undigested: set[int] = set()
        self._preparing = 0
        self._prepared = asyncio.Event()
        self._switch: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------- migrations
    @contextlib.contextmanager
    def migration(self) -> Iterator[None]:
        """Around what a migration does before its JOIN; at its end it is refused if the owner came meanwhile.

        Raises:
            CommunicatorBusy: It is the owner's turn.
            MigrationAborted: The owner's turn came meanwhile.
        """
        if turn := self._turn():
            raise CommunicatorBusy(f"cannot migrate: {turn}")
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1
            self._prepared.set()
        if turn := self._turn():
            raise MigrationAborted(f"migration not begun: {turn}", origin=self._driver.identity.rank, reason=turn)

    def _turn(self) -> str:
        """Whether it is the owner's turn, in words; empty if it is not."""
        if self.suspended:
            return "the communicator is suspended; await resume() first"
        return "this rank's weights are being rewritten (updating_weights)" if self._updating else ""

    async def _end_migration(self, why: str, timeout: float) -> None:
        """End the epoch that runs, and wait until this rank is idle and what was committed is applied."""
        session = self._session
        try:
            async with asyncio.timeout(timeout):
                if self._driver.attempt is not None:
                    self._driver.give_up(self._driver.attempt, why)
                await session.settled()
                while self._preparing:
                    self._prepared.clear()
                    await self._prepared.wait()
                    await session.settled()
        except TimeoutError:
            raise session.delays.unsettled(why, timeout) from None

    # ----------------------------------------------------------------------------------------- update
    async def begin_update(self, timeout: float) -> None:
        """Hold migrations off until :meth:`release`, and end the one that runs."""
        self._updating = True
        await self._switched()
        await self._end_migration("its weights are to be rewritten (updating_weights)", timeout)

    async def end_update(self, layers: Iterable[int], version: int | None) -> None:
        """These layers were rewritten: digest them, and let every entry say the new version."""
        session = self._session
        written = frozenset(layers)
        self._undigested |= written
        if not self.suspended:
            await self._digest()
        session.version = session.version + 1 if version is None else version
        self.write_entries()
        self.half_written -= written

    def release(self) -> None:
        """The owner's update is over, well or not."""
        self._updating = False

    async def digest_all(self) -> None:
        """Digest what the rows hold when they are opened."""
        self._undigested = set(range(self._session.placement.num_layers))
        await self._digest()

    def write_entries(self) -> None:
        """Let every entry say the expert, by the placement, and the version; digests stay."""
        for layer, experts in enumerate(self._local()):
            self._weights.write_entries(layer, experts, self._session.version)

    async def _digest(self) -> None:
        """Digest the layers that are due, once what the server has queued on its stream is done."""
        await self._copier.fence()
        if self.digester is None:
            self._undigested.clear()
            return
        local = self._local()
        for layer in sorted(self._undigested):
            held = [slot for slot, expert in enumerate(local[layer]) if expert >= 0]
            found = await self.digester.digests(layer, self._weights.expert_rows(layer), held)
            digests = [bytes(DIGEST_BYTES)] * len(local[layer])
            for slot, digest in zip(held, found, strict=True):
                digests[slot] = digest
            self._weights.write_entries(layer, local[layer], self._session.version, digests)
            self._undigested.discard(layer)

    def _local(self) -> list[list[int]]:
        """Logical expert of each slot of this rank, by layer."""
        local: list[list[int]] = self._session.placement.local(self._driver.identity.rank).tolist()
        return local

    # ---------------------------------------------------------------------------------------- suspend
    async def suspend(self, timeout: float) -> None:
        """See ``AsyncEplbCommunicator.suspend``."""
        await self._switched()
        if self.suspended:
            return
        deadline = self._engine.loop.time() + timeout
        self.suspended = True
        try:
            await self._end_migration("it is being suspended", timeout)
            await self._session.endpoint.drained(max(0.0, deadline - self._engine.loop.time()))
        except BaseException:
            self.suspended = False
            raise
        await self._go_through(self._switch_off())

    async def resume(self) -> None:
        """Register the tensors as the weights say they are now; see ``AsyncEplbCommunicator.resume``."""
        await self._go_through(self._switch_on())

    async def is_suspended(self) -> bool:
        """Whether it is suspended, once a switch that runs is over.

        Raises:
            CommunicatorClosed: It is closed, or was fenced.
        """
        await self._switched()
        if self._driver.over:
            raise CommunicatorClosed(f"the communicator is {self._driver.over}")
        return self.suspended

    async def _switched(self) -> None:
        if self._switch is not None:
            await asyncio.wait([self._switch])

    async def _go_through(self, switching: Coroutine[Any, Any, None]) -> None:
        """Await a switch, which goes on to its end when its awaiter is cancelled."""
        self._switch = self._engine.spawn(switching, "suspending or resuming")
        self._switch.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._switch)

    async def _switch_off(self) -> None:
        """Destroying the agent is what makes sure that nobody reads or writes its memory any more (I-3)."""
        try:
            await self._agents.recycle("suspended", bare=True)
        finally:
            self.suspended = self._agents.bare
        self._staging.buffers = {}

    async def _switch_on(self) -> None:
        try:
            self._staging.buffers = await self._engine.offload(self._session.make_staging)
        except (RuntimeError, MemoryError) as error:
            raise WeightsError(f"staging cannot be allocated, and the rank stays suspended: {error}") from error
        try:
            await self._agents.recycle("resumed")
        finally:
            if self._agents.bare:
                self._staging.buffers = {}
        await self._digest()
        self.write_entries()
        self.suspended = False


def chosen_layers(layers: Iterable[int] | None, num_layers: int) -> frozenset[int]:
    """The layers that a caller names, all of them by default.

    Raises:
        ValueError: There are none, or one is no layer; names it.
    """
    if layers is None:
        return frozenset(range(num_layers))
    try:
        given = list(layers)
        chosen = [operator.index(layer) for layer in given if not isinstance(layer, bool)]
    except TypeError:
        raise ValueError(f"layers={layers!r} is not a sequence of layer numbers") from None
    if not given or len(chosen) < len(given) or not all(0 <= layer < num_layers for layer in chosen):
        raise ValueError(f"layers={given!r}: need at least one number from 0 to {num_layers - 1}, and nothing else")
    return frozenset(chosen)


def checked_version(version: int | None, current: int) -> int | None:
    """A weight version that a caller gives.

    Raises:
        ValueError: It is no number, or lower than the present one.
    """
    if version is None:
        return None
    if type(version) is not int or not current <= version <= MAX_VERSION:
        raise ValueError(f"version={version!r}: need a whole number from {current}, the present weight version, on")
    return version
