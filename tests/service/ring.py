"""Pure rounds of N ranks, back to back: messages wait until a test delivers them, and so does work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from eplb_async.core.placement import Placement
from eplb_async.service.actions import Action, Collect, Decide, End, Move, Send, Stop
from eplb_async.service.payloads import Loads, Message, Verdict, decode
from eplb_async.service.rounds import Rounds

PLACEMENT = Placement.initial(2, 4, ep_size=4)
OTHER = Placement(np.array([[1, 0, 3, 2]] * 2), ep_size=4)
MOVED = Verdict(term=0, round=0, outcome="moved", before=0.5, after=0.9, moves=8, placement=OTHER)


@dataclass
class Rank:
    rounds: Rounds
    work: list[Collect | Decide | Move] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    moves: Counter[int] = field(default_factory=Counter)
    stopped: list[int] = field(default_factory=list)


class Ring:
    """Ranks, and what is under way between them. Every message goes through its bytes."""

    def __init__(self, n: int = 3, *, timeout: float = 10.0, min_interval: float = 0.0) -> None:
        self.now = 0.0
        self.ranks = [Rank(Rounds(rank, timeout=timeout, min_interval=min_interval)) for rank in range(n)]
        self.members: set[int] = set(range(n))
        self.term = 0
        self.wire: list[tuple[int, int, Message]] = []
        self.verdicts: dict[tuple[int, int], set[bytes]] = {}
        self.deaf: set[int] = set()
        """Ranks that get nothing."""
        self.tickets = 0
        self.wanted: dict[int, int] = {}
        for rank in range(n):
            self.see(rank)

    def see(self, rank: int) -> None:
        """A rank hears of the view as it is."""
        self.do(rank, self.ranks[rank].rounds.view(self.term, self.members, self.now))

    def lose(self, rank: int) -> None:
        """A rank is gone; the others have not heard of it yet."""
        self.members.discard(rank)
        self.term += 1

    def want(self, rank: int, *, force: bool = False) -> int:
        self.tickets += 1
        self.wanted[self.tickets] = rank
        self.do(rank, self.ranks[rank].rounds.want(self.tickets, self.now, force=force))
        return self.tickets

    def do(self, rank: int, actions: list[Action]) -> None:
        state = self.ranks[rank]
        for action in actions:
            match action:
                case Send(to, message):
                    assert to != rank
                    again = decode(message.encode(), PLACEMENT)
                    assert again.encode() == message.encode()
                    if isinstance(message, Verdict):
                        self.verdicts.setdefault((message.term, message.round), set()).add(message.encode())
                    self.wire.append((rank, to, again))
                case Collect() | Decide():
                    state.work.append(action)
                case Move(number):
                    assert not any(isinstance(work, Move) for work in state.work), "two migrations at once"
                    state.moves[number] += 1
                    state.work.append(action)
                case Stop(number, _):
                    state.work = [work for work in state.work if not isinstance(work, Move)]
                    state.stopped.append(number)
                case End():
                    state.ends.append(action)

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        """Deliver a message; ``keep`` it for another time, too."""
        sender, to, message = self.wire[index] if keep else self.wire.pop(index)
        if to in self.members - self.deaf:
            self.do(to, self.ranks[to].rounds.receive(sender, message, self.now))

    def finish(self, rank: int, index: int = 0, *, fails: bool = False, tell: bool = True) -> None:
        """Have a piece of a rank's work end."""
        state = self.ranks[rank]
        rounds = state.rounds
        match state.work.pop(index):
            case Collect(number) | Move(number) if fails:
                self.do(rank, rounds.failed(number, "it does not work", self.now, tell=tell))
            case Collect(number):
                loads = Loads(term=0, round=0, loads=np.full((2, 4), rank + 1.0), steps=rank)
                self.do(rank, rounds.collected(number, loads, self.now))
            case Decide(number):
                failed = replace(MOVED, outcome="failed", placement=None)
                self.do(rank, rounds.decided(number, failed if fails else MOVED, self.now))
            case Move(number):
                self.do(rank, rounds.moved(number, self.now))

    def settle(self, most: int = 10_000) -> None:
        """Deliver and do everything that there is, in order; no time passes."""
        for _ in range(most):
            if self.wire:
                self.deliver()
                continue
            busy = [rank for rank in sorted(self.members) if self.ranks[rank].work]
            if not busy:
                return
            self.finish(busy[0])
        raise AssertionError("it never settles")

    def pass_time(self, seconds: float) -> None:
        """Time passes, and every rank is woken when it wants to be."""
        until = self.now + seconds
        while True:
            wakes = [at for rank in self.members if (at := self.ranks[rank].rounds.next_wakeup) is not None]
            if not wakes or min(wakes) > until:
                break
            self.now = max(self.now, min(wakes))
            for rank in sorted(self.members):
                self.do(rank, self.ranks[rank].rounds.tick(self.now))
        self.now = until

    def outcome(self, ticket: int) -> End:
        """How a wish ended: exactly once."""
        ends = [end for end in self.ranks[self.wanted[ticket]].ends if ticket in end.tickets]
        assert len(ends) == 1, (ticket, ends)
        return ends[0]
