"""Medians, ratios and bars, from made-up turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eplb_async.bench.bars import bars
from eplb_async.bench.figures import Samples, spread, summarise
from eplb_async.bench.scenario import SCENARIOS

REFERENCE = SCENARIOS["reference"]


def turn(seconds: float, *, cpu: float = 1.0, polls: int | None = None, lags: tuple[float, ...] = ()) -> dict[str, Any]:
    return {"seconds": seconds, "cpu": cpu, "polls": polls, "lags": list(lags)}


def two_ranks(**turns: list[tuple[float, float]]) -> list[Samples]:
    """Of each contender, seconds on both ranks, turn by turn."""
    return [
        Samples(
            turns={name: [turn(pair[rank], polls=3) for pair in pairs] for name, pairs in turns.items()},
            wrong=dict.fromkeys(turns, 0),
            extra_mib=dict.fromkeys(turns, 10.0 + rank),
        )
        for rank in range(2)
    ]


def test_the_spread_is_median_and_quartiles() -> None:
    """Of five values: the third, the second and the fourth."""
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == {"median": 3.0, "iqr": [2.0, 4.0]}


def test_the_slowest_rank_counts_and_ratios_are_taken_within_a_round() -> None:
    """A machine twice as slow in one round changes no ratio."""
    samples = two_ranks(ours=[(1.0, 0.5), (0.5, 2.0), (1.0, 1.0)], gloo=[(3.0, 1.0), (1.0, 6.0), (3.0, 3.0)])
    found = summarise(REFERENCE, samples, [10**9, 10**9], {})
    assert found["contenders"]["ours"]["seconds"]["median"] == 1.0
    assert found["contenders"]["ours"]["gb_per_s"]["median"] == 2.0
    assert found["contenders"]["ours"]["cpu_s_per_gb"] == 1.0  # both ranks' seconds over both ranks' bytes
    assert found["contenders"]["ours"]["polls"] == 6
    assert found["contenders"]["ours"]["extra_mib"] == 11.0
    assert found["contenders"]["ours"]["verified"] is True
    assert found["ratios"] == {"gloo": {"median": 3.0, "iqr": [3.0, 3.0]}}
    assert "blocked_over_free" not in found


def test_one_wrong_byte_on_one_rank_is_wrong() -> None:
    """And what moves nothing is not verified at all."""
    samples = two_ranks(ours=[(1.0, 1.0)], copy_twice=[(1.0, 1.0)])
    samples[1].wrong = {"ours": 1}
    samples[0].wrong = {"ours": 0}
    found = summarise(REFERENCE, samples, [1, 1], {})["contenders"]
    assert [found[name]["verified"] for name in ("ours", "copy_twice")] == [False, None]


def test_lag_is_the_worst_ranks() -> None:
    """Each percentile by itself, in milliseconds, over all its ticks; unknown memory stays unknown."""
    calm, late = [turn(1.0, lags=(0.001,) * 10)], [turn(1.0, lags=(0.001,) * 9 + (0.1,))]
    samples = [Samples(turns={"ours": calm}), Samples(turns={"ours": late}, extra_mib={"ours": None})]
    found = summarise(REFERENCE, samples, [1, 1], {"vllm": "not installed"})
    lag = found["contenders"]["ours"]["lag_ms"]
    assert (lag["p50"], lag["max"], lag["ticks"]) == (1.0, 100.0, 20)
    assert found["contenders"]["ours"]["extra_mib"] is None
    assert found["not_run"] == {"vllm": "not installed"}


def test_of_a_blocked_loop_only_the_peers_count() -> None:
    """Rank 0 is late by its own doing; what counts is how long it keeps the others."""
    samples = two_ranks(late=[(9.0, 1.0), (9.0, 2.0)], blocked=[(9.0, 1.2), (9.0, 2.4)])
    found = summarise(SCENARIOS["blocked"], samples, [1, 1], {})
    assert found["blocked_over_free"]["median"] == pytest.approx(1.2)
    assert found["contenders"]["late"]["gb_per_s"] is None
    assert found["ratios"] == {}


def results(**ratios: float) -> dict[str, Any]:
    of = {name: {"median": value, "iqr": [value, value]} for name, value in ratios.items()}
    lag = {"p50": 0.1, "p99": 6.0, "max": 9.0}
    contenders = {"ours": {"lag_ms": lag}, "copies": {"lag_ms": {**lag, "p99": 4.5}}}
    return {"scenarios": {"reference": {"ratios": of, "contenders": contenders}}}


def test_bars_say_what_was_measured_and_whether_it_is_enough() -> None:
    """The lag may be as much as half more than under the same copies, where that is more than 5 ms."""
    found = {bar["name"]: bar for bar in bars(results(gloo=2.5, raw=0.8))}
    assert [bar["met"] for bar in found.values()] == [True, False, True]
    lag = found["user loop's lag while it migrates, p99, ms"]
    assert (lag["measured"], lag["bar"].split(" (")[0]) == (6.0, "<= 6.8")


def test_bars_of_what_was_not_run_are_left_out_and_parts_bring_their_own() -> None:
    """Nothing is met by silence."""
    assert bars({"scenarios": {}}) == []
    own = {"name": "idle", "bar": "<= 0.01", "measured": 0.004, "met": True}
    assert bars({"probes": {"idle": {"bars": [own]}, "open": {}}, "simulation": {"bars": [own]}}) == [own, own]
    held = summarise(replace(SCENARIOS["blocked-gil"]), two_ranks(late=[(1.0, 1.0)], blocked=[(1.0, 2.0)]), [1, 1], {})
    (bar,) = bars({"scenarios": {"blocked-gil": held}})
    assert (bar["measured"], bar["met"]) == (2.0, False)
