"""A forecast as a picture: who reads how much from whom, and how that adds up by rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eplb_async.core.forecast import Forecast
from eplb_async.core.spelling import spell_bytes
from eplb_async.plots import new_figure, save

__all__ = ["draw"]

_GB = 1e9
_LEAST = 1e-9  # GB at the top of the scale where nothing is READ


def draw(forecast: Forecast, path: Path) -> None:
    """Draw a heat map of bytes by source and reader, and bars of the bytes in and out of each rank.

    Local copies are left out, the diagonal is blank: they cross no link.

    Args:
        forecast: What to draw.
        path: The file; its suffix says in which format.

    Raises:
        EplbError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(12, 5)
    heat, bars = figure.subplots(1, 2)
    ranks = np.arange(forecast.plan.new.ep_size)
    read = np.where(np.eye(len(ranks), dtype=np.bool_), np.nan, forecast.matrix / _GB)
    most = max(float(np.nanmax(read, initial=0)), _LEAST)
    image = heat.imshow(read, cmap="viridis", vmin=0, vmax=most, interpolation="nearest")
    heat.set(title="READ, GB", xlabel="reader (rank)", ylabel="source (rank)")
    figure.colorbar(image, ax=heat)
    bars.bar(ranks - 0.2, forecast.bytes_in / _GB, width=0.4, label="in")
    bars.bar(ranks + 0.2, forecast.bytes_out / _GB, width=0.4, label="out")
    bars.set(title="READ by rank, GB", xlabel="rank")
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    for axis in (heat.xaxis, heat.yaxis, bars.xaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.suptitle(
        f"{spell_bytes(int(forecast.bytes_in.sum()))} READ"
        + ("" if forecast.seconds is None else f", at least {forecast.seconds:.3g} s")
    )
    save(figure, path)
