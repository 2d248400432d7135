"""The entry point that gives vLLM our communicator: it fits, or leaves vLLM as it is, and never raises."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eplb_async.integrations.vllm import AsyncNixlEplbCommunicator, install
from eplb_async.settings import Settings

NAME = "vllm.distributed.eplb.eplb_communicator"


class EplbCommunicator(ABC):
    """As vLLM 0.33's."""

    @abstractmethod
    def add_send(self, tensors: Any, dst_rank: int, expert_id: int) -> None: ...

    @abstractmethod
    def add_recv(self, tensors: Any, src_rank: int, expert_id: int) -> None: ...

    @abstractmethod
    def execute(self) -> None: ...

    def set_transfer_context(self, old_indices: Any, layer_idx: int) -> None: ...  # noqa: B027

    @property
    def needs_profile_buffer_reservation(self) -> bool:
        return True

    def set_stream(self, stream: Any) -> None: ...  # noqa: B027

    def _log_initialized(self) -> None: ...  # noqa: B027


class NixlEplbCommunicator(EplbCommunicator):
    def __init__(self, cpu_group: Any, all_expert_weights: Any, expert_buffer: Any) -> None: ...


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A vLLM that has been imported."""
    for name in ("vllm", "vllm.distributed", "vllm.distributed.eplb"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType(NAME)
    module.EplbCommunicator = type("EplbCommunicator", (EplbCommunicator,), dict(vars(EplbCommunicator)))  # type: ignore[attr-defined]
    module.NixlEplbCommunicator = NixlEplbCommunicator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.delenv("EPLB_ASYNC_VLLM", raising=False)
    return module


def test_vllm_gets_our_class_once(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert install()
    assert install()
    assert vllm.NixlEplbCommunicator is AsyncNixlEplbCommunicator
    assert issubclass(AsyncNixlEplbCommunicator, vllm.EplbCommunicator)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "EPLB_ASYNC_VLLM=0" in line
    assert "VLLM_PLUGINS" in line


@pytest.mark.parametrize("value", ["0", "false", "No", "off", " False "])
def test_switch_leaves_vllm_as_it_is(vllm: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("EPLB_ASYNC_VLLM", value)
    assert not install()
    assert vllm.NixlEplbCommunicator is NixlEplbCommunicator


@pytest.mark.parametrize("value", ["", " ", "1", "TRUE", "yes", "on"])
def test_switch_that_is_on_or_empty_changes_nothing(vllm: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("EPLB_ASYNC_VLLM", value)
    assert install()


def test_switch_that_is_misspelt_leaves_vllm_as_it_is_and_says_so(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever set it meant something, most likely to have vLLM's own."""
    monkeypatch.setenv("EPLB_ASYNC_VLLM", "disabled")
    assert not install()
    assert vllm.NixlEplbCommunicator is NixlEplbCommunicator
    assert "EPLB_ASYNC_VLLM='disabled' is neither on (1, true, yes, on) nor off (0, false, no, off)" in caplog.text


def test_switch_is_no_setting_and_another_name_is_still_refused() -> None:
    assert Settings.from_env({"EPLB_ASYNC_VLLM": "0"}) == Settings()
    with pytest.raises(ValueError, match="EPLB_ASYNC_VLMM names no setting"):
        Settings.from_env({"EPLB_ASYNC_VLMM": "0"})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("NixlEplbCommunicator", None, "has no class NixlEplbCommunicator"),
        ("EplbCommunicator", None, "has no class"),
        ("execute", lambda self, stream: None, "execute() takes ['stream']"),
        ("prefetch", lambda self: None, "EplbCommunicator.prefetch is new"),
        ("__init__", lambda self, cpu_group, all_expert_weights, expert_buffer, mesh: None, "takes mesh"),
        ("__init__", lambda self, cpu_group, weights: None, "takes no all_expert_weights"),
    ],
)
def test_another_vllm_is_left_as_it_is_with_the_reason(
    vllm: Any, name: str, value: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    if value is None:
        delattr(vllm, name)
    elif name == "__init__":
        vllm.NixlEplbCommunicator = type("NixlEplbCommunicator", (EplbCommunicator,), {"__init__": value})
    else:
        setattr(vllm.EplbCommunicator, name, value)
    before = dict(vars(vllm))
    assert not install()
    assert dict(vars(vllm)) == before
    assert says.replace("['", "").replace("']", "") in caplog.text


def test_vllm_that_does_not_load_is_survived(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    monkeypatch.delenv("EPLB_ASYNC_VLLM", raising=False)
    assert not install()
    assert "stays as it is" in caplog.text


def test_entry_point_is_declared_where_vllm_looks() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"eplb_async": "eplb_async.integrations.vllm:install"}
    assert install.__module__.startswith("eplb_async.integrations.vllm")


def test_plugin_loads_what_the_class_needs_and_starts_nothing() -> None:
    """vLLM loads it in processes that move no expert, too, and sets variables of UCX before it imports nixl itself."""
    program = (
        "import sys, threading, eplb_async.integrations.vllm\n"
        "heavy = ('nixl', 'vllm', 'uvloop', 'eplb_async.service', 'eplb_async.policy', 'eplb_async.communicator')\n"
        "print([name for name in heavy if name in sys.modules], threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[0] == "[] 1", done.stdout
