"""The fence of the vLLM drop-in, alone: messages lost, doubled, late, out of order; calls that fail and come again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from eplb_async.integrations.vllm.coordinator import Coordinator
from eplb_async.integrations.vllm.member import Member, Phase
from eplb_async.integrations.vllm.messages import Cause, Codec, Kind, Message, MessageError

KEY = bytes(range(32))
ONE, TWO = b"1" * 16, b"2" * 16


@dataclass
class Ranks:
    """N members and the coordinator; messages lie on the way until they are delivered."""

    size: int
    members: list[Member] = field(init=False)
    way: list[tuple[int, Message]] = field(default_factory=list)  # receiver, -1 for the coordinator
    reading: set[int] = field(default_factory=set)
    sent: int = 0

    def __post_init__(self) -> None:
        self.members = [Member(rank) for rank in range(self.size)]
        self.coordinator = Coordinator(self.size)

    def tell(self, message: Message | None) -> None:
        if message is not None:
            self.way.append((-1, message))
            self.sent += 1

    def post(self, mail: list[tuple[int, Message]]) -> None:
        self.way.extend(mail)
        self.sent += len(mail)

    def join(self, rank: int, layer: int = 0, digest: bytes = ONE) -> None:
        self.tell(self.members[rank].join(layer, digest))

    def deliver(self, at: int = 0) -> None:
        receiver, message = self.way.pop(at)
        if receiver < 0:
            self.post(self.coordinator.handle(message))
        else:
            self.tell(self.members[receiver].handle(message))

    def settle(self, *, read: bool = True) -> None:
        """Deliver all in order; ranks that may read are done at once."""
        while self.way or any(m.phase is Phase.READING for m in self.members if read):
            if self.way:
                self.deliver()
            for member in self.members if read else ():
                if member.phase is Phase.READING:
                    self.tell(member.done())

    def tick(self) -> None:
        self.post(self.coordinator.again())
        for member in self.members:
            self.tell(member.again())

    def causes(self) -> list[Cause | None]:
        return [None if m.outcome is None else m.outcome.cause for m in self.members]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 32])
def test_round_takes_a_constant_number_of_messages_for_each_rank(size: int) -> None:
    ranks = Ranks(size)
    for _ in range(3):
        ranks.sent = 0
        for rank in range(size):
            ranks.join(rank)
        ranks.settle()
        assert ranks.causes() == [Cause.NONE] * size
        assert ranks.sent == 5 * size  # JOIN, BEGIN, DONE, END, SEEN; those of rank 0 go nowhere


def test_nobody_reads_before_all_have_joined_and_nobody_leaves_before_all_have_read() -> None:
    ranks = Ranks(3)
    ranks.join(0)
    ranks.join(1)
    ranks.settle()
    assert [m.phase for m in ranks.members] == [Phase.JOINED, Phase.JOINED, Phase.IDLE]
    ranks.join(2)
    ranks.settle(read=False)
    assert all(m.phase is Phase.READING for m in ranks.members)
    ranks.tell(ranks.members[0].done())
    ranks.tell(ranks.members[2].done())
    ranks.settle(read=False)
    assert ranks.causes() == [None, None, None]
    ranks.settle()
    assert ranks.causes() == [Cause.NONE] * 3


def test_waiting_rank_learns_for_whom() -> None:
    ranks = Ranks(3)
    ranks.join(1)
    ranks.settle()
    ranks.tick()
    ranks.settle()
    assert ranks.members[1].waiting_for == "ranks 0, 2 to begin"


def test_other_layer_or_other_indices_end_the_round_naming_who_differs() -> None:
    ranks = Ranks(3)
    for rank, layer in enumerate((4, 4, 5)):
        ranks.join(rank, layer)
    ranks.settle()
    assert ranks.causes() == [Cause.FAILED] * 3
    assert "layer 4 on ranks 0, 1, layer 5 on rank 2" in ranks.members[0].outcome.text  # type: ignore[union-attr]
    for rank, digest in enumerate((ONE, TWO, ONE)):
        ranks.join(rank, 4, digest)
    ranks.settle()
    assert "old_indices of layer 4: ranks 0, 2 against rank 1" in ranks.members[1].outcome.text  # type: ignore[union-attr]
    for rank in range(3):
        ranks.join(rank)
    ranks.settle()
    assert ranks.causes() == [Cause.NONE] * 3


def test_failed_read_ends_the_round_for_all_and_the_next_one_works() -> None:
    ranks = Ranks(3)
    for rank in range(3):
        ranks.join(rank)
    ranks.settle(read=False)
    ranks.tell(ranks.members[1].fail(Cause.FAILED, "it broke"))
    ranks.settle(read=False)
    assert ranks.causes() == [Cause.FAILED] * 3
    assert ranks.members[2].outcome.text == "rank 1: it broke"  # type: ignore[union-attr]
    for rank in range(3):
        ranks.join(rank)
    ranks.settle()
    assert ranks.causes() == [Cause.NONE] * 3


def test_rank_that_fails_before_the_others_have_come_fails_their_call_when_they_do() -> None:
    ranks = Ranks(3)
    ranks.join(1)
    ranks.tell(ranks.members[2].fail(Cause.FAILED, "weights moved"))
    ranks.settle()
    assert ranks.causes() == [None, Cause.FAILED, Cause.FAILED]
    ranks.join(0)
    ranks.settle()
    assert ranks.causes() == [Cause.FAILED] * 3
    for rank in range(3):
        ranks.join(rank)
    ranks.settle()
    assert ranks.causes() == [Cause.NONE] * 3


def test_rank_that_never_came_is_no_failure_of_its_next_call() -> None:
    """Ranks whose calls are one apart fall into step again: rank 2 raised somewhere before it called us."""
    ranks = Ranks(3)
    ranks.join(0)
    ranks.join(1)
    ranks.settle()
    ranks.tell(ranks.members[1].fail(Cause.TIMEOUT, "waited 1 s for rank 2"))
    ranks.settle()
    assert ranks.causes() == [Cause.TIMEOUT, Cause.TIMEOUT, None]
    for rank in (2, 0, 1):
        ranks.join(rank)
    ranks.settle()
    assert ranks.causes() == [Cause.NONE] * 3


def test_rank_that_is_gone_fails_every_call_at_once() -> None:
    ranks = Ranks(3)
    for rank in range(3):
        ranks.join(rank)
    ranks.settle(read=False)
    ranks.post(ranks.coordinator.gone(2, "rank 2 is gone"))
    ranks.settle()
    assert ranks.causes()[:2] == [Cause.GONE] * 2
    ranks.join(0)
    assert ranks.members[0].outcome.origin == 2  # type: ignore[union-attr]
    assert not ranks.way


def test_lost_end_is_asked_for_again_and_lost_fail_is_found_out() -> None:
    ranks = Ranks(2)
    ranks.join(0)
    ranks.join(1)
    ranks.settle(read=False)
    for member in ranks.members:
        ranks.tell(member.done())
    ranks.deliver()
    ranks.deliver()
    ranks.way.clear()  # both ENDs
    ranks.tick()
    ranks.settle()
    assert ranks.causes() == [Cause.NONE] * 2
    ranks.join(0)
    ranks.join(1)
    ranks.settle(read=False)
    ranks.members[1].fail(Cause.FAILED, "it broke")  # nobody hears of it
    ranks.tick()
    ranks.settle(read=False)
    assert ranks.causes() == [Cause.FAILED] * 2


def test_good_end_is_kept_until_it_was_seen() -> None:
    ranks = Ranks(2)
    ranks.join(0)
    ranks.join(1)
    ranks.settle(read=False)
    for member in ranks.members:
        ranks.tell(member.done())
    while ranks.coordinator.is_open:
        ranks.deliver()
    assert [rank for rank, _ in ranks.coordinator.unseen] == [1]
    ranks.settle()
    assert not ranks.coordinator.unseen


@pytest.mark.parametrize("seed", range(60))
def test_random_walks_keep_the_fence_and_fall_into_step_again(seed: int) -> None:
    """Whatever is lost, doubled, late or given up: who leaves well leaves after all have read, in the same round."""
    chance = random.Random(seed)
    ranks = Ranks(chance.choice([2, 3, 4]))
    calls = [0] * ranks.size
    for _ in range(400):
        rank = chance.randrange(ranks.size)
        member = ranks.members[rank]
        act = chance.random()
        if ranks.way and act < 0.6:
            at = chance.randrange(len(ranks.way))
            if chance.random() < 0.1:
                ranks.way.append(ranks.way[at])
            if chance.random() < 0.1:
                ranks.way.pop(at)
            else:
                _deliver_and_check(ranks, at)
        elif member.phase is Phase.IDLE and act < 0.8:
            calls[rank] += 1
            ranks.join(rank)
        elif member.phase is Phase.READING:
            ranks.tell(member.done())
        elif act > 0.97:
            cause = chance.choice([Cause.FAILED, Cause.TIMEOUT])
            ranks.tell(member.fail(cause, "it gave up"))
        elif act > 0.9:
            ranks.tick()
    for _ in range(4):  # from now on nothing is lost: all call, wait until they have ended, and call again
        for rank, member in enumerate(ranks.members):
            if member.phase is Phase.IDLE:
                ranks.join(rank)
        for _ in range(5):
            ranks.settle()
            ranks.tick()
        for member in ranks.members:
            if member.phase is not Phase.IDLE:
                ranks.tell(member.fail(Cause.TIMEOUT, "waited"))
        ranks.settle()
    assert ranks.causes() == [Cause.NONE] * ranks.size, f"seed {seed}"


def _deliver_and_check(ranks: Ranks, at: int) -> None:
    before = [m.phase for m in ranks.members]
    ranks.deliver(at)
    for rank, member in enumerate(ranks.members):
        if before[rank] is Phase.DONE and member.outcome is not None and member.outcome.cause is Cause.NONE:
            reading = [q for q, other in enumerate(ranks.members) if other.phase is Phase.READING]
            assert not [q for q in reading if ranks.members[q]._round == member._round], (rank, reading)


def test_messages_go_and_come_back_and_nothing_else_is_taken() -> None:
    codec = Codec(KEY, 4)
    message = Message(Kind.FAIL, 3, 7, 2, 5, ONE, Cause.TIMEOUT, 1, "rank 3: waited\nlong")
    data = codec.encode(message)
    assert codec.decode(data) == replace(message, text="rank 3: waited long")
    for bad in (data[:-1], data[1:], b"", data + b"x", data[:20] + bytes([data[20] ^ 1]) + data[21:]):
        with pytest.raises(MessageError):
            codec.decode(bad)
    with pytest.raises(MessageError, match="another communicator"):
        Codec(bytes(32), 4).decode(data)
    with pytest.raises(MessageError, match="no rank"):
        Codec(KEY, 2).decode(Codec(KEY, 2).encode(message))
    assert len(codec.encode(replace(message, text="ü" * 5000))) < 700
