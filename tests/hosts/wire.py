"""A bad cable: late frames and lost ones, for kernels without ``netem`` too.

A process holds two TAP devices, one in each of two network namespaces, and carries frames from either to the other.

    python wire.py <namespace> <device> <namespace> <device>        # then lines "delay loss" on its standard input
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = 65536
_SEED = 77


class Wire:
    """A cable between two namespaces; ends with :meth:`close`, or with the process that made it."""

    def __init__(self, *ends: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, *ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", f"no TAP device between {ends}"

    def worsen(self, *, delay: float, loss: float) -> None:
        """Every frame is late by ``delay`` seconds, or lost with that probability; either way alike."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{delay} {loss}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """Take it away."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(10)


def carry(ends: tuple[int, int], control: int) -> None:
    """Carry frames until the control pipe is closed."""
    delay = loss = 0.0
    chance = random.Random(_SEED)
    under_way: deque[tuple[float, int, bytes]] = deque()
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([*ends, control], [], [], wait)
        if control in readable:
            line = os.read(control, 4096)
            if not line:
                return
            delay, loss = map(float, line.splitlines()[-1].split())
        now = time.monotonic()
        for end in ends:
            if end in readable:
                late = now + delay
                under_way.extend((late, other[end], frame) for frame in _taken(end) if chance.random() >= loss)
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, frame = under_way.popleft()
            try:
                os.write(end, frame)
            except OSError:  # that end is down
                pass


def _taken(end: int) -> Iterator[bytes]:
    for _ in range(64):
        try:
            yield os.read(end, _FRAME)
        except BlockingIOError:
            return


def _tap(namespace: str, device: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as entered:
        if libc.setns(entered.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI))
    return end


if __name__ == "__main__":
    here, there = _tap(*sys.argv[1:3]), _tap(*sys.argv[3:5])
    print("ready", flush=True)
    carry((here, there), sys.stdin.fileno())
