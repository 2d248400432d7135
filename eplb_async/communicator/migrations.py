"""Calls of ``migrate`` on the engine loop: planned, made room for, and seen through to a result."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from eplb_async.communicator.agents import Agents
from eplb_async.communicator.attempt import Attempt
from eplb_async.communicator.delays import Delays
from eplb_async.communicator.driver import Driver
from eplb_async.communicator.ending import Ending
from eplb_async.communicator.introduction import agreed
from eplb_async.communicator.loading import Loader
from eplb_async.communicator.members import Roster
from eplb_async.communicator.report import MigrationReport
from eplb_async.communicator.room import needs_of
from eplb_async.communicator.runs import Runs
from eplb_async.core import messages
from eplb_async.core.placement import Placement
from eplb_async.core.plan import MigrationPlan, plan
from eplb_async.engine import LoopEngine
from eplb_async.errors import MigrationAborted, PlacementError
from eplb_async.weights import ExpertWeights, Staging

if TYPE_CHECKING:
    from eplb_async.communicator.session import Session

_log = logging.getLogger("eplb_async.communicator")
_DRAIN_SECONDS = 0.5


class Migrations:
    """The migrations of one session, one at a time.

    Args:
        session: The session.
        engine: The engine loop.
        driver: Carries attempts out.
        agents: The agent is recycled where quarantine leaves too little staging.
        roster: Members and their nodes.
        weights: This rank's rows.
        staging: Where READs land.
        delays: Says what was waited for.
        runs: Makes the data movement of an attempt.
    """

    def __init__(
        self,
        session: Session,
        *,
        engine: LoopEngine,
        driver: Driver,
        agents: Agents,
        roster: Roster,
        weights: ExpertWeights,
        staging: Staging,
        delays: Delays,
        runs: Runs,
    ) -> None:
        self._session = session
        self._engine = engine
        self._driver = driver
        self._agents = agents
        self._roster = roster
        self._weights = weights
        self._staging = staging
        self._delays = delays
        self._runs = runs

    async def run(self, new: Placement, timeout: float, loader: Loader | None) -> MigrationReport:
        """Run one; see ``AsyncEplbCommunicator.migrate``."""
        emitter = self._session.emitter
        if emitter is None:
            return await self._run(new, timeout, loader, None)
        with Ending(emitter.emit, self._driver, self._engine.loop, self._session.placement.num_layers) as ending:
            return await self._run(new, timeout, loader, ending)

    def plan(self, new: Placement) -> MigrationPlan:
        """What is to move, in the view as it is; reads only, so any thread may call it.

        Raises:
            PlacementError: It does not fit the current one, or uses slots of ranks that are out.
        """
        members = self._driver.protocol.members
        nodes = self._nodes(members)
        labels = [nodes.get(rank, "") for rank in range(self._driver.identity.ep_size)]
        return plan(self._session.placement, new, nodes=labels, members=members, load_lost=True)

    async def _run(
        self, new: Placement, timeout: float, loader: Loader | None, ending: Ending | None
    ) -> MigrationReport:
        session, loop = self._session, self._engine.loop
        deadline = loop.time() + timeout
        ended: MigrationAborted | None = None
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    with session.owner.migration():
                        session.endpoint.look()  # an idle rank polls slowly: hear first what the others said meanwhile
                        wanted, planned = await self._prepare(new)
            except TimeoutError:
                raise (ended or self._delays.unsettled("migration", timeout)) from None
            except PlacementError as error:
                if ended is not None:
                    raise ended from error  # in the view that is left it cannot be done
                raise
            session.check_open()
            refusal = wanted.lost_error() if loader is None else None
            if refusal is not None and len(wanted.members) == 1:
                raise refusal
            attempt = Attempt(
                wanted,
                deadline=deadline,
                endpoint=session.endpoint,
                loop=loop,
                planned_seconds=planned,
                make_run=self._runs.make,
                loader=loader,
                refusal=refusal,
                overdue=lambda attempt: self._delays.overdue(attempt, timeout),
            )
            if ending is not None:
                ending.attempt = attempt
            try:
                return await self._see_through(attempt, timeout)
            except MigrationAborted as error:
                if not attempt.again:
                    raise
                _log.info("migration is made again: %s", error.reason)
                ended = error

    async def _prepare(self, new: Placement) -> tuple[MigrationPlan, float]:
        """Plan, and make room for it; anew if the view changed meanwhile. Returns what planning took, too."""
        driver, loop = self._driver, self._engine.loop
        while True:
            await self._session.settled()
            before = loop.time()
            wanted = await self._engine.offload(lambda: self.plan(new))
            planned = loop.time() - before
            await self._make_room(wanted)
            await self._session.copier.fence()  # JOIN says that peers may read the rows (I-18)
            if driver.settled and wanted.members == tuple(sorted(driver.protocol.members)):
                return wanted, planned

    async def _make_room(self, wanted: MigrationPlan) -> None:
        """Recycle the agent if quarantine leaves too little staging for this plan (DESIGN §5)."""
        needs = needs_of(wanted, self._driver.identity.rank, self._weights)
        if all(map(self._staging.fits, needs)):
            return
        await self._session.endpoint.drained(_DRAIN_SECONDS)
        self._session.check_open()
        if not all(map(self._staging.fits, needs)):
            await self._agents.recycle(f"quarantine holds {self._staging.reclaim()} bytes of staging")

    async def _see_through(self, attempt: Attempt, timeout: float) -> MigrationReport:
        """One attempt, from JOIN to its result."""
        timer = self._engine.loop.call_at(attempt.deadline, self._expire, attempt, timeout)
        try:
            self._driver.begin(attempt, self._digests(attempt.plan, refuses=attempt.cause is not None))
            return await asyncio.shield(attempt.result)
        except asyncio.CancelledError as error:
            why = f": {error.args[0]}" if error.args and isinstance(error.args[0], str) else ""
            self._driver.give_up(attempt, f"cancelled by its caller{why}")
            raise
        finally:
            timer.cancel()

    def _expire(self, attempt: Attempt, timeout: float) -> None:
        self._session.endpoint.look()  # completions before deadlines (I-11); a READ that is overdue is our own cause
        if attempt.cause is None and attempt.run is not None:
            attempt.cause = attempt.run.read_error()
        reason = self._delays.timed_out(attempt, timeout)
        attempt.late = True
        attempt.fail_if_overdue()
        self._driver.give_up(attempt, reason)

    def _digests(self, wanted: MigrationPlan, *, refuses: bool) -> messages.Digests:
        """Digests of JOIN; a rank that cannot load what is lost joins with one that no other rank has.

        So all ranks learn that it refuses, however late they join, and no READ is posted.
        """
        session = self._session
        refuser = self._driver.identity.rank if refuses else -1
        nodes = sorted(self._nodes(wanted.members).items())
        rest = (wanted.members, nodes, sorted(agreed(session.settings).items()), refuser)
        digest = hashlib.blake2b(repr(rest).encode(), digest_size=16 - messages.VERSION_BYTES).digest()
        return (wanted.old.digest(), wanted.new.digest(), digest + session.version.to_bytes(messages.VERSION_BYTES))

    def _nodes(self, members: Collection[int]) -> dict[int, str]:
        """Host label of each member; of others not all ranks need know one."""
        me = self._driver.identity
        return {m.rank: m.node for m in self._roster if m.rank in members} | {me.rank: me.node}
