"""A ring of pure protocols: every queue, crash and lost link in a test's hands, every invariant checked.

Nothing here is timed or random. A `Ring` stands in one state; a test may keep a state and come back to it, and
`explore` goes through all of them.

Each rank has rows and READs as well, as far as the invariants need them: a READ of layer *l* comes from the
next member's row, and is spoilt when that row is overwritten while it is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eplb_async.core import events, messages
from eplb_async.core.events import Command, Event, Phase, Proof
from eplb_async.core.protocol import Protocol
from eplb_async.testing import checks
from eplb_async.testing.board import Board, Body, Face, State
from eplb_async.testing.moves import UNLIMITED, USES, Limits, Move, Violation
from eplb_async.testing.reductions import is_dead

__all__ = ["UNLIMITED", "Body", "Face", "Limits", "Move", "Ring", "State", "Violation"]

_ABSENT, _FLYING, _SPOILT, _STAGED, _RUINED = range(5)


class Ring(Board):
    """``ep_size`` protocols and the messages between them.

    Args:
        ep_size: Ranks.
        num_layers: Layers of each migration.
        limits: What `moves` may choose.
        majority_rule: As for ``Protocol``.
        pings: Whether ``tick`` pings whom a rank waits for. Off, it only makes those doubt who asked for the
            end.

    Attributes:
        log: Rank and command of everything but ``Send`` since the ring was made, in order.
        reduced: Whether what can never matter is taken away (see ``reductions``); `explore` sets it.
    """

    def __init__(
        self,
        ep_size: int,
        num_layers: int,
        *,
        limits: Limits | None = None,
        majority_rule: bool = True,
        pings: bool = False,
    ) -> None:
        protocols = [
            Protocol(
                rank=rank,
                ep_size=ep_size,
                num_layers=num_layers,
                settle_timeout=0.0,
                ping_interval=0.0 if pings else 1.0,
                majority_rule=majority_rule,
            )
            for rank in range(ep_size)
        ]
        self._zeros = zeros = (0,) * num_layers
        super().__init__(protocols, Body(True, zeros, zeros, 0, 0, 0, 0, (0, 0, 0), (0, 0, 0)))
        self.num_layers = num_layers
        self.limits = limits or Limits()
        self.pings = pings
        self.recording = True
        self.reduced = False
        self.log: list[tuple[int, Command]] = []
        self._own: dict[Any, tuple[Move, ...]] = {}
        self._alive_letters: dict[tuple[int, int], int] = {}
        self._usable: dict[Any, str] = {}

    def commands(self, rank: int, kind: type[Command] | None = None) -> list[Command]:
        """What a rank has been told to do, ``Send`` apart."""
        return [c for r, c in self.log if r == rank and (kind is None or isinstance(c, kind))]

    # ------------------------------------------------------------------------------------------------- acts

    def play(self, move: Move) -> None:
        """Does a move that `moves` named."""
        getattr(self, move.act)(*move.args)

    def migrate(self, rank: int, digests: messages.Digests | None = None) -> None:
        """The caller of ``rank`` wants an epoch, by default the one that everybody wants."""
        body = self.body(rank)
        rows = b"".join(row.to_bytes(4, "big") for row in body.rows)[-16:].rjust(16, b"\0")
        self.put_body(rank, body._replace(owed=body.owed + 1, migrations=body.migrations + 1))
        self._feed(rank, events.Migrate(digests or (rows, b"n" * 16, b"p" * 16)))

    def stage(self, rank: int, holds: messages.Steps | None = None) -> None:
        """The first READ of ``rank`` that is still in flight arrives."""
        body, face = self.body(rank), self.face(rank)
        layer = next(i for i, read in enumerate(body.reads) if read in (_FLYING, _SPOILT))
        done = _STAGED if body.reads[layer] == _FLYING else _RUINED
        body = body._replace(reads=_put(body.reads, layer, done))
        if face.phase is Phase.OPEN and face.may_vote:
            body = body._replace(voted=(face.term, face.epoch, layer + 1))
        self.put_body(rank, body)
        self._feed(rank, events.Staged(layer + 1, holds))

    def give_up(self, rank: int, reason: str = "timeout") -> None:
        """``rank`` fails, times out or is cancelled."""
        self._use("give_ups")
        self._feed(rank, events.GiveUp(reason))

    def close(self, rank: int) -> None:
        """The caller of ``rank`` closes it."""
        self._use("closes")
        self._feed(rank, events.Close())

    def gone(self, rank: int, other: int, proof: Proof = Proof.DISCONNECTED) -> None:
        """``rank`` gets proof that ``other`` is gone."""
        self._feed(rank, events.Gone(other, proof))

    def exclude(self, rank: int, other: int) -> None:
        """The caller of ``rank`` says that ``other`` is gone, rightly or not."""
        self._use("exclusions")
        self._feed(rank, events.Gone(other, Proof.EXCLUDED))

    def tick(self, rank: int) -> None:
        """Time passes for ``rank``: it doubts if it asked for the end, and pings if the ring has pings."""
        self._use("doubts")
        self._feed(rank, events.Tick())

    def ping(self, rank: int) -> None:
        """As `tick`, for the pings."""
        self._feed(rank, events.Tick())

    def crash(self, rank: int) -> None:
        """``rank`` dies; what it had sent may still arrive, or be dropped."""
        self._use("crashes")
        self.put_body(rank, self.body(rank)._replace(alive=False, reads=self._zeros))
        self._deafen(rank)

    def cut(self, a: int, b: int) -> None:
        """The link between two ranks is lost, with all that is on it."""
        self._use("cuts")
        n = self.ep_size
        self.queues[a * n + b] = self.queues[b * n + a] = 0
        self.lost_links |= 1 << (a * n + b) | 1 << (b * n + a)

    def deliver(self, source: int, to: int, index: int = 0) -> None:
        """A message under way arrives."""
        letter = self.letters(source * self.ep_size + to)[index]
        if not self.limits.unreliable:
            self.drop(source, to, index)
        self._feed(to, letter)

    def drop(self, source: int, to: int, index: int = 0) -> None:
        """A message under way is lost."""
        link = source * self.ep_size + to
        letters = self.letters(link)
        self.put_queue(link, letters[:index] + letters[index + 1 :])

    def duplicate(self, source: int, to: int, index: int = 0) -> None:
        """A message under way will arrive twice."""
        self._use("duplicates")
        link = source * self.ep_size + to
        self._enqueue(link, self.letters(link)[index])

    def settle(self, *, stage: bool = True, detect: bool = True) -> None:
        """Lets everything arrive, in order, until nothing is left to happen by itself."""
        for _ in range(100_000):
            move = next(self._natural(stage=stage, detect=detect), None)
            if move is None:
                return
            self.play(move)
        raise Violation("the ring never comes to rest")

    # ---------------------------------------------------------------------------------------------- choosing

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
            if self.pings and self.face(rank).wakeup and self._may_ping(rank):
                yield Move("ping", (rank,))
        yield from self._traffic()

    def _moves_of(self, rank: int) -> Iterator[Move]:
        """What a rank may do or suffer, messages apart."""
        limits, face, body = self.limits, self.face(rank), self.body(rank)
        left = {name: getattr(limits, name) - used for name, used in zip(USES, self.uses(), strict=True)}
        if face.phase is Phase.IDLE and body.migrations < limits.migrations and not face.leaving >> rank & 1:
            yield Move("migrate", (rank,))
        if any(read in (_FLYING, _SPOILT) for read in body.reads):
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
                elif face.gone >> other & 1 and not face.has_majority and self.has_ended(other):
                    yield Move("gone", (rank, other, Proof.EXCLUDED))
                elif left["exclusions"] and not face.gone >> other & 1:
                    yield Move("exclude", (rank, other), helpful=False)
        if left["cuts"]:
            for other in self.alive():
                if rank < other and not self.is_cut(rank, other):
                    yield Move("cut", (rank, other), helpful=False)

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

    def _natural(self, *, stage: bool, detect: bool) -> Iterator[Move]:
        for link, number in enumerate(self.queues):
            if number:
                yield Move("deliver", divmod(link, self.ep_size))
        for rank in self.alive():
            if stage and any(read in (_FLYING, _SPOILT) for read in self.body(rank).reads):
                yield Move("stage", (rank,))
            if detect:
                face = self.face(rank)
                for other in range(self.ep_size):
                    if face.members >> other & 1 and not face.gone >> other & 1 and self._is_lost(rank, other):
                        yield Move("gone", (rank, other))

    def _is_lost(self, rank: int, other: int) -> bool:
        """Whether NIXL will tell ``rank`` that ``other`` is disconnected."""
        if rank == other:
            return False
        return self.has_ended(other) or self.is_cut(rank, other)

    def _may_ping(self, rank: int) -> bool:
        """Whether a ping may help: nothing is under way, or a rank that is out has heard nothing of it."""
        if not self._under_way():
            return True
        n = self.ep_size
        silent = not any(self.queues[rank * n + q] or self.queues[q * n + rank] for q in range(n))
        return silent and self.is_excluded(rank)

    # ---------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """Raises `Violation` if two ranks that count are of different minds (I-7), in two views, or left out."""
        checks.agreement(self)

    def is_at_rest(self) -> bool:
        """Whether all who are alive are idle in one view of exactly them, and nothing is under way that counts."""
        if not checks.idle_together(self):
            return False
        return not self._under_way()

    def _under_way(self) -> bool:
        """Whether a message is under way that progress may rely on."""
        n = self.ep_size
        return any(
            number and not (self.reduced and not self.body(link // n).alive) for link, number in enumerate(self.queues)
        )

    def check_usable(self) -> None:
        """Raises `Violation` if those who are alive, all idle, cannot complete a next epoch (I-9)."""
        kept, log, recording, limits, reduced = self.state, self.log, self.recording, self.limits, self.reduced
        key = (kept.protocols, tuple((self.body(r).alive, self.body(r).rows) for r in range(self.ep_size)), kept.cut)
        if key not in self._usable:
            self.log, self.recording, self.limits, self.reduced = [], True, Limits(), False
            self.queues = [0] * len(self.queues)
            try:
                self._usable[key] = self._try_epoch()
            finally:
                self.state, self.log, self.recording = kept, log, recording
                self.limits, self.reduced = limits, reduced
        if self._usable[key]:
            raise Violation(f"I-9: {self._usable[key]}")

    def _try_epoch(self) -> str:
        alive = self.alive()
        for rank in alive:
            self.migrate(rank)
        self.settle()
        ends = {rank: self.commands(rank, events.Ended) for rank in alive}
        rows = {self.body(rank).rows for rank in alive}
        for rank, found in ends.items():
            if len(found) != 1 or not isinstance(found[0], events.Ended) or not found[0].complete:
                return f"the next epoch ends with {found} on rank {rank}"
        return "" if len(rows) <= 1 else f"different rows after the next epoch: {rows}"

    # ------------------------------------------------------------------------------------------------ inside

    def _feed(self, rank: int, event: Event | int) -> None:
        """Gives one rank one event, or the message of a number, and carries out its commands."""
        before = self.protocols[rank]
        reaction = self.react(before, event)
        if reaction.impossible:
            what = self.message(event) if isinstance(event, int) else event
            raise Violation(f"rank {rank} finds {what} impossible")
        self.protocols[rank] = after = reaction.after
        for command in reaction.told:
            if self.recording:
                self.log.append((rank, command))
            self._apply(rank, self.faces[before], command)
        for to, letter in reaction.sends:
            if self.body(to).alive and not self.face(to).over and not self.is_cut(rank, to):
                self._enqueue(rank * self.ep_size + to, letter)
        if after != before:
            if self.faces[after].over:
                self.put_body(rank, self.body(rank)._replace(reads=self._zeros))
                self._deafen(rank)
            elif self.reduced and self.limits.only_crashes:
                for link in range(rank, len(self.queues), self.ep_size):
                    if self.queues[link]:
                        self._bury(link, after)

    def _enqueue(self, link: int, letter: int) -> None:
        letters = self.letters(link)
        if self.limits.unreliable and letter in letters:
            return
        if self.reduced:
            if self.limits.only_crashes and is_dead(self, self.protocols[link % self.ep_size], letter):
                return
            if self.limits.unreliable or not self.limits.fifo:
                letters = tuple(sorted((*letters, letter)))
                self.put_queue(link, letters)
                return
        self.put_queue(link, (*letters, letter))

    def _bury(self, link: int, protocol: int) -> None:
        """Takes the dead letters off a link, whose receiver stands in a new protocol state."""
        key = (self.queues[link], protocol)
        number = self._alive_letters.get(key)
        if number is None:
            self.put_queue(link, [x for x in self.letters(link) if not is_dead(self, protocol, x)])
            number = self._alive_letters[key] = self.queues[link]
        self.queues[link] = number

    def _apply(self, rank: int, face: Face, command: Command) -> None:
        body = self.body(rank)
        match command:
            case events.Begin(_, members):
                ring = sorted(members)
                source = ring[(ring.index(rank) + 1) % len(ring)]
                other = self.body(source)
                reads = tuple(
                    _FLYING if mine == theirs else _SPOILT for mine, theirs in zip(body.rows, other.rows, strict=True)
                )
                self.put_body(rank, body._replace(reads=reads, source=source))
            case events.Commit(epoch, first, upto, _):
                checks.commit(self, rank, face, command, [read == _STAGED for read in body.reads])
                for layer in range(first, upto):
                    self._overwrite(rank, layer, face.term << 8 | epoch)
                self.put_body(rank, self.body(rank)._replace(applied=upto))
            case events.Ended(epoch, committed, complete, _, _):
                checks.ended(self, rank, committed, complete=complete)
                ended = (face.term, epoch, committed) if epoch else body.ended
                self.put_body(rank, body._replace(owed=0, applied=0, source=0, reads=self._zeros, ended=ended))
            case _:
                pass

    def _overwrite(self, rank: int, layer: int, version: int) -> None:
        body = self.body(rank)
        self.put_body(rank, body._replace(rows=_put(body.rows, layer, version)))
        for other in range(self.ep_size):
            reader = self.body(other)
            if other != rank and reader.source == rank and reader.reads[layer] == _FLYING:
                self.put_body(other, reader._replace(reads=_put(reader.reads, layer, _SPOILT)))

    def _use(self, name: str) -> None:
        if getattr(self.limits, name) < UNLIMITED:
            self.use(name)

    def _deafen(self, rank: int) -> None:
        """Nothing reaches this rank any more."""
        for link in range(rank, len(self.queues), self.ep_size):
            self.queues[link] = 0


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
