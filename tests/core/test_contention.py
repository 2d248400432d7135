"""What turns, lanes and shares are good for: a modelled network of many ranks, and the scheduler as it is.

Each rank has one NIC of the same speed in both directions. READs at a NIC share it evenly. A network where crowds cost
something is one whose source loses 5 % for each reader above four. "Before" is what the scheduler did without turns:
every reader goes around the group, posts to all at once, and waits with everything when one source refuses.
Run with ``-s`` to see the figures.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.core.plan import MigrationPlan, plan
from eplb_async.core.schedule import pieces, turns
from eplb_async.core.window import Outbox, Waiting, Window
from eplb_async.settings import Settings

MIB = 1 << 20
# One layer alone: its order is what counts. Whole migrations, of layers that overlap, are the simulation's part.
ONE_LAYER = Settings(max_post_bytes=6 * MIB, max_peers_in_flight=4, max_bytes_in_flight=64 * MIB)
SPEED = 25e9


class Before:
    """The outbox without turns: the first batch goes, or none does."""

    def __init__(self, window: Window, waiting: list[Waiting[int]]) -> None:
        self.window = window
        self.left = waiting[::-1]

    def take(self) -> Waiting[int] | None:
        if self.left and self.window.admit(self.left[-1].batch.source, self.left[-1].batch.nbytes):
            return self.left.pop()
        return None


@dataclass
class Outcome:
    """How it went."""

    seconds: float = 0.0
    least: float = 0.0
    crowd: float = 0.0  # readers at the most crowded source, on average over time
    queued: int = 0  # most bytes in flight at one source
    finished: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """Last over first rank to finish."""
        return max(self.finished) / min(self.finished)


def simulate(what: MigrationPlan, row: int, *, before: bool, crowds_cost: float = 0.0) -> Outcome:
    """Runs one layer."""
    n, settings = what.new.ep_size, ONE_LAYER
    outboxes = [outbox_of(what, rank, row, settings, before=before) for rank in range(n)]
    flying: dict[tuple[int, int], list[tuple[float, int]]] = {}  # (reader, source) -> FIFO of (bytes left, bytes)
    outcome = Outcome(finished=[0.0] * n)
    for rank, outbox in enumerate(outboxes):
        fill(rank, outbox, flying)
    while flying:
        at_source = Counter(source for _, source in flying)
        at_reader = Counter(reader for reader, _ in flying)
        speed = {
            (reader, source): min(
                SPEED / (1 + crowds_cost * max(0, at_source[source] - 4)) / at_source[source],
                SPEED / at_reader[reader],
            )
            for reader, source in flying
        }
        step = min(queue[0][0] / speed[pair] for pair, queue in flying.items())
        outcome.seconds += step
        outcome.crowd += step * max(at_source.values())
        held = Counter()
        for (_, source), queue in flying.items():
            held[source] += sum(size for _, size in queue)
        outcome.queued = max(outcome.queued, *held.values())
        for pair in list(flying):
            left, size = flying[pair][0]
            flying[pair][0] = (left - step * speed[pair], size)
            if flying[pair][0][0] <= 1e-3:
                flying[pair].pop(0)
                if not flying[pair]:
                    del flying[pair]
                outcome.finished[pair[0]] = outcome.seconds
                outboxes[pair[0]].window.done(pair[1], size)
                fill(pair[0], outboxes[pair[0]], flying)
    outcome.crowd /= outcome.seconds
    reader, source = what.reads(range(1))
    outcome.least = max(np.bincount(reader).max(), np.bincount(source).max()) * row / SPEED
    outcome.finished = [at for at in outcome.finished if at]
    return outcome


def outbox_of(what: MigrationPlan, rank: int, row: int, settings: Settings, *, before: bool) -> Outbox[int] | Before:
    """What a rank has to read, as ``communicator.reads`` puts it."""
    n, (reader, source) = what.new.ep_size, what.reads(range(1))
    ours = turns(reader, source, rank=rank, ep_size=n, expert_bytes=row, max_bytes=settings.max_post_bytes)
    batches = pieces(
        [move.source for move in what.moves(0, rank)],
        [row],
        max_bytes=settings.max_post_bytes,
        max_descriptors=settings.max_post_descriptors,
        rank=rank,
        ep_size=n,
        order=() if before else ours.order,
    )
    waiting = [Waiting(0, batch, ours.readers[batch.source], rank) for batch in batches]
    window = Window(
        max_bytes=settings.max_bytes_in_flight,
        max_requests=settings.max_requests_in_flight,
        max_peer_bytes=settings.max_peer_bytes_in_flight,
        max_peer_requests=settings.max_peer_requests_in_flight,
        max_peers=n if before else settings.max_peers_in_flight,
        few_bytes=settings.max_post_bytes,
    )
    if before:
        return Before(window, waiting)
    outbox: Outbox[int] = Outbox(window)
    outbox.put(waiting)
    return outbox


def fill(rank: int, outbox: Outbox[int] | Before, flying: dict[tuple[int, int], list[tuple[float, int]]]) -> None:
    """Posts what goes."""
    while (taken := outbox.take()) is not None:
        flying.setdefault((rank, taken.batch.source), []).append((float(taken.batch.nbytes), taken.batch.nbytes))


def shuffled(n: int, slots: int, seed: int) -> MigrationPlan:
    """From one random placement to another, a fifth of the slots redundant."""
    rng, experts = np.random.default_rng(seed), n * slots * 4 // 5

    def one() -> Placement:
        row = np.concatenate([np.arange(experts), rng.integers(0, experts, n * slots - experts)])
        return Placement([rng.permutation(row)], ep_size=n)

    return plan(one(), one())


def skewed(n: int, slots: int) -> MigrationPlan:
    """Every rank fills half of its empty slots with experts of rank 0, the others with those of its neighbours."""
    old = np.full((n, 2 * slots), -1)
    old[:, :slots] = np.arange(n * slots).reshape(n, slots)
    new = old.copy()
    for rank in range(1, n):
        beside = [old[(rank + away) % n or 1][away] for away in range(1, slots - slots // 2 + 1)]
        new[rank, slots:] = [*old[0, : slots // 2], *beside]
    return plan(Placement([old.ravel()], ep_size=n), Placement([new.ravel()], ep_size=n))


def compare(name: str, what: MigrationPlan, row: int, **network: float) -> tuple[Outcome, Outcome]:
    """Before and now, printed."""
    then, now = (simulate(what, row, before=before, **network) for before in (True, False))
    for label, each in (("before", then), ("now", now)):
        print(
            f"{name}, {label}: {each.seconds / each.least:.2f} of the busiest NIC's time, {each.crowd:.1f} readers at "
            f"the most crowded source, at most {each.queued / MIB:.0f} MiB asked of one, last rank {each.spread:.2f} "
            "times the first"
        )
    return then, now


@pytest.mark.parametrize(("n", "slots"), [(32, 10), (16, 16)])
def test_fewer_readers_meet_and_no_time_is_lost(n: int, slots: int) -> None:
    """Shuffled placements: a third fewer readers at the most crowded source, and where crowds cost, it is faster."""
    what = shuffled(n, slots, seed=1)
    then, now = compare(f"{n} ranks, shuffled", what, 6 * MIB)
    assert now.crowd < 0.7 * then.crowd
    assert now.seconds < 1.1 * then.seconds
    then, now = compare(f"{n} ranks, shuffled, crowds cost", what, 6 * MIB, crowds_cost=0.05)
    assert now.seconds < 0.9 * then.seconds


@pytest.mark.parametrize("n", [16, 64])
def test_a_source_that_everybody_needs_is_not_swamped(n: int) -> None:
    """Every rank needs rank 0's rows: little is asked of it at once, its NIC is never idle, and all end together."""
    what = skewed(n, 16)
    then, now = compare(f"{n} ranks, skewed", what, 6 * MIB)
    assert now.seconds < 1.05 * now.least
    assert now.seconds < 1.02 * then.seconds
    assert now.queued < 0.4 * then.queued
    assert now.spread < 1.2


def test_a_slow_source_holds_up_only_its_own_reads() -> None:
    """Twenty batches of a source that answers nothing, then those of another: they do not wait for it."""
    window = {"max_bytes": 1 << 40, "max_requests": 32, "max_peer_bytes": 1 << 40, "max_peers": 4, "few_bytes": 1}
    mixed = [source for _ in range(20) for source in (1, 2)]
    waiting = [Waiting(0, SimpleNamespace(source=source, nbytes=1), 1, 0) for source in mixed]
    then = Before(Window(max_peer_requests=8, **window), list(waiting))
    now: Outbox[int] = Outbox(Window(max_peer_requests=8, **window))
    now.put(waiting)
    read = []
    for outbox in (then, now):
        count = 0
        while (taken := outbox.take()) is not None:
            if taken.batch.source == 2:
                count += 1
                outbox.window.done(2, 1)
        read.append(count)
    assert read == [8, 20]
