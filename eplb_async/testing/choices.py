"""What may happen next in a ring of pure protocols."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eplb_async.core.events import Phase, Proof
from eplb_async.core.protocol import Protocol
from eplb_async.core.steps import Frozen, StepCounter
from eplb_async.testing.board import FLYING, SPOILT, Board, Body
from eplb_async.testing.moves import USES, Limits, Move


@dataclass(frozen=True, slots=True)
class Walk:
    """The engines of a ring in lock-step.

    Attributes:
        steps: How many steps each runs at most; it is idle after the last.
        margin: As for ``StepCounter``.
        idle_after: After which steps the engines are idle.
    """

    steps: int
    margin: int = 1
    idle_after: frozenset[int] = frozenset()

    def counter(self, frozen: Frozen) -> StepCounter:
        """The counter of a rank as it stands."""
        counter = StepCounter(self.margin)
        counter.thaw(frozen)
        return counter


class Choices(Board):
    """A board with the moves that are possible where it stands.

    Attributes:
        limits: How often what may be chosen.
        pings: Whether a ``Tick`` pings whom a rank waits for.
        reduced: Whether what can never matter is taken away (see ``reductions``); `explore` sets it.
    """

    def __init__(self, protocols: list[Protocol], body: Body, limits: Limits, *, pings: bool) -> None:
        super().__init__(protocols, body)
        self.limits = limits
        self.pings = pings
        self.reduced = False
        self.walk: Walk | None = None
        self._own: dict[Any, tuple[Move, ...]] = {}

    def moves(self) -> Iterator[Move]:
        """Everything that may happen next, within the limits."""
        others = tuple(map(self.has_ended, range(self.ep_size)))
        limits = self.limits
        for rank in self.alive():
            key = (rank, self.protocols[rank], self.bodies[rank], others, self.used, self.lost_links, limits)
            own = self._own.get(key)
            if own is None:
                own = self._own[key] = tuple(self._moves_of(rank))
            yield from own
            yield from self._steps_of(rank)
            if self.pings and self.face(rank).wakeup and self._may_ping(rank):
                yield Move("ping", (rank,))
        if self.limits.returns:
            yield from self._comings()
        yield from self._traffic()

    def _moves_of(self, rank: int) -> Iterator[Move]:
        """What a rank may do or suffer, messages apart."""
        limits, face, body = self.limits, self.face(rank), self.body(rank)
        left = {name: getattr(limits, name) - used for name, used in zip(USES, self.uses(), strict=True)}
        busy = face.phase is not Phase.IDLE or face.outside or face.arriving or face.leaving >> rank & 1
        if not busy and not body.due and body.migrations < limits.migrations:
            yield Move("migrate", (rank,))
        if any(read in (FLYING, SPOILT) for read in body.reads):
            yield Move("stage", (rank,))
        if left["give_ups"] and face.phase in (Phase.JOINED, Phase.OPEN):
            yield Move("give_up", (rank,))
        if left["doubts"] and face.phase is Phase.SETTLING:
            yield Move("tick", (rank,))
        if left["closes"] and not face.leaving >> rank & 1:
            yield Move("close", (rank,), helpful=False)
        if left["crashes"]:
            yield Move("crash", (rank,), helpful=False)
        for other in range(self.ep_size):
            if other != rank and face.members >> other & 1:
                if not face.gone >> other & 1 and self._is_lost(rank, other):
                    yield Move("gone", (rank, other))
                elif face.outside:
                    continue
                elif face.gone >> other & 1 and not face.has_majority and self.has_ended(other):
                    yield Move("gone", (rank, other, Proof.EXCLUDED))
                elif left["exclusions"] and not face.gone >> other & 1:
                    yield Move("exclude", (rank, other), helpful=False)
        if left["cuts"]:
            for other in self.alive():
                if rank < other and not self.is_cut(rank, other):
                    yield Move("cut", (rank, other), helpful=False)

    def _steps_of(self, rank: int) -> Iterator[Move]:
        """What the engine of a rank may do next, in lock-step with those of the others in its view."""
        frozen = self.body(rank).steps
        if self.walk is None or frozen is None:
            return
        counter = self.walk.counter(frozen)
        for layer, _ in self.body(rank).due:
            if counter.is_time(layer):
                yield Move("apply", (rank,))
                return  # layers in order; the next step waits for it
        last = counter.number
        if last in self.walk.idle_after and counter.idle_after < last:
            yield Move("idle", (rank,))
            return
        if last == self.walk.steps or last + 1 >= counter.gate:
            return
        face = self.face(rank)
        for other in range(self.ep_size):
            if face.members >> other & 1 and other != rank:
                theirs = self.body(other).steps
                assert theirs is not None
                # A step exchanges something with all members, in one term: the dead hold it up until the view changes.
                if theirs[0] < last or (self.body(other).alive and self.face(other).term != face.term):
                    return
        yield Move("step", (rank,))

    def _comings(self) -> Iterator[Move]:
        """Ranks start again, are met, and die or lose patience before they are in.

        None starts again while another is outside: that one may have met the start before, and looks for no newer.
        """
        alive = self.alive()
        inside = [rank for rank in alive if not self.face(rank).outside]
        for rank in range(self.ep_size):
            has_it = any(self.face(q).members >> rank & 1 for q in inside)
            if self.has_ended(rank):
                if not has_it and inside == alive and self.limits.returns > self.uses()[USES.index("returns")]:
                    yield Move("restart", (rank,), helpful=False)
                for q in inside:
                    if rank in self.face(q).wants:
                        yield Move("gone", (q, rank))
            elif self.face(rank).outside:
                if not has_it:
                    yield Move("expire", (rank,))
                for q in inside:
                    face = self.face(q)
                    met = face.members >> rank & 1 or face.wants.get(rank) == self.body(rank).start
                    if face.phase is Phase.IDLE and not met:
                        yield Move("met", (q, rank))

    def _traffic(self) -> Iterator[Move]:
        limits = self.limits
        duplicates = limits.duplicates > self.uses()[USES.index("duplicates")]
        for link, number in enumerate(self.queues):
            if not number:
                continue
            letters = self.letters(link)
            source, to = divmod(link, self.ep_size)
            alive = self.body(source).alive
            ordered = limits.fifo and not limits.unreliable
            for index in range(1 if ordered else len(letters)):
                if letters[index] not in letters[:index]:
                    yield Move("deliver", (source, to, index), helpful=alive or not self.reduced)
                    if duplicates:
                        yield Move("duplicate", (source, to, index), helpful=False)
            if not alive and not self.reduced:
                yield Move("drop", (source, to, len(letters) - 1), helpful=False)

    def natural(self, *, stage: bool, detect: bool) -> Iterator[Move]:
        """What happens by itself, faults and callers apart.

        Args:
            stage: READs arrive.
            detect: NIXL says who is disconnected.
        """
        for link, number in enumerate(self.queues):
            if number:
                yield Move("deliver", divmod(link, self.ep_size))
        for rank in self.alive():
            if stage and any(read in (FLYING, SPOILT) for read in self.body(rank).reads):
                yield Move("stage", (rank,))
            if detect:
                face = self.face(rank)
                for other in range(self.ep_size):
                    if face.members >> other & 1 and not face.gone >> other & 1 and self._is_lost(rank, other):
                        yield Move("gone", (rank, other))
            yield from self._steps_of(rank)

    def _is_lost(self, rank: int, other: int) -> bool:
        """Whether NIXL will tell ``rank`` that ``other`` is disconnected."""
        if rank == other:
            return False
        return self.has_ended(other) or self.is_cut(rank, other)

    def _may_ping(self, rank: int) -> bool:
        """Whether a ping may help: nothing is under way, or who is out, or wants one back, has heard nothing of it."""
        if not self.under_way():
            return True
        n = self.ep_size
        silent = not any(self.queues[rank * n + q] or self.queues[q * n + rank] for q in range(n))
        return silent and (self.is_excluded(rank) or bool(self.face(rank).wants))

    def under_way(self) -> bool:
        """Whether a message is under way that progress may rely on."""
        n = self.ep_size
        return any(
            number and not (self.reduced and not self.body(link // n).alive) for link, number in enumerate(self.queues)
        )
