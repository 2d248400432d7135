"""Moves mixture-of-experts weights between expert-parallel ranks over NVIDIA NIXL, awaited from asyncio.

Names are loaded when they are first used, so importing the package needs neither torch nor NIXL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eplb_async._lazy import lazy

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
    from eplb_async.service import EplbService, RebalanceReport, ServiceHealth
    from eplb_async.service_settings import ServiceSettings
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
    "ServiceSettings": "service_settings",
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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOME)
