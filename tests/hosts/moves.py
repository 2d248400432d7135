"""Migrations of ranks on hosts, as callers make them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure, RankProcesses

_TRIES = 3
_SECONDS = 60.0


def migrate(ranks: RankProcesses, placement: Placement, members: Sequence[int]) -> None:
    """All members move to a placement, and have the right bytes."""
    ranks.all("migrate", placement, _SECONDS, ranks=members)
    assert ranks.all("check", placement, ranks=members) == [0] * len(members)


def insist(ranks: RankProcesses, placement: Placement, members: Sequence[int]) -> None:
    """As :func:`migrate`, and whoever is told that its migration has ended calls again.

    What was said before a link was cut arrives when it returns, and may end the next call once.
    """
    deadline = time.monotonic() + _SECONDS
    tries = dict.fromkeys(members, 1)
    waiting = list(members)
    for rank in members:
        ranks.send(rank, "migrate", placement, _SECONDS)
    while waiting:
        rank = waiting.pop(0)
        try:
            answer = ranks.receive(rank, 0.05)
        except TimeoutError as error:
            if time.monotonic() > deadline or "dead" in str(error):
                raise
            waiting.append(rank)
            continue
        if isinstance(answer, Failure):
            assert answer.kind == "MigrationAborted", answer
            assert tries[rank] < _TRIES, answer
            tries[rank] += 1
            ranks.send(rank, "migrate", placement, _SECONDS)
            waiting.append(rank)
    assert ranks.all("check", placement, ranks=members) == [0] * len(members)
