"""A rank's start and the job's key."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous import derive_key, job_key, join, next_incarnation

SECRET = b"0123456789abcdef"


def test_each_start_is_a_newer_incarnation(memory: Any) -> None:
    """Counted per rank and group, from 1."""
    assert [next_incarnation(memory, "a", 0) for _ in range(3)] == [1, 2, 3]
    assert next_incarnation(memory, "a", 1) == 1
    assert next_incarnation(memory, "b", 0) == 1


def test_a_secret_gives_each_group_its_key_and_stores_nothing(memory: Any) -> None:
    """Keys are derived, 32 bytes, and differ by group and secret."""
    keys = {
        job_key(memory, group=group, rank=3, secret=secret) for group in ("a", "b") for secret in (SECRET, SECRET[::-1])
    }
    assert len(keys) == 4
    assert {len(key or b"") for key in keys} == {32}
    assert memory.values == {}
    assert job_key(memory, group="a", rank=0, secret=SECRET) == derive_key(SECRET, "a")


def test_without_a_secret_rank_0_makes_the_key(memory: Any) -> None:
    """Others find none before, and the same one after."""
    assert job_key(memory, group="a", rank=1, secret=None) is None
    key = job_key(memory, group="a", rank=0, secret=None)
    assert key is not None
    assert job_key(memory, group="a", rank=1, secret=None) == key
    assert job_key(memory, group="b", rank=0, secret=None) != key


def test_a_later_run_and_a_restarted_rank_0_keep_the_key(memory: Any) -> None:
    """So a rank that starts before rank 0 has the right key, and rank 0 can verify those who live on."""
    before = job_key(memory, group="a", rank=0, secret=None)
    early = job_key(memory, group="a", rank=1, secret=None)
    again = job_key(memory, group="a", rank=0, secret=None)
    assert before == early == again


def test_a_public_rendezvous_keeps_no_key(memory: Any) -> None:
    """Without a secret there is no key to be had there."""
    memory.trusted = False
    with pytest.raises(HandshakeError, match="EPLB_ASYNC_SECRET"):
        job_key(memory, group="a", rank=0, secret=None)
    assert job_key(memory, group="a", rank=0, secret=SECRET) is not None


def test_what_is_no_key_is_refused(memory: Any) -> None:
    """Something else under that name is not used as a key."""
    memory.set("a/key", b"short")
    with pytest.raises(HandshakeError, match=r"'a/key' .* is no job key \(5 bytes\)"):
        job_key(memory, group="a", rank=0, secret=None)


@pytest.mark.asyncio
async def test_join_waits_for_rank_0(memory: Any) -> None:
    """Ranks may start in any order; all get the same key."""
    other = asyncio.create_task(join(memory, group="a", rank=1, secret=None, timeout=20))
    await asyncio.sleep(0)
    first = await join(memory, group="a", rank=0, secret=None, timeout=20)
    second = await other
    assert (first.incarnation, second.incarnation) == (1, 1)
    assert first.key == second.key
    assert repr(first) == "Joined(incarnation=1)"


@pytest.mark.asyncio
async def test_join_without_rank_0_is_bounded_and_says_so(memory: Any) -> None:
    """The message names rank, rendezvous and whom it waits for."""
    with pytest.raises(HandshakeError, match=r"rank 1 waited 0\.1 s at .*memory.*is rank 0 running"):
        await join(memory, group="a", rank=1, secret=None, timeout=0.1)


@pytest.mark.asyncio
async def test_join_on_a_store_that_hangs_is_bounded(memory: Any) -> None:
    """The loop does not wait for the thread."""
    free = threading.Event()
    memory.add = lambda key, amount: free.wait() and 1
    with pytest.raises(HandshakeError, match="to count this start"):
        await join(memory, group="a", rank=1, secret=None, timeout=0.1)
    free.set()


@pytest.mark.asyncio
async def test_join_on_a_store_that_fails_is_a_handshake_error(memory: Any) -> None:
    """Whatever a caller's Rendezvous raises is the cause."""

    def add(key: str, amount: int) -> int:
        raise ConnectionResetError("etcd is gone")

    memory.add = add
    with pytest.raises(HandshakeError, match="etcd is gone") as caught:
        await join(memory, group="a", rank=1, secret=None, timeout=5)
    assert isinstance(caught.value.__cause__, ConnectionResetError)
