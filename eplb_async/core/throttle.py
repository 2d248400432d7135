"""What the owner of a rank lets its READs do: nothing while paused, else so many bytes a second."""

from __future__ import annotations

import math

__all__ = ["Throttle"]

_GRACE = 0.02
_POSTS_PER_SECOND = 20


class Throttle:
    """A pause and a token bucket; time is passed in.

    A post goes as soon as those before it are paid for, however large it is itself, and then the next waits for as
    long as it cost. A timer that fires late is made good, up to 0.02 s.

    Args:
        bytes_per_second: Most bytes a second; 0 for no limit.

    Attributes:
        paused: Whether nothing may be posted.
        bytes_per_second: Most bytes a second; 0 for no limit.
    """

    def __init__(self, bytes_per_second: int = 0) -> None:
        self.paused = False
        self.bytes_per_second = bytes_per_second
        self._paid_at = -math.inf

    def delay(self, now: float) -> float:
        """Seconds until the next post may go; 0 if it may now, infinite while paused."""
        if self.paused:
            return math.inf
        return max(0.0, self._paid_at - now) if self.bytes_per_second else 0.0

    def spend(self, nbytes: int, now: float) -> None:
        """So many bytes are posted now."""
        if self.bytes_per_second:
            self._paid_at = max(self._paid_at, now - _GRACE) + nbytes / self.bytes_per_second

    def limit(self, bytes_per_second: int, now: float) -> None:
        """Sets another limit, from now on: what was posted before is not waited for any longer than that allows."""
        if self.bytes_per_second and bytes_per_second:
            debt = max(0.0, self._paid_at - now) * self.bytes_per_second
            self._paid_at = now + debt / bytes_per_second
        else:
            self._paid_at = -math.inf
        self.bytes_per_second = bytes_per_second

    def post_bytes(self, most: int, least: int) -> int:
        """Largest post: ``most``; under a limit what it lets through in 0.05 s, if less, but not below ``least``."""
        if not self.bytes_per_second:
            return most
        return min(most, max(least, self.bytes_per_second // _POSTS_PER_SECOND))

    @property
    def words(self) -> str:
        """Why READs wait, and what to do about it; empty if they need not."""
        if self.paused:
            return "this rank is paused and posts no READ: await resume()"
        if self.bytes_per_second:
            return (
                f"this rank reads at most {self.bytes_per_second} bytes a second (max_bytes_per_second, limit()): "
                "raise that, or the timeout"
            )
        return ""
