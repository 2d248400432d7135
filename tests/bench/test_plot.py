"""The bench's picture: drawn from whatever part of the results there is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eplb_async.bench.panels import panels
from eplb_async.bench.plot import plot
from eplb_async.cli import main
from eplb_async.errors import EplbError


def scenario(**gb_per_s: float) -> dict[str, Any]:
    contenders: dict[str, Any] = {
        name: {"gb_per_s": {"median": rate, "iqr": [rate * 0.9, rate * 1.1]}} for name, rate in gb_per_s.items()
    }
    contenders["copies"] = {"gb_per_s": None}
    ratios = {name: {"median": gb_per_s["ours"] / rate} for name, rate in gb_per_s.items() if name != "ours"}
    return {"contenders": contenders, "ratios": ratios}


RESULTS: dict[str, Any] = {
    "scenarios": {
        "reference": scenario(ours=4.0, raw=4.2, vllm_way=0.8),
        "small": scenario(ours=2.0, somebody=1.0),
        "blocked": {"contenders": {"late": {"gb_per_s": None}}, "ratios": {}},
    },
    "probes": {
        "open": {"curves": {"tcp": [{"peers": n, "seconds": 0.1 * n, "cpu_seconds": 0.05 * n} for n in (1, 2)]}},
        "latency": {
            "transports": {
                "tcp": {"plain": {"4 KiB, notified": {name: {"p50_us": 200.0} for name in ("ours", "spin", "sleep")}}}
            }
        },
    },
    "simulation": {
        "curves": [{"ranks": n, "makespan_over_bound": 1.1, "messages_per_rank_layer": 2.0} for n in (8, 16)]
    },
}


def test_the_picture_is_written(tmp_path: Path) -> None:
    """A PNG, with a panel for each part."""
    assert [panel.is_wide for panel in panels(RESULTS)] == [True, False, False, False, False]
    plot(RESULTS, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("part", RESULTS)
def test_one_part_is_enough(part: str, tmp_path: Path) -> None:
    """A run of one scenario, or of the probes alone, has a picture too."""
    plot({part: RESULTS[part]}, str(tmp_path / "out.svg"))
    assert (tmp_path / "out.svg").stat().st_size > 0


def test_the_ratio_is_on_the_others_bar_and_the_rate_on_ours() -> None:
    """4 GB/s against 0.8 is 5 times as fast."""
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    panels({"scenarios": {"reference": RESULTS["scenarios"]["reference"]}})[0].draw(axes)
    assert [text.get_text() for text in axes.texts] == ["4.0", "0.95×", "5×"]
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["eplb_async", "raw NIXL, then copy", "the vLLM way"]


def test_results_without_a_figure_are_refused(tmp_path: Path) -> None:
    """An empty picture helps nobody."""
    with pytest.raises(EplbError, match="nothing to draw"):
        plot({"scenarios": {}, "bars": []}, tmp_path / "out.png")


def test_the_command_says_why_nothing_was_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The results are out by then."""
    path = tmp_path / "out.png"
    assert main(["bench", "--part", "planner", "--quick", "--json", "--plot", str(path)]) == 2
    out, err = capfd.readouterr()
    assert json.loads(out)["bars"]
    assert f"bench: {path}: nothing to draw" in err


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench itself does not need it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EplbError, match=r"pip install 'eplb-async\[plot\]'"):
        plot(RESULTS, tmp_path / "out.png")
