"""Starts the small groups of real ranks that probes measure in."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure, RankProcesses, Spec

ROW_BYTES = 4096


def transports(*, quick: bool) -> tuple[str, ...]:
    """The transports to measure: UCX's own choice, and tcp unless it must be quick."""
    return ("auto",) if quick else ("auto", "tcp")


@contextlib.contextmanager
def started(ranks: int, transport: str, *, open_now: bool = True, **spec: Any) -> Iterator[RankProcesses]:
    """Real ranks with one layer of one small expert each; all are ended on leaving.

    Args:
        ranks: How many.
        transport: ``"auto"`` or ``"tcp"``.
        open_now: Whether to open them too.
        **spec: What else to set of :class:`~eplb_async.testing.processes.Spec`.
    """
    with tempfile.TemporaryDirectory(prefix="eplb-probe-") as folder:
        given = {
            "placement": Placement(np.arange(ranks)[None], ep_size=ranks),
            "rendezvous": f"file://{folder}/rendezvous",
            "row_bytes": (ROW_BYTES,),
            "loop": "uvloop",
            "transport": transport,
        }
        with RankProcesses(Spec(**{**given, **spec}), open_now=open_now) as group:
            yield group


def run(group: RankProcesses, rank: int, module: str, function: str, *args: Any, timeout: float = 60.0) -> Any:
    """Await a probe's ``module.function`` in a rank's process, and return what it does; see :func:`answer`."""
    group.send(rank, "run", module, function, *args)
    return answer(group, rank, timeout)


def answer(group: RankProcesses, rank: int, timeout: float = 60.0) -> Any:
    """A rank's answer to the oldest command that has none yet.

    Raises:
        RuntimeError: The command failed; says how.
        TimeoutError: The rank did not answer.
    """
    told = group.receive(rank, timeout)
    if isinstance(told, Failure):
        raise RuntimeError(f"rank {rank} of a probe failed: {told.kind}: {told.text}")
    return told
