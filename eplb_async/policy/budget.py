"""Spends a number of moves where each takes away most load from the busiest ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["Way", "spend"]

Way = tuple[Sequence[int], Sequence[float]]  # moves and load of the busiest rank after each step of one way to go


def spend(layers: Sequence[Sequence[Way]], start: Sequence[tuple[int, float]], max_moves: int) -> list[tuple[int, int]]:
    """Chooses for each layer a way and how many of its steps to go.

    Always takes the layer in which the next move gains most. The load of a layer's busiest rank is what a step of the
    engine waits for, and these add up over the layers.

    Args:
        layers: For each layer the ways to choose from.
        start: For each layer, moves and load before any choice; all these moves together are within ``max_moves``.
        max_moves: Moves to spend over all layers.

    Returns:
        For each layer the way and the step, or (-1, 0) to stay at the start.
    """
    points = [
        [
            (moves, peak, way, step)
            for way, (costs, peaks) in enumerate(ways)
            for step, (moves, peak) in enumerate(zip(costs, peaks, strict=True))
        ]
        for ways in layers
    ]
    here = [(moves, peak, -1, 0) for moves, peak in start]
    left = max_moves - sum(moves for moves, _ in start)
    queue = [entry for layer in range(len(here)) if (entry := _next(points[layer], here[layer], layer, left))]
    heapq.heapify(queue)
    while queue:
        _, layer, point = heapq.heappop(queue)
        cost = point[0] - here[layer][0]
        if cost <= left:
            here[layer] = point
            left -= cost
        if entry := _next(points[layer], here[layer], layer, left):
            heapq.heappush(queue, entry)
    return [(way, step) for _, _, way, step in here]


_Point = tuple[int, float, int, int]


def _next(points: Sequence[_Point], here: _Point, layer: int, left: int) -> tuple[float, int, _Point] | None:
    """The affordable point of a layer with most gain for each move, as an entry of the queue."""
    best: tuple[float, int, _Point] | None = None
    for point in points:
        moves, gain = point[0] - here[0], here[1] - point[1]
        if gain > 0 and moves <= left:
            entry = (-gain / max(moves, 0.5), layer, point)
            best = entry if best is None or entry < best else best
    return best
