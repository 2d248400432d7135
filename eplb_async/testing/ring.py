"""A ring of pure protocols: every queue, crash and lost link in a test's hands, every invariant checked.

Nothing here is timed or random. A `Ring` stands in one state; a test may keep a state and come back to it, and
`explore` goes through all of them.

Each rank has rows and READs as well, as far as the invariants need them: a READ of layer *l* comes from the
next member's row, and is spoilt when that row is overwritten while it is in flight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eplb_async.core import events, messages
from eplb_async.core.events import Command, Event, Phase, Proof
from eplb_async.core.protocol import Protocol
from eplb_async.core.steps import StepCounter
from eplb_async.testing import checks
from eplb_async.testing.board import FLYING, RUINED, SPOILT, STAGED, Body, Face, State
from eplb_async.testing.choices import Choices, Walk
from eplb_async.testing.moves import UNLIMITED, Limits, Move, Violation
from eplb_async.testing.reductions import is_dead

__all__ = ["UNLIMITED", "Body", "Face", "Limits", "Move", "Ring", "State", "Violation", "Walk"]


class Ring(Choices):
    """``ep_size`` protocols and the messages between them.

    Args:
        ep_size: Ranks.
        num_layers: Layers of each migration.
        limits: What `moves` may choose.
        majority_rule: As for ``Protocol``.
        pings: Whether ``tick`` pings whom a rank waits for. Off, it only makes those doubt who asked for the
            end.
        walk: The engines' steps, if layers are applied at them; ``None`` if at once.

    Attributes:
        log: Rank and command of everything but ``Send`` since the ring was made, in order.
    """

    def __init__(
        self,
        ep_size: int,
        num_layers: int,
        *,
        limits: Limits | None = None,
        majority_rule: bool = True,
        pings: bool = False,
        walk: Walk | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "ep_size": ep_size,
            "num_layers": num_layers,
            "settle_timeout": 0.0,
            "ping_interval": 0.0 if pings else 1.0,
            "majority_rule": majority_rule,
        }
        self._zeros = zeros = (0,) * num_layers
        steps = None if walk is None else StepCounter(walk.margin).freeze()
        self._newborn = Body(True, zeros, zeros, 0, 0, 0, 0, (0, 0, 0), (0, 0, 0), steps=steps)
        protocols = [Protocol(rank=rank, **self._options) for rank in range(ep_size)]
        super().__init__(protocols, self._newborn, limits or Limits(), pings=pings)
        self.walk = None if walk is None else replace(walk, idle_after=walk.idle_after | {0, walk.steps})
        self.num_layers = num_layers
        self.recording = True
        self.log: list[tuple[int, Command]] = []
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
        layer = next(i for i, read in enumerate(body.reads) if read in (FLYING, SPOILT))
        done = STAGED if body.reads[layer] == FLYING else RUINED
        body = body._replace(reads=_put(body.reads, layer, done))
        if self.walk is not None:
            self.put_body(rank, body)
            self._vote_at_steps(rank)
            return
        if face.phase is Phase.OPEN and face.may_vote:
            body = body._replace(voted=(face.term, face.epoch, layer + 1))
        self.put_body(rank, body)
        self._feed(rank, events.Staged(layer + 1, holds))

    def step(self, rank: int) -> None:
        """The engine of ``rank`` begins its next step, and ends it."""
        body = self.body(rank)
        counter = self._counter(rank)
        counter.number += 1
        counter.stride += 2
        self.put_body(rank, body._replace(steps=counter.freeze(), ran=(*body.ran, body.rows)))

    def idle(self, rank: int) -> None:
        """The engine of ``rank`` is idle after its last step."""
        counter = self._counter(rank)
        counter.idle()
        self.put_body(rank, self.body(rank)._replace(steps=counter.freeze()))

    def apply(self, rank: int) -> None:
        """``rank`` applies the layer whose step has come, and may vote for the next."""
        counter = self._counter(rank)
        (layer, version), *due = self.body(rank).due
        counter.applied(layer)
        self._overwrite(rank, layer, version)
        applied = layer + 1 if self.face(rank).committed > layer else 0  # 0: its epoch is over
        self.put_body(rank, self.body(rank)._replace(steps=counter.freeze(), due=tuple(due), applied=applied))
        self._vote_at_steps(rank)

    def give_up(self, rank: int, reason: str = "timeout") -> None:
        """``rank`` fails, times out or is cancelled."""
        self._use("give_ups")
        self._feed(rank, events.GiveUp(reason))

    def close(self, rank: int) -> None:
        """The caller of ``rank`` closes it."""
        self._use("closes")
        self._feed(rank, events.Close())

    def expire(self, rank: int) -> None:
        """The ``open`` of ``rank``, which is outside, runs out of time."""
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

    def restart(self, rank: int) -> None:
        """A rank that died or is over starts again, and opens into the group that runs without it.

        Messages are from one start to one start: what was under way to or from the one before is lost.
        """
        self._use("returns")
        start = self.body(rank).start + 1
        self._deafen(rank)
        self.queues[rank * self.ep_size : (rank + 1) * self.ep_size] = [0] * self.ep_size
        self.put_protocol(rank, Protocol(rank=rank, **self._options))
        self.put_body(rank, self._newborn._replace(start=start))
        self._feed(rank, events.Returning())

    def met(self, rank: int, other: int, start: int | None = None) -> None:
        """``rank`` wants ``other`` back and has met it, by default as it is now; 0 takes that back."""
        self._feed(rank, events.Met(other, self.body(other).start if start is None else start))

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
            move = next(self.natural(stage=stage, detect=detect), None)
            if move is None:
                return
            self.play(move)
        raise Violation("the ring never comes to rest")

    # ---------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """Raises `Violation` if two ranks that count are of different minds (I-7), in two views, or left out."""
        checks.agreement(self)

    def is_at_rest(self) -> bool:
        """Whether all who are alive are idle in one view of exactly them, and nothing is under way that counts."""
        if not checks.idle_together(self):
            return False
        return not self.under_way()

    def check_usable(self) -> None:
        """Raises `Violation` if those who are alive, all idle, cannot complete a next epoch (I-9)."""
        kept, log, recording, limits, reduced = self.state, self.log, self.recording, self.limits, self.reduced
        key = (kept.protocols, tuple(self._usable_by(r) for r in range(self.ep_size)), kept.cut)
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

    def _usable_by(self, rank: int) -> tuple[Any, ...]:
        body = self.body(rank)
        return (body.alive, body.rows, body.steps, body.due)

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
        if self.walk is not None and self.faces[after].prepared <= self.faces[after].committed:
            counter = self._counter(rank)
            counter.decide()
            self.put_body(rank, self.body(rank)._replace(steps=counter.freeze()))
        if after != before:
            if self.faces[after].over:
                self.put_body(rank, self.body(rank)._replace(reads=self._zeros, due=()))
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
                    FLYING if mine == theirs else SPOILT for mine, theirs in zip(body.rows, other.rows, strict=True)
                )
                self.put_body(rank, body._replace(reads=reads, source=source))
            case events.Commit(epoch, first, upto, at) if self.walk is not None:
                checks.commit(self, rank, face, command, [read == STAGED for read in body.reads])
                counter = self._counter(rank)
                for layer in range(first, upto):
                    counter.commit(layer, at[layer])
                version = face.term << 8 | epoch
                due = (*body.due, *((layer, version) for layer in range(first, upto)))
                self.put_body(rank, body._replace(steps=counter.freeze(), due=due))
            case events.Commit(epoch, first, upto, _):
                checks.commit(self, rank, face, command, [read == STAGED for read in body.reads])
                for layer in range(first, upto):
                    self._overwrite(rank, layer, face.term << 8 | epoch)
                self.put_body(rank, self.body(rank)._replace(applied=upto))
            case events.Ended(epoch, committed, complete, _, _):
                checks.ended(self, rank, committed, complete=complete)
                ended = (face.term, epoch, committed) if epoch else body.ended
                self.put_body(rank, body._replace(owed=0, applied=0, source=0, reads=self._zeros, ended=ended))
            case events.Installed(_, members) if face.outside:  # it takes over the group's placement
                rows = next((self.body(q).rows for q in sorted(members - {rank}) if self.body(q).alive), body.rows)
                self.put_body(rank, body._replace(rows=rows))
            case _:
                pass

    def _counter(self, rank: int) -> StepCounter:
        frozen = self.body(rank).steps
        assert self.walk is not None
        assert frozen is not None
        return self.walk.counter(frozen)

    def _vote_at_steps(self, rank: int) -> None:
        """Votes for the next layer if it is staged, and those before it are applied here."""
        body, face = self.body(rank), self.face(rank)
        layer = body.applied
        if face.phase is not Phase.OPEN or body.due or layer >= self.num_layers or face.prepared > layer:
            return
        if body.reads[layer] not in (STAGED, RUINED):
            return
        counter = self._counter(rank)
        hold = counter.voted(layer)
        body = body._replace(steps=counter.freeze())
        if face.may_vote:
            body = body._replace(voted=(face.term, face.epoch, layer + 1))
        self.put_body(rank, body)
        self._feed(rank, events.Staged(layer + 1, (hold,) * self.num_layers))

    def _overwrite(self, rank: int, layer: int, version: int) -> None:
        body = self.body(rank)
        self.put_body(rank, body._replace(rows=_put(body.rows, layer, version)))
        for other in range(self.ep_size):
            reader = self.body(other)
            if other != rank and reader.source == rank and reader.reads[layer] == FLYING:
                self.put_body(other, reader._replace(reads=_put(reader.reads, layer, SPOILT)))

    def _use(self, name: str) -> None:
        if getattr(self.limits, name) < UNLIMITED:
            self.use(name)

    def _deafen(self, rank: int) -> None:
        """Nothing reaches this rank any more."""
        for link in range(rank, len(self.queues), self.ep_size):
            self.queues[link] = 0


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
