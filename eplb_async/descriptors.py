"""Epoll descriptors of this process, and which of them belong to loops of ours."""

from __future__ import annotations

import contextlib
import os

loops: set[int] = set()
"""Those of engine loops that live. What else appeared while one was made may be among them."""


def epolls() -> set[int]:
    """Epoll descriptors of this process; none where there is no ``/proc``."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own is gone by now
                if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                    found.add(int(name))
    return found
