"""Judges of environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from eplb_async.doctor.finding import Finding, failed, ok, warning
from eplb_async.doctor.host import Host
from eplb_async.service_settings import ServiceSettings
from eplb_async.settings import Settings
from eplb_async.variables import PREFIX

__all__ = ["allocator", "interfaces", "plugin_folders", "refusals", "settings", "ucx"]

_SLOW_LEVELS = ("DEBUG", "TRACE", "DATA", "ASYNC", "FUNC", "POLL", "REQ")
_NO_CARRIERS = re.compile(r"^(self|sm|shm|mm|posix|sysv|xpmem|knem|cma|gdr_copy|(cuda|rocm|ze)(_copy|_ipc|_gdr)?)$")


def refusals(environ: Mapping[str, str]) -> dict[str, str]:
    """Why the library refuses its variables, each by its name; by the record where two do not go together."""
    refused: dict[str, str] = {}
    for kind in (Settings, ServiceSettings):
        sound: dict[str, str] = {}
        wrong = {name: why for name, text in environ.items() if (why := _refused(kind, {name: text}))}
        for name, text in sorted(environ.items(), key=lambda item: item[0] in wrong):
            if name not in wrong or not _refused(kind, sound | {name: text}):  # right beside the others, perhaps
                sound[name] = text
                wrong.pop(name, None)
        refused |= wrong
        if why := _refused(kind, sound):
            refused[kind.__name__] = why
    return refused


def _refused(kind: type[Settings] | type[ServiceSettings], environ: Mapping[str, str]) -> str:
    try:
        kind.from_env(environ)
    except ValueError as error:
        return str(error)
    return ""


def settings(environ: Mapping[str, str]) -> Finding:
    """Judge the library's own variables: all that are refused, by name, and switches that cost."""
    ours = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
    refused = [why if name in why else f"{name}: {why}" for name, why in refusals(ours).items()]
    facts = {"variables": sorted(ours), "refused": refused}
    if refused:
        return failed(
            "settings",
            "; ".join(refused),
            "correct or unset them; `eplb-async doctor --settings` has the table",
            **facts,
        )
    if Settings.from_env(ours).progress_thread:
        return warning(
            "settings",
            "EPLB_ASYNC_PROGRESS_THREAD is on: NIXL's thread burns one core for each agent, for ever",
            "unset it; it is for ranks that serve others and do nothing else",
            **facts,
        )
    return ok(
        "settings",
        f"{len(ours)} EPLB_ASYNC_ variables, all known" if ours else "defaults, no EPLB_ASYNC_ variable",
        **facts,
    )


def ucx(environ: Mapping[str, str], plugin_in: Mapping[str, bool]) -> Iterator[Finding]:
    """Judge NIXL's and UCX's variables.

    Args:
        environ: Variables.
        plugin_in: For each folder named in them, whether it has NIXL's UCX plugin.
    """
    troubles = []
    folder = environ.get("NIXL_PLUGIN_DIR", "")
    if folder and not plugin_in.get(folder, False):
        yield failed(
            "environment",
            f"NIXL_PLUGIN_DIR={folder} has no libplugin_UCX.so",
            "unset it: NIXL finds the plugins of its own wheel",
        )
        return
    tls = environ.get("UCX_TLS", "")
    names = [name.partition(":")[0] for name in tls.lower().removeprefix("^").split(",") if name]
    if names and (("tcp" in names) if tls.startswith("^") else all(map(_NO_CARRIERS.match, names))):
        yield failed(
            "environment",
            f"UCX_TLS={tls} leaves no transport that NIXL can use: it needs one that reports a peer's death, "
            "which shared memory and CMA do not",
            "add tcp (or rc on RDMA): UCX_TLS=tcp,cma,self; or unset it",
        )
        return
    for name in ("UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"):
        if environ.get(name, "").upper().startswith(_SLOW_LEVELS):
            troubles.append((f"{name}={environ[name]} slows every transfer down", f"unset {name}"))
    if environ.get("UCX_RCACHE_ENABLE", "").lower() in ("n", "no", "0", "off"):
        troubles.append(
            ("UCX_RCACHE_ENABLE is off: memory is registered anew for each transfer", "unset UCX_RCACHE_ENABLE")
        )
    if troubles:
        yield warning("environment", "; ".join(t for t, _ in troubles), "; ".join(r for _, r in troubles))
        return
    there = sorted(name for name in environ if name.startswith(("UCX_", "NIXL_")))
    yield ok(
        "environment", ", ".join(f"{n}={environ[n]}" for n in there) or "no UCX_ or NIXL_ variable", variables=there
    )


def interfaces(host: Host) -> Finding:
    """Judge network interfaces and RDMA devices, and whether ``UCX_NET_DEVICES`` names some that are there."""
    there = [*host.interfaces, *host.rdma]
    shown = ", ".join(f"{name} {address}".strip() for name, address in host.interfaces.items() if address)
    rdma = f"RDMA: {', '.join(host.rdma)}" if host.rdma else "no RDMA device"
    facts = {"interfaces": dict(host.interfaces), "rdma": list(host.rdma)}
    devices = host.environ.get("UCX_NET_DEVICES", "")
    wanted = [name.strip() for name in devices.split(",") if name.strip() not in ("", "all")]
    if devices.startswith("^") or "[" in devices:  # those that are left out need not be there; ranges are UCX's to read
        wanted = []
    lost = [name for name in wanted if name.partition(":")[0] not in there]
    if lost:
        return failed(
            "network",
            f"UCX_NET_DEVICES names {', '.join(lost)}: not on this host, which has {', '.join(there)}",
            "name interfaces of this host (RDMA ones as mlx5_0:1), or unset UCX_NET_DEVICES",
            **facts,
        )
    if not any(address for name, address in host.interfaces.items() if name != "lo") and not host.rdma:
        return warning(
            "network", f"only loopback has an address ({shown}), {rdma}", "other hosts cannot be reached", **facts
        )
    chosen = f"; UCX_NET_DEVICES={devices}" if devices else ""
    return ok("network", f"{shown}; {rdma}{chosen}", **facts)


def allocator(environ: Mapping[str, str], devices: int) -> Finding:
    """Judge torch's allocator: memory of ``expandable_segments`` is read hundreds of times slower, without an error."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*true", environ.get(name, ""), re.IGNORECASE):
            text = f"{name} has expandable_segments:True"
            remedy = f"set expandable_segments:False in {name}, or `--peers` to see what it costs here"
            if not devices:
                return ok("allocator", f"{text}; no GPU here that it matters for")
            return warning("allocator", f"{text}: READs of such memory are known to be some 600 times slower", remedy)
    return ok("allocator", "no expandable_segments")


def plugin_folders(environ: Mapping[str, str]) -> dict[str, bool]:
    """The facts for :func:`ucx`."""
    folder = environ.get("NIXL_PLUGIN_DIR", "")
    return {folder: (Path(folder) / "libplugin_UCX.so").is_file()} if folder else {}
