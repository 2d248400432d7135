"""The probes of the bench: what each reports, and the bars that hold on a busy machine too."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from eplb_async.bench.probes import PROBES, alone, idle, latency, opening, planner, record, service, stopped
from eplb_async.bench.probes.group import run, started


def told(probe: Any, **how: Any) -> dict[str, Any]:
    """What a probe measures, after a trip through JSON; its bars are complete."""
    found: dict[str, Any] = json.loads(json.dumps(probe.measure(**how)))
    for bar in found["bars"]:
        assert set(bar) == {"name", "bar", "measured", "met"}
        assert isinstance(bar["met"], bool)
    return found


def met(found: dict[str, Any]) -> dict[str, bool]:
    return {bar["name"]: bar["met"] for bar in found["bars"]}


def test_every_probe_has_a_name_and_a_measure() -> None:
    """The bench finds them by these; no two share a name."""
    modules = [importlib.import_module(f"eplb_async.bench.probes.{name}") for name in PROBES]
    assert all(callable(module.measure) for module in modules)
    assert len({module.NAME for module in modules}) == len(PROBES)


def test_a_bar_says_what_was_asked_and_what_was_found() -> None:
    """Exactly the limit is still met."""
    assert alone.at_most("it", 1.5, 1.5) == {"name": "it", "bar": "<= 1.5", "measured": 1.5, "met": True}
    assert not alone.at_most("it", 1.5, 1.6)["met"]


def test_a_probe_alone_prints_one_json_object(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """``--quick`` reaches the probe."""
    monkeypatch.setattr("sys.argv", ["probe", "--quick"])
    alone.main("it", lambda *, quick: {"quick": quick})
    assert json.loads(capsys.readouterr().out) == {"quick": True}


def test_latency_ratios_are_of_the_same_round() -> None:
    """A machine that is slow for one round is slow for all three, and no ratio shows it."""
    blocks = {"ours": [[2e-4] * 3, [8e-4] * 3], "spin": [[1e-4] * 3, [4e-4] * 3], "sleep": [[4e-4] * 3, [16e-4] * 3]}
    found = latency.summary(blocks)
    assert found["ratios"] == {"spin": 2.0, "sleep": 0.5}
    assert found["spin"] == {"p50_us": 250.0, "p99_us": 400.0}
    bars = latency.bars({"auto": {latency.BAR_SOURCE: {latency.BAR_CASE: found}}})
    assert [bar["met"] for bar in bars] == [False, False]


def test_the_planner_probe_plans_both_shapes() -> None:
    """One repeat of each; the time is the bench's to judge."""
    found = told(planner, quick=True)
    assert [(shape["slots"], shape["ranks"]) for shape in found["shapes"]] == [(320, 32), (512, 256)]
    assert all(shape["reads"] > 0 and shape["rank_batches"] > 0 < shape["plan_seconds"] for shape in found["shapes"])
    assert len(found["bars"]) == 2


def test_the_record_probe_measures_every_kind_of_counts() -> None:
    """The time is the bench's to judge."""
    found = told(record, quick=True)
    assert {"int64", "torch int32", "int64, 4 threads", "int64, a layer changes each step"} <= set(found["record"])
    assert set(found["looks"]) == {"loads", "collect", "applied"}
    assert all(0 < one["p50_us"] <= one["p99_us"] for part in ("record", "looks") for one in found[part].values())
    assert len(found["bars"]) == 1


def test_a_round_of_the_service_makes_skewed_loads_more_even() -> None:
    """As the ranks count them, and as the policy said; every byte is right."""
    found = told(service, quick=True)
    one = found["transports"]["auto"]
    print({name: value for name, value in one.items() if not isinstance(value, dict)})
    assert one["balancedness_before"] + 0.05 < one["balancedness_after"] <= 1
    assert one["balancedness_after"] == pytest.approx(one["predicted_after"], abs=1e-3)
    assert one["gigabytes"] > 0 == one["wrong_bytes"]
    assert one["seconds"] == pytest.approx(one["ask"] + one["policy"] + one["migrate"], abs=1e-3)
    assert 0 < one["forward_us"]["p50"] <= one["forward_us"]["p99"]
    assert len(found["bars"]) == 1


def test_waiting_on_a_stopped_peer_polls_little_and_is_cancelled_at_once() -> None:
    """Polls and turns do not depend on how busy the machine is: their bars hold here too."""
    found = told(stopped, quick=True)
    assert set(found["waiting"]) == {"a READ", "a migration"}
    bars = met(found)
    assert len(bars) == 6
    assert all(is_met for name, is_met in bars.items() if "polls" in name or "turns" in name), found


def test_a_probe_that_fails_on_a_rank_says_where_and_why() -> None:
    """And its processes are ended."""
    with started(1, "auto", open_now=False) as group, pytest.raises(RuntimeError, match=r"rank 0 .*KeyError"):
        run(group, 0, __name__, "fails")


async def fails(_: object) -> None:
    raise KeyError("nothing")


@pytest.mark.faults
def test_an_idle_rank_burns_less_than_a_hundredth_of_a_core() -> None:
    """With NIXL's progress thread it burns most of one, unless others take it."""
    found = told(idle, quick=False)
    assert all(met(found).values()), found
    assert found["with_progress_thread"] > 10 * max(found["share_of_a_core"].values())


@pytest.mark.faults
def test_one_awaited_read_is_measured_from_both_sources() -> None:
    """Every case has every contender."""
    found = told(latency, quick=True)
    for sources in found["transports"].values():
        assert set(sources) == set(latency.SOURCES)
        for cases in sources.values():
            assert set(cases) == set(latency.CASES)
            for figures in cases.values():
                assert all(figures[name]["p50_us"] <= figures[name]["p99_us"] for name in ("ours", "spin", "sleep"))
    assert len(found["bars"]) == 2


@pytest.mark.faults
def test_open_is_measured_against_the_number_of_peers() -> None:
    """A curve, and a late peer that delays nobody."""
    found = told(opening, quick=True)
    curves = {name: [point["peers"] for point in curve] for name, curve in found["curves"].items()}
    assert curves == {"auto": [1, 2]}
    late = found["late_peer"]
    assert late["others_met"] < late["late_one_met"]
