"""The making of an epoch's data movement, and what follows from what it reports."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eplb_async.communicator.attempt import Attempt
from eplb_async.communicator.driver import Driver
from eplb_async.communicator.epoch import EpochRun
from eplb_async.communicator.members import Roster
from eplb_async.core import events
from eplb_async.engine import LoopEngine
from eplb_async.errors import describe
from eplb_async.weights import ExpertWeights, Staging

if TYPE_CHECKING:
    from eplb_async.communicator.session import Session

_log = logging.getLogger("eplb_async.communicator")
_HAIR = 1e-4


class Runs:
    """Makes the run of each attempt of one session.

    Args:
        session: The session; its placement follows what is applied.
        engine: The engine loop.
        driver: Told of what is staged, and of what fails.
        roster: Members to read from.
        weights: This rank's rows.
        staging: Where READs land.

    Attributes:
        callback_errors: How often a callback for applied layers has raised.
    """

    def __init__(
        self,
        session: Session,
        *,
        engine: LoopEngine,
        driver: Driver,
        roster: Roster,
        weights: ExpertWeights,
        staging: Staging,
    ) -> None:
        self.callback_errors = 0
        self._session = session
        self._engine = engine
        self._driver = driver
        self._roster = roster
        self._weights = weights
        self._staging = staging
        self._read_failures: dict[int, str] = {}  # as noted in degraded, until the next migration begins

    def make(self, attempt: Attempt) -> EpochRun:
        """Make the run of an attempt whose epoch has begun."""
        session, driver = self._session, self._driver
        steps, emitter = session.steps, session.emitter

        def staged(upto: int) -> None:
            if driver.attempt is attempt:
                holds = None if steps is None else (steps.voted(upto - 1),) * session.placement.num_layers
                driver.feed(events.Staged(upto, holds))

        def failed(error: Exception) -> None:
            attempt.cause = error
            _log.error("migration fails on rank %d: %s", driver.identity.rank, describe(error))
            driver.give_up(attempt, describe(error))

        def applied(layers: range) -> None:
            session.placement = session.placement.with_layers(attempt.plan.new, layers.stop)
            if emitter is not None:
                for layer in layers:
                    emitter.emit("layer_applied", layer=layer, epoch=attempt.epoch)

        self._forget_failures()
        return EpochRun(
            plan=attempt.plan,
            rank=driver.identity.rank,
            sources={member.rank: member for member in self._roster},
            engine=self._engine,
            endpoint=session.endpoint,
            weights=self._weights,
            staging=self._staging,
            copier=session.copier,
            settings=session.settings,
            throttle=session.throttle,
            version=session.version,
            loader=attempt.loader,
            digester=session.owner.digester,
            deadline=attempt.deadline - _HAIR,  # a READ that is late is the cause, so it is late first
            on_staged=staged,
            on_failed=failed,
            on_applied=applied,
            on_retry=self._retried,
            after_apply=self._tell_applied,
            emit=None if emitter is None else emitter.emit,
            steps=steps,
            users=session.users,
        )

    def _retried(self, layer: int, experts: Sequence[int], source: int, instead: int, error: Exception) -> None:
        driver, why = self._driver, describe(error)
        what = f"rank {instead} serves experts {list(experts)} of layer {layer} instead of rank {source}"
        _log.warning("rank %d: %s: %s", driver.identity.rank, what, why)
        if source not in driver.degraded:
            driver.degraded[source] = self._read_failures[source] = f"a READ from it failed: {why}"

    def _forget_failures(self) -> None:
        """Those of an earlier migration."""
        degraded = self._driver.degraded
        for rank, why in self._read_failures.items():
            if degraded.get(rank) == why:
                del degraded[rank]
        self._read_failures.clear()

    async def _tell_applied(self, layer: int) -> None:
        """Have the caller's routing tables follow, before a step runs with the layer."""
        session = self._session
        listeners, placement = session.listeners(), session.placement
        if not listeners:
            return
        failed: list[tuple[str, BaseException]] = []
        try:
            await session.copier.call(lambda: failed.extend(listeners.tell(layer, placement)))
        except Exception as error:  # what the callbacks have queued failed
            failed.append(("what on_layer_applied began", error))
        for name, why in failed:
            self.callback_errors += 1
            self._driver.last_error = f"{name} failed for layer {layer}: {describe(why)}"
            _log.error("%s failed for layer %d, which is applied", name, layer, exc_info=why)
