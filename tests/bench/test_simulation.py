"""The modelled network, and what is simulated over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eplb_async.bench.simulation.control import coordinator_cost
from eplb_async.bench.simulation.memory import deep_size, rank_memory
from eplb_async.bench.simulation.network import Network, fair_rates
from eplb_async.bench.simulation.run import simulate
from eplb_async.bench.simulation.world import World, lower_bound, random_pair, skewed_pair
from eplb_async.core.plan import plan
from eplb_async.settings import Settings

RATE = 10.0


def network(ranks: int = 4, **more: Any) -> Network:
    return Network(ranks, bytes_per_second=RATE, **more)


def test_a_flow_alone_has_the_whole_nic_and_its_end_is_known_a_latency_later() -> None:
    """100 bytes at 10 bytes a second, and half a second."""
    net = network(latency=0.5)
    flow = net.begin(0, 1, 100, 0.0)
    assert net.next_end == pytest.approx(10.0)
    assert net.advance(9.9) == []
    assert flow.arrives is None
    assert net.advance(11.0) == [flow]
    assert flow.arrives == pytest.approx(10.5)


@pytest.mark.parametrize("ends", [((0, 1), (0, 2)), ((1, 0), (2, 0))], ids=["out", "in"])
def test_two_flows_share_one_nic_and_the_one_that_is_left_has_it_whole(
    ends: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """50 and 100 bytes over one NIC, in either direction: the short one ends at 10 s, the long one at 15 s."""
    net = network()
    short, long = (net.begin(*pair, nbytes, 0.0) for pair, nbytes in zip(ends, (50, 100), strict=True))
    net.advance(20.0)
    assert (short.arrives, long.arrives) == (pytest.approx(10.0), pytest.approx(15.0))


def test_in_and_out_do_not_share() -> None:
    """A NIC is duplex."""
    net = network()
    flows = [net.begin(0, 1, 100, 0.0), net.begin(1, 0, 100, 0.0)]
    net.advance(20.0)
    assert [flow.arrives for flow in flows] == pytest.approx([10.0, 10.0])


def test_what_one_flow_cannot_use_the_others_get() -> None:
    """Three flows into rank 3, which have a third of it each; the fourth has what its source has left."""
    out, into = np.array([0, 1, 2, 2]), np.array([7, 7, 7, 4])
    assert fair_rates(out, into, np.full(8, 9.0)) == pytest.approx([3.0, 3.0, 3.0, 6.0])


def test_rates_are_fair_and_no_nic_is_overrun() -> None:
    """Any flows: each is held up by a full lane on which none has more than it."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        out, into = rng.integers(0, 12, 60), 12 + rng.integers(0, 12, 60)
        capacity = rng.uniform(1, 5, 24)
        rates = fair_rates(out, into, capacity)
        used = np.bincount(out, rates, 24) + np.bincount(into, rates, 24)
        assert (used <= capacity * (1 + 1e-9)).all()
        for i, rate in enumerate(rates):
            assert any(
                used[lane] >= capacity[lane] * (1 - 1e-9) and rate >= rates[lanes == lane].max() * (1 - 1e-9)
                for lanes, lane in ((out, out[i]), (into, into[i]))
            )


@pytest.mark.parametrize("resolution", [0.0, 0.05])
def test_bytes_are_conserved(resolution: float) -> None:
    """Flows that begin at any time: all bytes leave and arrive, no earlier than their NICs can carry them."""
    rng = np.random.default_rng(3)
    net = network(resolution=resolution)
    sent = np.zeros(4)
    for at in np.sort(rng.uniform(0, 20, 50)).tolist():
        source, reader = rng.permutation(4)[:2].tolist()
        net.advance(at)
        nbytes = float(rng.uniform(1, 30))
        net.begin(source, reader, nbytes, at)
        sent[source] += nbytes
    while net.active:
        net.advance(net.next_end)
    assert net.served == pytest.approx(sent)
    assert net.delivered.sum() == pytest.approx(sent.sum())
    assert net.now >= max(net.served.max(), net.delivered.max()) / RATE - 50 * resolution


def test_ranks_of_one_node_read_beside_the_nic() -> None:
    """At their own rate, and without taking from what goes through the NIC."""
    net = network(nodes=[0, 0, 1, 1], node_bytes_per_second=100.0)
    near, far = net.begin(0, 1, 100, 0.0), net.begin(0, 2, 100, 0.0)
    net.advance(20.0)
    assert (near.arrives, far.arrives) == (pytest.approx(1.0), pytest.approx(10.0))


def test_a_flow_begins_now() -> None:
    """The network is followed first: nobody may add to its past."""
    net = network()
    net.advance(5.0)
    with pytest.raises(ValueError, match="advance it first"):
        net.begin(0, 1, 10, 4.0)


def test_messages_per_rank_and_layer_do_not_grow_with_the_number_of_ranks() -> None:
    """JOIN and BEGIN, and a vote and a decision for each layer, or for several at once."""
    for ranks in (8, 16, 32):
        world = World(ranks=ranks, layers=2, slots=2)
        mean, most = (found := simulate(world, *random_pair(world))).messages
        assert 2.0 < mean <= most <= 3.0
        assert found.coordinator_messages == pytest.approx(mean * (ranks - 1))


def test_a_small_world_comes_close_to_what_its_nics_can_carry() -> None:
    """Random placements of 8 ranks, and one source that all read."""
    world = World(ranks=8)
    spread = simulate(world, *random_pair(world), settings=Settings(staging_layers=3))
    assert 1.0 <= spread.over_bound <= 1.2
    hot = simulate(world, *skewed_pair(world))
    assert hot.bound == pytest.approx(7 * 4 * 4 * sum(world.row_bytes) / world.bytes_per_second)
    assert 1.0 <= hot.over_bound <= 1.05


def test_copies_spread_the_reads_of_a_hot_expert() -> None:
    """Two holders: each serves half of the other six ranks, where one served seven."""
    world = World(ranks=8)
    alone, shared = (lower_bound(plan(*skewed_pair(world, holders)), world) for holders in ((0,), (0, 4)))
    assert shared == pytest.approx(alone * 3 / 7)


def test_the_coordinator_takes_one_vote_and_sends_one_decision_for_each_member() -> None:
    """What is measured is a whole epoch."""
    cost = coordinator_cost(ranks=5, layers=3)
    assert cost.messages_per_layer == 8
    assert cost.seconds_per_layer > 0


def test_what_a_rank_keeps_of_its_peers_grows_evenly() -> None:
    """The same for each further one: their addresses and cards."""
    planned = plan(*random_pair(World(ranks=4)))
    sizes = [rank_memory(ranks, planned).peers for ranks in (5, 9, 13)]
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=0.2)
    assert deep_size([1, [2, 3]]) > deep_size([1])
