"""The wheel and the source distribution, built as pip builds them: what is in them, and that the wheel works.

Nothing is downloaded: what builds is what is installed, and the virtual environment that the wheel goes into sees the
packages of the running one, but not this checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
WHEEL = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"

pytestmark = pytest.mark.faults


def output_of(*arguments: str | Path, where: Path) -> str:
    """What a program prints, errors and all, where no variable of Python leads back to this checkout."""
    done = subprocess.run(
        list(map(str, arguments)),
        cwd=where,
        env={"PATH": os.environ["PATH"], "HOME": str(where)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def warnings_of(built: str) -> list[str]:
    """Lines of a build that warn, but for that of an environment in which Python writes no bytecode."""
    lines = [line for line in built.splitlines() if "warning" in line.lower()]
    return [line for line in lines if "byte-compiling is disabled" not in line]


def tracked() -> set[str]:
    """Files of this checkout, as git has them; as they lie, where this is no checkout but an unpacked distribution."""
    if (ROOT / ".git").exists():
        return set(output_of("git", "-c", f"safe.directory={ROOT}", "ls-files", where=ROOT).split())
    return {str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source distribution, made from what is tracked, and the wheel, made from the source distribution."""
    folder = tmp_path_factory.mktemp("distribution")
    source = folder / "checkout"
    for name in tracked():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = (sys.executable, "-W", "error", "-c")
    assert warnings_of(output_of(*build, SDIST, folder, where=source)) == []
    sdists = list(folder.glob("*.tar.gz"))
    assert len(sdists) == 1
    with tarfile.open(sdists[0]) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and newer
        archive.extractall(folder)
    unpacked = folder / sdists[0].name.removesuffix(".tar.gz")
    assert warnings_of(output_of(*build, WHEEL, folder, where=unpacked)) == []
    wheels = list(folder.glob("*.whl"))
    assert len(wheels) == 1
    return {"sdist": sdists[0], "wheel": wheels[0]}


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel: its folder of programs."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    output_of(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built["wheel"]),
        where=folder,
    )
    packages = output_of(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", where=folder).strip()
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = output_of(python, "-c", "import eplb_async; print(eplb_async.__file__)", where=folder)
    assert found.startswith(str(folder))
    return python.parent


def test_the_source_distribution_has_all_that_is_tracked(built: dict[str, Path]) -> None:
    """So that its tests and pages are whole; only what git itself reads is left out."""
    with tarfile.open(built["sdist"]) as archive:
        files = {item.name.partition("/")[2] for item in archive.getmembers() if item.isfile()}
    assert tracked() - files <= {".gitignore"}
    assert {name for name in files - tracked() if "egg-info" not in name} <= {"PKG-INFO", "setup.cfg"}


def test_the_wheel_has_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    """Types and license among it; no tests, pages or examples."""
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = set(archive.namelist())
        metadata = message_from_bytes(archive.read(next(name for name in names if name.endswith("/METADATA"))))
    ours = {name for name in tracked() if name.startswith("eplb_async/")}
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert "eplb_async/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert (metadata["Name"], metadata["License-Expression"]) == ("eplb-async", "Apache-2.0")
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert str(metadata.get_payload()).startswith("# eplb_async")


def test_the_installed_command_moves_bytes(installed: Path, tmp_path: Path) -> None:
    """``eplb-async demo``, from the wheel alone, on NIXL."""
    small = ("--layers", "2", "--experts", "4", "--mib", "0.5", "--rounds", "1")
    found = json.loads(output_of(installed / "eplb-async", "demo", *small, "--json", where=tmp_path))
    assert found["verified"] is True
    assert output_of(installed / "python", "-m", "eplb_async", "--help", where=tmp_path).startswith("usage: eplb-async")


def test_users_code_is_typed_by_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    """mypy's strict mode finds the types of the public face, and the mistakes that are marked as such."""
    code = tmp_path / "users_code.py"
    code.write_bytes((ROOT / "tests" / "packaging" / "users_code.py").read_bytes())
    said = output_of(
        *(sys.executable, "-m", "mypy", "--strict", "--python-executable", installed / "python", code), where=tmp_path
    )
    assert said.startswith("Success: no issues found in 1 source file")
