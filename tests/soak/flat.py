"""What must stay flat in a process that lives long, and by how much its memory may grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

KIB = 1 << 10
FLAT = ("fds", "threads", "shm", "handles", "leases", "registrations", "peers", "staging", "calls", "tasks")
KIB_PER_MINUTE, WARM_KIB = 256, 2 * KIB


def judge(rank: int, life: Sequence[tuple[float, dict[str, int]]], also: Iterable[str] = ()) -> None:
    """Assert it of one process, and print how its memory grew.

    Args:
        rank: The rank.
        life: Samples at rest: seconds, and counts as `tests.real.inside.counts` gives them.
        also: Further counts that must stay as they are.
    """
    first, last = life[0][1], life[-1][1]
    minutes = (life[-1][0] - life[0][0]) / 60
    kib = last["rss_kib"] - first["rss_kib"]
    print(f"rank {rank}, process {first['pid']}: {minutes:.1f} min, RSS {kib:+} KiB")
    for name in (*FLAT, *also):
        found = {counts[name] for _, counts in life}
        assert max(found) - min(found) <= (2 if name == "fds" else 0), (rank, name, found)
    assert kib <= WARM_KIB + KIB_PER_MINUTE * minutes, f"rank {rank}: RSS grew by {kib} KiB in {minutes:.1f} min"
