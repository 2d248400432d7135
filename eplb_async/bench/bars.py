"""The bars of the design, against what was measured; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["bar", "bars"]

_LAG_MS, _LAG_TIMES = 5.0, 1.5
_AT_LEAST = (
    ("reference", "vllm_way", 3.0, "migrate against the vLLM way"),
    ("reference", "vllm", 3.0, "migrate against vLLM's own class"),
    ("reference", "gloo", 2.0, "migrate against gloo"),
    ("reference", "raw", 0.9, "migrate against raw NIXL and copy"),
    ("reference", "copy_twice", 0.45, "migrate against the same bytes copied twice"),
    ("small", "vllm_way", 4.0, "small experts against the vLLM way"),
    ("small", "vllm", 4.0, "small experts against vLLM's own class"),
)
_BLOCKED = (
    ("blocked", 1.3, "peer of a rank whose loop blocks, GIL released"),
    ("blocked-gil", 1.3, "peer of a rank whose loop blocks, GIL held"),
)


def bars(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every bar that these results can answer: ``name``, ``bar``, ``measured``, ``met``.

    Args:
        results: ``scenarios`` by name, as :func:`~eplb_async.bench.figures.summarise` gives them; ``probes`` by name,
            ``simulation`` and ``policy``, each with ``bars`` of their own.
    """
    return [*_of_scenarios(results.get("scenarios", {})), *_of_parts(results)]


def _of_scenarios(scenarios: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, rival, limit, what in _AT_LEAST:
        ratio = scenarios.get(name, {}).get("ratios", {}).get(rival)
        if ratio:
            yield bar(f"{what}: times as fast", f">= {limit:g}", ratio["median"], ratio["median"] >= limit)
    contenders = scenarios.get("reference", {}).get("contenders", {})
    ours, copies = (contenders.get(name, {}).get("lag_ms") for name in ("ours", "copies"))
    if ours and copies:
        limit = max(_LAG_MS, _LAG_TIMES * copies["p99"])
        text = (
            f"<= {limit:.1f} (the greater of {_LAG_MS:g} and {_LAG_TIMES:g} x {copies['p99']:.1f} of the same copies)"
        )
        yield bar("user loop's lag while it migrates, p99, ms", text, ours["p99"], ours["p99"] <= limit)
    for name, limit, what in _BLOCKED:
        ratio = scenarios.get(name, {}).get("blocked_over_free")
        if ratio:
            yield bar(f"{what}: times as long", f"<= {limit:g}", ratio["median"], ratio["median"] <= limit)


def _of_parts(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for part in (*results.get("probes", {}).values(), results.get("simulation", {}), results.get("policy", {})):
        yield from part.get("bars", ())


def bar(name: str, limit: str, measured: float, met: bool) -> dict[str, Any]:
    """A bar, what was measured against it, and whether that meets it."""
    return {"name": name, "bar": limit, "measured": measured, "met": met}
