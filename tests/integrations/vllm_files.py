"""vLLM's own rearrangement, loaded for a CPU: four of its files as they are, stand-ins for what wants a GPU.

The files come from a wheel, ``EPLB_TEST_VLLM_WHEEL``, or from an installed vLLM, which is not imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import zipfile
from pathlib import Path

VARIABLE = "EPLB_TEST_VLLM_WHEEL"
EPLB = "vllm/distributed/eplb/"
FILES = ("eplb_communicator.py", "eplb_utils.py", "migration_scheduler.py", "rebalance_execute.py")
STUBS = {
    "vllm/__init__.py": "",
    "vllm/config.py": "class ParallelConfig: pass",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/eplb/__init__.py": "",
    "vllm/distributed/device_communicators/__init__.py": "",
    "vllm/distributed/device_communicators/pynccl.py": "class PyNcclCommunicator: pass",
    "vllm/distributed/device_communicators/pynccl_wrapper.py": "class ncclDataTypeEnum: pass",
    "vllm/distributed/nixl_utils.py": "from nixl._api import nixl_agent as NixlWrapper, nixl_agent_config",
    "vllm/distributed/parallel_state.py": (
        "from types import SimpleNamespace\n"
        "class GroupCoordinator: pass\n"
        "def is_local_first_rank(): return False\n"
        "def get_pp_group(): return SimpleNamespace(world_size=1, rank_in_group=0)"
    ),
    "vllm/distributed/stateless_coordinator.py": "class StatelessGroupCoordinator: pass",
    "vllm/distributed/utils.py": "def is_weak_contiguous(tensor): return True",
    "vllm/logger.py": "import logging\ninit_logger = logging.getLogger",
    "vllm/platforms.py": (
        "class current_platform:\n"
        "    is_rocm = staticmethod(lambda: False)\n"
        "    is_cuda_alike = staticmethod(lambda: {cuda_alike})"
    ),
    "vllm/utils/__init__.py": "",
    "vllm/utils/gpu_sync_debug.py": "import contextlib\ngpu_sync_allowed = contextlib.nullcontext",
    "vllm/utils/torch_utils.py": "PIN_MEMORY = False",
}


def why_not() -> str:
    """Why there is no vLLM to test with; empty if there is."""
    wheel = os.environ.get(VARIABLE, "")
    if wheel:
        return "" if Path(wheel).is_file() else f"{VARIABLE}={wheel} is no file"
    return "" if _installed() is not None else f"no vllm is installed, and {VARIABLE} names no wheel of it"


def unpack(folder: Path) -> str:
    """Write the files and the stand-ins into a folder; returns it as an entry of ``sys.path``."""
    for name, text in STUBS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("{cuda_alike}", "True") + "\n")
    wheel = os.environ.get(VARIABLE, "")
    for name in FILES:
        if wheel:
            with zipfile.ZipFile(wheel) as archive:
                data = archive.read(EPLB + name)
        else:
            root = _installed()
            assert root is not None
            data = (root / "distributed/eplb" / name).read_bytes()
        (folder / EPLB / name).write_bytes(data)
    return str(folder)


def use(folder: str) -> None:
    """Have ``import vllm`` find these in this process."""
    sys.path.insert(0, folder)
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def _installed() -> Path | None:
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places and (Path(places[0]) / "distributed/eplb" / FILES[0]).is_file() else None
