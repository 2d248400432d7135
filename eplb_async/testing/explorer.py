"""Walks everything a `Ring` may do, breadth first: each state is safe, and has a way back to rest.

The states are kept whole, in numbers and not as hashes, so "all" means all. What makes a state is reduced to what
can matter (``reductions``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eplb_async.testing.board import Names
from eplb_async.testing.moves import Move, Violation
from eplb_async.testing.ring import Ring


@dataclass(frozen=True, slots=True)
class Explored:
    """What was walked.

    Attributes:
        states: Distinct states found.
        moves: Moves tried.
        depth: Length of the longest of the shortest ways to a state.
        at_rest: States in which all who live are idle and a next epoch was seen to complete.
        exhaustive: Whether nothing was left out by ``max_states``.
    """

    states: int
    moves: int
    depth: int
    at_rest: int
    exhaustive: bool


def explore(
    ring: Ring,
    *,
    max_states: int = 1_000_000,
    liveness: bool = True,
    reduced: bool = True,
    visit: Callable[[Ring], None] | None = None,
) -> Explored:
    """Explores from the ring's present state, breadth first.

    Args:
        ring: Left as it was found. What may happen is in ``ring.limits``.
        max_states: Bound; every state nearer than the last ones is still explored.
        liveness: Check too that from every state a way of helpful moves leads to rest (I-9). Only judged
            when the exploration is exhaustive, and not where messages are ``unreliable``.
        reduced: Leave out what can never matter.
        visit: Called with the ring in each new state.

    Raises:
        Violation: With the moves that lead there, which `Ring.play` repeats.
    """
    start, recording = ring.state, ring.recording
    ring.recording, ring.reduced = False, reduced
    liveness = liveness and not ring.limits.unreliable
    walk = _Walk(ring, liveness, visit)
    try:
        exhaustive = walk.run(max_states)
        if exhaustive and liveness:
            walk.check_returns()
    finally:
        ring.state, ring.recording, ring.reduced = start, recording, False
    return Explored(len(walk.states), walk.moves, walk.depth, sum(walk.goal), exhaustive)


class _Walk:
    def __init__(self, ring: Ring, liveness: bool, visit: Callable[[Ring], None] | None) -> None:
        self.ring = ring
        self.liveness = liveness
        self.visit = visit or (lambda ring: None)
        self.states = [ring.pack()]
        self.index = {self.states[0]: 0}
        self.parent, self.how = array("I", [0]), array("I", [0])
        self.names: Names[Move] = Names()
        self.sources, self.targets = array("I"), array("I")
        self.goal = bytearray()
        self.depth = 0
        self.moves = 0

    def run(self, max_states: int) -> bool:
        self.visit(self.ring)
        head, level_end = 0, 1
        while head < len(self.states):
            if head == level_end:
                self.depth += 1
                level_end = len(self.states)
            if len(self.states) > max_states:
                return False
            self._expand(head)
            head += 1
        return True

    def _expand(self, head: int) -> None:
        ring = self.ring
        ring.unpack(self.states[head])
        move: Move | None = None
        try:
            rest = ring.is_at_rest()
            self.goal.append(rest)
            if rest:
                ring.check_usable()
            state = ring.state
            for move in list(ring.moves()):
                ring.state = state
                ring.play(move)
                self.moves += 1
                found = self._find(head, move)
                if self.liveness and move.helpful and found != head:
                    self.sources.append(head)
                    self.targets.append(found)
        except Exception as error:
            raise Violation(self.story(head, move, str(error))) from error

    def _find(self, head: int, move: Move) -> int:
        """The number of the state in which the ring stands, new or not."""
        packed = self.ring.pack()
        found = self.index.get(packed)
        if found is None:
            self.ring.check()
            found = self.index[packed] = len(self.states)
            self.states.append(packed)
            self.parent.append(head)
            self.how.append(self.names.number(move))
            self.visit(self.ring)
        return found

    def check_returns(self) -> None:
        """I-9: from every state, helpful moves lead to rest."""
        back = np.frombuffer(self.goal, dtype=bool).copy()
        sources, targets = (np.frombuffer(side, dtype=np.uint32) for side in (self.sources, self.targets))
        while (new := sources[back[targets] & ~back[sources]]).size:
            back[new] = True
        if not back.all():
            lost = np.flatnonzero(~back)
            raise Violation(self.story(int(lost[0]), None, f"I-9: no way back to rest from {lost.size} states"))

    def story(self, at: int, last: Move | None, what: str) -> str:
        """The moves that lead to a state, one a line."""
        way: list[Move] = [last] if last else []
        while at:
            way.append(self.names.values[self.how[at]])
            at = self.parent[at]
        return "\n  ".join([what, *map(str, reversed(way))])
