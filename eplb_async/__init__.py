"""Moves mixture-of-experts weights between expert-parallel ranks over NVIDIA NIXL, awaited from asyncio.

Names are loaded when they are first used, so importing the package needs neither torch nor NIXL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eplb_async.communicator import AsyncEplbCommunicator, Health, MigrationReport
    from eplb_async.core.forecast import Forecast
    from eplb_async.core.placement import Placement
    from eplb_async.errors import (
        ActivationTimeout,
        CommunicatorBusy,
        CommunicatorClosed,
        EplbError,
        ExpertLoadFailed,
        ExpertsLost,
        HandshakeError,
        IntegrityError,
        MigrationAborted,
        MigrationError,
        MigrationInDoubt,
        MigrationTimeout,
        NixlPeerDisconnected,
        NixlTransferFailed,
        NixlTransferTimeout,
        PlacementError,
        RebalanceFailed,
        RebalanceTimeout,
        TransferError,
        WeightsError,
    )
    from eplb_async.nixl import AsyncNixlAgent
    from eplb_async.rendezvous import Rendezvous
    from eplb_async.service import EplbService, RebalanceReport, ServiceHealth, ServiceSettings
    from eplb_async.settings import Settings

_HOME = {
    "ActivationTimeout": "errors",
    "AsyncEplbCommunicator": "communicator",
    "AsyncNixlAgent": "nixl",
    "CommunicatorBusy": "errors",
    "CommunicatorClosed": "errors",
    "EplbError": "errors",
    "EplbService": "service",
    "ExpertLoadFailed": "errors",
    "ExpertsLost": "errors",
    "Forecast": "core.forecast",
    "HandshakeError": "errors",
    "Health": "communicator",
    "IntegrityError": "errors",
    "MigrationAborted": "errors",
    "MigrationError": "errors",
    "MigrationInDoubt": "errors",
    "MigrationReport": "communicator",
    "MigrationTimeout": "errors",
    "NixlPeerDisconnected": "errors",
    "NixlTransferFailed": "errors",
    "NixlTransferTimeout": "errors",
    "Placement": "core.placement",
    "PlacementError": "errors",
    "RebalanceFailed": "errors",
    "RebalanceReport": "service",
    "RebalanceTimeout": "errors",
    "Rendezvous": "rendezvous",
    "ServiceHealth": "service",
    "ServiceSettings": "service",
    "Settings": "settings",
    "TransferError": "errors",
    "WeightsError": "errors",
}

__all__ = [
    "ActivationTimeout",
    "AsyncEplbCommunicator",
    "AsyncNixlAgent",
    "CommunicatorBusy",
    "CommunicatorClosed",
    "EplbError",
    "EplbService",
    "ExpertLoadFailed",
    "ExpertsLost",
    "Forecast",
    "HandshakeError",
    "Health",
    "IntegrityError",
    "MigrationAborted",
    "MigrationError",
    "MigrationInDoubt",
    "MigrationReport",
    "MigrationTimeout",
    "NixlPeerDisconnected",
    "NixlTransferFailed",
    "NixlTransferTimeout",
    "Placement",
    "PlacementError",
    "RebalanceFailed",
    "RebalanceReport",
    "RebalanceTimeout",
    "Rendezvous",
    "ServiceHealth",
    "ServiceSettings",
    "Settings",
    "TransferError",
    "WeightsError",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
