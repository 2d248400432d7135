"""UCX's part of the environment: what is set in it before NIXL is loaded, and what may be wrong with it, in words.

UCX reads it once. It warns of variables that nothing reads, on standard output.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NETWORK = Path("/sys/class/net")
_FABRIC = Path("/sys/class/infiniband")


def prepare() -> None:
    """Set what the user has not; call it before NIXL is imported."""
    # NIXL logs INFO to stdout, UCX can leak registrations that it keeps for later, and over tcp it waits inside of a
    # call for a host that does not answer, two minutes at worst (N-54).
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    if _may_use_tcp():
        os.environ.setdefault("UCX_TCP_CONN_NB", "y")


def advice() -> str:
    """What to look at when UCX finds no way: on this host at all, or to a peer."""
    devices = os.environ.get("UCX_NET_DEVICES", "")
    there = _present(_NETWORK) | _present(_FABRIC)
    missing = [name for name in _names(devices) if name.partition(":")[0] not in there and name != "all"]
    if missing and not devices.startswith("^") and "[" not in devices:
        return (
            f"UCX_NET_DEVICES names {', '.join(missing)}, which this host does not have; it has "
            f"{', '.join(sorted(there)) or 'none'}"
        )
    tls = os.environ.get("UCX_TLS", "")
    return (
        f"UCX_NET_DEVICES is {devices or 'not set'} and UCX_TLS is {tls or 'not set'} here, and this host has "
        f"{', '.join(sorted(there)) or 'no network'}: see that both leave UCX a network that all ranks are on; what "
        "UCX says of it is on standard output"
    )


def _may_use_tcp() -> bool:
    tls, devices = os.environ.get("UCX_TLS", "all"), os.environ.get("UCX_NET_DEVICES", "all")
    if bool({"all", "tcp"} & set(_names(tls))) == tls.startswith("^"):
        return False
    names = _names(devices)
    return devices.startswith("^") or "all" in names or "[" in devices or bool(_present(_NETWORK) & set(names))


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.removeprefix("^").split(",") if name.strip()]


def _present(where: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return {entry.name for entry in where.iterdir() if entry.is_symlink() or entry.is_dir()}
    return set()
