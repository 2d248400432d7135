"""Facts of this machine and process that can be read at once, in this process."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import resource
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Host", "look"]

_PREFIXES = ("EPLB_ASYNC_", "UCX_", "NIXL_", "PYTORCH_")
_NAMES = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 1 << 14, 1 << 19
_INFINITE = -1
_SIOCGIFADDR = 0x8915
_GLOBAL = "00"  # scope of an IPv6 address


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What was read; sizes in bytes.

    Attributes:
        environ: Variables that the library, NIXL, UCX or torch's allocator read.
        shm_bytes: Size of ``/dev/shm``; None: there is none.
        shm_free: What is free there.
        memlock: Soft limit of locked memory; -1: none.
        nofile: Soft limit of file descriptors; -1: none.
        nofile_hard: Hard limit of file descriptors; -1: none.
        interfaces: Network interfaces, with an address where they have one that others may reach and are up.
        rdma: RDMA devices.
        ptrace_scope: Yama's setting; None: this kernel has none.
        seccomp: Whether a seccomp filter is on this process.
        cap_sys_ptrace: Whether this process has that capability.
        cap_ipc_lock: Whether it has that one, which lifts the limit of locked memory.
        cores: Cores that this process may use, the quota of its cgroup counted.
        throttled: How often its cgroup was kept from running; None: unknown.
    """

    environ: Mapping[str, str]
    shm_bytes: int | None
    shm_free: int
    memlock: int
    nofile: int
    nofile_hard: int
    interfaces: Mapping[str, str]
    rdma: tuple[str, ...]
    ptrace_scope: int | None
    seccomp: bool
    cap_sys_ptrace: bool
    cap_ipc_lock: bool
    cores: float
    throttled: int | None


def look(environ: Mapping[str, str] = os.environ) -> Host:
    """Read them; nothing raises, what cannot be read is as if it were not there."""
    status = _read("/proc/self/status")
    shm = None
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
    scope = _read("/proc/sys/kernel/yama/ptrace_scope").strip()
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    capabilities = int(effective[1], 16) if effective else 0
    nofile, nofile_hard = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    return Host(
        environ={k: v for k, v in environ.items() if k.startswith(_PREFIXES) or k in _NAMES},
        shm_bytes=shm and shm.f_frsize * shm.f_blocks,
        shm_free=shm.f_frsize * shm.f_bavail if shm else 0,
        memlock=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        nofile=nofile,
        nofile_hard=nofile_hard,
        interfaces=_interfaces(),
        rdma=tuple(_names("/sys/class/infiniband")),
        ptrace_scope=int(scope) if scope.isdigit() else None,
        seccomp=re.search(r"^Seccomp:\s*[12]", status, re.MULTILINE) is not None,
        cap_sys_ptrace=bool(capabilities & _CAP_SYS_PTRACE),
        cap_ipc_lock=bool(capabilities & _CAP_IPC_LOCK),
        cores=_cores(),
        throttled=_throttled(),
    )


def _limit(value: int) -> int:
    return _INFINITE if value == resource.RLIM_INFINITY else value


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in os.scandir(folder))
    return []


def _interfaces() -> dict[str, str]:
    found = {}
    for _, name in sorted(socket.if_nameindex()):
        found[name] = _address(name) if _read(f"/sys/class/net/{name}/operstate").strip() != "down" else ""
    return found


def _address(interface: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        got = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(got[20:24])
    for line in _read("/proc/net/if_inet6").splitlines():
        address, _, _, scope, _, name = line.split()
        if (name, scope) == (interface, _GLOBAL):
            return str(ipaddress.IPv6Address(int(address, 16)))
    return ""


def _cores() -> float:
    allowed = float(len(os.sched_getaffinity(0)))
    quota = re.match(r"(\d+) (\d+)", _read("/sys/fs/cgroup/cpu.max"))
    return min(allowed, round(int(quota[1]) / int(quota[2]), 2)) if quota else allowed


def _throttled() -> int | None:
    found = re.search(r"^nr_throttled (\d+)", _read("/sys/fs/cgroup/cpu.stat"), re.MULTILINE)
    return int(found[1]) if found else None
