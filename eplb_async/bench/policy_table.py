"""The policy beside the published algorithm, over a chain of rebalances with drifting load.

``python -m eplb_async.bench.policy_table`` prints one row for each load, cluster and policy. Each chain starts at the
published placement of its load. Before each rebalance every expert's load is multiplied by a log-normal factor (sigma
0.3). All policies see the same loads, each continues from its own placement before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.bench.bars import bar
from eplb_async.bench.published_policy import as_vllm_loops, published_rebalance
from eplb_async.core.placement import Placement
from eplb_async.policy import rank_loads, rebalance_experts

__all__ = ["CLUSTERS", "LOADS", "Cluster", "Row", "chain", "main", "measure", "rows"]

BYTES_PER_EXPERT = 44_000_000
EXPERTS = 256


@dataclass(frozen=True, slots=True)
class Cluster:
    """Sizes of one case."""

    name: str
    num_ranks: int
    num_replicas: int
    num_groups: int = 1
    num_nodes: int = 1


CLUSTERS = (
    Cluster("32 ranks × 9, global", 32, 288),
    Cluster("64 ranks × 5, global", 64, 320),
    Cluster("256 ranks × 2, global", 256, 512),
    Cluster("32 ranks × 9, 8 groups on 4 nodes", 32, 288, 8, 4),
    Cluster("64 ranks × 5, 8 groups on 8 nodes", 64, 320, 8, 8),
)
LOADS = ("zipf 1.1", "zipf 1.3", "zipf 1.5", "uniform", "one hot")


@dataclass(frozen=True, slots=True)
class Row:
    """One policy over one chain, means over its rebalances unless said otherwise.

    Attributes:
        load: Name of the load.
        cluster: Name of the cluster.
        policy: ``published``, ``published, as vLLM loops`` (the same placement), ``ours`` or ``ours, placement-aware``.
        balancedness: Mean over maximum of the rank loads, mean over the layers.
        least_ratio: The lowest balancedness over the published one's, of all rebalances.
        moved: Part of all slots that receive an expert that their rank did not hold.
        gigabytes: What these are at 44 MB an expert, all ranks together.
        milliseconds: CPU time of one call.
    """

    load: str
    cluster: str
    policy: str
    balancedness: float
    least_ratio: float
    moved: float
    gigabytes: float
    milliseconds: float


def first_load(name: str, num_layers: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """The load that a chain starts from, ``[num_layers, 256]``, the experts shuffled in each layer."""
    kind, _, exponent = name.partition(" ")
    weights = np.ones(EXPERTS)
    if kind == "zipf":
        weights = 1 / np.arange(1, EXPERTS + 1) ** float(exponent)
    elif kind == "one":
        weights[0] = 0.1 * EXPERTS  # as much as a tenth of all others together
    return rng.permuted(np.tile(weights, (num_layers, 1)), axis=1)


def received(old: Placement, new: Placement) -> int:
    """Experts that a rank must receive, because it did not hold them in that layer: counted from the maps alone."""
    total = 0
    for rank in range(old.ep_size):
        for before, after in zip(old.local(rank).tolist(), new.local(rank).tolist(), strict=True):
            total += len({expert for expert in after if expert >= 0} - set(before))
    return total


def chain(load: str, cluster: Cluster, *, num_layers: int = 58, rebalances: int = 20, seed: int = 0) -> list[Row]:
    """Runs the policies over one chain: published, as vLLM loops, ours, ours placement-aware."""
    rng = np.random.default_rng(seed)
    loads = first_load(load, num_layers, rng)
    sizes = (cluster.num_replicas, cluster.num_groups, cluster.num_nodes, cluster.num_ranks)

    def placed(slots: NDArray[Any]) -> Placement:
        return Placement(slots, ep_size=cluster.num_ranks, num_logical=EXPERTS)

    policies: dict[str, Callable[[Any, Placement], Placement]] = {
        "published": lambda now, _: placed(published_rebalance(now, *sizes)),
        "published, as vLLM loops": lambda now, _: placed(as_vllm_loops(now, *sizes)),
        "ours": lambda now, _: rebalance_experts(now, *sizes).placement,
        "ours, placement-aware": lambda now, held: rebalance_experts(now, *sizes, current=held).placement,
    }
    start = placed(published_rebalance(loads, *sizes))
    held = dict.fromkeys(policies, start)
    seen: dict[str, list[tuple[float, int, float]]] = {name: [] for name in policies}
    for _ in range(rebalances):
        loads = loads * rng.lognormal(0.0, 0.3, loads.shape)
        for name, policy in policies.items():
            began = time.process_time()
            new = policy(loads, held[name])
            took = time.process_time() - began
            carried = rank_loads(loads, new)
            balance = float((carried.mean(axis=1) / carried.max(axis=1)).mean())
            seen[name].append((balance, received(held[name], new), took))
            held[name] = new
    reference = np.array([balance for balance, _, _ in seen["published"]])
    slots = num_layers * cluster.num_replicas
    return [
        Row(
            load=load,
            cluster=cluster.name,
            policy=name,
            balancedness=float(figures[:, 0].mean()),
            least_ratio=float((figures[:, 0] / reference).min()),
            moved=float(figures[:, 1].mean() / slots),
            gigabytes=float(figures[:, 1].mean() * BYTES_PER_EXPERT / 1e9),
            milliseconds=float(np.median(figures[:, 2]) * 1e3),
        )
        for name, figures in ((name, np.array(values)) for name, values in seen.items())
    ]


def rows(*, quick: bool = False) -> Iterator[Row]:
    """All rows, as they come; ``quick`` takes 8 layers and 6 rebalances instead of 58 and 20."""
    for cluster in CLUSTERS:
        for load in LOADS:
            yield from chain(load, cluster, num_layers=8 if quick else 58, rebalances=6 if quick else 20)


def measure(*, quick: bool) -> dict[str, Any]:
    """All rows under ``rows``, and under ``bars`` the worst of them beside what is asked."""
    found = list(rows(quick=quick))
    cases = [found[at : at + 4] for at in range(0, len(found), 4)]
    one_node = {cluster.name for cluster in CLUSTERS if cluster.num_nodes == 1}
    bars = []
    for mode, limit in (("global", 1 / 6), ("hierarchical", 1 / 3)):
        of_mode = [case for case in cases if (case[0].cluster in one_node) == (mode == "global")]
        moved = max(aware.moved / published.moved for published, _, _, aware in of_mode)
        least = min(aware.least_ratio for _, _, _, aware in of_mode)
        bars.append(
            bar(f"policy, {mode}, placement-aware: balance over the published", ">= 0.99", least, least >= 0.99)
        )
        bars.append(
            bar(f"policy, {mode}, placement-aware: moves over the published", f"<= {limit:.3f}", moved, moved <= limit)
        )
    least = min(ours.balancedness / published.balancedness for published, _, ours, _ in cases)
    bars.append(bar("policy without current: balance over the published", ">= 0.999", least, least >= 0.999))
    slowest = max(ours.milliseconds / loops.milliseconds for _, loops, ours, _ in cases)
    bars.append(bar("policy without current: time over the published as vLLM loops", "<= 1", slowest, slowest <= 1))
    return {"rows": [asdict(row) for row in found], "bars": bars}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 layers and 6 rebalances instead of 58 and 20")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args(argv)
    if arguments.json:
        print(json.dumps(measure(quick=arguments.quick)))
        return 0
    print("| ranks × slots | load | policy | balancedness | least of published | slots moved | GB | ms |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for row in rows(quick=arguments.quick):
        print(
            f"| {row.cluster} | {row.load} | {row.policy} | {row.balancedness:.3f} | {row.least_ratio:.4f} "
            f"| {row.moved:.1%} | {row.gigabytes:.1f} | {row.milliseconds:.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
