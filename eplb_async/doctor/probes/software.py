"""Whether torch and NIXL load, and what they find."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eplb_async.errors import EplbError, NixlTransferFailed


def torch() -> Iterator[dict[str, Any]]:
    """Import torch and count the devices; makes no CUDA context."""
    module: Any = importlib.import_module("torch")
    yield {
        "version": str(module.__version__),
        "cuda": module.version.cuda,
        "hip": getattr(module.version, "hip", None),
        "devices": module.cuda.device_count() if module.cuda.is_available() else 0,
    }


def nixl(*, after_torch: bool = False) -> Iterator[dict[str, Any]]:
    """Load NIXL, then make an agent as the library does; answers twice, since the second may abort the process.

    The second answer says which of its files NIXL and UCX were really loaded from.

    Args:
        after_torch: Import torch first, as ranks have: on ROCm another variant of NIXL is looked for then.
    """
    if after_torch:
        importlib.import_module("torch")
    os.environ["UCX_LOG_LEVEL"] = "info"  # UCX tells its version
    from eplb_async.nixl import bindings

    try:
        api, _ = bindings.load()
    except EplbError as error:
        yield {"missing": " ".join(str(error).split())}
        return
    found = {"variant": api.__name__.partition(".")[0], "path": str(Path(api.__file__ or "").parent), **_files()}
    yield {**found, "agent": False, "error": ""}
    try:
        agent = bindings.NixlNative(f"doctor-{os.getpid()}")
    except (EplbError, NixlTransferFailed) as error:
        yield {**found, "agent": False, "error": str(error.__cause__ or error)}
        return
    memory = list(agent.agent.get_backend_mem_types("UCX"))
    agent.destroy()
    yield {**found, **_files(), "agent": True, "error": "", "memory": memory}


def _files() -> dict[str, Any]:
    """Where NIXL's plugins are looked for, which there are, and which UCX is loaded."""
    mapped = sorted(set(re.findall(r"(/\S+\.so[.0-9]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)))
    core = next((path for path in mapped if re.search(r"/libnixl[-.]", path)), "")
    given = os.environ.get("NIXL_PLUGIN_DIR", "")
    folder = Path(given) if given else Path(core).parent / "plugins"
    plugins = sorted(p.name.removeprefix("libplugin_").removesuffix(".so") for p in folder.glob("libplugin_*.so"))
    return {
        "plugin_dir": str(folder),
        "plugins": plugins,
        "ucx": next((path for path in mapped if "/libucp" in path), ""),
    }
