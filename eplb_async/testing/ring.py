"""A ring of pure protocols: every queue, crash and lost link in a test's hands, every invariant checked.

Nothing here is timed or random. A `Ring` holds one immutable state; each act replaces it, so a test may keep
a state and come back to it. What one rank does in one of its states on one event is computed once and
remembered, which makes exploring millions of states practical (`explore`).

Each rank has rows and READs as well, as far as the invariants need them: a READ of layer *l* comes from the
next member's row, and is spoilt when that row is overwritten while it is in flight.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from eplb_async.core import events, messages
from eplb_async.core.events import Command, Event, Phase, Proof
from eplb_async.core.messages import Message
from eplb_async.core.protocol import Protocol

UNLIMITED = 1 << 30
_NEVER = ((0, 0, 0), (0, 0, 0))
_ABSENT, _FLYING, _SPOILT, _STAGED, _RUINED = range(5)


class Violation(AssertionError):
    """An invariant does not hold."""


class Move(NamedTuple):
    """One act, by name and arguments: printable, and repeatable with `Ring.play`."""

    act: str
    args: tuple[Any, ...] = ()
    helpful: bool = True
    """Whether progress may rely on it; faults are not."""

    def __str__(self) -> str:
        return f"{self.act}({', '.join(map(str, self.args))})"


@dataclass(frozen=True, slots=True)
class Limits:
    """How often what may happen in `Ring.moves`: everywhere together, but ``migrations`` on each rank."""

    migrations: int = 1
    crashes: int = 0
    give_ups: int = UNLIMITED
    closes: int = 0
    exclusions: int = 0
    cuts: int = 0
    duplicates: int = 0
    doubts: int = 0
    returns: int = 0
    fifo: bool = True


class Body(NamedTuple):
    """What a rank has besides its protocol."""

    alive: bool
    rows: tuple[int, ...]
    """Version of each layer's rows: term and epoch that wrote them."""
    reads: tuple[int, ...]
    source: int
    applied: int
    """Layers of the open epoch."""
    owed: int
    """Attempts without their ``Ended``."""
    migrations: int
    voted: tuple[int, int, int]
    """Term, epoch and layers of its last vote."""
    ended: tuple[int, int, int]
    """Term, epoch and layers of the last epoch that ended here."""


class Face(NamedTuple):
    """What is looked at of a protocol."""

    phase: Phase
    term: int
    promised: int
    members: int
    gone: int
    leaving: int
    epoch: int
    prepared: int
    committed: int
    attempt: int
    wakeup: bool
    has_majority: bool
    may_vote: bool
    outside: bool
    arriving: frozenset[int]
    wants: frozenset[int]


class State(NamedTuple):
    """A ring at one moment; all numbers are names of interned values."""

    protocols: tuple[int, ...]
    bodies: tuple[Body, ...]
    queues: tuple[tuple[int, ...], ...]
    used: tuple[int, ...]
    cut: int


_USES = ("crashes", "give_ups", "closes", "exclusions", "cuts", "duplicates", "doubts", "returns")


class Ring:
    """``ep_size`` protocols and the messages between them.

    Args:
        ep_size: Ranks.
        num_layers: Layers of each migration.
        limits: What `moves` may choose.
        majority_rule: As for ``Protocol``.
        pings: Whether ``tick`` pings whom a rank waits for. Off, it only makes those doubt who asked for the
            end.

    Attributes:
        state: Where it stands; may be kept and set again.
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
    ) -> None:
        self.ep_size = ep_size
        self.num_layers = num_layers
        self.limits = limits or Limits()
        self.recording = True
        self.log: list[tuple[int, Command]] = []
        self._blobs: list[bytes] = []
        self._faces: list[Face] = []
        self._by_snapshot: dict[Hashable, int] = {}
        self._messages: list[Message] = []
        self._by_message: dict[Message, int] = {}
        self._known: dict[tuple[int, Hashable], tuple[int, tuple[Command, ...], tuple[tuple[int, int], ...]]] = {}
        self._usable: dict[Hashable, str] = {}
        self._zeros = zeros = (0,) * num_layers
        body = Body(True, zeros, zeros, 0, 0, 0, 0, (0, 0, 0), (0, 0, 0))
        self._options: dict[str, Any] = {
            "ep_size": ep_size,
            "num_layers": num_layers,
            "settle_timeout": 0.0,
            "ping_interval": 0.0 if pings else 1.0,
            "majority_rule": majority_rule,
        }
        protocols = [Protocol(rank=rank, **self._options) for rank in range(ep_size)]
        self.state = State(
            tuple(map(self._intern, protocols)),
            (body,) * ep_size,
            ((),) * (ep_size * ep_size),
            (0,) * len(_USES),
            0,
        )

    # ----------------------------------------------------------------------------------------------- looking

    def face(self, rank: int) -> Face:
        """What is looked at of a rank's protocol."""
        return self._faces[self.state.protocols[rank]]

    def protocol(self, rank: int) -> Protocol:
        """A copy of a rank's protocol as it stands."""
        protocol: Protocol = pickle.loads(self._blobs[self.state.protocols[rank]])  # our own, from this process
        return protocol

    def body(self, rank: int) -> Body:
        """What a rank has besides its protocol."""
        return self.state.bodies[rank]

    def queue(self, source: int, to: int) -> tuple[Message, ...]:
        """Messages under way from one rank to another, oldest first."""
        return tuple(self._messages[m] for m in self.state.queues[source * self.ep_size + to])

    def alive(self) -> list[int]:
        """Ranks that have not crashed, closed or been fenced."""
        over = (Phase.CLOSED, Phase.FENCED)
        return [r for r in range(self.ep_size) if self.state.bodies[r].alive and self.face(r).phase not in over]

    def is_excluded(self, rank: int) -> bool:
        """Whether another rank is in a newer view that does not have this one."""
        term = self.face(rank).term
        others = (self.face(q) for q in self.alive() if q != rank)
        return any(face.term > term and not face.members >> rank & 1 for face in others)

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
        self._put_body(rank, body._replace(owed=body.owed + 1, migrations=body.migrations + 1))
        self._feed(rank, events.Migrate(digests or (rows, b"n" * 16, b"p" * 16)))

    def stage(self, rank: int, holds: messages.Steps | None = None) -> None:
        """The first READ of ``rank`` that is still in flight arrives."""
        body = self.body(rank)
        layer = next(i for i, read in enumerate(body.reads) if read in (_FLYING, _SPOILT))
        done = _STAGED if body.reads[layer] == _FLYING else _RUINED
        self._put_body(rank, body._replace(reads=_put(body.reads, layer, done)))
        face = self.face(rank)
        if face.phase is Phase.OPEN and face.may_vote:
            self._put_body(rank, self.body(rank)._replace(voted=(face.term, face.epoch, layer + 1)))
        self._feed(rank, events.Staged(layer + 1, holds))

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
        self._put_body(rank, self.body(rank)._replace(alive=False, reads=self._zeros))
        self._deafen(rank)

    def restart(self, rank: int) -> None:
        """A rank that crashed or is over starts again, and opens into the group that runs without it."""
        self._use("returns")
        self._deafen(rank)
        n = self.ep_size
        queues = tuple(() if i // n == rank else queue for i, queue in enumerate(self.state.queues))
        self.state = self.state._replace(
            protocols=_put(self.state.protocols, rank, self._intern(Protocol(rank=rank, **self._options))),
            queues=queues,
        )
        self._put_body(rank, Body(True, self._zeros, self._zeros, 0, 0, 0, 0, *_NEVER))
        self._feed(rank, events.Returning())

    def met(self, rank: int, other: int, start: int = 2) -> None:
        """``rank`` wants ``other`` back and has met it; 0 takes that back."""
        self._feed(rank, events.Met(other, start))

    def cut(self, a: int, b: int) -> None:
        """The link between two ranks is lost, with all that is on it."""
        self._use("cuts")
        n = self.ep_size
        queues = list(self.state.queues)
        queues[a * n + b] = queues[b * n + a] = ()
        self.state = self.state._replace(cut=self.state.cut | 1 << (a * n + b) | 1 << (b * n + a), queues=tuple(queues))

    def deliver(self, source: int, to: int, index: int = 0) -> None:
        """A message under way arrives."""
        message = self._take(source, to, index)
        self._feed(to, events.Received(self._messages[message]), message)

    def drop(self, source: int, to: int, index: int = 0) -> None:
        """A message under way is lost."""
        self._take(source, to, index)

    def duplicate(self, source: int, to: int, index: int = 0) -> None:
        """A message under way will arrive twice."""
        self._use("duplicates")
        n = source * self.ep_size + to
        queue = self.state.queues[n]
        self.state = self.state._replace(queues=_put(self.state.queues, n, (*queue, queue[index])))

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
        alive, limits = self.alive(), self.limits
        left = {name: getattr(limits, name) - used for name, used in zip(_USES, self.state.used, strict=True)}
        for rank in alive:
            face, body = self.face(rank), self.body(rank)
            if (
                face.phase is Phase.IDLE
                and body.migrations < limits.migrations
                and not (face.leaving >> rank & 1 or face.outside or face.arriving)
            ):
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
                    elif face.gone >> other & 1 and not face.has_majority and not self.body(other).alive:
                        yield Move("gone", (rank, other, Proof.EXCLUDED))
                    elif left["exclusions"] and not face.gone >> other & 1:
                        yield Move("exclude", (rank, other), helpful=False)
                if left["returns"] and self._may_return(other):
                    yield Move("restart", (other,), helpful=False)
                if other != rank and not face.members >> other & 1 and self._may_meet(rank, other):
                    yield Move("met", (rank, other))
            may_be_out = bool(limits.exclusions or limits.closes) and self.is_excluded(rank)
            if face.wakeup and (may_be_out or face.wants) and self._silent(rank):
                yield Move("ping", (rank,))
            if face.outside and not any(self.face(q).members >> q & 1 and not self.face(q).outside for q in alive):
                yield Move("expire", (rank,))
            if left["cuts"]:
                for other in alive:
                    if rank < other and not self.is_cut(rank, other):
                        yield Move("cut", (rank, other), helpful=False)
        yield from self._traffic(left["duplicates"] > 0)

    def _traffic(self, duplicates: bool) -> Iterator[Move]:
        n = self.ep_size
        for link, queue in enumerate(self.state.queues):
            if not queue:
                continue
            source, to = divmod(link, n)
            for index in range(1 if self.limits.fifo else len(queue)):
                if queue[index] not in queue[:index]:
                    yield Move("deliver", (source, to, index))
                    if duplicates:
                        yield Move("duplicate", (source, to, index), helpful=False)
            if not self.state.bodies[source].alive:
                yield Move("drop", (source, to, len(queue) - 1), helpful=False)

    def _natural(self, *, stage: bool, detect: bool) -> Iterator[Move]:
        for link, queue in enumerate(self.state.queues):
            if queue:
                yield Move("deliver", divmod(link, self.ep_size))
        for rank in self.alive():
            if stage and any(read in (_FLYING, _SPOILT) for read in self.body(rank).reads):
                yield Move("stage", (rank,))
            if detect:
                face = self.face(rank)
                for other in range(self.ep_size):
                    if face.members >> other & 1 and not face.gone >> other & 1 and self._is_lost(rank, other):
                        yield Move("gone", (rank, other))

    def _may_return(self, rank: int) -> bool:
        return not self.body(rank).alive and not any(self.face(q).members >> rank & 1 for q in self.alive())

    def _may_meet(self, rank: int, other: int) -> bool:
        idle = self.face(rank).phase is Phase.IDLE and not self.face(rank).outside
        return idle and other in self.alive() and self.face(other).outside and other not in self.face(rank).wants

    def _is_lost(self, rank: int, other: int) -> bool:
        """Whether NIXL will tell ``rank`` that ``other`` is disconnected."""
        if rank == other:
            return False
        return not self.state.bodies[other].alive or self.face(other).phase is Phase.CLOSED or self.is_cut(rank, other)

    def is_cut(self, a: int, b: int) -> bool:
        """Whether the link between two ranks is lost."""
        return bool(self.state.cut >> (a * self.ep_size + b) & 1)

    def _silent(self, rank: int) -> bool:
        n = self.ep_size
        return not any(self.state.queues[rank * n + q] or self.state.queues[q * n + rank] for q in range(n))

    # ---------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """Raises `Violation` if two ranks that count are of different minds (I-7), or in two views."""
        if self.state.cut and not self.state.used[_USES.index("exclusions")]:
            self._check_one_view()
        live = [r for r in self.alive() if not self.is_excluded(r)]
        for i, a in enumerate(live):
            for b in live[i + 1 :]:
                self._check_pair(a, b)
                self._check_pair(b, a)

    def _check_one_view(self) -> None:
        """Behind cut links, two views that are both installed on all their members would go on apart."""
        whole = {}
        for rank in self.alive():
            face = self.face(rank)
            members = [q for q in range(self.ep_size) if face.members >> q & 1 and self.body(q).alive]
            if all(self.face(q).term == face.term == self.face(q).promised for q in members):
                whole[face.term] = face.members
        if len(whole) > 1:
            raise Violation(f"I-7: two views at once, by term: {whole}")

    def _check_pair(self, a: int, b: int) -> None:
        term, epoch, upto = self.body(a).ended
        other = self.body(b).ended
        if epoch and epoch == other[1] and upto != other[2]:
            raise Violation(f"I-7: epoch {epoch} ended at {upto} on rank {a}, at {other[2]} on rank {b}")
        face, mine = self.face(b), self.face(a)
        if epoch and face.epoch == epoch and face.committed > upto:
            raise Violation(f"I-7: epoch {epoch} ended at {upto} on rank {a}, rank {b} has committed {face.committed}")
        if mine.term == face.term and mine.members != face.members:
            raise Violation(f"ranks {a} and {b} have different members in term {term}")

    def is_at_rest(self) -> bool:
        """Whether all who are alive are idle in one view of exactly them, and nothing is under way."""
        alive = self.alive()
        members = sum(1 << r for r in alive)
        if any(self.is_cut(a, b) for a in alive for b in alive):
            return False
        for rank in alive:
            face = self.face(rank)
            if face.phase is not Phase.IDLE or face.term != face.promised or face.members != members:
                return False
            if face.leaving >> rank & 1:
                return False
        return not any(self.state.queues)

    def check_usable(self) -> None:
        """Raises `Violation` if those who are alive, all idle, cannot complete a next epoch (I-9)."""
        kept, log, recording = self.state, self.log, self.recording
        key = (kept.protocols, tuple((b.alive, b.rows) for b in kept.bodies), kept.cut)
        if key not in self._usable:
            self.log, self.recording = [], True
            try:
                self._usable[key] = self._try_epoch()
            finally:
                self.state, self.log, self.recording = kept, log, recording
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

    def _feed(self, rank: int, event: Event, name: Hashable = None) -> None:
        """Gives one rank one event and carries out its commands."""
        before = self.state.protocols[rank]
        key = (before, event if name is None else name)
        known = self._known.get(key)
        if known is None:
            protocol: Protocol = pickle.loads(self._blobs[before])
            commands = protocol.handle(event, 0.0)
            if protocol.dropped["impossible"]:
                raise Violation(f"rank {rank} finds {event} impossible")
            others = tuple(c for c in commands if not isinstance(c, events.Send))
            sends = tuple((c.to, self._intern_message(c.message)) for c in commands if isinstance(c, events.Send))
            known = self._known[key] = (self._intern(protocol), others, sends)
        after, told, sends = known
        if after != before:
            self.state = self.state._replace(protocols=_put(self.state.protocols, rank, after))
        for command in told:
            if self.recording:
                self.log.append((rank, command))
            self._apply(rank, self._faces[before], command)
        if sends:
            self._post(rank, sends)
        if after != before and self._faces[after].phase in (Phase.CLOSED, Phase.FENCED):
            self._put_body(rank, self.body(rank)._replace(reads=self._zeros))
            self._deafen(rank)

    def _post(self, rank: int, sends: Iterable[tuple[int, int]]) -> None:
        n = self.ep_size
        queues = list(self.state.queues)
        hears = set(self.alive())
        for to, message in sends:
            if to in hears and not self.is_cut(rank, to):
                queues[rank * n + to] = (*queues[rank * n + to], message)
        self.state = self.state._replace(queues=tuple(queues))

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
                self._put_body(rank, body._replace(reads=reads, source=source))
            case events.Commit(epoch, first, upto, _):
                self._check_commit(rank, face, command)
                for layer in range(first, upto):
                    self._overwrite(rank, layer, face.term << 8 | epoch)
                self._put_body(rank, self.body(rank)._replace(applied=upto))
            case events.Ended(epoch, committed, complete, _, _):
                if body.owed != 1:
                    raise Violation(f"rank {rank} ends an attempt that is over already")
                if complete != (committed == self.num_layers):
                    raise Violation(f"rank {rank} ends at {committed}, complete={complete}")
                ended = (face.term, epoch, committed) if epoch else body.ended
                self._put_body(rank, body._replace(owed=0, applied=0, source=0, reads=self._zeros, ended=ended))
            case events.Installed(_, members) if face.outside:  # it takes over the group's placement
                rows = next((self.body(q).rows for q in sorted(members - {rank}) if self.body(q).alive), body.rows)
                self._put_body(rank, body._replace(rows=rows))
            case _:
                pass

    def _check_commit(self, rank: int, face: Face, commit: events.Commit) -> None:
        body = self.body(rank)
        if not body.applied == commit.first < commit.upto:
            raise Violation(f"rank {rank} commits [{commit.first}, {commit.upto}) after {body.applied}")
        for layer in range(commit.first, commit.upto):
            if body.reads[layer] != _STAGED and not self.is_excluded(rank):
                raise Violation(f"I-6: rank {rank} commits layer {layer} from a READ that is not whole")
        for member in range(self.ep_size):
            if face.members >> member & 1:
                term, epoch, upto = self.body(member).voted
                this = (face.term, commit.epoch)  # who has voted in a later one has ended this one
                if (term, epoch) < this or ((term, epoch) == this and upto < commit.upto):
                    raise Violation(
                        f"I-19: rank {rank} commits {commit.upto}, rank {member} prepared {upto} of {epoch}"
                    )

    def _overwrite(self, rank: int, layer: int, version: int) -> None:
        body = self.body(rank)
        self._put_body(rank, body._replace(rows=_put(body.rows, layer, version)))
        for other in range(self.ep_size):
            reader = self.body(other)
            if other != rank and reader.source == rank and reader.reads[layer] == _FLYING:
                self._put_body(other, reader._replace(reads=_put(reader.reads, layer, _SPOILT)))

    def _put_body(self, rank: int, body: Body) -> None:
        self.state = self.state._replace(bodies=_put(self.state.bodies, rank, body))

    def _use(self, name: str) -> None:
        if getattr(self.limits, name) < UNLIMITED:
            index, used = _USES.index(name), self.state.used
            self.state = self.state._replace(used=_put(used, index, used[index] + 1))

    def _take(self, source: int, to: int, index: int) -> int:
        n = source * self.ep_size + to
        queue = self.state.queues[n]
        self.state = self.state._replace(queues=_put(self.state.queues, n, queue[:index] + queue[index + 1 :]))
        return queue[index]

    def _deafen(self, rank: int) -> None:
        """Nothing reaches this rank any more."""
        n = self.ep_size
        self.state = self.state._replace(
            queues=tuple(() if i % n == rank else queue for i, queue in enumerate(self.state.queues))
        )

    def _intern(self, protocol: Protocol) -> int:
        snapshot = protocol.snapshot()
        name = self._by_snapshot.get((protocol.rank, snapshot))
        if name is None:
            name = self._by_snapshot[protocol.rank, snapshot] = len(self._blobs)
            protocol.dropped.clear()
            self._blobs.append(pickle.dumps(protocol))
            self._faces.append(_face(protocol))
        return name

    def _intern_message(self, message: Message) -> int:
        name = self._by_message.get(message)
        if name is None:
            name = self._by_message[message] = len(self._messages)
            self._messages.append(message)
        return name


def _face(protocol: Protocol) -> Face:
    return Face(
        phase=protocol.phase,
        term=protocol.term,
        promised=protocol.promised,
        members=sum(1 << r for r in protocol.members),
        gone=sum(1 << r for r in protocol.gone),
        leaving=sum(1 << r for r in protocol.leaving),
        epoch=protocol.epoch,
        prepared=protocol.prepared,
        committed=protocol.committed,
        attempt=protocol.attempt,
        wakeup=protocol.next_wakeup is not None,
        has_majority=protocol.has_majority,
        may_vote=protocol._view.accepts(protocol.term),
        outside=protocol.outside,
        arriving=protocol.arriving - protocol.gone,
        wants=frozenset(protocol._returns.own),
    )


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
