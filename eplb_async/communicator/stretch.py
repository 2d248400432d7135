"""Neighbouring layers that are staged together, and how many of them go together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from eplb_async.communicator.job import Job, room_for
from eplb_async.core.incoming import Incoming
from eplb_async.core.layout import Layout, TensorPlace, TensorSpec
from eplb_async.nixl.devices import memory_of
from eplb_async.weights import Copy, ExpertWeights, Staging

_SHARE = 4
"""Stretches that fill the staging at least, so that one is READ while another waits for COMMIT or is applied."""


@dataclass(eq=False)
class Stretch:
    """Layers that are posted, checked and voted for together.

    Attributes:
        layers: The layers.
        jobs: What is received: all of it, then again from elsewhere what was not brought.
        tasks: What stages it.
    """

    layers: range
    jobs: list[Job]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def landing(self, layers: range, weights: ExpertWeights, staging: Staging) -> Iterator[Copy]:
        """The copies that apply layers of it."""
        for job in self.jobs:
            yield from job.landing(layers, weights, staging)


class Stretches:
    """How layers are taken together: small ones that are alike, up to a post and a share of the staging.

    What a layer costs beside its bytes is then shared by many. A layer with many bytes goes alone, so that the READs
    of the next overlap its apply.

    Args:
        moves: All that this rank receives.
        layout: Where its rows are.
        staging: Bytes of staging by memory type.
        max_bytes: Most bytes of several layers; 0: each goes alone.
    """

    def __init__(self, moves: Incoming, layout: Layout, *, staging: Mapping[str, int], max_bytes: int) -> None:
        self._layers = layout.layers
        self._max_bytes = max_bytes
        self._count = np.bincount(moves.layer, minlength=len(layout.layers)).tolist()
        self._limits = {memory: min(max_bytes, nbytes // _SHARE) for memory, nbytes in staging.items()}

    def sizes(self, layers: range) -> dict[str, int]:
        """Bytes of staging that layers need together, by memory type."""
        specs = [place.spec for place in self._layers[layers.start]]
        return room_for(specs, sum(self._count[layers.start : layers.stop]))[1]

    def widest(self, first: int) -> range:
        """The layers from ``first`` on that go together."""
        if not self._max_bytes:
            return range(first, first + 1)
        specs = [place.spec for place in self._layers[first]]
        row_bytes: dict[str, int] = {}
        for spec in specs:
            row_bytes[memory_of(spec.device)] = row_bytes.get(memory_of(spec.device), 0) + spec.row_bytes
        left = min((self._limits[m] // nbytes for m, nbytes in row_bytes.items() if nbytes), default=0)
        left -= self._count[first]
        stop = first + 1
        while stop < len(self._layers) and self._count[stop] <= left and _alike(specs, self._layers[stop]):
            left -= self._count[stop]
            stop += 1
        return range(first, stop)


def _alike(specs: list[TensorSpec], places: Iterable[TensorPlace]) -> bool:
    return specs == [place.spec for place in places]
