"""How a call of ``migrate`` ended, as telemetry tells of it."""

from __future__ import annotations

import asyncio
from types import TracebackType

from eplb_async.communicator.attempt import Attempt
from eplb_async.communicator.driver import Driver
from eplb_async.communicator.reads import Traffic
from eplb_async.errors import MigrationAborted, MigrationError, MigrationInDoubt, describe
from eplb_async.telemetry.emitter import Emit


class Ending:
    """Around a call of ``migrate`` on the engine loop: says at its end how it went.

    Args:
        emit: Told of it.
        driver: Knows the view.
        loop: The engine loop.
        num_layers: Layers of a migration.

    Attributes:
        attempt: The latest attempt that the call has made.
    """

    def __init__(self, emit: Emit, driver: Driver, loop: asyncio.AbstractEventLoop, num_layers: int) -> None:
        self.attempt: Attempt | None = None
        self._emit = emit
        self._driver = driver
        self._loop = loop
        self._num_layers = num_layers
        self._began = loop.time()

    def __enter__(self) -> Ending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        attempt, traffic, polls = self.attempt, Traffic(), 0
        seconds = {"total": self._loop.time() - self._began}
        if attempt is not None:
            attempt.told = True
            traffic = traffic if attempt.run is None else attempt.run.traffic
            seconds, polls = attempt.seconds(), attempt.polls
            if error is None:
                report = attempt.result.result()
                seconds, polls = dict(report.seconds), report.polls
        self._emit(
            "migration_ended",
            outcome=_outcome(error),
            epoch=attempt.epoch if attempt is not None else 0,
            term=self._driver.protocol.term,
            layers_committed=self._committed(error),
            num_layers=self._num_layers,
            seconds=seconds,
            bytes_read=traffic.bytes_read,
            bytes_copied=traffic.bytes_copied,
            bytes_by_peer={rank: int(nbytes) for rank, (nbytes, _, _) in traffic.by_peer.items()},
            reads=traffic.reads,
            retries=traffic.retries,
            loads=traffic.loads,
            polls=polls,
            error="" if error is None else describe(error),
        )

    def _committed(self, error: BaseException | None) -> int:
        """Layers that hold the new placement, as far as is known now."""
        if error is None:
            return self._num_layers
        if isinstance(error, MigrationError):
            return error.committed_layers
        return 0 if self.attempt is None else self.attempt.committed


def _outcome(error: BaseException | None) -> str:
    match error:
        case None:
            return "done"
        case MigrationInDoubt():
            return "in_doubt"
        case TimeoutError():
            return "timeout"
        case MigrationAborted():
            return "aborted"
        case asyncio.CancelledError():
            return "cancelled"
    return "failed"
