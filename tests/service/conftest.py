"""Real ranks, as the communicator's tests have them."""

from __future__ import annotations

from tests.real.conftest import start, transport

__all__ = ["start", "transport"]
