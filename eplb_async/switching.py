"""How long a thread that computes may keep the GIL while ranks wait for this one.

A thread that wants the GIL asks for it after ``sys.getswitchinterval()``, 5 ms by default, and the engine thread has to
ask after every native call. So a server that computes in Python holds up its peers' migrations many times over.
The interval belongs to the process: it is shortened while an epoch is open, and put back afterwards.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

__all__ = ["shorter"]

_lock = threading.Lock()
_wanted: list[float] = []
_before = _ours = 0.0


@contextlib.contextmanager
def shorter(seconds: float) -> Iterator[None]:
    """Have threads switch at least this often meanwhile; several at once go by the shortest, and 0 asks for nothing.

    What the process has is put back at the end, unless somebody else has set it since.
    """
    if seconds <= 0:
        yield
        return
    with _lock:
        _wanted.append(seconds)
        _settle()
    try:
        yield
    finally:
        with _lock:
            _wanted.remove(seconds)
            _settle()


def _settle() -> None:
    global _before, _ours
    now = sys.getswitchinterval()
    if not _ours or abs(now - _ours) > 2e-6:  # it is the process's own (Python keeps whole microseconds)
        _before = now
    _ours = min([*_wanted, _before]) if _wanted else 0.0
    sys.setswitchinterval(_ours or _before)
