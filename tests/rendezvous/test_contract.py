"""What every rendezvous does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from eplb_async.rendezvous import (
    EnvRendezvous,
    FileRendezvous,
    Launch,
    Rendezvous,
    StoreRendezvous,
    TcpRendezvous,
    resolve,
    withdraw,
)

Pair = tuple[Rendezvous, Rendezvous]


@pytest.fixture(params=["memory", "tcp", "file", "hash-store", "env", "env-agent"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, memory: Any) -> Iterator[Pair]:
    """Two views of one rendezvous, as two ranks have them."""
    first: Rendezvous
    second: Rendezvous
    with ExitStack() as stack:
        if request.param == "memory":
            first = second = memory
        elif request.param == "tcp":
            first = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
            second = TcpRendezvous.connect("127.0.0.1", port_of(first), timeout=20, secret=None)
        elif request.param == "file":
            first, second = (FileRendezvous(tmp_path / "store", timeout=20) for _ in range(2))
        elif request.param == "hash-store":
            store = dist.HashStore()
            first, second = StoreRendezvous(store), StoreRendezvous(store)
        else:
            agent = TcpRendezvous.host("127.0.0.1", 0, timeout=20, secret=None)
            stack.callback(agent.close)
            by_agent = request.param == "env-agent"
            if not by_agent:
                agent.close()
            launches = [Launch(rank, 2, "127.0.0.1", port_of(agent), by_agent, "run", 0) for rank in range(2)]
            first, second = (EnvRendezvous.open(launch, timeout=20, secret=None) for launch in launches)
        stack.callback(first.close)
        stack.callback(second.close)
        yield first, second


def port_of(rendezvous: TcpRendezvous) -> int:
    return int(rendezvous.url.rpartition(":")[2])


def test_it_is_a_rendezvous(pair: Pair) -> None:
    """It has every method and attribute that the protocol names."""
    assert isinstance(pair[0], Rendezvous)
    assert pair[0].trusted
    assert resolve(pair[0], rank=0, ep_size=2, secret=None, timeout=1) is pair[0]


@pytest.mark.parametrize("value", [b"x", bytes(range(256)), b"\0" * 1000, b"7" * (1 << 20)], ids=len)
def test_what_one_rank_sets_another_gets(pair: Pair, value: bytes) -> None:
    """Any bytes come back as they were."""
    pair[0].set("group/blob/0", value)
    assert pair[1].get("group/blob/0") == value


def test_the_last_value_wins(pair: Pair) -> None:
    """A second set replaces the first, for everybody."""
    pair[0].set("k", b"old")
    assert pair[1].get("k") == b"old"
    pair[1].set("k", b"new")
    assert [one.get("k") for one in pair] == [b"new", b"new"]


def test_an_absent_key_is_none_at_once(pair: Pair) -> None:
    """``get`` does not wait for a key: hundreds of misses take less than one timeout."""
    started = time.monotonic()
    assert [pair[1].get(f"absent/{i}") for i in range(200)] == [None] * 200
    assert time.monotonic() - started < 10


def test_counters_count_atomically(pair: Pair) -> None:
    """Concurrent adds through both views lose nothing and give every value once."""
    with ThreadPoolExecutor(8) as threads:
        seen = list(threads.map(lambda i: pair[i % 2].add("starts", 1), range(64)))
    assert sorted(seen) == list(range(1, 65))
    assert pair[0].add("starts", 0) == 64
    assert pair[1].add("other", 5) == 5


def test_deleted_keys_are_gone_and_deleting_never_raises(pair: Pair) -> None:
    """``delete`` removes for everybody; an absent key does not matter."""
    pair[0].set("k", b"v")
    pair[1].delete("k")
    pair[1].delete("k")
    assert pair[0].get("k") is None


def test_what_was_withdrawn_is_empty_unless_a_newer_start_replaced_it(pair: Pair) -> None:
    """A rank that closes takes back its own introduction, and no other."""
    pair[0].set("g/blob/1", b"old")
    withdraw(pair[0], group="g", rank=1, sealed=b"old")
    assert not pair[1].get("g/blob/1")
    pair[1].set("g/blob/1", b"new")
    withdraw(pair[0], group="g", rank=1, sealed=b"old")
    assert pair[0].get("g/blob/1") == b"new"


def test_close_is_idempotent(pair: Pair) -> None:
    """Closing twice is closing once."""
    pair[1].close()
    pair[1].close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    """Calls after ``close`` fail with the name of the rendezvous; ``delete`` stays silent."""
    makers: list[Callable[[], Rendezvous]] = [
        lambda: FileRendezvous(tmp_path / "store"),
        lambda: StoreRendezvous(dist.HashStore()),
    ]
    for make in makers:
        rendezvous = make()
        rendezvous.close()
        with pytest.raises(Exception, match="is closed"):
            rendezvous.get("k")
        rendezvous.delete("k")
