"""Judges of this machine and of the limits of this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eplb_async.doctor.finding import Finding, failed, ok, warning
from eplb_async.doctor.host import Host

__all__ = ["cma", "cores", "files", "lag", "locked", "shm"]

_MIB = 1 << 20
_SHM_BYTES, _SHM_FREE = 128 * _MIB, 16 * _MIB  # docker gives 64 MiB
_BASE_FILES = 512  # a server's own, torch's, and NIXL's some forty
_FILES_PER_PEER = 4  # where it was not measured
_LAG_MS = 5.0


def shm(host: Host) -> Finding:
    """Judge ``/dev/shm``."""
    remedy = "docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm"
    if host.shm_bytes is None:
        return warning("shm", "there is no /dev/shm: inference servers, NCCL and gloo need it", remedy)
    facts = {"bytes": host.shm_bytes, "free": host.shm_free}
    text = f"/dev/shm: {_size(host.shm_bytes)}, {_size(host.shm_free)} free"
    if host.shm_bytes < _SHM_BYTES or host.shm_free < _SHM_FREE:
        text += ": too small for inference servers, NCCL and gloo; NIXL's READs do without"
        return warning("shm", text, remedy, **facts)
    return ok("shm", text, **facts)


def cma(found: Mapping[str, Any], problem: str, host: Host) -> Finding:
    """Judge whether one process may read another's memory, which is how UCX reads within a host.

    Args:
        found: What the probe ``cma.cma`` answered.
        problem: Why it did not.
        host: For why it is refused.
    """
    remedy = "without it READs within this host go through tcp, several times slower: "
    facts = {"allowed": bool(found.get("allowed")), "ptrace_scope": host.ptrace_scope, "seccomp": host.seccomp}
    if found.get("allowed"):
        return ok("cma", "allowed: a process may read another's memory (process_vm_readv)", **facts)
    why = problem or found.get("error") or "it read something else"
    if host.ptrace_scope and not host.cap_sys_ptrace:
        return warning(
            "cma",
            f"refused: {why}; kernel.yama.ptrace_scope is {host.ptrace_scope}",
            f"{remedy}sysctl kernel.yama.ptrace_scope=1 on the host (3 lasts until it boots), or give the container "
            "CAP_SYS_PTRACE (--cap-add SYS_PTRACE; Kubernetes: securityContext.capabilities.add)",
            **facts,
        )
    if host.seccomp:
        return warning(
            "cma",
            f"refused: {why}; a seccomp filter is on this process",
            f"{remedy}--cap-add SYS_PTRACE lifts it in docker's own profile; otherwise --security-opt "
            "seccomp=unconfined, or a profile that allows process_vm_readv and process_vm_writev",
            **facts,
        )
    return warning(
        "cma", f"refused: {why}", f"{remedy}give the container CAP_SYS_PTRACE (--cap-add SYS_PTRACE)", **facts
    )


def files(host: Host, per_peer: int | None, ep_size: int | None) -> Finding:
    """Judge the limit of file descriptors.

    Args:
        host: For the limits.
        per_peer: Descriptors that one peer took here; None where it was not measured.
        ep_size: Ranks of the group; None: unknown.
    """
    each = max(_FILES_PER_PEER, 2 * (per_peer or 0))  # both ends of both ways
    limit = "no limit" if host.nofile < 0 else str(host.nofile)
    measured = f"{per_peer} for a peer measured" if per_peer is not None else "not measured"
    facts = {"soft": host.nofile, "hard": host.nofile_hard, "per_peer": per_peer, "ep_size": ep_size}
    enough = (host.nofile - _BASE_FILES) // each
    if host.nofile >= 0 and (enough < (ep_size or 1)):
        need = _BASE_FILES + each * (ep_size or 64)
        return failed(
            "files",
            f"limit of open files {limit} ({measured}): too few for {ep_size or 'any'} ranks",
            f"ulimit -n {need}"
            + (
                ""
                if host.nofile_hard < 0 or need <= host.nofile_hard
                else f", and raise the hard limit of {host.nofile_hard} (limits.conf, LimitNOFILE=, --ulimit nofile=)"
            ),
            **facts,
        )
    peers = "" if host.nofile < 0 else f": enough for some {enough} ranks"
    return ok("files", f"limit of open files {limit} ({measured}){peers}", **facts)


def locked(host: Host) -> Finding:
    """Judge the limit of locked memory, which RDMA registration counts against."""
    text = "no limit" if host.memlock < 0 else f"{_size(host.memlock)}"
    if host.rdma and host.memlock >= 0 and not host.cap_ipc_lock:
        return failed(
            "memlock",
            f"limit of locked memory {text}, with RDMA devices here: weights will not register",
            "ulimit -l unlimited (limits.conf, LimitMEMLOCK=infinity, docker --ulimit memlock=-1, Slurm: "
            "PropagateResourceLimitsExcept=MEMLOCK)",
            bytes=host.memlock,
        )
    note = "" if host.memlock < 0 else "; CAP_IPC_LOCK lifts it" if host.cap_ipc_lock else "; matters with RDMA only"
    return ok("memlock", f"limit of locked memory {text}{note}", bytes=host.memlock)


def cores(host: Host, ranks_here: int | None) -> Finding:
    """Judge how many cores there are for the ranks of this host; each has an engine loop beside its own."""
    facts = {"cores": host.cores, "ranks": ranks_here, "throttled": host.throttled}
    text = f"{host.cores:g} cores" + (f" for {ranks_here} ranks" if ranks_here else "")
    if ranks_here and host.cores < ranks_here:
        return warning(
            "cores", f"{text}: ranks keep each other waiting", "fewer ranks, or more cores (cpu limit, cpuset)", **facts
        )
    if host.throttled:
        text += f", throttled {host.throttled} times by its cpu limit"
        return warning("cores", text, "raise or drop the container's cpu limit: a throttled rank holds all up", **facts)
    return ok("cores", text, **facts)


def lag(found: Mapping[str, Mapping[str, float]], problem: str) -> Finding:
    """Judge how late an idle event loop is here.

    Args:
        found: What the probe ``loops.loops`` answered.
        problem: Why it did not.
    """
    if not found:
        return failed("lag", f"not measured: {problem}", "is the machine overloaded? top, uptime")
    text = ", ".join(f"{loop} p99 {lags['p99_ms']:.2f} ms, max {lags['max_ms']:.1f} ms" for loop, lags in found.items())
    if max(lags["p99_ms"] for lags in found.values()) > _LAG_MS:
        return warning(
            "lag", f"{text}: late with nothing to do", "the machine is overloaded or the container throttled", **found
        )
    return ok("lag", f"{text}, idle, 1 ms ticker", **found)


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", _MIB)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes // 1024} KiB"
