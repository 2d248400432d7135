"""Forecasts: what they add up is the plan's moves, each counted once."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.core.forecast import Forecast, Share
from eplb_async.core.placement import Placement
from eplb_async.core.plan import plan
from tests.core.test_plan import every_move, losses, migrations


def sizes(draw, migration):
    """Bytes of an expert for each layer."""
    layers = migration.new.num_layers
    return tuple(draw(st.lists(st.integers(0, 1 << 40), min_size=layers, max_size=layers)))


@given(st.one_of(migrations(), losses()), st.data())
@settings(max_examples=60, deadline=None)
def test_it_adds_up_the_moves_of_the_plan(case, data):
    """Every kind, rank and pair of ranks, counted move by move; what is READ from ranks is what ranks READ."""
    old, new, where = case
    migration = plan(old, new, **where, load_lost=True)
    per_expert = sizes(data.draw, migration)
    forecast = Forecast(migration, per_expert)
    kinds, nbytes, copied = Counter(), Counter(), Counter()
    matrix = np.zeros((new.ep_size, new.ep_size), dtype=np.int64)
    filled = 0
    for layer, move in every_move(migration):
        same_node = where["nodes"][move.source] == where["nodes"][move.reader]
        kind = "loads" if move.is_loaded else "local_copies" if move.is_local else ("across", "on")[same_node]
        kinds[kind] += 1
        nbytes[kind] += per_expert[layer]
        copied[move.reader] += per_expert[layer] * len(move.targets)
        filled += len(move.targets)
        if not move.is_loaded:
            matrix[move.source, move.reader] += per_expert[layer]
    assert forecast.local_copies == Share(kinds["local_copies"], nbytes["local_copies"])
    assert forecast.reads_on_node == Share(kinds["on"], nbytes["on"])
    assert forecast.reads_across_nodes == Share(kinds["across"], nbytes["across"])
    assert forecast.loads == Share(kinds["loads"], nbytes["loads"])
    assert np.array_equal(forecast.matrix, matrix)
    assert forecast.bytes_copied.tolist() == [copied[rank] for rank in range(new.ep_size)]
    assert forecast.bytes_in.sum() == forecast.bytes_out.sum() == nbytes["on"] + nbytes["across"]
    assert np.array_equal(forecast.bytes_in + matrix.diagonal(), matrix.sum(axis=0))
    assert np.array_equal(forecast.bytes_out + matrix.diagonal(), matrix.sum(axis=1))
    assert forecast.unchanged_slots + filled == np.count_nonzero(new.physical_to_logical_map >= 0)
    assert forecast.unchanged_slots + filled + forecast.emptied_slots >= np.count_nonzero(
        old.physical_to_logical_map >= 0
    )
    changed = (old.physical_to_logical_map != new.physical_to_logical_map).any(axis=1)
    assert forecast.layers_touched == tuple(np.flatnonzero(changed))
    assert forecast.lost == migration.lost


@given(migrations(), st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
@settings(max_examples=40, deadline=None)
def test_the_time_is_what_the_busiest_link_needs(case, gbps, local_gbps):
    """The formula of the docstring, rank by rank; without a rate its links do not count."""
    old, new, where = case
    migration = plan(old, new, **where)
    per_expert = (10**6,) * new.num_layers
    nodes = np.array(where["nodes"])
    matrix = Forecast(migration, per_expert).matrix
    across = np.where(nodes[:, None] == nodes[None, :], 0, matrix)

    def busiest(part):
        return max(part.sum(axis=0).max(), part.sum(axis=1).max())

    nic, local = busiest(across) * 8 / (gbps * 1e9), busiest(matrix - across) * 8 / (local_gbps * 1e9)
    assert Forecast(migration, per_expert).seconds is None
    assert Forecast(migration, per_expert, gbps=gbps).seconds == pytest.approx(nic)
    assert Forecast(migration, per_expert, local_gbps=local_gbps).seconds == pytest.approx(local)
    assert Forecast(migration, per_expert, gbps, local_gbps).seconds == pytest.approx(max(nic, local))


@given(st.one_of(migrations(), losses()))
@settings(max_examples=30, deadline=None)
def test_json_holds_what_the_properties_say(case):
    """Nothing of numpy is in it; the same plan gives the same text."""
    old, new, where = case
    forecast = Forecast(plan(old, new, **where, load_lost=True), (7,) * new.num_layers, gbps=400.0)
    found = json.loads(json.dumps(forecast.to_dict()))
    assert found == forecast.to_dict()
    assert found["matrix"] == forecast.matrix.tolist()
    assert found["reads_across_nodes"] == {
        "experts": forecast.reads_across_nodes.experts,
        "bytes": forecast.reads_across_nodes.nbytes,
    }
    assert found["hottest_source"] == forecast.hottest_source
    assert {int(layer): tuple(experts) for layer, experts in found["lost"].items()} == forecast.lost
    assert "takes at least" in str(forecast)
    assert ("\nlost " in str(forecast)) == bool(forecast.lost)


def test_the_report_reads_so():
    """Two nodes of two ranks, rank 3 out, expert 5 lost with it."""
    old = Placement([[0, 1, 2, 3, 4, 1, 5, 0]] * 2, ep_size=4)
    new = Placement([[0, 2, 3, 1, 4, 5, -1, -1], [0, 1, 2, 3, 4, 5, -1, -1]], ep_size=4)
    moves = plan(old, new, nodes=["a", "a", "b", "b"], members=[0, 1, 2], load_lost=True)
    forecast = Forecast(moves, (44_000_000, 1_250_000_000), gbps=400, local_gbps=3600)
    assert str(forecast).splitlines() == [
        "2 layers of 8 slots on 4 ranks, 1 of them out, 2 nodes",
        "unchanged                  7 slots",
        "emptied                    4 slots",
        "local copies              1 expert      44 MB",
        "READs on a node          2 experts      88 MB",
        "READs across nodes       0 experts        0 B",
        "loaded                   2 experts    1.29 GB",
        "layers touched      2 of 2",
        "hottest source      rank 0, 44 MB (the mean is 29.3 MB)",
        "hottest reader      rank 0, 44 MB (the mean is 29.3 MB)",
        "staging             1.25 GB for the busiest layer of the busiest rank",
        "takes at least      0.000196 s (rank 1's local bandwidth at 3600 Gb/s)",
        "lost                layer 0: expert 5; layer 1: expert 5",
    ]


def test_nothing_to_do_is_nothing():
    """The same placement: no rank is hottest, and no time passes."""
    same = Placement([[0, 1, 2, 3]], ep_size=2)
    forecast = Forecast(plan(same, same), (8,), gbps=1.0)
    assert (forecast.hottest_source, forecast.hottest_reader) == (None, None)
    assert forecast.seconds == 0
    assert forecast.unchanged_slots == 4
    assert forecast.layers_touched == ()
    assert "hottest source      none\n" in str(forecast)
    assert str(forecast).endswith("takes at least      0 s (nothing moves where a rate is given)")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"bytes_per_expert": (1,)}, "1 layer sizes for 2 layers"),
        ({"bytes_per_expert": (1, -2)}, "-2 bytes"),
        ({"gbps": 0.0}, "gbps is 0.0"),
        ({"gbps": float("nan")}, "gbps is nan"),
        ({"local_gbps": -1.0}, "local_gbps is -1.0"),
        ({"local_gbps": float("inf")}, "local_gbps is inf"),
    ],
)
def test_sizes_and_rates_that_make_no_sense_are_refused(arguments, said):
    """ValueError, with the value."""
    same = Placement([[0, 1]] * 2, ep_size=2)
    with pytest.raises(ValueError, match=said):
        Forecast(plan(same, same), **({"bytes_per_expert": (1, 1)} | arguments))


def test_what_it_says_cannot_be_changed():
    """Arrays are read-only."""
    same = Placement([[0, 1]], ep_size=2)
    forecast = Forecast(plan(same, same), (1,))
    for array in (forecast.matrix, forecast.bytes_in, forecast.bytes_out, forecast.bytes_copied):
        assert not array.flags.writeable
