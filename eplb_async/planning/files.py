"""Placements in ``.npy`` files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eplb_async.core.placement import Placement
from eplb_async.errors import PlacementError

__all__ = ["read_placement"]


def read_placement(path: Path, *, ep_size: int) -> Placement:
    """Read a ``physical_to_logical_map`` ``[num_layers, num_physical]`` that ``numpy.save`` wrote.

    Nothing pickled is ever loaded: an array of objects is refused, as an archive is. The file is mapped, so a
    header that claims terabytes takes no memory.

    Raises:
        PlacementError: The file cannot be read, or is no placement on ``ep_size`` ranks; names the file.
    """
    try:
        ids = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise PlacementError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # numpy has one for each way in which a file is none of its own
        raise PlacementError(f"{path}: not an array that numpy.save() wrote: {error}") from error
    try:
        return Placement(ids, ep_size=ep_size)
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from error
