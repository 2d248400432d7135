"""What a process uses: CPU time, and memory at its peak."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PeakMemory"]


class PeakMemory:
    """Memory that this process takes beyond what it had when this was made, from ``/proc``."""

    def __init__(self) -> None:
        self._before = _kib("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
            self._resettable = True
        except OSError:
            self._resettable = False

    def extra_mib(self) -> float | None:
        """MiB at the peak since then; ``None`` where the kernel does not let us ask."""
        peak = _kib("VmHWM")
        if not self._resettable or peak is None or self._before is None:
            return None
        return round(max(0, peak - self._before) / 1024, 1)


def _kib(name: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    except OSError:
        pass
    return None
