"""Judges, fed with facts: also those that this machine does not have."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from eplb_async.doctor.finding import Finding, Status, failed, ok, warning, worst
from eplb_async.doctor.host import Host
from eplb_async.doctor.judges import environment, machine, meeting, software, transports
from eplb_async.doctor.judges.transports import Carrier, carriers
from tests.doctor.setups import ROOT

GIB = 1 << 30
HOST = Host(
    environ={},
    shm_bytes=8 * GIB,
    shm_free=8 * GIB,
    memlock=-1,
    nofile=65_536,
    nofile_hard=65_536,
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1", "docker0": ""},
    rdma=(),
    ptrace_scope=0,
    seccomp=False,
    cap_sys_ptrace=False,
    cap_ipc_lock=False,
    cores=16.0,
    throttled=0,
)
VERSIONS: dict[str, str | None] = {"python": "3.11.7", "eplb-async": "0.1.0", **software.NEEDED}
LOG = """\
[1.2] [vm:1 :0]   +--------+
[1.2] [vm:1 :0]   | rd self cfg#0                                  |
[1.2] [vm:1 :0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.2] [vm:1 :0]   | 0..inf | zero-copy   | cma/memory              |
[1.2] [vm:1 :0]   | rd intra-node cfg#1                            |
[1.2] [vm:1 :0]   | remote memory write by ucp_put* from host memory to host |
[1.2] [vm:1 :0]   | 0..inf | zero-copy   | rc_mlx5/mlx5_0:1        |
[1.2] [vm:1 :0]   | rd intra-node cfg#1                            |
[1.2] [vm:1 :0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.2] [vm:1 :0]   |   Range   |    Description     |    Config     |
[1.2] [vm:1 :0]   |   0..8184 | short              | tcp/lo        |
[1.2] [vm:1 :0]   | 8185..inf | software emulation | tcp/lo        |
[1.2] [vm:1 :0]   | rd inter-node cfg#2                            |
[1.2] [vm:1 :0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.2] [vm:1 :0]   | 0..inf | zero-copy   | 52% on rc_mlx5/mlx5_0:1 and 48% on rc_mlx5/mlx5_1:1 |
[1.2] [vm:1 :0]   | active message by ucp_am_send* from host memory |
[1.2] [vm:1 :0]   | 16516..inf | multi-frag copy-in | tcp/eth0     |
"""
TCP, BOTH = Carrier("intra-node", "software emulation", "tcp/lo"), "52% on rc_mlx5/mlx5_0:1 and 48% on rc_mlx5/mlx5_1:1"
READ = {"gb_per_s": 5.0, "p50_us": 80.0, "first_ms": 6.0, "wrong_bytes": 0}


def told(finding: Finding, status: Status, *words: str) -> None:
    """It has that status and says these words, and what to do unless all is well."""
    assert finding.status is status, finding
    assert all(word in f"{finding.found} {finding.remedy}" for word in words), finding
    assert bool(finding.remedy) == (status is not Status.OK), finding


def test_the_worst_finding_counts() -> None:
    """Which is what the exit status is made of."""
    assert worst([]) is Status.OK
    assert worst([ok("a", "x"), failed("b", "x", "y"), warning("c", "x", "y")]) is Status.FAILED


def test_lowest_versions_are_those_of_the_package() -> None:
    """The judge has its own table, since metadata is not there in every installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [re.match(r"(\w+)>=([\d.]+)", line) for line in project["dependencies"]]
    assert {match[1]: match[2] for match in named if match} == software.NEEDED
    assert project["requires-python"] == ">=3.11"


@pytest.mark.parametrize(
    ("changed", "status", "words"),
    [
        ({}, Status.OK, ["torch 2.4"]),
        ({"torch": "2.13.0+cpu", "nixl": "1.10.2"}, Status.OK, ["nixl 1.10.2"]),
        ({"torch": "2.3.1"}, Status.FAILED, ["torch 2.3.1 < 2.4", "pip install 'torch>=2.4'"]),
        ({"nixl": None}, Status.FAILED, ["no nixl", "pip install 'nixl>=1.0'"]),
        ({"python": "3.10.2"}, Status.FAILED, ["Python 3.11"]),
        ({"uvloop": None}, Status.WARNING, ["no uvloop", "pip install 'uvloop>=0.19'"]),
    ],
)
def test_versions(changed: dict[str, str | None], status: Status, words: list[str]) -> None:
    """Missing and old packages are told by name, with what installs them."""
    told(software.versions({**VERSIONS, **changed}), status, *words)


def test_gpus() -> None:
    """None, none although torch wants some, and some that NIXL cannot register."""
    none = {"version": "2.9", "cuda": None, "hip": None, "devices": 0}
    told(software.gpu(none, "", []), Status.OK, "CPU memory")
    told(software.gpu({**none, "cuda": "13.0"}, "", []), Status.WARNING, "CUDA_VISIBLE_DEVICES")
    told(
        software.gpu({**none, "cuda": "13.0", "devices": 8}, "", ["DRAM_SEG", "VRAM_SEG"]), Status.OK, "8 of CUDA 13.0"
    )
    told(software.gpu({**none, "cuda": "13.0", "devices": 8}, "", ["DRAM_SEG"]), Status.FAILED, "DRAM_SEG")
    told(software.gpu({}, "ended by SIGSEGV", []), Status.FAILED, "SIGSEGV")


def test_variables_of_the_library_are_refused_by_name() -> None:
    """All of them at once, and never what a secret is."""
    wrong = {
        "EPLB_ASYNC_NOPE": "1",
        "EPLB_ASYNC_VERIFY": "maybe",
        "EPLB_ASYNC_SECRET": "too short",
        "EPLB_ASYNC_SERVICE_MIN_GAIN": "7",
    }
    finding = environment.settings(wrong)
    told(finding, Status.FAILED, *wrong, "doctor --settings")
    assert "too short" not in finding.found
    service = {"EPLB_ASYNC_SERVICE_BACKOFF": "400", "EPLB_ASYNC_SERVICE_BACKOFF_MAX": "500"}
    told(environment.settings({"EPLB_ASYNC_SERVICE_BACKOFF": "400"}), Status.FAILED, "backoff_max")
    told(environment.settings(service), Status.OK)
    assert environment.refusals(service | wrong).keys() == wrong.keys()
    apart = {"EPLB_ASYNC_SERVICE_BACKOFF": "250", "EPLB_ASYNC_SERVICE_BACKOFF_MAX": "200"}
    assert environment.refusals(apart | wrong).keys() == {*wrong, "ServiceSettings"}
    told(environment.settings({"EPLB_ASYNC_PROGRESS_THREAD": "1"}), Status.WARNING, "core")
    told(environment.settings({"UCX_TLS": "tcp"}), Status.OK)


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        ({}, Status.OK, ["no UCX_ or NIXL_ variable"]),
        ({"UCX_TLS": "tcp,self"}, Status.OK, ["UCX_TLS=tcp,self"]),
        ({"UCX_TLS": "rc,cuda_copy,self"}, Status.OK, []),
        ({"UCX_TLS": "all"}, Status.OK, []),
        ({"UCX_TLS": "^cuda_ipc"}, Status.OK, []),
        ({"UCX_TLS": "^tcp"}, Status.FAILED, ["UCX_TLS=^tcp"]),
        ({"UCX_TLS": "posix,cma,self"}, Status.FAILED, ["add tcp"]),
        ({"UCX_LOG_LEVEL": "trace", "UCX_RCACHE_ENABLE": "n"}, Status.WARNING, ["UCX_LOG_LEVEL", "UCX_RCACHE_ENABLE"]),
        ({"NIXL_PLUGIN_DIR": "/nowhere"}, Status.FAILED, ["/nowhere", "unset"]),
    ],
)
def test_variables_of_nixl_and_ucx(environ: dict[str, str], status: Status, words: list[str]) -> None:
    """What leaves no transport, and what slows everything down."""
    [finding] = environment.ucx(environ, environment.plugin_folders(environ))
    told(finding, status, *words)


def test_interfaces_that_are_not_there() -> None:
    """Of those in ``UCX_NET_DEVICES`` the ones that are missing are told, beside those that are there."""
    told(environment.interfaces(HOST), Status.OK, "eth0 10.0.0.1", "no RDMA")
    rdma = replace(HOST, rdma=("mlx5_0",), environ={"UCX_NET_DEVICES": "mlx5_0:1,eth0"})
    told(environment.interfaces(rdma), Status.OK, "RDMA: mlx5_0", "UCX_NET_DEVICES")
    wrong = replace(HOST, environ={"UCX_NET_DEVICES": "eth0,ib7"})
    told(environment.interfaces(wrong), Status.FAILED, "names ib7:", "docker0")
    for devices in ("^ib7", "eth[0-3]", "all", " eth0 "):
        told(environment.interfaces(replace(HOST, environ={"UCX_NET_DEVICES": devices})), Status.OK, devices)
    told(environment.interfaces(replace(HOST, interfaces={"lo": "127.0.0.1"})), Status.WARNING, "loopback")


def test_the_allocator_trap_matters_on_gpus() -> None:
    """Both names of the variable."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        environ = {name: "max_split_size_mb:64,expandable_segments:True"}
        told(environment.allocator(environ, 8), Status.WARNING, name, "expandable_segments:False")
        told(environment.allocator(environ, 0), Status.OK, name)
        told(environment.allocator({name: "expandable_segments:False"}, 8), Status.OK)


def test_refused_ptrace_says_what_refuses_it() -> None:
    """Yama, a seccomp filter, or neither: each has its remedy."""
    refused = {"allowed": False, "errno": 1, "error": "Operation not permitted"}
    told(machine.cma({"allowed": True, "errno": 0, "error": ""}, "", HOST), Status.OK)
    told(machine.cma(refused, "", replace(HOST, ptrace_scope=2)), Status.WARNING, "ptrace_scope is 2", "SYS_PTRACE")
    told(machine.cma(refused, "", replace(HOST, seccomp=True)), Status.WARNING, "seccomp", "not permitted")
    told(machine.cma(refused, "", HOST), Status.WARNING, "SYS_PTRACE")
    told(machine.cma({}, "no answer within 5.0 s", HOST), Status.WARNING, "no answer")


def test_limits() -> None:
    """Shared memory, locked memory, open files."""
    told(machine.shm(HOST), Status.OK, "8.0 GiB")
    told(machine.shm(replace(HOST, shm_bytes=64 << 20, shm_free=64 << 20)), Status.WARNING, "64.0 MiB", "--shm-size")
    told(machine.shm(replace(HOST, shm_free=0)), Status.WARNING, "0 KiB free")
    told(machine.shm(replace(HOST, shm_bytes=None)), Status.WARNING, "no /dev/shm")
    limited = replace(HOST, memlock=64 << 10)
    told(machine.locked(HOST), Status.OK, "no limit")
    told(machine.locked(limited), Status.OK, "64 KiB")
    told(machine.locked(replace(limited, rdma=("mlx5_0",))), Status.FAILED, "ulimit -l unlimited")
    told(machine.locked(replace(limited, rdma=("mlx5_0",), cap_ipc_lock=True)), Status.OK, "CAP_IPC_LOCK")
    told(machine.files(HOST, 2, 64), Status.OK, "2 for a peer measured")
    told(machine.files(replace(HOST, nofile=1024, nofile_hard=4096), 2, 320), Status.FAILED, "ulimit -n 1792")
    told(machine.files(replace(HOST, nofile=1024, nofile_hard=1024), 2, 320), Status.FAILED, "hard limit of 1024")
    told(machine.files(replace(HOST, nofile=-1), None, 4096), Status.OK, "no limit", "not measured")


def test_cores_and_lag() -> None:
    """Fewer cores than ranks, a throttled container, a busy machine."""
    told(machine.cores(HOST, 8), Status.OK, "16 cores for 8 ranks")
    told(machine.cores(replace(HOST, cores=1.5), 2), Status.WARNING, "1.5 cores for 2 ranks")
    told(machine.cores(replace(HOST, throttled=12), None), Status.WARNING, "throttled 12 times")
    calm = {"asyncio": {"p50_ms": 0.1, "p99_ms": 0.2, "max_ms": 3.0}}
    told(machine.lag(calm, ""), Status.OK, "p99 0.20 ms")
    told(machine.lag({**calm, "uvloop": {"p50_ms": 1.0, "p99_ms": 20.0, "max_ms": 80.0}}, ""), Status.WARNING, "20.00")
    told(machine.lag({}, "ended by SIGKILL"), Status.FAILED, "SIGKILL")


def test_what_carries_reads_is_read_from_what_ucx_prints() -> None:
    """Of READs only, of the largest sizes, by where the peer is."""
    assert carriers(LOG) == (
        Carrier("self", "zero-copy", "cma/memory"),
        TCP,
        Carrier("inter-node", "zero-copy", BOTH),
    )
    assert carriers("") == ()


def test_reads_within_a_host() -> None:
    """Slow, wrong, by tcp although nobody asked for it, or none at all."""
    cma = LOG.replace("software emulation | tcp/lo ", "zero-copy | cma/memory ")
    judge = transports.reads
    told(judge("read", READ, "", cma, floor=0.5, forced=False), Status.OK, "5.00 GB/s", "cma/memory")
    told(judge("read", READ, "", "", floor=0.5, forced=False), Status.OK, "did not name")
    told(judge("read", READ, "", LOG, floor=0.5, forced=False), Status.WARNING, "tcp/lo", "see cma")
    told(judge("read tcp", READ, "", LOG, floor=0.5, forced=True), Status.OK, "tcp/lo")
    told(judge("read", READ, "", cma, floor=6.0, forced=False), Status.WARNING, "below 6 GB/s")
    told(judge("read", {**READ, "wrong_bytes": 3}, "", cma, floor=0.5, forced=False), Status.FAILED, "3 WRONG BYTES")
    told(judge("read", {}, "ended by SIGABRT", "", floor=0.5, forced=False), Status.FAILED, "SIGABRT")
    told(judge("read rdma", {}, "ended by SIGABRT", "", floor=0.5, forced=True), Status.WARNING, "SIGABRT")


def rendezvous(found: dict[str, Any], problem: str = "", rank: int = 1) -> list[Finding]:
    return list(meeting.rendezvous(found, problem, url="tcp://head:1", rank=rank, ep_size=4))


def test_a_rendezvous_that_is_not_reached() -> None:
    """Told apart from one that refuses, and from a missing key."""
    [finding] = rendezvous({"stage": "reach"}, "HandshakeError: cannot reach the rendezvous")
    told(finding, Status.FAILED, "tcp://head:1", "firewall")
    assert finding.facts["kind"] == "unreachable"
    told(rendezvous({}, "no answer within 9.0 s", rank=0)[0], Status.FAILED, "free port")
    [finding] = rendezvous({"stage": "reach"}, "HandshakeError: refusing ...: no secret is set")
    assert finding.facts["kind"] == "secret"
    [finding] = rendezvous({"stage": "key"}, "HandshakeError: waited to find the job's key")
    told(finding, Status.FAILED, "is rank 0 running")


def test_ranks_that_were_not_met_are_told_by_kind() -> None:
    """Another secret, never came, does not answer: one finding each."""
    met = {"stage": "done", "met": {"0": "head"}}
    told(rendezvous({**met, "met": {"0": "a", "2": "b", "3": "c"}, "missed": {}})[0], Status.OK, "all 4 ranks met")
    missed = {"2": {"kind": "secret", "why": "another secret"}, "3": {"kind": "absent", "why": "never came"}}
    findings = rendezvous({**met, "missed": missed})
    assert [finding.facts for finding in findings] == [
        {"kind": "secret", "ranks": [2]},
        {"kind": "absent", "ranks": [3]},
    ]
    told(findings[0], Status.FAILED, "rank 2", "met 1 of 3", "EPLB_ASYNC_SECRET")
    told(findings[1], Status.FAILED, "rank 3", "same --rendezvous")
    many = {str(rank): {"kind": "absent", "why": "never came"} for rank in range(40)}
    told(rendezvous({**met, "missed": many})[0], Status.FAILED, "ranks 0, 1, 2", "and 24 more")


def test_peers_below_the_floor_and_the_slowest() -> None:
    """Each peer has its own line, with what carried it by where it is."""
    found = {
        "stage": "done",
        "met": {"0": "here", "10": "there", "2": "here"},
        "reads": {"0": READ, "10": {**READ, "gb_per_s": 0.1}, "2": {"error": "peer gone"}},
    }
    findings = list(meeting.peers(found, "", LOG, node="here", floor=0.5))
    assert [finding.check for finding in findings] == ["peer 0", "peer 2", "peer 10", "peers"]
    told(findings[0], Status.OK, "5.00 GB/s", "tcp/lo")
    told(findings[1], Status.FAILED, "peer gone")
    told(findings[2], Status.FAILED, "below the floor of 0.5 GB/s", "rc_mlx5/mlx5_1:1")
    told(findings[3], Status.OK, "slowest is rank 10 on there, 0.10 GB/s")
    told(next(meeting.peers({"stage": "read", "met": {}}, "killed", "", node="", floor=1)), Status.FAILED, "killed")
    told(next(meeting.peers({"agent_error": "no UCX"}, "", "", node="", floor=1)), Status.FAILED, "no UCX")
    assert not list(meeting.peers({"stage": "reach"}, "unreachable", "", node="", floor=1))
