"""Probes in broken set-ups, which are real where this machine can be broken so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from eplb_async.doctor.child import Answer, Child, ask
from eplb_async.doctor.finding import Finding, Status
from eplb_async.doctor.host import look
from eplb_async.doctor.judges import machine, meeting, software
from eplb_async.rendezvous import TcpRendezvous
from tests.doctor.setups import NO_PTRACE, TINY_SHM, children_of, mounts, run
from tests.procs import wait_until

LIMIT = 60.0
SECRETS = {"EPLB_ASYNC_SECRET": "a" * 32}, {"EPLB_ASYNC_SECRET": "b" * 32}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No probe outlives what asked for it."""
    yield
    assert not children_of(os.getpid())


def nixl(environ: dict[str, str], limit: float = LIMIT) -> Finding:
    answer = ask("software.nixl", {}, limit=limit, environ=environ)
    return software.nixl(answer.found, answer.problem, answer.log, ["do this"])


def fake_nixl(folder: Path, code: str) -> dict[str, str]:
    """The environment in which NIXL is this code."""
    (folder / "nixl").mkdir()
    (folder / "nixl" / "__init__.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def test_a_plugin_that_is_missing(tmp_path: Path) -> None:
    """``NIXL_PLUGIN_DIR`` of an empty folder."""
    finding = nixl({"NIXL_PLUGIN_DIR": str(tmp_path)})
    assert finding.status is Status.FAILED
    assert f"no UCX plugin, plugins in {tmp_path}" in finding.found
    assert "unset NIXL_PLUGIN_DIR" in finding.remedy


def test_an_interface_that_is_missing() -> None:
    """UCX finds no device, and NIXL makes no agent; the remedy is that of the check that found why."""
    finding = nixl({"UCX_NET_DEVICES": "nosuch0"})
    assert finding.status is Status.FAILED
    assert "makes no agent" in finding.found
    assert finding.remedy == "do this"


def test_a_nixl_that_hangs_is_given_up(tmp_path: Path) -> None:
    """At the deadline, and it says so."""
    environ = fake_nixl(tmp_path, "import time; time.sleep(600)")
    began = time.monotonic()
    finding = nixl(environ, limit=0.5)
    assert finding.status is Status.FAILED
    assert "no answer within 0.5 s" in finding.found
    assert time.monotonic() - began < LIMIT


def test_a_nixl_that_aborts_is_told_by_its_signal(tmp_path: Path) -> None:
    """And takes nobody along."""
    finding = nixl(fake_nixl(tmp_path, "import os; os.abort()"))
    assert finding.status is Status.FAILED
    assert "SIGABRT" in finding.found


def test_a_nixl_that_is_not_there(tmp_path: Path) -> None:
    """Nor any variant of it."""
    environ = fake_nixl(tmp_path, "raise ImportError('libcuda')")
    for variant in ("nixl_rocm", "rixl"):
        (tmp_path / variant).mkdir()
        (tmp_path / variant / "__init__.py").write_text("raise ImportError('librocm')")
    finding = nixl(environ)
    assert finding.status is Status.FAILED
    assert "libcuda" in finding.found
    assert "pip install nixl" in finding.remedy


def test_ptrace_refused_by_a_seccomp_filter() -> None:
    """A real filter, as container runtimes put on: found, and told with what lifts it."""
    code = (
        "import json; from eplb_async.doctor.child import ask; from eplb_async.doctor.host import look\n"
        "from eplb_async.doctor.judges.machine import cma\n"
        "answer = ask('cma.cma', {}, limit=30.0)\n"
        "print(json.dumps(cma(answer.found, answer.problem, look()).to_json()))"
    )
    done = run([*NO_PTRACE, sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    finding = json.loads(done.stdout)
    assert finding["status"] == "warning", finding
    assert "Operation not permitted; a seccomp filter" in finding["found"]
    assert "SYS_PTRACE" in finding["remedy"]


def test_a_tiny_shared_memory() -> None:
    """A real 1 MiB mounted over ``/dev/shm``, in a namespace of its own."""
    if not mounts():
        pytest.skip("this user may not mount in a namespace of its own; the judge is tested by facts")
    done = run([*TINY_SHM, sys.executable, "-c", "from eplb_async.doctor.host import look; print(look().shm_bytes)"])
    assert done.returncode == 0, done.stderr
    finding = machine.shm(replace(look(), shm_bytes=int(done.stdout), shm_free=1 << 20))
    assert finding.status is Status.WARNING
    assert "1.0 MiB" in finding.found
    assert "--shm-size" in finding.remedy


def meet(
    url: str, rank: int, *, seconds: float, environ: dict[str, str] | None = None, memory: str | None = None
) -> Child:
    arguments = {
        "rendezvous": url,
        "rank": rank,
        "ep_size": 2,
        "group": "g",
        "node": "here",
        "seconds": seconds,
        "memory": memory,
    }
    return Child("peers.peers", arguments, environ=environ)


def judged(answer: Answer, rank: int) -> list[Finding]:
    return list(meeting.rendezvous(answer.found, answer.problem, url="url", rank=rank, ep_size=2))


def together(url: str, environs: list[dict[str, str]], seconds: float) -> list[Answer]:
    with ExitStack() as stack:
        children = [
            stack.enter_context(meet(url, rank, seconds=seconds, environ=environ))
            for rank, environ in enumerate(environs)
        ]
        return [child.last(LIMIT) for child in children]


def test_ranks_of_one_secret_meet_again_and_again(tmp_path: Path) -> None:
    """What an earlier run has left holds nobody up."""
    for _ in range(2):
        for rank, answer in enumerate(together(f"file://{tmp_path}/r", [SECRETS[0]] * 2, 40.0)):
            [finding] = judged(answer, rank)
            assert finding.status is Status.OK, (finding, answer.log)


def test_a_wrong_secret_is_told_from_a_missing_rank(tmp_path: Path) -> None:
    """On both sides."""
    for rank, answer in enumerate(together(f"file://{tmp_path}/r", list(SECRETS), 4.0)):
        [finding] = judged(answer, rank)
        assert finding.facts == {"kind": "secret", "ranks": [1 - rank]}
        assert "EPLB_ASYNC_SECRET" in finding.remedy
        assert not any(environ["EPLB_ASYNC_SECRET"] in f"{finding}{answer.log}" for environ in SECRETS)


@pytest.mark.faults
def test_a_secret_that_one_rank_lacks(tmp_path: Path) -> None:
    """Each says who has none."""
    for environs in ([SECRETS[0], {}], [{}, SECRETS[0]]):
        for rank, answer in enumerate(together(f"file://{tmp_path}/{len(environs[0])}", environs, 3.5)):
            [finding] = judged(answer, rank)
            assert finding.facts["kind"] == "secret", (finding, answer.log)
            assert "has no EPLB_ASYNC_SECRET" in finding.found


@pytest.mark.faults
def test_a_rank_that_never_comes_and_one_that_only_came_before(tmp_path: Path) -> None:
    """Absent; and after a run of both, silent."""
    url = f"file://{tmp_path}/r"
    for kind in ("absent", "silent"):
        with meet(url, 0, seconds=3.5) as alone:
            [finding] = judged(alone.last(LIMIT), 0)
        assert finding.facts == {"kind": kind, "ranks": [1]}
        together(url, [{}, {}], 40.0)


@pytest.mark.faults
@pytest.mark.parametrize("stricken", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_stops_or_dies_while_it_is_read_from(stricken: signal.Signals, tmp_path: Path) -> None:
    """The READ ends by its deadline, or by proof of the death, and whoever read says from whom."""
    url, tcp = f"file://{tmp_path}/r", {"UCX_TLS": "tcp,self"}
    with (
        meet(url, 0, seconds=7.0, environ=tcp, memory="cpu") as reads,
        meet(url, 1, seconds=7.0, environ=tcp, memory="cpu") as is_read,
    ):
        while (answer := reads.receive(LIMIT)).found["stage"] != "read":
            pass
        os.kill(is_read.pid, stricken)
        answer = reads.last(LIMIT)
    assert answer.found["stage"] == "done"
    [finding] = meeting.peers(answer.found, answer.problem, answer.log, node="here", floor=0.001)
    assert (finding.check, finding.status) == ("peer 1", Status.FAILED)
    assert ("state=PROC" if stricken is signal.SIGSTOP else "Disconnect") in finding.found


def test_a_rendezvous_that_nobody_hosts() -> None:
    """Told with what to look at, in the time that was given."""
    store = TcpRendezvous.host("127.0.0.1", 0, timeout=10.0, secret=None)
    url = store.url
    store.close()
    with meet(url, 1, seconds=3.0) as child:
        [finding] = judged(child.last(LIMIT), 1)
    assert finding.facts["kind"] == "unreachable"
    assert "Connection refused" in finding.found


def test_probes_die_with_whoever_asked(tmp_path: Path) -> None:
    """Killed without a chance to clean up."""
    environ = fake_nixl(tmp_path, "import time; time.sleep(600)")
    code = "from eplb_async.doctor.child import ask; print(1, flush=True); ask('software.nixl', {}, limit=300.0)"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, **environ, "PYTHONPATH": _path(environ)},
    ) as asking:
        assert asking.stdout is not None
        asking.stdout.readline()
        wait_until(lambda: bool(children_of(asking.pid)))
        asking.send_signal(signal.SIGKILL)
        asking.wait(30)
        wait_until(lambda: not children_of(asking.pid))


def _path(environ: dict[str, str]) -> str:
    return os.pathsep.join([str(Path(__file__).parents[2]), environ["PYTHONPATH"]])
