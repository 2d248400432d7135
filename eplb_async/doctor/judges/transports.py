"""Judges of READs within this machine: what carried them, and how fast."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eplb_async.doctor.finding import Finding, failed, ok, warning

__all__ = ["Carrier", "carriers", "reads"]

_TITLE = re.compile(r"\| [^|]*?\b(self|intra-node|inter-node) cfg#")
_READ = re.compile(r"\| remote memory read by ucp_get")
_OTHER = re.compile(r"\| [\w ]+ by ucp_")
_LARGEST = re.compile(r"\|\s*[\w.]+\.\.inf\s*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|")


@dataclass(frozen=True, slots=True)
class Carrier:
    """What UCX said it reads large memory by.

    Attributes:
        where: ``"self"``, ``"intra-node"`` or ``"inter-node"``.
        how: ``"zero-copy"`` where the memory itself is read, ``"software emulation"`` where the peer sends it.
        what: Transports and devices, such as ``"cma/memory"`` or ``"rc_mlx5/mlx5_0:1"``.
    """

    where: str
    how: str
    what: str


def carriers(log: str) -> tuple[Carrier, ...]:
    """The carriers in what UCX printed with ``UCX_PROTO_INFO=y``, in its order, each once."""
    found: dict[Carrier, None] = {}
    where, reading = "", False
    for line in log.splitlines():
        if title := _TITLE.search(line):
            where, reading = title[1], False
        elif _READ.search(line):
            reading = True
        elif _OTHER.search(line):
            reading = False
        elif reading and (row := _LARGEST.search(line)):
            found[Carrier(where, row[1], row[2])] = None
    return tuple(found)


def reads(check: str, found: Mapping[str, Any], problem: str, log: str, *, floor: float, forced: bool) -> Finding:
    """Judge READs between two processes of this host.

    Args:
        check: Name of the check.
        found: What the probe ``reads.read`` answered.
        problem: Why it did not.
        log: What it printed.
        floor: GB/s that are expected.
        forced: Whether the doctor chose the transport: then another way may be the one that is used.
    """
    used = [carrier for carrier in carriers(log) if carrier.where != "self"]
    by = ", ".join(f"{carrier.what} ({carrier.how})" for carrier in used) or "a transport that UCX did not name"
    if not found:
        remedy = "see nixl, network and environment above; UCX_LOG_LEVEL=info says more"
        return (warning if forced else failed)(check, f"no READ: {problem}", remedy)
    text = f"{found['gb_per_s']:.2f} GB/s, 4 KiB in {found['p50_us']:.0f} µs, by {by}"
    facts = {**found, "carriers": [carrier.what for carrier in used]}
    if found["wrong_bytes"]:
        return failed(check, f"{text}: {found['wrong_bytes']} WRONG BYTES", "do not use this transport", **facts)
    if found["gb_per_s"] < floor:
        remedy = "is the machine busy? see cma, cores and lag; run it again"
        return warning(check, f"{text}: below {floor:g} GB/s", remedy, **facts)
    if not forced and any(carrier.what.startswith("tcp/") for carrier in used):
        return warning(check, f"{text}: not read from memory, although on one host", "see cma and environment", **facts)
    return ok(check, text, **facts)
