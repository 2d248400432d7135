"""Judges of the rendezvous, and of READs from every peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eplb_async.doctor.finding import Finding, failed, ok
from eplb_async.doctor.judges.transports import Carrier, carriers

__all__ = ["peers", "rendezvous"]

_SECRET = "set the same EPLB_ASYNC_SECRET on every rank, and start the doctor on all of them anew"
_REMEDIES = {
    "secret": _SECRET,
    "absent": "start the doctor on these ranks at the same time, with the same --rendezvous, --group and --ep-size",
    "silent": "it has left a hello but does not answer: stopped, dead, or of an earlier run; start it again",
}


def rendezvous(found: Mapping[str, Any], problem: str, *, url: str, rank: int, ep_size: int) -> Iterator[Finding]:
    """Judge whether the ranks found each other, one finding for each kind of trouble.

    Args:
        found: What the probe ``peers.peers`` answered last.
        problem: Why it came to no good end.
        url: The rendezvous as it was given.
        rank: This rank.
        ep_size: Ranks in the group.
    """
    stage = found.get("stage", "reach")
    if "met" not in found:
        if stage == "reach":
            remedy = "start rank 0 first or at the same time; check host, port, DNS, firewall and network policy"
            if rank == 0:
                remedy = "this rank hosts it: choose a free port and an address of this host"
            kind = "secret" if "secret" in problem.lower() else "unreachable"
            remedy = "set the same EPLB_ASYNC_SECRET on every rank" if kind == "secret" else remedy
        else:
            kind = "secret" if "SECRET" in problem else "key"
            remedy = (
                _SECRET if kind == "secret" else "is rank 0 running, and without EPLB_ASYNC_SECRET as this rank is?"
            )
        yield failed("rendezvous", f"{url}: {problem}", remedy, kind=kind, stage=stage)
        return
    met, missed = found["met"], found["missed"]
    if not missed:
        yield ok("rendezvous", f"{url}: all {ep_size} ranks met, same secret", met=len(met))
    for kind, remedy in _REMEDIES.items():
        ranks = {peer: each["why"] for peer, each in missed.items() if each["kind"] == kind}
        if ranks:
            whys = "; ".join(sorted(set(ranks.values())))
            text = f"{url}: met {len(met)} of {ep_size - 1} peers; {kind}: {_ranks(ranks)} ({whys})"
            yield failed("rendezvous", text, remedy, kind=kind, ranks=sorted(map(int, ranks)))


def peers(found: Mapping[str, Any], problem: str, log: str, *, node: str, floor: float) -> Iterator[Finding]:
    """Judge the READs from each peer, and name the slowest.

    Args:
        found: What the probe ``peers.peers`` answered last.
        problem: Why it came to no good end.
        log: What it printed.
        node: This rank's host label.
        floor: GB/s that each peer must reach.
    """
    if found.get("agent_error"):
        yield failed("peers", f"this rank has no NIXL agent: {found['agent_error']}", "see nixl above")
        return
    if "reads" not in found:
        if "met" in found:
            yield failed(
                "peers",
                f"READs came to no end: {problem}",
                "a peer is stopped or the network drops; see the others' reports",
            )
        return
    used = carriers(log)
    speeds = {}
    for peer, each in sorted(found["reads"].items(), key=lambda item: int(item[0])):
        check, by = f"peer {peer}", _by(used, same_node=found["met"][peer] == node)
        if "error" in each:
            yield failed(
                check, f"no READ: {each['error']}", "see what that rank's doctor says; a firewall between the hosts?"
            )
            continue
        speeds[peer] = each["gb_per_s"]
        text = f"{each['gb_per_s']:.2f} GB/s, 4 KiB in {each['p50_us']:.0f} µs, by {by}"
        facts = {**each, "rank": int(peer), "node": found["met"][peer], "carrier": by}
        if each["wrong_bytes"]:
            yield failed(check, f"{text}: {each['wrong_bytes']} WRONG BYTES", "do not use this transport", **facts)
        elif each["gb_per_s"] < floor:
            remedy = "cma within a host, RDMA or UCX_NET_DEVICES between hosts; --floor-gbps says what is expected"
            yield failed(check, f"{text}: below the floor of {floor:g} GB/s", remedy, **facts)
        else:
            yield ok(check, text, **facts)
    if speeds:
        slowest = min(speeds, key=speeds.__getitem__)
        text = (
            f"{len(speeds)} read from; slowest is rank {slowest} on {found['met'][slowest]}, {speeds[slowest]:.2f} GB/s"
        )
        yield ok("peers", text, slowest=int(slowest), gb_per_s=speeds[slowest])


def _by(used: tuple[Carrier, ...], *, same_node: bool) -> str:
    wanted = "intra-node" if same_node else "inter-node"
    names = [carrier.what for carrier in used if carrier.where == wanted]
    names = names or [carrier.what for carrier in used if carrier.where != "self"]
    return " or ".join(dict.fromkeys(names)) or "a transport that UCX did not name"


def _ranks(ranks: Mapping[str, str]) -> str:
    numbers = sorted(map(int, ranks))
    shown = ", ".join(map(str, numbers[:16])) + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
