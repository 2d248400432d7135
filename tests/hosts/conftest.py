"""Fixtures: ranks that live on a host each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import RankProcesses, Spec
from tests.hosts.netns import Host, Network

PORT = 29500
SECRET = b"of several hosts"


@dataclass(frozen=True)
class Site:
    """Hosts, and a rank on each.

    Attributes:
        hosts: By rank.
        ranks: Their processes.
    """

    hosts: tuple[Host, ...]
    ranks: RankProcesses


Begin = Callable[..., Site]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Make a host for each rank of a placement, and start the ranks there, over tcp."""
    with ExitStack() as stack:

        def begin(
            placement: Placement,
            *,
            planes: int = 1,
            bad: bool = False,
            open_now: bool = True,
            environments: Sequence[dict[str, str]] = ({},),
            settings: dict[str, Any] | None = None,
            **spec: Any,
        ) -> Site:
            size = placement.ep_size
            network = stack.enter_context(Network(size, planes=planes, bad=bad))
            environments = list(environments) * size if len(environments) == 1 else environments
            whole = Spec(
                placement=placement,
                rendezvous=spec.pop("rendezvous", f"tcp://{network.hosts[0].address()}:{PORT}"),
                transport="tcp",
                entries=tuple(host.entry(**more) for host, more in zip(network.hosts, environments, strict=True)),
                nodes=tuple(host.node for host in network.hosts),
                settings={"secret": SECRET, **(settings or {})},
                **spec,
            )
            return Site(network.hosts, stack.enter_context(RankProcesses(whole, open_now=open_now)))

        yield begin
