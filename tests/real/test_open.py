"""The exchange with all peers, on a real store and real NIXL: each peer has its own time."""

from __future__ import annotations

from eplb_async.bench.probes.opening import late_peer

LATE = 2.0


def test_one_slow_peer_of_eight_delays_nobody_else() -> None:
    """8 peers over tcp://, one comes late: 7 are met long before, ``open`` takes as long as it."""
    found = late_peer(8, LATE)
    print(found)
    assert found["others_met"] < found["late_one_met"] - LATE / 2
    assert found["late_one_met"] < LATE + found["others_met"] + 1.0
