"""Programs that use the vLLM drop-in and, as vLLM does, never close it: how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def both(folder: Path, transport: str, how: str) -> list[list[str]]:
    """Run both ranks to their end; answers what each printed, without NIXL's lines."""
    environ = dict(os.environ) | ({"UCX_TLS": "tcp,self"} if transport == "tcp" else {})
    script = Path(__file__).parent / "vllm_alone.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error::ResourceWarning", script, str(rank), folder, how],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    assert [rank.returncode for rank in ranks] == [0, 0], [err[-3000:] for _, err in ends]
    assert not any(word in err for _, err in ends for word in ("Traceback", "Warning: agent", "Exception ignored"))
    return [[line for line in out.splitlines() if "NIXL" not in line and line] for out, _ in ends]


@pytest.mark.faults
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_interpreters_end_cleanly_without_a_close(tmp_path: Path, transport: str) -> None:
    """Made on one thread, used on others, and never closed."""
    assert both(tmp_path, transport, "exit") == [["done"], ["done"]]


@pytest.mark.faults
def test_fork_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    assert both(tmp_path, "auto", "fork") == [["done"], ["done"]]


@pytest.mark.faults
def test_interrupt_ends_the_call_on_both_ranks_and_the_next_one_works(tmp_path: Path) -> None:
    assert both(tmp_path, "auto", "interrupt") == [["interrupted", "done"], ["failed", "done"]]
