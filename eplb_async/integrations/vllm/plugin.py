"""``install``: vLLM's backend ``"nixl"`` becomes ours, by its entry point ``vllm.general_plugins``, in each process."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from typing import Any

from eplb_async.errors import describe
from eplb_async.integrations.vllm.communicator import AsyncNixlEplbCommunicator
from eplb_async.settings import VLLM_SWITCH

__all__ = ["install"]

_MODULE = "vllm.distributed.eplb.eplb_communicator"
_CLASS, _INTERFACE = "NixlEplbCommunicator", "EplbCommunicator"
_GIVEN = {"cpu_group", "all_expert_weights", "expert_buffer"}
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_log = logging.getLogger("vllm.eplb_async")  # below vLLM's own logger, so that it is shown where vLLM's lines are


def install() -> bool:
    """Have vLLM make our communicator where its configuration says ``"nixl"``.

    Called by vLLM in every process that it starts. Idempotent. Whatever it meets it never raises: a vLLM that it does
    not fit is left as it is, with a warning that says why. ``EPLB_ASYNC_VLLM=0`` leaves vLLM as it is, too.

    Returns:
        Whether vLLM has our class now.
    """
    try:
        return _install()
    except Exception as error:  # a plugin that raises ends vLLM
        _log.warning("eplb-async: vLLM's NIXL communicator stays as it is: %s", describe(error))
        return False


def _install() -> bool:
    switch = os.environ.get(VLLM_SWITCH, "").strip()
    if switch.lower() in _OFF:
        _log.info("eplb-async: %s is off, vLLM's NIXL communicator stays as it is", VLLM_SWITCH)
        return False
    if switch and switch.lower() not in _ON:  # whoever set it meant something, most likely this
        _log.warning(
            "eplb-async: vLLM's NIXL communicator stays as it is, %s=%r is neither on (%s) nor off (%s)",
            VLLM_SWITCH,
            switch,
            ", ".join(_ON),
            ", ".join(_OFF),
        )
        return False
    module = importlib.import_module(_MODULE)
    if getattr(module, _CLASS, None) is AsyncNixlEplbCommunicator:
        return True
    if missing := _missing(module):
        _log.warning(
            "eplb-async: vLLM's NIXL communicator stays as it is, this release fits another vLLM: %s",
            "; ".join(missing),
        )
        return False
    getattr(module, _INTERFACE).register(AsyncNixlEplbCommunicator)
    setattr(module, _CLASS, AsyncNixlEplbCommunicator)
    _log.info(
        'eplb-async: the EPLB communicator "nixl" is AsyncNixlEplbCommunicator now; to go back set %s=0, or '
        "VLLM_PLUGINS without eplb_async",
        VLLM_SWITCH,
    )
    return True


def _missing(module: Any) -> list[str]:
    """What this vLLM lacks, or wants that we lack."""
    theirs, interface = getattr(module, _CLASS, None), getattr(module, _INTERFACE, None)
    if not isinstance(theirs, type) or not isinstance(interface, type):
        return [f"{_MODULE} has no class {_CLASS} or {_INTERFACE}"]
    found = []
    if not callable(getattr(interface, "register", None)):
        found.append(f"{_INTERFACE} is no abstract base class")
    for name, member in vars(interface).items():
        if name.startswith("_"):
            continue
        ours = getattr(AsyncNixlEplbCommunicator, name, None)
        if ours is None:
            found.append(f"{_INTERFACE}.{name} is new")
        elif inspect.isfunction(member):
            found.extend(f"{name}() takes {given}" for given in _more(member, ours))
    taken = set(inspect.signature(AsyncNixlEplbCommunicator.__init__).parameters)
    wanted = set(inspect.signature(theirs.__init__).parameters)  # type: ignore[misc]
    found.extend(f"{_CLASS}() takes {name}" for name in sorted(wanted - taken))
    found.extend(f"{_CLASS}() takes no {name}" for name in sorted(_GIVEN - wanted))
    return found


def _more(theirs: Any, ours: Any) -> list[str]:
    return sorted(set(inspect.signature(theirs).parameters) - set(inspect.signature(ours).parameters))
