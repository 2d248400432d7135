"""The calls of the vLLM drop-in, two ranks in one process on real NIXL: what each takes, refuses, and reads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_async.errors import HandshakeError, NixlTransferFailed, NixlTransferTimeout
from eplb_async.integrations.vllm import AsyncNixlEplbCommunicator
from eplb_async.settings import Settings

OLD = np.array([0, 1, 2, 1, 3, -1, 4, 3])  # expert 1 twice on rank 0, 3 twice on rank 1; an empty slot


class Two:
    """Two ranks, each with a thread of its own."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self.threads = [ThreadPoolExecutor(1) for _ in range(2)]
        limit = timedelta(seconds=20)
        self.groups: list[Any] = self.both(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit))
        self.weights = [
            [[torch.arange(4 * 6).view(4, 6).add(100 * rank + 1000 * layer).to(torch.int32)] for layer in range(2)]
            for rank in range(2)
        ]
        self.buffers = [[torch.zeros(4, 6, dtype=torch.int32)] for _ in range(2)]
        self.comms: list[AsyncNixlEplbCommunicator] = []

    def both(self, work: Callable[[int], Any]) -> list[Any]:
        """What each rank's work answers; an error in place of an answer."""
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self.threads)]
        return [f.exception(30) or f.result() for f in futures]

    def make(self, **more: Any) -> list[Any]:
        def one(rank: int) -> Any:
            given = {"settings": Settings(close_timeout=1.0), "timeout": 3.0, "arrival_timeout": 20.0} | more
            return AsyncNixlEplbCommunicator(self.groups[rank], self.weights[rank], self.buffers[rank], **given)

        made = self.both(one)
        self.comms = [comm for comm in made if isinstance(comm, AsyncNixlEplbCommunicator)]
        return made

    def execute(self) -> list[Any]:
        return self.both(lambda rank: self.comms[rank].execute())

    def receive(self, rank: int, row: int, source: int, expert: int) -> None:
        self.comms[rank].add_recv([self.buffers[rank][0][row]], source, expert)


@pytest.fixture
def two() -> Iterator[Two]:
    ranks = Two()
    try:
        yield ranks
    finally:
        for comm in ranks.comms:
            comm.close()
        for thread in ranks.threads:
            thread.shutdown()


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_rows_are_found_as_vllm_reads_the_indices(two: Two, use_uvloop: bool) -> None:
    """The last row of an expert that a rank holds twice; empty slots hold nothing; what is too long is not read."""
    two.make(settings=Settings(close_timeout=1.0, use_uvloop=use_uvloop))
    for comm in two.comms:
        assert not comm.needs_profile_buffer_reservation
        comm.set_stream(None)
        comm.set_transfer_context(np.concatenate([OLD, [7, 7, 7]]).astype(np.int32), 1)
    two.receive(0, 2, 1, 3)
    two.receive(0, 0, 1, 4)
    two.comms[1].add_send([two.weights[1][1][0][2]], 0, expert_id=4)
    two.receive(1, 3, 0, 1)
    assert two.execute() == [None, None]
    assert two.buffers[0][0].tolist() == [
        two.weights[1][1][0][2].tolist(),
        [0] * 6,
        two.weights[1][1][0][3].tolist(),
        [0] * 6,
    ]
    assert two.buffers[1][0][3].tolist() == two.weights[0][1][0][3].tolist()
    assert two.execute() == [None, None]  # without a context: the fence alone


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: t.receive(0, 0, 1, 3), r"add_recv\(\) before set_transfer_context"),
        (lambda t: t.comms[0].set_transfer_context(OLD[:7], 0), "8 or more whole numbers, not int64 .7."),
        (lambda t: t.comms[0].set_transfer_context(OLD.astype(float), 0), "not float64"),
        (lambda t: t.comms[0].set_transfer_context(OLD, 2), "no layer 2"),
        (lambda t: (t.comms[0].set_transfer_context(OLD, 0), t.receive(0, 0, 0, 0)), "rank 0 cannot be read from"),
        (lambda t: (t.comms[0].set_transfer_context(OLD, 0), t.receive(0, 0, 2, 0)), "rank 2 cannot be read from"),
        (lambda t: (t.comms[0].set_transfer_context(OLD, 0), t.receive(0, 0, 1, 0)), "rank 1 does not hold expert 0"),
        (lambda t: (t.comms[0].set_transfer_context(OLD, 0), t.receive(0, 0, 1, -1)), "does not hold expert -1"),
        (
            lambda t: (t.comms[0].set_transfer_context(OLD, 0), t.receive(0, 0, 1, 3), t.receive(0, 0, 1, 4)),
            "row 0 of expert_buffer is to receive two",
        ),
        (
            lambda t: (t.comms[0].set_transfer_context(OLD, 0), t.comms[0].add_recv([torch.zeros(6)], 1, 3)),
            "no row of expert_buffer",
        ),
        (
            lambda t: (
                t.comms[0].set_transfer_context(OLD, 0),
                t.receive(0, 0, 1, 3),
                t.comms[0].set_transfer_context(OLD, 1),
            ),
            "layer 0 was given experts to receive, but never executed",
        ),
    ],
)
def test_call_that_is_wrong_fails_both_ranks_once(two: Two, call: Callable[[Two], Any], says: str) -> None:
    two.make()
    with pytest.raises(NixlTransferFailed, match=says) as caught:
        call(two)
    assert str(caught.value).startswith("NIXL transfer failed with state=ERR")
    with pytest.raises(NixlTransferFailed, match="rank 0: ") as told:
        two.comms[1].execute()
    assert told.value.rank == 0
    assert two.execute() == [None, None]


def test_rows_to_send_that_are_not_those_that_peers_read_fail_both_ranks(two: Two) -> None:
    """As after a reload that gave vLLM's list other tensors: the ones that were registered are alive, and stale."""
    for rank in range(2):
        two.weights[rank] = [[*tensors, torch.zeros(4, 3)] for tensors in two.weights[rank]]
        two.buffers[rank].append(torch.zeros(4, 3))
    two.make()
    first, second = two.weights[0][1]
    two.comms[0].set_transfer_context(OLD, 1)
    for row in (1, 3):  # it holds expert 1 twice
        two.comms[0].add_send([first[row], second[row]], 1, expert_id=1)
    with pytest.raises(NixlTransferFailed, match="layer 1, tensor 1, row 2: it is not where it was registered"):
        two.comms[0].add_send([first[2], second.clone()[2]], 1, expert_id=2)
    with pytest.raises(NixlTransferFailed, match=r"rank 0: .*tensor 1, row 2"):
        two.comms[1].execute()
    two.comms[0].set_transfer_context(OLD, 1)
    with pytest.raises(NixlTransferFailed, match="this rank does not hold expert 4 by old_indices"):
        two.comms[0].add_send([first[2], second[2]], 1, expert_id=4)
    with pytest.raises(NixlTransferFailed, match="rank 0: "):
        two.comms[1].execute()
    two.comms[0].set_transfer_context(OLD, 1)
    with pytest.raises(NixlTransferFailed, match="2 tensors, 1 rows were given to send"):
        two.comms[0].add_send([first[2]], 1, expert_id=2)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError("CUDA error: an illegal memory access"), NixlTransferFailed), (KeyboardInterrupt(), None)],
)
def test_error_before_a_round_is_told_to_the_others(
    two: Two, error: BaseException, raised: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.make(timeout=20.0)

    def wait(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("eplb_async.integrations.vllm.communicator.wait_for_streams", wait)
        with pytest.raises(raised or KeyboardInterrupt) as caught:
            two.comms[0].execute()
    assert raised is None or "illegal memory" in str(caught.value)
    with pytest.raises(NixlTransferFailed, match=r"rank 0: .*(illegal memory|interrupted)") as told:
        two.comms[1].execute()
    assert not isinstance(told.value, NixlTransferTimeout)
    assert two.execute() == [None, None]


def test_error_of_another_kind_in_a_round_is_one_of_a_transfer(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.make(timeout=20.0)

    async def read(endpoint: Any, posts: Any, peers: Any, **_: Any) -> None:
        if posts:
            raise KeyError("a slip of ours")

    for comm in two.comms:
        comm.set_transfer_context(OLD, 0)
    two.receive(0, 2, 1, 3)
    with monkeypatch.context() as patched:
        patched.setattr("eplb_async.integrations.vllm.communicator.read_all", read)
        errors = two.execute()
    assert all(isinstance(error, NixlTransferFailed) and "a slip of ours" in str(error) for error in errors), errors
    assert two.execute() == [None, None]


def test_leases_of_many_rows_are_waited_for_within_one_deadline(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.make(timeout=2.0)
    comm = two.comms[0]
    limits: list[float] = []

    async def released(intervals: object, timeout: float) -> bool:
        limits.append(timeout)
        await asyncio.sleep(0.02)
        return True

    monkeypatch.setattr(comm._group.endpoint, "released", released)
    comm._tainted.update({0: 1, 1: 1, 2: 1})
    with pytest.raises(NixlTransferFailed, match=r"wrote rows \[0, 1, 2\]"):
        comm.execute()
    assert 2.0 >= limits[0] > limits[1] > limits[2]


def test_rank_that_does_not_come_is_named(two: Two) -> None:
    two.make(timeout=0.4)
    with pytest.raises(NixlTransferTimeout, match=r"waited 0.4 s for rank 1 to begin"):
        two.comms[0].execute()
    with pytest.raises(NixlTransferTimeout, match=r"waited 0.4 s for rank 0 to begin"):
        two.comms[1].execute()
    assert two.execute() == [None, None]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda t: t.buffers[1].clear(), "rank 1: WeightsError: layer 0 has 1 tensors, expert_buffer 0"),
        (lambda t: t.weights[1].pop(), "number of layers"),
        (
            lambda t: (t.weights[1].__setitem__(slice(None), [[w.float()] for (w,) in t.weights[1]]),
                       t.buffers[1].__setitem__(0, t.buffers[1][0].float())),
            "dtype is 'int32' here, 'float32' there",
        ),
    ],
)  # fmt: skip
def test_constructor_fails_on_both_ranks_naming_the_one_at_fault(two: Two, spoil: Any, says: str) -> None:
    before = threading.active_count()
    spoil(two)
    made = two.make()
    assert all(isinstance(error, HandshakeError) and says in str(error) for error in made), made
    assert not [t for t in threading.enumerate() if t.name.startswith("eplb-async vllm")]
    assert threading.active_count() <= before


def test_nixl_that_makes_no_agent_fails_both_ranks(two: Two) -> None:
    def missing(name: str, settings: Settings) -> Any:
        raise NixlTransferFailed("no plugin", phase="open")

    made = two.both(
        lambda rank: AsyncNixlEplbCommunicator(
            two.groups[rank], two.weights[rank], two.buffers[rank], **({"native": missing} if rank == 1 else {})
        )
    )
    assert all(isinstance(error, HandshakeError) and "rank 1: NixlTransferFailed: " in str(error) for error in made)


def test_setting_that_is_wrong_on_one_rank_fails_both(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLB_ASYNC_READ_TIMEOUT", "soon")
    given = {1: {}, 0: {"settings": Settings(), "timeout": 1.0}}
    made = two.both(
        lambda rank: AsyncNixlEplbCommunicator(two.groups[rank], two.weights[rank], two.buffers[rank], **given[rank])
    )
    assert all("rank 1: ValueError: EPLB_ASYNC_READ_TIMEOUT='soon'" in str(error) for error in made), made


def test_close_ends_the_call_of_another_thread_and_later_ones(two: Two) -> None:
    two.make(timeout=20.0)
    waiting = two.threads[0].submit(two.comms[0].execute)
    two.comms[0].close()
    assert isinstance(waiting.exception(10), NixlTransferFailed)
    assert "closed" in str(waiting.exception(10))
    with pytest.raises(NixlTransferFailed, match="closed"):
        two.comms[0].execute()
    with pytest.raises(NixlTransferFailed, match="rank 0"):  # it was told, or finds out
        two.comms[1].execute()


def test_ranks_of_different_secrets_do_not_meet(two: Two) -> None:
    secrets = (b"the secret of the job", b"another secret, so wrong")
    made = two.both(
        lambda rank: AsyncNixlEplbCommunicator(
            two.groups[rank], two.weights[rank], two.buffers[rank], settings=Settings(secret=secrets[rank])
        )
    )
    assert all(isinstance(error, HandshakeError) and "secret" in str(error) for error in made), made
    assert not any(secret.decode() in str(error) for secret in secrets for error in made)


def test_communicators_over_the_same_weights_live_side_by_side(two: Two) -> None:
    """As in elastic EP: the next one is made, over a group that torch does not know, while the old one is in use."""
    old = two.make()
    store, limit = dist.HashStore(), timedelta(seconds=20)

    def stateless(rank: int) -> dist.ProcessGroup:
        prefixed = dist.PrefixStore("tcp://127.0.0.1:1", store)
        group, gloo = dist.ProcessGroup(prefixed, rank, 2), dist.ProcessGroupGloo(prefixed, rank, 2, limit)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group

    two.groups = two.both(stateless)
    new = two.make()
    for turn, two.comms in enumerate((old, new, old, new)):
        for comm in two.comms:
            comm.set_transfer_context(OLD, turn % 2)
        two.receive(0, turn, 1, 4)
        assert two.execute() == [None, None]
        assert two.buffers[0][0][turn].tolist() == two.weights[1][turn % 2][0][2].tolist()
    old[0].close()
    old.clear()
    assert two.execute() == [None, None]


def test_one_rank_alone_has_rounds_of_its_own() -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    comm = AsyncNixlEplbCommunicator(group, [[torch.zeros(4, 6)]], [torch.zeros(4, 6)], timeout=5.0)
    for _ in range(2):
        comm.set_transfer_context(np.arange(4), 0)
        comm.execute()
    comm.close()
