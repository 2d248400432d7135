"""``eplb-async plan`` as a user runs it."""

from __future__ import annotations

import builtins
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_async import cli
from eplb_async.arguments import byte_count, positive
from eplb_async.core.forecast import Forecast
from eplb_async.core.placement import Placement
from eplb_async.core.plan import plan

OLD = [[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 4, 5, 2, 3]]
NEW = [[0, 1, 2, 3, 4, 5, 4, 5], [5, 4, 3, 2, 1, 0, -1, 0]]


class Trap:
    """What a pickle would run."""

    sprung = False

    def __reduce__(self) -> Any:
        return setattr, (Trap, "sprung", True)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The arguments of a good call."""
    np.save(tmp_path / "old.npy", np.array(OLD))
    np.save(tmp_path / "new.npy", np.array(NEW, dtype=np.int32))
    return ["plan", "--old", str(tmp_path / "old.npy"), "--new", str(tmp_path / "new.npy"), "--ep-size", "4"]


def forecast(**more: Any) -> Forecast:
    old, new = Placement(OLD, ep_size=4), Placement(NEW, ep_size=4)
    return Forecast(plan(old, new, nodes=["0", "0", "1", "1"]), (44_000_000,) * 2, **more)


def test_it_prints_the_report(files: list[str], capsys: Any) -> None:
    """That of the forecast, and no time without a rate."""
    assert cli.main([*files, "--ranks-per-node", "2"]) == 0
    out = capsys.readouterr().out
    assert out == f"{forecast()}\n"
    assert "takes at least" not in out


def test_it_prints_one_json_object_and_loads_nothing_slow(files: list[str]) -> None:
    """As its own process; what takes seconds to import is not needed."""
    code = (
        "import sys; from eplb_async import cli; cli.main(sys.argv[1:]); "
        "assert not {'torch', 'nixl', 'matplotlib'} & set(sys.modules)"
    )
    options = ["--json", "--ranks-per-node", "2", "--gbps", "400", "--local-gbps", "3600"]
    done = subprocess.run(
        [sys.executable, "-c", code, *files, *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == forecast(gbps=400.0, local_gbps=3600.0).to_dict()


def test_without_nodes_every_read_goes_through_a_nic(files: list[str], capsys: Any) -> None:
    """So the time counts all of them."""
    assert cli.main([*files, "--json", "--gbps", "100", "--bytes-per-expert", "1MiB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"] == 4
    assert found["reads_on_node"]["experts"] == 0
    assert found["seconds"] == max(*found["bytes_in"], *found["bytes_out"]) * 8 / 100e9 > 0


@pytest.mark.parametrize("ep_size", [1, 4])
def test_it_draws_a_heat_map(files: list[str], capsys: Any, tmp_path: Path, ep_size: int) -> None:
    """A PNG; stdout holds what it holds without. Also where there is nothing to draw."""
    plot = tmp_path / "out.png"
    assert cli.main([*files[:-1], str(ep_size), "--json", "--gbps", "1", "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    assert json.loads(capsys.readouterr().out)["ranks"] == ep_size


def test_without_matplotlib_it_says_what_to_install(
    files: list[str], capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only with --plot; nothing is printed then but the error."""
    original = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("no matplotlib")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert cli.main(files) == 0
    capsys.readouterr()
    assert cli.main([*files, "--plot", str(tmp_path / "out.png")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "pip install 'eplb-async[plot]'" in said.err


@pytest.mark.parametrize("name", ["no/such/folder/out.png", "out.docx"])
def test_a_plot_that_cannot_be_written_is_named(files: list[str], capsys: Any, tmp_path: Path, name: str) -> None:
    """Folder or format: status 2."""
    assert cli.main([*files, "--plot", str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{name}: the plot cannot be written" in said.err


def short_file() -> bytes:
    """The header of an array of many terabytes, and nothing after it."""
    head = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1048576, 1048576), }"
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "not an array"),
        (b"layer,expert\n0,1\n", "not an array"),
        (b"PK\x03\x04 but no archive", "not an array"),
        (b"\x93NUMPY", "not an array"),
        (b"\x93NUMPY\x01\x00\x05\x00{[(:\n", "not an array"),
        (b"\x93NUMPY\x09\x00\x05\x00{[(:\n", "not an array"),
        (short_file(), "not an array"),
        (pickle.dumps(Trap()), "not an array"),
        (np.array([[Trap()]]), "not an array"),
        ({"map": np.array(OLD)}, "not an array"),
        (np.array([[0.0, 1.0]]), "dtype float64; it must hold integers"),
        (np.array([[True, False]]), "dtype bool; it must hold integers"),
        (np.arange(8), "has shape (8,)"),
        (np.zeros((2, 2, 2), dtype=np.int64), "has shape (2, 2, 2)"),
        (np.zeros((0, 4), dtype=np.int64), "{path}"),
        (np.array([[0, 1, 2, 3, 4, 7, 0, 1]]), "every expert needs a copy"),
        (np.array([[0, 1, 2, 3, 4, -2, 0, 1]]), "id -2 is outside"),
        (np.array([[0, 1, 2, 3, 4, 5, 0]]), "do not divide over ep_size 4"),
    ],
)
@pytest.mark.parametrize("which", ["old", "new"])
def test_a_file_that_is_no_placement_is_named(
    files: list[str], capsys: Any, tmp_path: Path, content: Any, said: str, which: str
) -> None:
    """Status 2, one line on stderr, nothing on stdout; nothing pickled is ever run."""
    path = tmp_path / f"{which}.npy"
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        with path.open("wb") as file:
            np.savez(file, **content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    assert cli.main(files) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith(f"eplb-async plan: {path}: ")
    assert said.format(path=path) in found.err
    assert found.err.count("\n") == 1
    assert not Trap.sprung


def test_placements_that_do_not_fit_together_are_both_named(files: list[str], capsys: Any, tmp_path: Path) -> None:
    """With what differs."""
    np.save(tmp_path / "new.npy", np.array(NEW)[:1])
    assert cli.main(files) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path / 'old.npy'} and {tmp_path / 'new.npy'}: " in err
    assert "num_layers is 2 in the old and 1 in the new" in err


@pytest.mark.parametrize(
    "bad",
    [
        ["--ep-size", "0"],
        ["--ep-size", "four"],
        ["--gbps", "0"],
        ["--gbps", "nan"],
        ["--local-gbps", "fast"],
        ["--ranks-per-node", "-1"],
        ["--bytes-per-expert", "44 apples"],
        ["--bytes-per-expert", "0"],
    ],
)
def test_arguments_out_of_range_are_refused(files: list[str], capsys: Any, bad: list[str]) -> None:
    """By argparse, which names the argument."""
    with pytest.raises(SystemExit) as refused:
        cli.main([*files, *bad])
    assert refused.value.code == 2
    assert bad[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("44e6", 44_000_000),
        ("44MB", 44_000_000),
        ("44 mb", 44_000_000),
        ("42MiB", 42 << 20),
        ("1.5GB", 1_500_000_000),
        ("7k", 7000),
        ("16B", 16),
        ("1TiB", 1 << 40),
        ("1e15", 10**15),
    ],
)
def test_bytes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    """Decimal units, and binary ones with an i."""
    assert byte_count(text) == nbytes


@pytest.mark.parametrize("text", ["", "MB", "1e16", "-1", "nan", "inf", "1.2.3", "1ib", "0.2", "1e999", "0x10"])
def test_other_numbers_of_bytes_are_refused(text: str) -> None:
    """argparse shows the message."""
    with pytest.raises(Exception, match=r"bytes|byte"):
        byte_count(text)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "x"])
def test_a_rate_is_above_nothing(text: str) -> None:
    """And finite."""
    with pytest.raises(Exception, match=r"above 0|could not convert"):
        positive(text)
