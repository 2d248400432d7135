"""Judges of what is installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eplb_async.doctor.finding import Finding, failed, ok, warning

__all__ = ["NEEDED", "gpu", "nixl", "versions"]

NEEDED = {"msgspec": "0.18", "nixl": "1.0", "numpy": "1.26", "torch": "2.4", "uvloop": "0.19"}
"""Lowest version of each package, as pyproject.toml has it."""
_PYTHON = "3.11"


def versions(found: Mapping[str, str | None]) -> Finding:
    """Judge installed versions.

    Args:
        found: Version by package, ``python`` and ``eplb-async`` too; None: not installed.
    """
    needed = {"python": _PYTHON, **NEEDED}
    missing = [name for name in NEEDED if not found.get(name)]
    old = [f"{name} {found[name]} < {low}" for name, low in needed.items() if _older(found.get(name), low)]
    told = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    if missing or old:
        wrong = [f"no {name}" for name in missing] + old
        packages = " ".join(
            f"'{name}>={low}'" for name, low in NEEDED.items() if name in missing or f"{name} " in " ".join(old)
        )
        remedy = f"pip install {packages}" if packages else f"use Python {_PYTHON} or newer"
        if missing == ["uvloop"] and not old:
            return warning("versions", f"{told}; no uvloop: loops run on asyncio, slower", remedy, **found)
        return failed("versions", f"{'; '.join(wrong)} (found {told})", remedy, **found)
    return ok("versions", told, **found)


def _older(version: str | None, lowest: str) -> bool:
    return version is not None and _numbers(version) < _numbers(lowest)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def nixl(found: Mapping[str, Any], problem: str, log: str, suspects: list[str]) -> Finding:
    """Judge whether NIXL makes an agent as the library needs it.

    Args:
        found: What the probe ``software.nixl`` answered last.
        problem: Why it came to no good end.
        log: What it printed.
        suspects: What other checks found that may be why.
    """
    facts = {key: found[key] for key in ("variant", "path", "plugin_dir", "plugins", "ucx") if key in found}
    version = re.search(r"Version (\d[\w.]*) \(loaded from", log)
    facts["ucx_version"] = version[1] if version else ""
    if "missing" in found:
        return failed("nixl", found["missing"], "pip install nixl; on ROCm its nixl_rocm or rixl", **facts)
    if not found:  # it is there, and hangs or kills its process
        remedy = "python -c 'import nixl' says more; give --timeout more, or install NIXL anew"
        return failed("nixl", f"does not load: {problem}", remedy, **facts)
    where = f"plugins in {found['plugin_dir']}"
    if "UCX" not in found["plugins"]:
        there = f"of UCX not among {', '.join(found['plugins'])}" if found["plugins"] else "none"
        return failed(
            "nixl",
            f"{found['variant']}: no UCX plugin, {where}: {there}",
            "unset NIXL_PLUGIN_DIR, or point it at the folder with libplugin_UCX.so; otherwise install NIXL anew",
            **facts,
        )
    if not found["agent"]:
        why = found["error"] or problem or "no agent came of it"
        remedy = "; ".join(suspects) or "read what UCX says with UCX_LOG_LEVEL=info; try UCX_TLS=tcp,self"
        complaint = _complaint(log)
        return failed("nixl", f"{found['variant']} makes no agent: {why}{complaint}", remedy, **facts)
    ucx = f"UCX {facts['ucx_version']}" if version else "UCX"
    return ok("nixl", f"{found['variant']}, {ucx}, {where}", **facts)


def _complaint(log: str) -> str:
    lines = re.findall(r"(?:UCX  (?:ERROR|WARN)|\bE\d{4}[^]]*\])\s+(.+)", log)
    return f" ({lines[-1].strip()})" if lines else ""


def gpu(torch: Mapping[str, Any], problem: str, memory: list[str]) -> Finding:
    """Judge whether there are GPUs, and whether READs reach their memory.

    Args:
        torch: What the probe ``software.torch`` answered.
        problem: Why it did not.
        memory: Types of memory that NIXL's UCX backend registers, in NIXL's words.
    """
    if problem or not torch:
        return failed("gpu", f"torch does not load: {problem}", "python -c 'import torch' says more; install it anew")
    devices = torch["devices"]
    facts = {"devices": devices, "cuda": torch["cuda"], "hip": torch["hip"], "memory": memory}
    if not devices:
        built = torch["cuda"] or torch["hip"]
        if built:
            return warning(
                "gpu",
                f"none, although torch is built for {'CUDA' if torch['cuda'] else 'ROCm'} {built}",
                "on a machine without GPUs that is as it should be; otherwise: nvidia-smi, CUDA_VISIBLE_DEVICES, "
                "the container's --gpus",
                **facts,
            )
        return ok("gpu", "none: weights in CPU memory", **facts)
    if memory and not any(kind.startswith("VRAM") for kind in memory):
        return failed(
            "gpu", f"{devices}, but NIXL registers only {', '.join(memory)}", "install NIXL for this GPU", **facts
        )
    return ok("gpu", f"{devices} of {'ROCm' if torch['hip'] else 'CUDA'} {torch['hip'] or torch['cuda']}", **facts)
