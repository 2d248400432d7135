"""One call of ``migrate`` on this rank, from JOIN to its result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from eplb_async.communicator.epoch import EpochRun
from eplb_async.communicator.loading import Loader
from eplb_async.communicator.report import MigrationReport
from eplb_async.core.events import Ended
from eplb_async.core.plan import MigrationPlan
from eplb_async.errors import EplbError, MigrationAborted, MigrationTimeout
from eplb_async.nixl.endpoint import Endpoint


class Attempt:
    """Holds what an attempt needs, its timestamps, and the future of its result.

    Args:
        plan: What is to move.
        deadline: Loop time of its end.
        endpoint: This rank's agent.
        loop: The engine loop.
        planned_seconds: What planning took.
        make_run: Makes the epoch's data movement.
        loader: Loads experts that no member holds, if the caller can.
        refusal: Why this rank cannot take part; it joins in a way that ends the attempt on all ranks.
        overdue: The error of layers that are committed and wait for their step; ``None`` if there are none.

    Attributes:
        again: The view changed before anybody in the new one had begun it: it may be made again.
        epoch: Its epoch; 0 before BEGIN.
        committed: Layers that are known committed.
        told: Whether telemetry was told that its call has ended.
    """

    def __init__(
        self,
        plan: MigrationPlan,
        *,
        deadline: float,
        endpoint: Endpoint,
        loop: asyncio.AbstractEventLoop,
        planned_seconds: float,
        make_run: Callable[[Attempt], EpochRun],
        loader: Loader | None = None,
        refusal: Exception | None = None,
        overdue: Callable[[Attempt], Exception | None] = lambda _: None,
    ) -> None:
        self.plan = plan
        self.deadline = deadline
        self.result: asyncio.Future[MigrationReport] = loop.create_future()
        self.result.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.run: EpochRun | None = None
        self.cause = refusal
        self.loader = loader
        self.late = False
        self.again = False
        self.epoch = 0
        self.committed = 0
        self.told = False
        self._loop = loop
        self._endpoint = endpoint
        self._make_run = make_run
        self._overdue = overdue
        self._ended = False
        self._planned = planned_seconds
        self._joined = self._moved = loop.time()
        self._begun: float | None = None
        self._polls = endpoint.native.polls

    @property
    def held(self) -> str:
        """Why the owner of this rank holds its READs back, in words; empty if none is held."""
        return "" if self.run is None else self.run.held

    def begin(self, epoch: int, members: frozenset[int]) -> None:
        """BEGIN came: post READs."""
        self.epoch = epoch
        self._begun = self._loop.time()
        self.run = self._make_run(self)
        self.run.start()

    def commit(self, upto: int, at: Sequence[int]) -> None:
        """Layers below ``upto`` are decided: apply them, each layer before its step of ``at``."""
        assert self.run is not None
        self.committed = upto
        self.run.commit(upto, at)

    async def finish(self, ended: Ended) -> None:
        """The epoch is over here: see it through, then say so."""
        self._moved = self._loop.time()
        self._ended = True
        self.committed = ended.committed
        self.again = ended.again
        held = self.held
        if self.late:
            self.fail_if_overdue()
        if self.run is not None:
            try:
                await self.run.finish(ended.committed)
            except Exception as error:
                self.fail(error)
                raise
        if ended.complete:
            if not self.result.done():
                self.result.set_result(self._report(ended))
        else:
            self.fail(self.cause or _aborted(ended, self.plan, late=self.late, held=held))

    def fail_if_overdue(self) -> None:
        """The deadline has passed: do not wait any longer for the step of a layer that is committed."""
        if self._ended and (error := self._overdue(self)) is not None:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended."""
        if not self.result.done():
            self.result.set_exception(error)

    @property
    def polls(self) -> int:
        """Native polls so far."""
        return self._endpoint.native.polls - self._polls

    def seconds(self) -> dict[str, float]:
        """Wall time by phase, up to now; see ``MigrationReport``."""
        now = self._loop.time()
        moved = self._moved if self._ended else now
        begun = moved if self._begun is None else self._begun
        return {
            "plan": self._planned,
            "join": begun - self._joined,
            "move": moved - begun,
            "apply": now - moved,
            "total": self._planned + now - self._joined,
        }

    def _report(self, ended: Ended) -> MigrationReport:
        traffic: Any = self.run.traffic if self.run is not None else None
        rates = {
            rank: nbytes / (last - first) / 1e9 if last > first else 0.0
            for rank, (nbytes, first, last) in (traffic.by_peer.items() if traffic else ())
        }
        return MigrationReport(
            epoch=ended.epoch,
            layers_committed=ended.committed,
            bytes_read=traffic.bytes_read if traffic else 0,
            bytes_copied=traffic.bytes_copied if traffic else 0,
            reads=traffic.reads if traffic else 0,
            retries=traffic.retries if traffic else 0,
            loads=traffic.loads if traffic else 0,
            seconds=self.seconds(),
            gb_per_s=rates,
            polls=self.polls,
            longest_native_call=self._endpoint.native.longest_call,
        )


def _aborted(ended: Ended, plan: MigrationPlan, *, late: bool, held: str) -> EplbError:
    who = f"rank {ended.origin}" if ended.origin >= 0 else "the view"
    when = f"in epoch {ended.epoch}" if ended.epoch else "before its epoch began"
    kind = MigrationTimeout if late else MigrationAborted
    return kind(
        f"migration aborted {when} by {who}: {ended.reason or 'no reason given'}; layers [0, {ended.committed}) "
        "hold the new placement on every rank of the view; migrate again when that is mended"
        + (f"; {held}" if held and held not in ended.reason else "")
        + ("; lost experts are loaded only if every rank passes load_expert" if plan.lost and not ended.epoch else ""),
        epoch=ended.epoch,
        origin=ended.origin if ended.origin >= 0 else None,
        reason=ended.reason,
        committed_layers=ended.committed,
    )
