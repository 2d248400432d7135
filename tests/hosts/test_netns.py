"""The kit itself: what it makes is removed, also that of a test process which was killed; a skip is no pass in CI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import netns
from tests.hosts.netns import Network

ROOT = Path(netns.__file__).parents[2]
KILLED = "from tests.hosts.netns import Network; Network(1).__enter__(); print('made', flush=True); input()"


def names(pid: int) -> list[str]:
    """Of the namespaces of a test process."""
    return [entry.name for entry in Path("/run/netns").glob(f"eplb-{pid}-*")]


def test_what_a_killed_test_process_has_left_is_removed_by_the_next() -> None:
    """Names outlive the process that made them."""
    with Network(1):  # skipped where it is not permitted
        pass
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "made\n"
        assert len(names(killed.pid)) == 2
        killed.kill()
    with Network(1) as network:
        assert names(killed.pid) == []
        mine = network.hosts[0].namespace
        assert Path("/run/netns", mine).exists()
    assert not Path("/run/netns", mine).exists()


def test_where_namespaces_are_not_permitted_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped with the reason, or failed with it where they must run."""

    def refuse(*_: str, **__: str) -> str:
        raise AssertionError("Operation not permitted")

    monkeypatch.setattr(netns, "ip", refuse)
    monkeypatch.delenv("REQUIRE_NAMESPACES", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"need root .* Operation not permitted"):
        netns.require_namespaces()
    monkeypatch.setenv("REQUIRE_NAMESPACES", "1")
    with pytest.raises(pytest.fail.Exception, match="Operation not permitted"):
        netns.require_namespaces()
