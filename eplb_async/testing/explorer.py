"""Walks everything a `Ring` may do, breadth first: each state is safe, and has a way back to rest.

The states are kept whole, not as hashes, so "all" means all.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from eplb_async.testing.ring import Move, Ring, State, Violation


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


def explore(ring: Ring, *, max_states: int = 1_000_000, liveness: bool = True) -> Explored:
    """Explores from the ring's present state, breadth first.

    Args:
        ring: Left as it was found. What may happen is in ``ring.limits``.
        max_states: Bound; every state nearer than the last ones is still explored.
        liveness: Check too that from every state a way of helpful moves leads to rest (I-9). Only judged
            when the exploration is exhaustive.

    Raises:
        Violation: With the moves that lead there, which `Ring.play` repeats.
    """
    start, recording = ring.state, ring.recording
    ring.recording = False
    walk = _Walk(ring, start)
    try:
        exhaustive = walk.run(max_states)
        if exhaustive and liveness:
            walk.check_returns()
    finally:
        ring.state, ring.recording = start, recording
    return Explored(len(walk.states), walk.moves, walk.depth, sum(walk.goal), exhaustive)


class _Walk:
    def __init__(self, ring: Ring, start: State) -> None:
        self.ring = ring
        self.states = [start]
        self.index = {start: 0}
        self.parent = array("q", [-1])
        self.how: list[Move | None] = [None]
        self.sources, self.targets = array("I"), array("I")
        self.goal = bytearray()
        self.depth = 0
        self.moves = 0

    def run(self, max_states: int) -> bool:
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
        ring, state = self.ring, self.states[head]
        ring.state = state
        move: Move | None = None
        try:
            rest = ring.is_at_rest()
            self.goal.append(rest)
            if rest:
                ring.check_usable()
            for move in list(ring.moves()):
                ring.state = state
                ring.play(move)
                self.moves += 1
                found = self.index.get(ring.state)
                if found is None:
                    ring.check()
                    found = self.index[ring.state] = len(self.states)
                    self.states.append(ring.state)
                    self.parent.append(head)
                    self.how.append(move)
                if move.helpful:
                    self.sources.append(head)
                    self.targets.append(found)
        except Exception as error:
            raise Violation(self.story(head, move, str(error))) from error

    def check_returns(self) -> None:
        """I-9: from every state, helpful moves lead to rest."""
        into: list[list[int]] = [[] for _ in self.states]
        for source, target in zip(self.sources, self.targets, strict=True):
            into[target].append(source)
        back = bytearray(self.goal)
        todo = [state for state, goal in enumerate(self.goal) if goal]
        while todo:
            for source in into[todo.pop()]:
                if not back[source]:
                    back[source] = 1
                    todo.append(source)
        lost = back.count(0)
        if lost:
            raise Violation(self.story(back.index(0), None, f"I-9: no way back to rest from {lost} states"))

    def story(self, at: int, last: Move | None, what: str) -> str:
        """The moves that lead to a state, one a line."""
        way: list[Move | None] = [last] if last else []
        while self.parent[at] >= 0:
            way.append(self.how[at])
            at = self.parent[at]
        return "\n  ".join([what, *map(str, reversed(way))])
