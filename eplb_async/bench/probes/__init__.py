"""Single probes of the bench: one figure each, besides the migrations.

Each module has ``NAME`` and ``measure(*, quick) -> dict`` with JSON-able values, ``bars`` among them, and runs alone:
``python -m eplb_async.bench.probes.latency [--quick]``.
"""

PROBES = ("latency", "idle", "opening", "stopped", "verify", "planner", "record", "service")
"""The modules of this package that measure, in the order in which the bench runs them."""
