"""Public test kit: what this library is tested with, and what its users may test with.

``run`` runs a coroutine on virtual time; ``MemoryFabric`` stands in for NIXL; ``FaultPlan`` says what goes
wrong.
"""

from eplb_async.testing.clock import Deadlock, VirtualClockLoop, run
from eplb_async.testing.faults import FaultPlan
from eplb_async.testing.memory import Life, MemoryFabric, MemoryNative

__all__ = [
    "Deadlock",
    "FaultPlan",
    "Life",
    "MemoryFabric",
    "MemoryNative",
    "VirtualClockLoop",
    "run",
]
