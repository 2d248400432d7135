"""The communicator: ``core.protocol`` run against ``nixl`` and ``weights``, on the engine loop."""

from eplb_async.communicator.face import AsyncEplbCommunicator
from eplb_async.communicator.report import Health, MigrationReport

__all__ = ["AsyncEplbCommunicator", "Health", "MigrationReport"]
