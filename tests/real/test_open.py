"""The exchange with all peers, on a real store and real NIXL: each peer has its own time."""

from __future__ import annotations

import socket
import time

import numpy as np

from eplb_async.core.placement import Placement
from tests.real.conftest import Start

LATE = 2.0


def test_one_slow_peer_of_eight_delays_nobody_else(start: Start) -> None:
    """8 peers over tcp://, one comes late: 7 are met long before, ``open`` takes as long as it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = start(Placement(np.arange(9)[None], ep_size=9), open_now=False, rendezvous=f"tcp://127.0.0.1:{port}")
    ranks.all("warm")
    for rank in range(8):
        ranks.send(rank, "open")
    time.sleep(LATE)  # how slow the ninth rank is
    ranks.send(8, "open")
    for rank in range(9):
        assert ranks.receive(rank) is None
    seconds = ranks.call(0, "run", "tests.real.inside", "met_seconds")
    late = seconds.pop(8)
    print(f"seven peers met within {max(seconds.values()):.2f} s, the slow one after {late:.2f} s")
    assert sorted(seconds) == list(range(1, 8))
    assert max(seconds.values()) < late - LATE / 2
    assert late < LATE + max(seconds.values()) + 1.0
