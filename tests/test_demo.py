"""``eplb-async demo`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from eplb_async import cli
from eplb_async.demo import show
from eplb_async.demo.rank import Rows, Work

FIELDS = {"verified", "bytes", "seconds", "gb_per_s", "loop_lag_ms", "idle_cpu", "rounds"}
WORK = Work(ranks=2, layers=2, experts=3, mib=0.25, rounds=2, transport="auto", loop="asyncio", seed=1)


@pytest.mark.parametrize(
    ("transport", "loop"), [("auto", "uvloop"), pytest.param("tcp", "asyncio", marks=pytest.mark.faults)]
)
def test_it_prints_one_json_object_and_nothing_else(transport: str, loop: str) -> None:
    """Three real ranks: every byte verified, exactly the documented fields, status 0."""
    arguments = [
        "--ranks",
        "3",
        "--layers",
        "2",
        "--experts",
        "4",
        "--mib",
        "0.5",
        "--rounds",
        "2",
        "--seed",
        "3",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "eplb_async.cli", "demo", *arguments, "--transport", transport, "--loop", loop],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == FIELDS
    assert found["verified"] is True
    assert found["rounds"] == 2
    assert found["bytes"] > 0
    assert set(found["loop_lag_ms"]) == {"p50", "p99", "max"}


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_byte_is_status_one(monkeypatch: pytest.MonkeyPatch, capsys: Any, wrong: int) -> None:
    """One byte on one rank in one round is enough."""
    rounds = [[{"wrong": 0, "bytes": 10, "seconds": 1.0, "lags": [0.001]} for _ in range(2)] for _ in range(2)]
    rounds[1][1]["wrong"] = wrong
    monkeypatch.setattr(show, "_drive", lambda work, step: (rounds, [0.001, 0.002]))
    assert show.run(WORK, as_json=True) == wrong
    found = json.loads(capsys.readouterr().out)
    assert found["verified"] is (wrong == 0)
    assert (found["bytes"], found["seconds"], found["idle_cpu"]) == (40, 2.0, 0.002)


def test_a_rank_that_dies_is_status_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It says which rank, on stderr."""

    def die(work: Work, step: Any) -> Any:
        raise show.DemoFailed("rank 1 died")

    monkeypatch.setattr(show, "_drive", die)
    assert show.run(WORK, as_json=True) == 1
    assert "rank 1 died" in capsys.readouterr().err


def test_its_check_sees_every_byte() -> None:
    """Any byte changed anywhere in a rank's weights is counted; experts differ from each other everywhere."""
    placement = WORK.placements()[0]
    rows = Rows(WORK, 1)
    rows.fill(placement)
    assert rows.wrong_bytes(placement) == 0
    rng = np.random.default_rng(0)
    for layer in rows.layers:
        for tensor in layer.values():
            flat = tensor.view(-1).numpy().view(np.uint8)
            at = int(rng.integers(len(flat)))
            flat[at] ^= 1
            assert rows.wrong_bytes(placement) == 1
            flat[at] ^= 1
    other = WORK.placements()[1]
    assert rows.wrong_bytes(other) > 0


@pytest.mark.parametrize("bad", ["--ranks=1", "--rounds=0", "--transport=rdma", "--experts=1"])
def test_arguments_out_of_range_are_refused(bad: str) -> None:
    """By argparse, before any process is started."""
    with pytest.raises(SystemExit) as refused:
        cli.main(["demo", bad])
    assert refused.value.code == 2
