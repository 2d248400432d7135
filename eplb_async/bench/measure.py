"""One scenario on one rank: everyone verified once, then round after round in turns."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

from eplb_async.bench.contenders import CONTENDERS, Contender
from eplb_async.bench.contenders.link import agent_name
from eplb_async.bench.figures import Samples, summarise
from eplb_async.bench.group import Group
from eplb_async.bench.scenario import Scenario
from eplb_async.bench.usage import PeakMemory
from eplb_async.bench.work import Work
from eplb_async.nixl.bindings import NixlNative

__all__ = ["measure"]


async def measure(scenario: Scenario, group: Group, *, rounds: int) -> dict[str, Any]:
    """Run a scenario with the other ranks of the group.

    Each round gives every contender one turn, in an order that moves on by one from round to round.

    Returns:
        The summary of all ranks, the same on each; see :func:`~eplb_async.bench.figures.summarise`.
    """
    work = Work(scenario, group)
    not_run = _not_run(work)
    chosen = [CONTENDERS[name](work) for name in scenario.contenders if name not in not_run]
    samples = Samples(turns={contender.name: [] for contender in chosen})
    opened: list[Contender] = []
    NixlNative(agent_name("first", group.rank)).destroy()  # the libraries' own memory is nobody's
    try:
        if any(contender.on_shared_rows for contender in chosen):
            _ = work.rows  # before anybody's memory is looked at
        for contender in chosen:
            group.barrier()
            memory = PeakMemory()
            await contender.open()
            opened.append(contender)
            if contender.moves:
                samples.wrong[contender.name] = await contender.verify()
            else:
                await contender.turn()
            samples.extra_mib[contender.name] = memory.extra_mib()
        for number in range(rounds):
            at = number % len(chosen)
            for contender in chosen[at:] + chosen[:at]:
                samples.turns[contender.name].append(asdict(await _one(contender, group)))
    finally:
        for contender in opened:
            await contender.close()
    everyone = [Samples(**each) for each in group.gather(asdict(samples))]
    nbytes = group.gather(work.bytes_in)
    return summarise(scenario, everyone, nbytes, not_run)


async def _one(contender: Contender, group: Group) -> Any:
    await contender.ready()
    gc.collect()  # not in the middle of somebody's turn
    turn = await contender.turn()
    group.barrier()
    await contender.rest()
    return turn


def _not_run(work: Work) -> dict[str, str]:
    """Contenders that some rank cannot run, and why."""
    reasons = {name: CONTENDERS[name].why_not(work) for name in work.scenario.contenders}
    found: dict[str, str] = {}
    for rank, each in enumerate(work.group.gather(reasons)):
        for name, reason in each.items():
            if reason and name not in found:
                found[name] = reason if rank == 0 else f"rank {rank}: {reason}"
    return found
