"""Real ranks whose programs have no event loop: open, rebalance, migrate, close, and ends of other kinds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def both(folder: Path, transport: str, how: str) -> list[str]:
    """Run both ranks to their end; answers what each printed last."""
    environ = dict(os.environ) | ({"UCX_TLS": "tcp,self"} if transport == "tcp" else {})
    script = Path(__file__).parent / "sync_rank.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), folder, how],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    assert [rank.returncode for rank in ranks] == [0, 0], [err[-3000:] for _, err in ends]
    return [" ".join(out.split()[-2:]) for out, _ in ends]


@pytest.mark.faults
def test_two_programs_without_a_loop(tmp_path: Path) -> None:
    """They serve, rebalance, migrate and close; layers that are used never change under their users."""
    for last in both(tmp_path, "auto", "close"):
        assert last.endswith("done")


@pytest.mark.faults
@pytest.mark.parametrize("how", ["close", "exit", "fork", "interrupt"])
def test_how_a_program_without_a_loop_ends(tmp_path: Path, transport: str, how: str) -> None:
    """Closed, just ended, with a forked child, after Ctrl-C in a call that waits: the exit code is 0 each time."""
    first, second = both(tmp_path, transport, how)
    assert first.endswith("interrupted done" if how == "interrupt" else "done")
    assert second.endswith("done")
