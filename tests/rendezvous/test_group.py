"""Bytes of all ranks over a ProcessGroup."""

from __future__ import annotations

import struct
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous.group import MAX_PAYLOAD, gather
from tests.rendezvous.groups import on_groups


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_gets_the_bytes_of_all_in_rank_order(size: int) -> None:
    """Of any length, also none, and any bytes."""
    payloads = [bytes(range(256)) * (37 * rank) for rank in range(size)]
    done = on_groups(size, lambda group: gather(group, payloads[group.rank()], timeout=20))
    assert [one.result() for one in done] == [payloads] * size


def test_nothing_from_anybody_is_nothing() -> None:
    """A gather of no bytes is a barrier."""
    assert [one.result() for one in on_groups(2, lambda group: gather(group, b"", timeout=20))] == [[b"", b""]] * 2


def test_a_rank_that_does_not_call_is_bounded_by_the_deadline() -> None:
    """And the error says that a collective cannot name it, and that the group is spent."""
    over = threading.Event()

    def call(group: Any) -> Any:
        if group.rank() == 2:
            over.wait(20)
            return None
        started = time.monotonic()
        with pytest.raises(HandshakeError, match=r"3 could not gather .*0\.3 s .*cannot say who.*make a new one"):
            gather(group, b"x", timeout=0.3)
        over.set()
        return time.monotonic() - started

    waited = [one.result() for one in on_groups(3, call, timeout=2)]
    assert max(waited[:2]) < 10


def test_a_backend_that_ignores_timeouts_is_bounded_too() -> None:
    """The wait happens on a thread that nobody has to wait for."""
    free = threading.Event()

    class Group:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 0

        def allgather(self, *_: Any) -> Any:
            free.wait(20)

    with pytest.raises(HandshakeError, match="its collective did not come back"):
        gather(Group(), b"x", timeout=0.1)  # type: ignore[arg-type]
    free.set()


@pytest.mark.parametrize("header", [struct.pack(">8sQ", b"EPLBGRP1", MAX_PAYLOAD + 1), b"another matter  "])
def test_what_is_no_header_of_ours_is_refused(header: bytes) -> None:
    """Bytes of another collective, and lengths out of range, name their rank; nothing is allocated for them."""

    def call(group: Any) -> None:
        if group.rank() == 0:
            gather(group, b"x", timeout=20)
        mine = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        group.allgather([[torch.empty(16, dtype=torch.uint8) for _ in range(2)]], [mine]).wait(timedelta(seconds=20))

    with pytest.raises(HandshakeError, match="rank 1 of the ProcessGroup answered with bytes of something else"):
        on_groups(2, call)[0].result()


def test_a_group_without_a_cpu_backend_says_what_to_make() -> None:
    """As one of nccl alone; refused at once, on every rank."""
    bare = dist.ProcessGroup(dist.HashStore(), 0, 2)
    with pytest.raises(ValueError, match=r'no backend for CPU tensors.*new_group\(backend="gloo"\)'):
        gather(bare, b"x", timeout=20)


@pytest.mark.parametrize("group", [None, dist.GroupMember.NON_GROUP_MEMBER, "gloo"])
def test_what_is_no_group_of_this_process_is_refused(group: Any) -> None:
    """``new_group`` gives those outside it a number."""
    with pytest.raises(ValueError, match="of which this process is a member"):
        gather(group, b"x", timeout=20)


def test_wrong_numbers_are_refused_before_anything_is_sent() -> None:
    """A payload too long, a time already over."""
    group: Any = dist.ProcessGroup(dist.HashStore(), 0, 2)
    with pytest.raises(ValueError, match="too long to gather"):
        gather(group, bytes(MAX_PAYLOAD + 1), timeout=20)
    with pytest.raises(ValueError, match="must be positive"):
        gather(group, b"", timeout=0.0)
