"""When the next automatic round is due: steps, and the back-off after failures. No clock."""

from __future__ import annotations

from eplb_async.service.report import Outcome
from eplb_async.service_settings import ServiceSettings

__all__ = ["NEVER", "Gates"]

NEVER = 1 << 62


class Gates:
    """Counts the steps since the last round, and the failures since one that was none.

    Args:
        settings: The interval and the back-off.

    Attributes:
        failures: Rounds that have failed one after the other.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._since = 0
        self._urged = False
        self._urgent = False  # the round that was begun
        self._retry_at = float("-inf")
        self.failures = 0

    def steps_left(self, steps: int, *, leads: bool) -> int | None:
        """Steps until a round is due; ``None`` for never.

        A rank that is not the coordinator asks an eighth later: in lock-step it does not have to.

        Args:
            steps: All steps so far.
            leads: Whether this rank is the coordinator.
        """
        interval = self._settings.step_interval
        if not interval:
            return None
        if leads and (self._urged or self.failures):
            return 0
        return max(0, self._since + interval + (0 if leads else interval // 8) - steps)

    def wait(self, now: float) -> float:
        """Seconds for which a round that is due still waits for the back-off."""
        return max(0.0, self._retry_at - now)

    def urge(self) -> None:
        """The members have changed: a round is due whatever was counted."""
        self._urged = True

    def began(self, steps: int) -> None:
        """A round was begun."""
        self._since, self._urged, self._urgent = steps, False, self._urgent or self._urged

    def ended(self, outcome: Outcome, now: float) -> None:
        """A round, or the wish for one, is over; one that was urgent and could not be is due again."""
        settings = self._settings
        self._urged |= self._urgent and outcome in ("failed", "paused")
        self._urgent = False
        if outcome != "failed":
            self.failures, self._retry_at = 0, now + settings.backoff if self._urged else float("-inf")
            return
        pause = min(settings.backoff_max, settings.backoff * 2.0 ** min(self.failures, 60))
        self.failures += 1
        self._retry_at = now + pause
