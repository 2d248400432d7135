"""A state of a ring of pure protocols, in numbers: equal states are equal numbers, and millions of them fit.

Every protocol state, body, queue and message is named by a number when it is first seen. What a rank does in one
of its states on one event is worked out once and remembered: two ranks that stand the same are the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterable
from struct import Struct
from typing import Generic, NamedTuple, TypeVar

from eplb_async.core import events
from eplb_async.core.events import Command, Event, Phase
from eplb_async.core.messages import Message
from eplb_async.core.protocol import Protocol
from eplb_async.core.steps import Frozen
from eplb_async.testing.moves import USES

Value = TypeVar("Value", bound=Hashable)

ABSENT, FLYING, SPOILT, STAGED, RUINED = range(5)
"""What becomes of the READ of a layer."""


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
    start: int = 1
    """Which start of its rank this is."""
    steps: Frozen | None = None
    """Where its engine stands among the steps; None in a ring without."""
    due: tuple[tuple[int, int], ...] = ()
    """Layer and version of what is committed and waits for its step."""
    ran: tuple[tuple[int, ...], ...] = ()
    """The rows that each step ran with, from step 1 on."""


class Face(NamedTuple):
    """What is looked at of a protocol."""

    phase: Phase
    over: bool
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
    arriving: int
    wants: dict[int, int]
    """The start that it has met of each rank that it wants back."""


class State(NamedTuple):
    """A ring at one moment; all are numbers of named values, but ``cut`` is a set of links."""

    protocols: tuple[int, ...]
    bodies: tuple[int, ...]
    queues: tuple[int, ...]
    used: int
    cut: int


class Reaction(NamedTuple):
    """What a protocol state does on one event."""

    after: int
    told: tuple[Command, ...]
    """Commands, ``Send`` apart."""
    sends: tuple[tuple[int, int], ...]
    impossible: bool
    """Whether it was told what cannot be true."""


class Names(Generic[Value]):
    """Numbers for values, in the order in which they are first seen."""

    def __init__(self, *first: Value) -> None:
        self.values: list[Value] = []
        self._numbers: dict[Value, int] = {}
        for value in first:
            self.number(value)

    def number(self, value: Value) -> int:
        """The number of a value; equal values have one."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


class Board:
    """Where all ranks stand, and what is under way between them.

    Attributes:
        protocols: Number of each rank's protocol state.
        bodies: Number of each rank's body.
        queues: Number of the queue of each link; the link from *a* to *b* is ``a * ep_size + b``.
        used: Number of how often each of ``USES`` was used.
        lost_links: Links that are lost, as a bitset.
    """

    def __init__(self, protocols: list[Protocol], body: Body) -> None:
        self.ep_size = len(protocols)
        self._blobs: list[bytes] = []
        self.faces: list[Face] = []
        self._by_snapshot: dict[Hashable, int] = {}
        self._reactions: dict[tuple[int, Hashable], Reaction] = {}
        self._bodies = Names(body)
        self._queues: Names[tuple[int, ...]] = Names(())
        self._uses = Names((0,) * len(USES))
        self._messages: Names[Message] = Names()
        self.protocols = [self._name(protocol) for protocol in protocols]
        self.bodies = [0] * self.ep_size
        self.queues = [0] * self.ep_size**2
        self.used = self.lost_links = 0
        self._layout = Struct(f"={self.ep_size * (self.ep_size + 2) + 1}IQ")

    @property
    def state(self) -> State:
        """Where it stands; may be kept and set again."""
        return State(tuple(self.protocols), tuple(self.bodies), tuple(self.queues), self.used, self.lost_links)

    @state.setter
    def state(self, state: State) -> None:
        self.protocols, self.bodies, self.queues = list(state.protocols), list(state.bodies), list(state.queues)
        self.used, self.lost_links = state.used, state.cut

    def pack(self) -> bytes:
        """The state, whole and small."""
        return self._layout.pack(*self.protocols, *self.bodies, *self.queues, self.used, self.lost_links)

    def unpack(self, packed: bytes) -> None:
        """Stands where `pack` was called."""
        n, numbers = self.ep_size, self._layout.unpack(packed)
        self.protocols, self.bodies = list(numbers[:n]), list(numbers[n : 2 * n])
        self.queues = list(numbers[2 * n : -2])
        self.used, self.lost_links = numbers[-2:]

    # ----------------------------------------------------------------------------------------------- looking

    def face(self, rank: int) -> Face:
        """What is looked at of a rank's protocol."""
        return self.faces[self.protocols[rank]]

    def protocol(self, rank: int) -> Protocol:
        """A copy of a rank's protocol as it stands."""
        return self._protocol(self.protocols[rank])

    def body(self, rank: int) -> Body:
        """What a rank has besides its protocol."""
        return self._bodies.values[self.bodies[rank]]

    def queue(self, source: int, to: int) -> tuple[Message, ...]:
        """Messages under way from one rank to another; oldest first unless a walk has put them in order."""
        return tuple(map(self.message, self.letters(source * self.ep_size + to)))

    def letters(self, link: int) -> tuple[int, ...]:
        """Numbers of the messages under way on a link."""
        return self._queues.values[self.queues[link]]

    def message(self, number: int) -> Message:
        """The message of a number."""
        return self._messages.values[number]

    def uses(self) -> tuple[int, ...]:
        """How often each of ``USES`` was used."""
        return self._uses.values[self.used]

    def is_cut(self, a: int, b: int) -> bool:
        """Whether the link between two ranks is lost."""
        return bool(self.lost_links >> (a * self.ep_size + b) & 1)

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has crashed, closed or been fenced: its agent is gone, or soon will be."""
        return not self.body(rank).alive or self.face(rank).over

    def alive(self) -> list[int]:
        """Ranks that have not crashed, closed or been fenced."""
        return [r for r in range(self.ep_size) if self.body(r).alive and not self.face(r).over]

    def is_excluded(self, rank: int) -> bool:
        """Whether another rank is in a newer view that does not have this one."""
        term = self.face(rank).term
        others = (self.face(q) for q in self.alive() if q != rank)
        return any(face.term > term and not face.members >> rank & 1 for face in others)

    # ---------------------------------------------------------------------------------------------- changing

    def put_body(self, rank: int, body: Body) -> None:
        """Gives a rank another body."""
        self.bodies[rank] = self._bodies.number(body)

    def put_protocol(self, rank: int, protocol: Protocol) -> None:
        """Has a rank stand elsewhere."""
        self.protocols[rank] = self._name(protocol)

    def put_queue(self, link: int, letters: Iterable[int]) -> None:
        """Puts other messages on a link."""
        self.queues[link] = self._queues.number(tuple(letters))

    def use(self, name: str) -> None:
        """Counts one use of a limit."""
        used = list(self.uses())
        used[USES.index(name)] += 1
        self.used = self._uses.number(tuple(used))

    def react(self, number: int, event: Event | int) -> Reaction:
        """What a protocol state does on an event, or on the arrival of the message of that number."""
        known = self._reactions.get((number, event))
        if known is None:
            protocol = self._protocol(number)
            happens = events.Received(self.message(event)) if isinstance(event, int) else event
            commands = protocol.handle(happens, 0.0)
            impossible = bool(protocol.dropped["impossible"])
            known = self._reactions[number, event] = Reaction(
                after=self._name(protocol),
                told=tuple(c for c in commands if not isinstance(c, events.Send)),
                sends=tuple((c.to, self._messages.number(c.message)) for c in commands if isinstance(c, events.Send)),
                impossible=impossible,
            )
        return known

    def _protocol(self, number: int) -> Protocol:
        protocol: Protocol = pickle.loads(self._blobs[number])  # our own, from this process
        return protocol

    def _name(self, protocol: Protocol) -> int:
        snapshot = (protocol.rank, protocol.snapshot())
        number = self._by_snapshot.get(snapshot)
        if number is None:
            number = self._by_snapshot[snapshot] = len(self._blobs)
            protocol.dropped.clear()
            self._blobs.append(pickle.dumps(protocol))
            self.faces.append(_face(protocol))
        return number


def _face(protocol: Protocol) -> Face:
    return Face(
        phase=protocol.phase,
        over=protocol.phase in (Phase.CLOSED, Phase.FENCED),
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
        arriving=sum(1 << r for r in protocol.arriving - protocol.gone),
        wants={rank: met.start for rank, met in protocol._returns.own.items()},
    )
