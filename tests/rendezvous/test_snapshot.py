"""A ProcessGroup as a rendezvous."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous import GroupRendezvous, Rendezvous, job_key, next_incarnation, resolve
from tests.rendezvous.groups import on_groups


def resolved(group: Any, *, timeout: float = 20) -> Any:
    return resolve(group, rank=group.rank(), ep_size=group.size(), secret=None, timeout=timeout)


def test_ranks_find_what_all_have_set() -> None:
    """One value each, the same key for all, each start newer than the one before."""

    def call(group: Any) -> Any:
        rendezvous = resolved(group)
        assert isinstance(rendezvous, GroupRendezvous)
        assert isinstance(rendezvous, Rendezvous)
        rank = group.rank()
        starts = [next_incarnation(rendezvous, "g", rank) for _ in range(2)]
        assert starts[1] > starts[0]
        key = job_key(rendezvous, group="g", rank=rank, secret=None)
        assert rendezvous.get("g/blob/0") is None
        rendezvous.set(f"g/blob/{rank}", bytes([rank]) * (rank * 1000))
        return key, [rendezvous.get(f"g/blob/{peer}") for peer in range(group.size())]

    first, *others = [one.result() for one in on_groups(3, call)]
    assert first == (first[0], [b"", b"\1" * 1000, b"\2" * 2000])
    assert others == [first, first]


def test_every_open_has_a_key_of_its_own() -> None:
    """Nothing of an earlier one can be said again."""

    def call(group: Any) -> Any:
        return [job_key(resolved(group), group="g", rank=group.rank(), secret=None) for _ in range(2)]

    first, second = (one.result() for one in on_groups(2, call))
    assert first == second
    assert first[0] != first[1]


def test_a_second_value_is_refused_at_once() -> None:
    """It would be another collective, which nobody else makes."""

    def call(group: Any) -> None:
        rendezvous = resolved(group)
        rendezvous.set("g/blob/0", b"x")
        rendezvous.set("g/blob/0", b"y")

    for one in on_groups(2, call):
        with pytest.raises(HandshakeError, match=r"ProcessGroup gathers introductions once.*file://"):
            one.result()


@pytest.mark.parametrize(("rank", "ep_size"), [(1, 2), (0, 3)])
def test_numbers_that_are_not_the_groups_are_refused_on_every_rank(rank: int, ep_size: int) -> None:
    """By name, and the group stays in step."""

    def call(group: Any) -> Any:
        numbers = (rank, ep_size) if group.rank() == 0 else (1, 2)
        with pytest.raises(ValueError, match=f"rank {rank} of {ep_size} cannot open .* there it is rank 0 of 2"):
            resolve(group, rank=numbers[0], ep_size=numbers[1], secret=None, timeout=20)
        return resolved(group).get("g/key")

    one, other = (done.result() for done in on_groups(2, call))
    assert one == other


def test_ranks_that_open_different_groups_are_told() -> None:
    """Opened at once, in another order: both are named."""

    def call(group: Any) -> None:
        resolved(group).set(f"{'ab'[group.rank()]}/blob/{group.rank()}", b"x")

    for one, (mine, other) in zip(
        on_groups(2, call), [("a/blob/0", "b/blob/1"), ("b/blob/1", "a/blob/0")], strict=True
    ):
        with pytest.raises(HandshakeError, match=f"opens '{other}' at this moment, and this rank '{mine}'"):
            one.result()


def test_a_rank_that_never_opens_is_bounded_and_a_second_try_does_not_wait_again() -> None:
    """The deadline is one for all of it; what failed once fails again at once."""
    over = threading.Event()

    def call(group: Any) -> None:
        if group.rank() == 1:
            resolved(group)
            over.wait(20)
            return
        rendezvous = resolved(group, timeout=1)
        for _ in range(2):
            with pytest.raises(HandshakeError, match="cannot say who is missing"):
                rendezvous.set("g/blob/0", b"x")
        over.set()

    for one in on_groups(2, call, timeout=3):
        one.result()
