"""Real ranks that send each other mail, and one that dies while all are idle."""

from __future__ import annotations

import pytest

from eplb_async.core.placement import Placement
from tests.real.conftest import Start

OLD = Placement([[0, 1, 2, 3, 4, 5]] * 2, ep_size=3)
NEW = Placement([[2, 3, 4, 5, 0, 1]] * 2, ep_size=3)
SIZES = [0, 300_000, 17, 32 << 10, 300_000, 1]


def test_mail_among_three_ranks_and_the_death_of_an_idle_one(start: Start, transport: str) -> None:
    """300 KB both ways between all, beside a migration: whole and in order. Then one is killed, and nothing else
    happens: the watch of the others finds it.
    """
    ranks = start(OLD, transport=transport)
    ranks.all("run", "tests.real.mail", "subscribe")
    ranks.all("run", "tests.real.mail", "watch", 0.5)
    ranks.all("run", "tests.real.mail", "send_all", SIZES)
    ranks.all("migrate", NEW, 60.0)
    assert ranks.all("run", "tests.real.mail", "received", 3 * len(SIZES)) == [[SIZES] * 3] * 3
    assert ranks.all("check", NEW) == [0, 0, 0]
    assert [health["dropped"] for health in ranks.all("health")] == [{}, {}, {}]
    ranks.kill(1)
    ranks.all("members", 0, 2, ranks=[0, 2])
    assert [health["degraded"] for health in ranks.all("health", ranks=[0, 2])] == [{1: "disconnected"}] * 2


@pytest.mark.faults
def test_a_stopped_rank_is_named_and_gets_its_mail_when_it_goes_on(start: Start, transport: str) -> None:
    """While it stands still it is sent a bounded amount; then it gets all of 12 MiB, and is not named any more."""
    ranks = start(OLD, transport=transport, settings={"idle_tick": 0.5})
    ranks.all("run", "tests.real.mail", "subscribe")
    ranks.all("run", "tests.real.mail", "watch", 0.5)
    ranks.stop(2)
    sizes = [4 << 20] * 3
    ranks.all("run", "tests.real.mail", "send_to", 2, sizes, ranks=[0, 1])
    ranks.all("run", "tests.real.mail", "degraded", 2, ranks=[0, 1])
    assert ranks.call(0, "health")["members"] == (0, 1, 2)
    ranks.resume(2)
    assert ranks.call(2, "run", "tests.real.mail", "received", 6) == [sizes, sizes, []]
    ranks.all("run", "tests.real.mail", "well", ranks=[0, 1])
    ranks.all("migrate", NEW, 60.0)
    assert ranks.all("check", NEW) == [0, 0, 0]


@pytest.mark.faults
def test_a_flood_of_mail_does_not_keep_others_from_migrating(start: Start, transport: str) -> None:
    """Rank 2 sends as much as is taken, for as long as migrations run: they do, every byte is right, memory stays."""
    ranks = start(OLD, transport=transport, row_bytes=(1 << 20, 4096))
    ranks.all("run", "tests.real.mail", "subscribe")
    before = ranks.all("run", "tests.real.inside", "counts")
    ranks.call(2, "run", "tests.real.mail", "begin_flood", [0, 1])
    for target in (NEW, OLD) * 5:
        ranks.all("migrate", target, 60.0)
    sent = ranks.call(2, "run", "tests.real.mail", "end_flood")
    assert ranks.all("check", OLD) == [0, 0, 0]
    after = ranks.all("run", "tests.real.inside", "counts")
    print(f"{sent} messages; resident KiB {[(b['rss_kib'], a['rss_kib']) for b, a in zip(before, after, strict=True)]}")
    assert sent > 10
    for one, other in zip(before, after, strict=True):
        assert other["rss_kib"] - one["rss_kib"] < 96 << 10
