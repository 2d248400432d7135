"""The communicator: ``core.protocol`` run against ``nixl`` and ``weights``, on the engine loop."""

from eplb_async.communicator.face import AsyncEplbCommunicator
from eplb_async.communicator.mail import MAX_MAIL, Mail
from eplb_async.communicator.report import Health, MigrationReport, View

__all__ = ["MAX_MAIL", "AsyncEplbCommunicator", "Health", "Mail", "MigrationReport", "View"]
