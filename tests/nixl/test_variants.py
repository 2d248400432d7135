"""Which NIXL is loaded, of those installed; and what is said where none loads.

The packages are fakes of layout only, as NVIDIA's and ROCm's are laid out: ``_api`` and ``_bindings`` in each, and a
``nixl`` that stands for one of the others by putting that one's modules under its own name. The last test takes the
modules of the NIXL that is really installed, under RIXL's name.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from eplb_async.errors import EplbError
from eplb_async.nixl import bindings, variants

ROOTS = ("nixl", "rixl", "nixl_rocm", "nixl_cu12", "nixl_cu13")
API = "from . import _bindings as nixlBind\nclass nixl_agent: ...\nclass nixl_agent_config: ...\n"
BINDINGS = "class nixlRemoteDisconnectError(RuntimeError): ...\n"
STANDS_FOR = """
import importlib, sys
for part in ("_bindings", "_api"):
    sys.modules[f"nixl.{{part}}"] = importlib.import_module(f"{0}.{{part}}")
"""


class OnlyIn:
    """Finds the variants in one folder, and nowhere else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in ROOTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, [str(self.folder)])
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return spec


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only place where variants are found; what the process has loaded of them comes back afterwards."""

    def ours() -> dict[str, object]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ROOTS}

    before = ours()
    monkeypatch.setattr(sys, "meta_path", [OnlyIn(tmp_path), *sys.meta_path])
    for name in before:
        del sys.modules[name]
    yield tmp_path
    for name in ours():
        del sys.modules[name]
    sys.modules.update(before)  # type: ignore[arg-type]


def install(folder: Path, name: str, **parts: str) -> None:
    """A package with the parts that a variant has, or other ones."""
    package = folder / name
    package.mkdir()
    for part, text in ({"__init__": "", "_api": API, "_bindings": BINDINGS} | parts).items():
        (package / f"{part}.py").write_text(text)
    importlib.invalidate_caches()


def install_meta(folder: Path, stands_for: str) -> None:
    (folder / "nixl").mkdir()
    (folder / "nixl" / "__init__.py").write_text(STANDS_FOR.format(stands_for))
    importlib.invalidate_caches()


@pytest.mark.parametrize("name", ["nixl", "nixl_rocm", "rixl"])
def test_each_variant_is_found_by_its_name(folder: Path, name: str) -> None:
    """Alone, with its version where it has one."""
    install(folder, name, __init__='__version__ = "1.2.3"')
    found = variants.find()
    assert (found.name, found.version) == (name, "1.2.3")
    assert found.api is importlib.import_module(f"{name}._api")
    assert found.bindings is importlib.import_module(f"{name}._bindings")


@pytest.mark.parametrize("real", ["nixl_cu12", "nixl_rocm", "rixl"])
def test_what_stands_for_another_is_named_for_what_it_is(folder: Path, real: str) -> None:
    """NVIDIA's ``nixl`` and RIXL's are no NIXL of their own."""
    install(folder, real)
    install_meta(folder, real)
    assert variants.find().name == real


@pytest.mark.parametrize(("hip", "first"), [(None, "nixl"), ("6.4", "nixl_rocm")])
def test_of_several_the_one_for_this_torch_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hip: str | None, first: str
) -> None:
    """On ROCm ``nixl`` may stand for one for CUDA, which is installed as well."""
    for name in ("nixl", "nixl_rocm", "rixl"):
        install(folder, name)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(hip=hip)))  # type: ignore[arg-type]
    assert variants.find().name == first


@pytest.mark.parametrize(
    "broken",
    [
        {"_bindings": "raise ImportError('libcuda.so.1: cannot open shared object file')"},
        {"__init__": "raise OSError('bad magic')"},
        {"_bindings": ""},
        {"_api": "import not_there"},
    ],
)
def test_one_that_is_broken_does_not_hide_the_next(folder: Path, broken: dict[str, str]) -> None:
    install(folder, "nixl", **broken)
    install(folder, "rixl")
    assert variants.find().name == "rixl"


def test_none_at_all_says_what_to_install(folder: Path) -> None:
    with pytest.raises(EplbError) as caught:
        variants.find()
    assert str(caught.value) == (
        "NIXL is not installed; `pip install nixl` (on ROCm, build NIXL for it). Tried nixl: not installed; "
        "nixl_rocm: not installed; rixl: not installed"
    )


def test_what_was_tried_is_said_of_each(folder: Path) -> None:
    """The first that is there is the one to mend; a folder that only has the name is seen by its place."""
    install(folder, "nixl_rocm", _bindings="raise ImportError('libamdhip64.so.6:\\n cannot open')")
    install(folder, "rixl", _bindings="")
    (folder / "nixl").mkdir()
    with pytest.raises(EplbError, match=r"^NIXL does not load; install nixl anew") as caught:
        variants.find()
    said = str(caught.value)
    assert f"nixl: ModuleNotFoundError: No module named 'nixl._api' (in {folder / 'nixl'})" in said
    assert "nixl_rocm: ImportError: libamdhip64.so.6:  cannot open" in said
    assert "rixl: ImportError: its _bindings has no nixlRemoteDisconnectError" in said
    assert "\n" not in said


READ = """
import asyncio, sys, numpy as np
from tests.nixl.test_variants import OnlyIn
from pathlib import Path
sys.meta_path.insert(0, OnlyIn(Path(sys.argv[1])))
from eplb_async import AsyncNixlAgent
from eplb_async.nixl import bindings

async def main():
    rows, target = np.arange(4096, dtype=np.uint8), np.zeros(4096, dtype=np.uint8)
    async with AsyncNixlAgent.open("source") as source, AsyncNixlAgent.open("reader") as reader:
        await source.register(rows, name="rows")
        ours = await reader.register(target, name="target")
        peer = await reader.add_peer(await source.metadata())
        async with source.serving():
            await reader.read(ours[:], peer.region("rows")[:], timeout=30)
    print(bindings.variant().name, (rows == target).all())

asyncio.run(main())
"""


def test_real_bindings_under_the_name_of_rixl_move_bytes(tmp_path: Path) -> None:
    """Nothing depends on the name that the package has: what is installed here is read through as ``rixl``."""
    real = Path(bindings.variant().bindings.__file__).parent
    for source, name in ((real, "rixl"), (real.parent / f"{real.name}.libs", f"{real.name}.libs")):
        (tmp_path / name).symlink_to(source, target_is_directory=True)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["rixl", "True"]
