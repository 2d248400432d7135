"""Fixtures for real ranks over real NIXL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import RankProcesses, Spec

Start = Callable[..., RankProcesses]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ranks; all processes are ended, by pid, when the test is over."""
    with ExitStack() as stack:

        def begin(placement: Placement, *, open_now: bool = True, **spec: Any) -> RankProcesses:
            url = spec.pop("rendezvous", f"file://{tmp_path}/rendezvous")
            ranks = RankProcesses(Spec(placement=placement, rendezvous=url, **spec), open_now=open_now)
            return stack.enter_context(ranks)

        yield begin


@pytest.fixture(params=["auto", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """UCX's own choice of transport, and ``UCX_TLS=tcp,self``."""
    return str(request.param)
