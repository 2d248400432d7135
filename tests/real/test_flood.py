"""A real rank that floods two others with notifications while they migrate."""

from __future__ import annotations

from eplb_async.core.placement import Placement
from tests.real.conftest import Start

MIB = 1 << 20
OLD = Placement([[0, 1, 0, 2, 1, 2]] * 4, ep_size=3)
ONE, TWO = (Placement([row] * 4, ep_size=3) for row in ([2, 1, 0, 1, -1, -1], [0, 1, 2, 0, -1, -1]))
FLOOD = 50_000


def test_a_flood_does_not_keep_the_others_from_migrating(start: Start, transport: str) -> None:
    """50 000 from a rank that is out: migrations go on, the users' loops tick, memory stays, drops are counted."""
    ranks = start(OLD, transport=transport, row_bytes=(MIB, 4096))
    for rank in (0, 1):
        ranks.call(rank, "exclude", 2)

    def migrations(count: int) -> list[dict[str, float]]:
        ranks.all("run", "tests.real.flood", "feel", ranks=[0, 1])
        for i in range(count):
            ranks.all("migrate", (ONE, TWO)[i % 2], 60.0, ranks=[0, 1])
        return [dict(felt) for felt in ranks.all("run", "tests.real.flood", "felt", ranks=[0, 1])]

    migrations(4)
    quiet = migrations(20)
    ranks.send(2, "run", "tests.real.flood", "flood", FLOOD, 120)
    loud = migrations(20)
    seconds = ranks.receive(2, 60)
    print(f"flood of {2 * FLOOD} in {seconds:.2f} s\nquiet {quiet}\nloud  {loud}")
    assert ranks.all("check", TWO, ranks=[0, 1]) == [0, 0]
    ranks.all("migrate", ONE, 60.0, ranks=[0, 1])
    healths = ranks.all("health", ranks=[0, 1])
    for before, during, health in zip(quiet, loud, healths, strict=True):
        assert during["grown"] < 64 * MIB
        assert during["ticks"] > before["ticks"] / 8
        assert sum(health["dropped"].values()) > 1000, health["dropped"]
        assert health["members"] == (0, 1)
