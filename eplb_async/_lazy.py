"""Names of a package that are loaded when they are first used, so that importing it is quick (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    Type checkers are to see the names by imports under ``TYPE_CHECKING``, and not these functions: with them, they
    would take any name for one of the package's.

    Args:
        package: Its name.
        home: The module, below the package, of each name.
    """
    loaded = vars(sys.modules[package])

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        loaded[name] = value
        return value

    def names() -> list[str]:
        return sorted({*loaded, *home})

    return load, names
