"""Which NIXL is installed: NVIDIA's, or one of those for AMD's GPUs, which have the same modules under other names.

``nixl`` is a package that stands for another, and chooses it by the torch that is installed: ``nixl_cu12``,
``nixl_cu13`` or ``nixl_rocm``; RIXL's ``nixl`` stands for ``rixl``. Without CUDA it takes the first of these, which on
ROCm may be one for CUDA; so where torch is ROCm's, those for ROCm are asked for by name first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from dataclasses import dataclass
from typing import Any

from eplb_async.core.text import one_line
from eplb_async.errors import EplbError, describe

VARIANTS = ("nixl", "nixl_rocm", "rixl")
ON_ROCM = ("nixl_rocm", "rixl", "nixl")

_NEEDED = (("_api", "nixl_agent"), ("_api", "nixl_agent_config"), ("_bindings", "nixlRemoteDisconnectError"))


@dataclass(frozen=True, slots=True)
class Variant:
    """A NIXL that was loaded.

    Attributes:
        name: The package that it really is, such as ``nixl_cu12``.
        version: Its version, or ``unknown`` where it was not installed as a package.
        api: Its module ``_api``.
        bindings: Its module ``_bindings``.
    """

    name: str
    version: str
    api: Any
    bindings: Any


def find() -> Variant:
    """Import the first variant that loads.

    Raises:
        EplbError: None does; says of each why.
    """
    failures: dict[str, str] = {}
    for name in ON_ROCM if _is_rocm() else VARIANTS:
        try:
            return _load(name)
        except Exception as error:  # what a broken package raises when it is imported
            absent = isinstance(error, ModuleNotFoundError) and error.name == name
            failures[name] = "not installed" if absent else _say(name, error)
    tried = "; ".join(f"{name}: {why}" for name, why in failures.items())
    broken = next((name for name, why in failures.items() if why != "not installed"), None)
    if broken is None:
        raise EplbError(f"NIXL is not installed; `pip install nixl` (on ROCm, build NIXL for it). Tried {tried}")
    raise EplbError(f"NIXL does not load; install {broken} anew, for this Python and this GPU's driver. Tried {tried}")


def _load(name: str) -> Variant:
    package = importlib.import_module(name)
    api, bindings = (importlib.import_module(f"{package.__name__}.{part}") for part in ("_api", "_bindings"))
    for part, needed in _NEEDED:
        if not hasattr(api if part == "_api" else bindings, needed):
            raise ImportError(f"its {part} has no {needed}; a NIXL from 1.0 on has")
    real = api.__name__.partition(".")[0]
    return Variant(real, _version(real), api, bindings)


def _version(name: str) -> str:
    if version := getattr(sys.modules.get(name), "__version__", None):
        return str(version)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _say(name: str, error: Exception) -> str:
    """Why it does not load, and where it lies: a folder of that name that is something else is found too."""
    package = sys.modules.get(name)
    places = list(getattr(package, "__path__", ()))
    return one_line(describe(error)) + (f" (in {places[0]})" if places else "")


def _is_rocm() -> bool:
    """Whether torch is loaded and ROCm's; not loading it here: numpy's memory is the same to all variants."""
    return bool(getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None))
