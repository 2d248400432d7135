"""``eplb-async bench`` as a user runs it."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eplb_async import cli
from eplb_async.bench import parts, whole
from eplb_async.bench.launch import BenchFailed, launch
from eplb_async.bench.scenario import SCENARIOS

TINY = replace(SCENARIOS["small"].quicker(), experts=8, contenders=("ours",))


@pytest.mark.timeout(260)
def test_it_prints_one_json_object_and_nothing_else() -> None:
    """Real ranks, everyone's bytes verified."""
    done = subprocess.run(
        [sys.executable, "-m", "eplb_async.cli", "bench", "--quick", "--scenario", "small", "--rounds", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=240,  # seconds alone; a bound for a machine with much else to do
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"machine", "quick", "scenarios", "failed", "bars"}
    small = found["scenarios"]["small"]
    verified = {name: each["verified"] for name, each in small["contenders"].items()}
    assert verified == {
        **dict.fromkeys(("ours", "raw", "vllm_way", "vllm_drop_in", "gloo"), True),
        **dict.fromkeys(("copy_twice", "copy_once", "copies")),
    }
    assert set(small["not_run"]) == {"vllm"}
    assert set(small["ratios"]) == {"raw", "vllm_way", "vllm_drop_in", "gloo", "copy_twice", "copy_once"}
    assert small["contenders"]["ours"]["lag_ms"]["ticks"] > 0
    assert small["contenders"]["ours"]["polls"] > 0
    assert [bar["name"] for bar in found["bars"]] == ["small experts against the vLLM way: times as fast"]


def test_a_rank_that_fails_is_named_and_the_others_are_ended() -> None:
    """No other scenario is lost with it."""
    with pytest.raises(BenchFailed, match=r"rank \d failed: .*max_post_bytes"):
        launch(replace(TINY, settings={"max_post_bytes": 1}), rounds=1)


def made_up(*, verified: bool = True, met: bool = True) -> dict[str, Any]:
    figures = {"median": 1.0, "iqr": [0.9, 1.1]}
    contender = {
        "seconds": figures,
        "gb_per_s": figures,
        "cpu_s_per_gb": 1.0,
        "polls": None,
        "extra_mib": None,
        "lag_ms": {"p50": 0.1, "p99": 1.0, "max": 2.0, "ticks": 3},
        "verified": verified,
    }
    scenario = {
        "what": "made up",
        "bytes": 10,
        "rounds": 1,
        "contenders": {"ours": contender, "gloo": {**contender, "lag_ms": None, "polls": 7, "extra_mib": 1.0}},
        "ratios": {"gloo": figures},
        "not_run": {"vllm": "not here"},
    }
    bar = {"name": "speed", "bar": ">= 2", "measured": 2.0 if met else 1.0, "met": met}
    return {
        "scenarios": {"made-up": scenario, "blocked": {**scenario, "blocked_over_free": figures}},
        "failed": {},
        "probes": {"idle": {"share": 0.004, "bars": []}},
        "simulation": {"curves": []},
        "bars": [bar],
    }


@pytest.mark.parametrize("rich", [True, False])
def test_the_report_is_a_table(monkeypatch: pytest.MonkeyPatch, capfd: Any, rich: bool) -> None:
    """With rich and without it, the same figures."""
    monkeypatch.setattr(whole, "run_whole", lambda *_, **__: made_up())
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["bench", "--scenario", "small"]) == 0
    text = capfd.readouterr().out
    for shown in ("made up", "1.00 (0.90 to 1.10)", "vllm was not run: not here", "share 0.004", ">= 2", "yes"):
        assert shown in text


@pytest.mark.parametrize(
    ("result", "arguments", "status"),
    [
        ({}, ["--check"], 0),
        ({"met": False}, [], 0),
        ({"met": False}, ["--check"], 1),
        ({"verified": False}, [], 1),
    ],
)
def test_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, result: dict[str, bool], arguments: list[str], status: int
) -> None:
    """A missed bar counts where it is asked for, wrong bytes always."""
    monkeypatch.setattr(whole, "run_whole", lambda *_, **__: made_up(**result))
    assert cli.main(["bench", "--scenario", "small", "--json", *arguments]) == status


def test_names_that_do_not_exist_are_refused(capfd: Any) -> None:
    """Before anything is started; the list says what there is."""
    assert cli.main(["bench", "--scenario", "fast", "--contender", "nobody"]) == 2
    assert "there is no fast, nobody" in capfd.readouterr().err
    assert cli.main(["bench", "--list"]) == 0
    listed = capfd.readouterr().out
    assert all(name in listed for name in (*SCENARIOS, "vllm_way"))


def test_every_part_measures_and_lands_where_the_report_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes by name among the probes, the rest under a key of its own."""
    for module in parts.parts().values():
        assert callable(importlib.import_module(module).measure)
    made = ModuleType("made")
    made.measure = lambda *, quick: {"quick": quick}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made", made)
    monkeypatch.setattr(parts, "parts", lambda: {"idle": "made", "simulation": "made"})
    found: dict[str, Any] = {}
    for name in ("idle", "simulation"):
        parts.run_part(name, found, quick=True)
    assert found == {"probes": {"idle": {"quick": True}}, "simulation": {"quick": True}}


def test_what_fails_does_not_take_the_rest_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a scenario nor a part."""

    def measure(scenario: Any, rounds: int) -> dict[str, Any]:
        if scenario.name == "tcp":
            raise BenchFailed("rank 1 died")
        return {"ratios": {}, "contenders": {}}

    def part(name: str, results: dict[str, Any], *, quick: bool) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(whole, "run_part", part)
    began: list[str] = []
    found = whole.run_whole(
        [SCENARIOS["tcp"], SCENARIOS["small"]], ["idle"], rounds=1, quick=True, measure=measure, told=began.append
    )
    assert began == ["tcp", "tcp failed: rank 1 died", "small", "idle", "idle failed: no such device"]
    assert found["failed"] == {"tcp": "rank 1 died", "idle": "OSError: no such device"}
    assert list(found["scenarios"]) == ["small"]


@pytest.mark.faults
def test_ranks_die_with_their_launcher() -> None:
    """SIGKILLed, it can tell nobody: they notice by themselves, whatever they are in."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "eplb_async.bench", "--quick", "--scenario", "reference", "--rounds", "1000", "--json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while len(started := descendants(launcher.pid)) < 4:  # forkserver, resource tracker, two ranks
            assert time.monotonic() < deadline, started
            time.sleep(0.1)
    finally:
        launcher.kill()
        launcher.wait(10)
    deadline = time.monotonic() + 30
    while left := [pid for pid in started if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    """Process ids of all that a process started, and of what these started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]
