"""The store that a launcher's variables name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous import EnvRendezvous, Launch, TcpRendezvous, job_key, join, next_incarnation, resolve

SECRET = b"0123456789abcdef"
VARIABLES = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


@pytest.fixture
def agent() -> Iterator[Launch]:
    """A launch whose store an agent hosts."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), False)
    yield Launch(0, 2, "127.0.0.1", store.port, by_agent=True, run="job", attempt=0)
    del store


def free_port() -> int:
    host = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
    host.close()
    return int(host.url.rpartition(":")[2])


def opened(launch: Launch, secret: bytes | None = None) -> EnvRendezvous:
    return EnvRendezvous.open(launch, timeout=20, secret=secret)


# ------------------------------------------------------------------------------------------ variables
def test_variables_are_read_as_torch_reads_them() -> None:
    """Those of torchrun, and the four that everybody exports."""
    assert Launch.read(VARIABLES) == Launch(1, 4, "node-0", 29500, by_agent=False, run="none", attempt=0)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert Launch.read(VARIABLES | torchrun) == Launch(1, 4, "node-0", 29500, by_agent=True, run="x", attempt=2)


@pytest.mark.parametrize("lacks", [*VARIABLES, "RANK and MASTER_PORT"])
def test_what_is_missing_is_named(lacks: str) -> None:
    """All of it at once, with what to do; set to nothing is missing, too."""
    names = lacks.split(" and ")
    with pytest.raises(ValueError, match=rf'"env://" needs {", ".join(names)}, which .* not set: .*torchrun'):
        Launch.read(VARIABLES | dict.fromkeys(names, ""))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "9" * 99),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "²"),
        ("TORCHELASTIC_RESTART_COUNT", "x"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: str) -> None:
    """With what it is, and what it may be."""
    with pytest.raises(ValueError, match=f"{name}='{value[:20]}.* is no number from"):
        Launch.read(VARIABLES | {name: value})


def test_a_run_id_too_long_is_refused() -> None:
    """It becomes part of every key."""
    with pytest.raises(ValueError, match="TORCHELASTIC_RUN_ID has 300 characters"):
        Launch.read(VARIABLES | {"TORCHELASTIC_RUN_ID": "x" * 300})


def test_a_group_larger_than_the_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is reached."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="ep_size 8 is more than the WORLD_SIZE=4"):
        resolve("env://", rank=1, ep_size=8, secret=None, timeout=1)


# ------------------------------------------------------------------------------------------- restarts
def test_what_an_earlier_attempt_left_is_not_there(agent: Launch) -> None:
    """torchrun keeps its store when it starts all processes anew: values are of their attempt, counters go on."""
    before = opened(agent)
    before.set("g/blob/1", b"old")
    key = job_key(before, group="g", rank=0, secret=None)
    start = next_incarnation(before, "g", 0)
    before.close()
    after = opened(replace(agent, attempt=1))
    assert after.get("g/blob/1") is None
    assert job_key(after, group="g", rank=1, secret=None) is None
    assert job_key(after, group="g", rank=0, secret=None) != key
    assert next_incarnation(after, "g", 0) == start + 1
    after.close()


def test_one_of_an_earlier_attempt_that_lives_on_does_not_replace_the_key(agent: Launch) -> None:
    """torchrun may end it late: it finds no key, and those of the later attempt keep theirs."""
    late, now = opened(agent), opened(replace(agent, attempt=1))
    key = job_key(now, group="g", rank=0, secret=None)
    assert job_key(late, group="g", rank=0, secret=None) is None
    assert job_key(now, group="g", rank=1, secret=None) == key
    late.close()
    now.close()


def test_a_store_does_not_grow_by_restarts(agent: Launch) -> None:
    """Each attempt overwrites what the one before has left."""
    counts = []
    for attempt in range(3):
        for rank in range(2):
            rendezvous = opened(replace(agent, rank=rank, attempt=attempt))
            job_key(rendezvous, group="g", rank=rank, secret=None)
            next_incarnation(rendezvous, "g", rank)
            rendezvous.set(f"g/blob/{rank}", bytes(100))
            rendezvous.close()
        client = dist.TCPStore("127.0.0.1", agent.port, None, False, timedelta(seconds=20), False)
        counts.append(client.num_keys())
        del client
    assert counts[0] == counts[1] == counts[2]


def test_runs_on_one_store_do_not_meet(agent: Launch) -> None:
    """Keys carry the run's id, so that they are apart from those of torch and of other runs, too."""
    one, other = opened(agent), opened(replace(agent, run="another"))
    one.set("k", b"v")
    assert other.get("k") is None
    one.close()
    other.close()


@pytest.mark.asyncio
async def test_two_groups_of_one_world_that_share_a_name_are_told(
    agent: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their ranks have the same numbers: ``group=`` has to tell them apart. A rank that starts again is no other."""
    for rank, group in ((0, "a"), (0, "a"), (2, "b"), (2, "a")):
        rendezvous = opened(replace(agent, rank=rank, world_size=4), SECRET)
        caplog.clear()
        await join(rendezvous, group=group, rank=0, secret=SECRET, timeout=20)
        rendezvous.close()
    assert "rank 0 of group 'a' was the process with RANK=0, and is the one with RANK=2 now" in caplog.text
    assert len(caplog.records) == 1


# ---------------------------------------------------------------------------------- beside torch itself
BESIDE = """
import sys
import torch.distributed as dist
from eplb_async.rendezvous import EnvRendezvous, Launch
order = sys.argv[1]
if order == "before":
    dist.init_process_group("gloo")
one = EnvRendezvous.open(Launch.read(), timeout=20, secret=None)
two = EnvRendezvous.open(Launch.read(), timeout=20, secret=None)
one.set("k", b"v")
one.close()
if order == "after":
    dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
assert two.get("k") == b"v"
two.close()
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_it_shares_the_port_with_torch_distributed(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes first hosts; the store lives until the last of this process lets go."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    subprocess.run([sys.executable, "-c", BESIDE, order], check=True, timeout=60)


def test_where_another_process_hosts_rank_0_connects(agent: Launch) -> None:
    """As a launcher may that sets no variable of torchrun's."""
    program = f"""
from eplb_async.rendezvous import EnvRendezvous, Launch
launch = Launch(0, 2, "127.0.0.1", {agent.port}, by_agent=False, run="job", attempt=0)
EnvRendezvous.open(launch, timeout=20, secret=None).set("k", b"v")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    rendezvous = opened(agent)
    assert rendezvous.get("k") == b"v"
    rendezvous.close()


# ---------------------------------------------------------------------------------------------- trust
def test_a_store_on_the_network_needs_a_secret() -> None:
    """By whoever it is hosted."""
    for by_agent in (False, True):
        launch = Launch(0, 2, "0.0.0.0", free_port(), by_agent, run="job", attempt=0)
        with pytest.raises(HandshakeError, match="EPLB_ASYNC_SECRET"):
            opened(launch)
    assert opened(replace(launch, by_agent=False), SECRET).close() is None


def test_a_store_that_is_not_ours_is_pointed_out(agent: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """It listens everywhere: once, by rank 0, and not where a secret is set."""
    for launch, secret in ((agent, None), (replace(agent, rank=1), None), (agent, SECRET)):
        opened(launch, secret).close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "EPLB_ASYNC_SECRET" in caplog.text


def test_a_store_that_nobody_hosts_says_who_should(agent: Launch) -> None:
    """And is waited for no longer than asked."""
    nobody = replace(agent, rank=1, port=free_port())
    with pytest.raises(HandshakeError, match=r"env:// \(tcp://127.0.0.1:\d+\) in 0.2 s: .*torchrun's agent hosts it"):
        EnvRendezvous.open(nobody, timeout=0.2, secret=None)
    with pytest.raises(HandshakeError, match="the process with RANK=0 hosts it"):
        EnvRendezvous.open(replace(nobody, by_agent=False), timeout=0.2, secret=None)
