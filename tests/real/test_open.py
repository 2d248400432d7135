"""The exchange with all peers, on a real store and real NIXL: each peer has its own time."""

from __future__ import annotations

from eplb_async.bench.probes.opening import late_peer

LATE = (2.0, 4.0, 8.0)  # a busy machine, on which nobody is met within a second, earns a later peer


def test_one_slow_peer_of_eight_delays_nobody_else() -> None:
    """8 peers over tcp://, one comes late: 7 are met long before, ``open`` takes as long as it."""
    for late in LATE:
        found = late_peer(8, late)
        print(found)
        if found["others_met"] < found["late_one_met"] - late / 2:
            break
    assert found["others_met"] < found["late_one_met"] - late / 2
    assert found["late_one_met"] < 2 * late + found["others_met"]
