"""What an import loads, and what works where NIXL, torch or an extra is not installed."""

from __future__ import annotations

import subprocess
import sys
import typing

import pytest

import eplb_async
from eplb_async import telemetry

LOADED = """
import sys, sysconfig
places = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
def of_others():
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    tops = {name.partition(".")[0] for name, file in files.items() if file.startswith(places)}
    return sorted(name for name in tops - before if not name.startswith("_"))
before = set()
before = set(of_others())
"""
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
NIXL = ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm", "rixl")
EXTRAS = ("httpx", "matplotlib", "prometheus_client", "rich", "starlette", "uvicorn", "uvloop", "xxhash")
ALL_MODULES = """
import importlib, pkgutil, eplb_async
failed = {}
for found in pkgutil.walk_packages(eplb_async.__path__, "eplb_async."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except Exception as error:
            failed[found.name] = str(error)
"""


def output_of(*code: str) -> str:
    """What a program prints, with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(code)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("statement", "loads"),
    [
        ("import eplb_async, eplb_async.cli, eplb_async.errors, eplb_async.settings_table, eplb_async.telemetry", []),
        ("from eplb_async import EplbError, ServiceSettings, Settings; Settings.from_env({})", []),
        ("import eplb_async.policy, eplb_async.core.plan; from eplb_async import Forecast, Placement", ["numpy"]),
        ("import eplb_async.nixl, eplb_async.rendezvous, eplb_async.engine", ["msgspec", "numpy"]),
    ],
)
def test_an_import_loads_no_more_than_it_needs(statement: str, loads: list[str]) -> None:
    """Of other packages; torch takes a second, NIXL its libraries, numpy a tenth of a second."""
    loaded = output_of(LOADED, statement, "print(*of_others())").split()
    assert [name for name in loaded if name != "typing_extensions"] == loads  # msgspec's, where it is installed


@pytest.mark.parametrize("package", [eplb_async, telemetry])
def test_names_that_are_loaded_late_are_all_there(package: typing.Any) -> None:
    """Each name that the package exports loads, is listed by ``dir``, and is no other's; a wrong one is refused."""
    assert set(package.__all__) <= set(dir(package))
    assert set(package._HOME) <= set(package.__all__)
    for name in package.__all__:
        value = getattr(package, name)
        assert name not in package._HOME or value.__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Plcement'"):
        package.Plcement  # noqa: B018


def test_without_nixl_and_extras_modules_load_and_use_says_what_to_install() -> None:
    """An agent and a communicator raise it where they are opened, and leave no thread; metrics at their import."""
    use = """
import asyncio, threading, time, torch
from eplb_async import AsyncEplbCommunicator, AsyncNixlAgent, EplbError, Placement
from eplb_async.testing.cluster import MemoryRendezvous

async def main():
    rows = [[torch.zeros(2, 4)]]
    opens = [AsyncNixlAgent.open("agent"), AsyncEplbCommunicator.open(
        rank=0, ep_size=1, weights=rows, placement=Placement([[0, 1]], ep_size=1), rendezvous=MemoryRendezvous()
    )]
    for opening in opens:
        try:
            await opening
        except EplbError as error:
            print(type(error).__name__, error)

print(sorted(failed))
asyncio.run(main())
for thread in [t for t in threading.enumerate() if t.name.startswith("eplb-async")]:
    thread.join(30)
print([t.name for t in threading.enumerate()])
"""
    lines = output_of(WITHOUT.format(names=NIXL + EXTRAS), ALL_MODULES, use).splitlines()
    assert lines[0] == str(["eplb_async.telemetry.gauges", "eplb_async.telemetry.prometheus"])
    assert len(lines) == 4
    assert all(line.startswith("EplbError NIXL is not installed; `pip install nixl`") for line in lines[1:3])
    assert lines[3] == "['MainThread']"


def test_without_torch_what_needs_none_loads_and_the_rest_names_it() -> None:
    """Placements, plans, policy, settings, the agent, and the commands' help."""
    works = """
from eplb_async import AsyncNixlAgent, EplbError, Placement, Rendezvous, ServiceSettings, Settings
import eplb_async.cli, eplb_async.core.plan, eplb_async.engine, eplb_async.policy, eplb_async.settings_table
import eplb_async.planning.command, eplb_async.telemetry, eplb_async.testing
print(sorted(set(failed.values())))
try:
    from eplb_async import AsyncEplbCommunicator
except ImportError as error:
    print(error)
"""
    assert output_of(WITHOUT.format(names=("torch",)), ALL_MODULES, works).splitlines() == [
        """["No module named 'torch'"]""",
        "No module named 'torch'",
    ]


def test_the_package_runs_as_a_module() -> None:
    """``python -m eplb_async`` is the command line."""
    done = subprocess.run(
        [sys.executable, "-m", "eplb_async", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: eplb-async ")
