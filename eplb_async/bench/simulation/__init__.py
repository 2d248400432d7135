"""Scale by simulation: a migration of 8 to 512 ranks on a modelled network.

The communicators, their planner, scheduler, protocol and pollers are the real ones, all in one loop on virtual time;
only NIXL and the network are modelled, and a row of a few bytes stands for many. What control, planning and memory
cost is measured for real, apart from it. ``python -m eplb_async.bench.simulation [--quick] [--json] [--plot f.png]``.
"""

from eplb_async.bench.simulation.measure import NAME, measure

__all__ = ["NAME", "measure"]
