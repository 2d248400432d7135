"""The command as people run it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from eplb_async import cli
from eplb_async.service_settings import ServiceSettings
from eplb_async.settings import Settings
from tests.doctor.setups import DOCTOR, NO_PTRACE, ROOT, TINY_SHM, children_of, environment, mounts, run
from tests.procs import wait_until

ALL_ALONE = [
    "versions", "settings", "nixl", "gpu", "allocator", "network", "environment", "cma", "shm", "memlock", "cores",
    "lag", "read", "read tcp", "files",
]  # fmt: skip


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """By check; nothing but one JSON object is on stdout."""
    found: dict[str, Any] = json.loads(done.stdout)
    statuses = {finding["status"] for finding in found["findings"]}
    assert found["status"] == next(status for status in ("failed", "warning", "ok") if status in statuses)
    assert done.returncode == (1 if found["status"] == "failed" else 0), done.stderr
    return {finding["check"]: finding for finding in found["findings"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rendezvous", "tcp://127.0.0.1:1"], "needs --rank and --ep-size"),
        (["--rank", "1"], "needs --rendezvous"),
        (["--rendezvous", "file:///x", "--rank", "2", "--ep-size", "2"], "is not in a group"),
        (["--rendezvous", "env://"], "torchrun"),
    ],
)
def test_arguments_that_do_not_go_together(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2, and one line that says which."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["doctor", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--timeout", "0"], ["--floor-gbps", "-1"], ["--rank", "-1"], ["--nope"]])
def test_arguments_that_are_none(arguments: list[str]) -> None:
    """As argparse says it."""
    with pytest.raises(SystemExit) as refused:
        cli.main(["doctor", *arguments])
    assert refused.value.code == 2


def test_two_ranks_here_and_what_is_true_of_this_machine() -> None:
    """``--peers`` without more: each reads from the other, by what this machine has."""
    found = findings(run([*DOCTOR, "--peers", "--json", "--floor-gbps", "0.001", "--timeout", "80"]))
    assert {"peer 0", "peer 1", "rendezvous", "peers"} <= set(found)
    assert found["gpu"]["facts"]["devices"] == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert bool(found["network"]["facts"]["rdma"]) == Path("/sys/class/infiniband").exists()
    assert set(found["network"]["facts"]["interfaces"]) == {name for _, name in socket.if_nameindex()}
    assert found["shm"]["facts"]["bytes"] == os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks
    assert "UCX" in found["nixl"]["facts"]["plugins"]
    for peer in ("peer 0", "peer 1"):
        assert found[peer]["facts"]["wrong_bytes"] == 0
        if not torch.cuda.is_available():
            assert ("cma" in found[peer]["facts"]["carrier"]) == found["cma"]["facts"]["allowed"]


@pytest.mark.faults
def test_broken_setups_are_told_with_their_remedy() -> None:
    """And every other check has run all the same."""
    wrong = run([*DOCTOR, "--json"], {"UCX_NET_DEVICES": "nosuch0", "EPLB_ASYNC_NOPE": "1"})
    found = findings(wrong)
    assert set(ALL_ALONE) <= set(found)
    assert {check for check in found if found[check]["status"] == "failed"} == {"settings", "nixl", "network", "read"}
    assert "nosuch0" in found["network"]["found"]
    assert found["nixl"]["remedy"] == found["network"]["remedy"]
    assert "EPLB_ASYNC_NOPE" in found["settings"]["found"]


@pytest.mark.faults
def test_a_container_that_refuses_ptrace_and_has_no_shared_memory() -> None:
    """It works, so these are warnings; what really carried the READs is told, in plain text where no terminal is."""
    shm = TINY_SHM if mounts() else []
    done = run([*shm, *NO_PTRACE, *DOCTOR, "--floor-gbps", "0.001"])
    assert done.returncode == 0, done.stdout
    assert "\x1b" not in done.stdout
    *lines, counts = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert counts.endswith(" 0 failed")
    told = {check: line for line in lines for check in ALL_ALONE if line[9:].startswith(f"{check}  ")}
    assert list(told) == ALL_ALONE
    assert told["cma"].startswith("warning")
    assert told["read"].startswith("warning")
    assert "by tcp/" in told["read"]
    assert not shm or told["shm"].startswith("warning")


@pytest.mark.faults
def test_a_nixl_that_hangs_keeps_no_other_check_from_running(tmp_path: Path) -> None:
    """Nor the doctor from ending in the time it was given, and some seconds for starting processes."""
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("import time; time.sleep(600)")
    began = time.monotonic()
    found = findings(run([*DOCTOR, "--json", "--timeout", "9"], {"PYTHONPATH": f"{ROOT}:{tmp_path}"}))
    assert time.monotonic() - began < 60
    assert set(ALL_ALONE) <= set(found)
    assert "no answer" in found["nixl"]["found"]
    assert found["read"]["status"] == "failed"


@pytest.mark.faults
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_ends_at_once_with_its_children(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """While a probe hangs; no folder of the rendezvous is left either."""
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("import time; time.sleep(600)")
    env = environment({"PYTHONPATH": f"{ROOT}:{tmp_path}", "TMPDIR": str(tmp_path)})
    with subprocess.Popen(
        [*DOCTOR, "--peers", "--json", "--timeout", "500"], env=env, cwd=ROOT, stdout=subprocess.PIPE
    ) as doctor:
        wait_until(lambda: "software.nixl" in children_of(doctor.pid).values())
        doctor.send_signal(number)
        out, _ = doctor.communicate(timeout=30)
        assert doctor.returncode == code
        assert out == b""
        wait_until(lambda: not children_of(doctor.pid))
    assert [path.name for path in tmp_path.iterdir()] == ["nixl"]


def start(url: str, rank: int, ep_size: int, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    arguments = ["--peers", "--json", "--rendezvous", url, "--rank", str(rank), "--ep-size", str(ep_size)]
    return subprocess.Popen(
        [*DOCTOR, *arguments, "--timeout", "60", "--floor-gbps", "0.001"],
        env=environment(environ), cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def report(doctor: subprocess.Popen[str]) -> dict[str, dict[str, Any]]:
    out, _ = doctor.communicate(timeout=120)
    return findings(subprocess.CompletedProcess([], doctor.returncode, out, ""))


@pytest.mark.faults
def test_three_ranks_over_tcp_read_from_each_other(tmp_path: Path) -> None:
    """Started by hand, with a secret; each names the slowest."""
    environ = {"UCX_TLS": "tcp,self", "EPLB_ASYNC_SECRET": "s" * 32}
    url = f"file://{tmp_path}/r"
    doctors = [start(url, rank, 3, environ) for rank in range(3)]
    for rank, doctor in enumerate(doctors):
        found = report(doctor)
        peers = {peer for peer in range(3) if peer != rank}
        assert {check for check in found if check.startswith("peer ")} == {f"peer {peer}" for peer in peers}
        assert all(found[f"peer {peer}"]["facts"]["carrier"].startswith("tcp/") for peer in peers)
        assert found["peers"]["facts"]["slowest"] in peers


def test_every_setting_with_its_value_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it comes from, and never the text of a secret."""
    secret = "do not show this to anybody"
    given = {"SECRET": secret, "MAX_PAUSE": "0.004", "SERVICE_BACKOFF": "400", "SERVICE_BACKOFF_MAX": "500"}
    for name, text in given.items():
        monkeypatch.setenv(f"EPLB_ASYNC_{name}", text)
    assert cli.main(["doctor", "--settings", "--json"]) == 0
    out = capsys.readouterr().out
    found = {setting["variable"]: setting for setting in json.loads(out)["settings"]}
    assert len(found) == len(fields(Settings)) + len(fields(ServiceSettings))
    assert {name for name, setting in found.items() if setting["source"] == "variable"} == {
        f"EPLB_ASYNC_{name}" for name in given
    }
    assert found["EPLB_ASYNC_MAX_PAUSE"]["value"] == "0.004"
    assert found["EPLB_ASYNC_SECRET"]["value"] == "set"
    assert found["EPLB_ASYNC_VERIFY"]["value"] == "'identity'"
    assert cli.main(["doctor", "--settings"]) == 0
    text = capsys.readouterr().out
    assert "EPLB_ASYNC_MAX_PAUSE = 0.004  [s: 0.0001 to 1; from the environment; default 0.008]" in text
    assert secret not in out + text


def test_settings_that_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its variable, beside the table; status 1."""
    wrong = {"EPLB_ASYNC_NOPE": "1", "EPLB_ASYNC_MAX_PAUSE": "9", "EPLB_ASYNC_SECRET": "short"}
    for name, text in (wrong | {"EPLB_ASYNC_SERVICE_BACKOFF": "400"}).items():
        monkeypatch.setenv(name, text)
    assert cli.main(["doctor", "--settings", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found["refused"]) == {*wrong, "EPLB_ASYNC_SERVICE_BACKOFF"}
    assert cli.main(["doctor", "--settings"]) == 1
    text = capsys.readouterr().out
    assert "EPLB_ASYNC_MAX_PAUSE = refused" in text
    assert "short" not in text


def test_the_doctor_imports_nothing_that_it_looks_at() -> None:
    """A torch or NIXL that hangs as it is imported hangs a probe, and nothing else."""
    code = (
        "import sys; import eplb_async.doctor.examine, eplb_async.doctor.show, eplb_async.doctor.in_force\n"
        "print({'torch', 'nixl', 'numpy', 'uvloop'} & set(sys.modules))"
    )
    assert run([sys.executable, "-c", code]).stdout == "set()\n"
