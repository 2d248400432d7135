"""How late an event loop of this process is while nothing runs on it."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from eplb_async.bench.lag import lags_while


def loops(seconds: float) -> Iterator[dict[str, Any]]:
    """Tick every millisecond, on asyncio and on uvloop where it is installed; lags in ms."""
    found = {"asyncio": _lags(asyncio.run(lags_while(asyncio.sleep(seconds))))}
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ImportError:
        pass
    else:
        found["uvloop"] = _lags(uvloop.run(lags_while(asyncio.sleep(seconds))))
    yield found


def _lags(seconds: list[float]) -> dict[str, float]:
    p50, p99, most = np.percentile(np.array(seconds) * 1e3, [50, 99, 100]).tolist()
    return {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "max_ms": round(most, 3)}
