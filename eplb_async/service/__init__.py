"""Load balancing beside requests: loads in, a placement decided, the weights moved."""

from eplb_async.service.report import RebalanceReport, ServiceHealth
from eplb_async.service.service import EplbService
from eplb_async.service.sync import SyncService
from eplb_async.service_settings import ServiceSettings

__all__ = ["EplbService", "RebalanceReport", "ServiceHealth", "ServiceSettings", "SyncService"]
