"""Exit and fork of processes that have a communicator open (DESIGN §3, N-40, N-41)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure
from tests.real.conftest import Start

OLD, NEW = Placement([[0, 1]], ep_size=2), Placement([[1, 0]], ep_size=2)


@pytest.mark.faults
def test_exit_with_an_open_communicator_and_nobody_closing(start: Start, transport: str) -> None:
    """The interpreter ends clean, exit code 0, and the peer learns that the rank left or died."""
    ranks = start(OLD, transport=transport, method="spawn")
    ranks.send(1, "leave")
    assert ranks.exit_code(1) == 0
    answer = ranks.call(0, "migrate", NEW, 20.0)
    assert isinstance(answer, Failure)
    assert ranks.call(0, "health")["members"] in ((0, 1), (0,))


@pytest.mark.parametrize("how", ["_exit", "sys.exit"])
def test_a_fork_refuses_and_does_not_harm_its_parent(tmp_path: Path, transport: str, how: str) -> None:
    """The child's copy says it belongs to the parent; whatever the child does, the parent migrates on."""
    environ = dict(os.environ) | ({"UCX_TLS": "tcp,self"} if transport == "tcp" else {})
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "life.py", tmp_path, how],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split("\n")[-2:]) == (0, ["the parent lives", ""]), done.stderr


def test_ranks_may_die_while_they_are_being_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was killed is gone before its parent is told so: ending the ranks is no error then."""
    ranks = start(OLD, open_now=False)
    ranks.kill(1)
    ranks.exit_code(1)
    monkeypatch.setattr(ranks._processes[1], "is_alive", lambda: True)
    ranks.__exit__(None, None, None)
