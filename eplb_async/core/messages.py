"""The control messages that ranks send each other: frozen records, no bytes (see ``wire``) and no behaviour.

A set of ranks is a bitset: a Python ``int`` in which bit *r* stands for rank *r*. ``holds`` and ``at`` are
steps, one unsigned 32-bit number for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSION_BYTES = 8
DIGEST_BYTES = 16
Digests = tuple[bytes, bytes, bytes]
Steps = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What every message carries.

    Attributes:
        term: Number of the view it belongs to (``View``, ``State``, ``Install``: of the one in the making).
        epoch: Number of the migration it is about; 0 where it is about none.
        attempt: The receiver's attempt (``Begin``, ``End``) or the sender's (``Join``, ``AbortRequest``).
        sender: Rank that sent it.
        sender_incarnation: Start of the sender that sent it. The driver fills it in.
        receiver_incarnation: Start of the receiver that it is meant for. The driver fills it in.
    """

    term: int = 0
    epoch: int = 0
    attempt: int = 0
    sender: int = 0
    sender_incarnation: int = 0
    receiver_incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Introduction: "I have added you"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduce(Message):
    """A recycled rank's new signed metadata, opaque to the protocol."""

    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Message):
    """Are you there? Says too whom the sender knows gone, so that the receiver looks for its own proof.

    Attributes:
        gone: Ranks that the sender has proof are gone: a hint.
        declared: Those of them that a caller excluded by word: an order, it spreads.
        stride: Where the sender's engine stands among the steps (see `Pong`). The driver fills it in.
    """

    gone: int = 0
    declared: int = 0
    stride: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong(Message):
    """I am here.

    Attributes:
        stride: Where the sender's engine stands: twice the number of the step that it runs, and one more between that
            and the next. The driver fills it in.
    """

    stride: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Message):
    """The sender's caller wants an epoch (rule 1).

    Attributes:
        digests: 16 bytes each: current placement, new placement, everything else that the plan depends on. The
            last ends with the weight version (8 bytes, big-endian), so that unequal ones can be named.
        last_epoch: The highest epoch that the sender has seen.
    """

    digests: Digests
    last_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Message):
    """The coordinator opens ``epoch`` for the receiver's ``attempt`` (rule 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Message):
    """A vote: all READs and local copies of layers ``[0, upto)`` are done and checked here (rule 3)."""

    upto: int
    holds: Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(Message):
    """The decision: layers ``[0, upto)`` change, each at its step ``at`` (rule 4)."""

    upto: int
    at: Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest(Message):
    """The sender wants its ``attempt`` ended (rule 5)."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Message):
    """The coordinator ends the receiver's ``attempt`` with exactly layers ``[0, upto)`` committed (rule 5).

    Attributes:
        upto: Layers committed.
        at: Steps of those layers.
        origin: Rank that asked for the end, or -1.
        reason: Why.
    """

    upto: int
    at: Steps
    origin: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View(Message):
    """The lowest remaining member opens a new term without ``gone`` (rule 7).

    Attributes:
        gone: Ranks that the sender has proof are gone; the receiver needs its own proof.
        declared: Those of them that a caller excluded by word; the receiver takes that word.
        installed_term: Term of the sender's view.
        members: Members of the sender's view; a receiver that has not heard of that view finds itself here.
    """

    gone: int
    declared: int
    installed_term: int = 0
    members: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Term(Message):
    """Your term is too old: I have promised ``term``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Message):
    """The answer to ``View``, and the promise to accept and send nothing of an older term (rule 7).

    Attributes:
        last_epoch: The epoch that ``upto``, ``ended`` and ``at`` speak of.
        upto: Layers that the sender knows committed in it.
        ended: Whether that is where it ended.
        at: Steps of those layers.
        highest_epoch: The highest epoch that the sender has seen.
        gone: Ranks that the sender has proof are gone.
        declared: Those of them that a caller excluded by word.
        leaving: Ranks that said LEAVE to the sender, or the sender itself.
        installed_term: Term of the sender's view.
        members: Members of the sender's view.
        last_attempt: The sender's latest attempt.
    """

    last_epoch: int
    upto: int
    ended: bool
    at: Steps
    highest_epoch: int
    gone: int
    declared: int
    leaving: int
    installed_term: int
    members: int
    last_attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Install(Message):
    """The new view, and where its last ``epoch`` ended (rule 7). Who is not in it is fenced (rule 8)."""

    members: int
    upto: int
    at: Steps
    next_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Met(Message):
    """The sender's caller wants ``rank`` back, and the sender and that rank have met (rule 12).

    Attributes:
        rank: The rank that is to come back.
        start: Its start that the sender has met; 0 takes an earlier word back.
        digest: Of what the sender will hold true with that rank back: placement and weight version. All members
            must say the same, or they would be of different minds in the view that has it.
    """

    rank: int
    start: int
    digest: bytes = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Message):
    """The sender closes (rule 10)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word(Message):
    """A part of a message of the layer above (see ``mail``); it is not the protocol's, and moves nothing of it.

    Attributes:
        topic: What it is about, to the layer above.
        serial: Number of the message; later ones of a sender have greater ones.
        part: Which part of it this is, from 0.
        parts: How many there are.
        data: The part's bytes.
    """

    topic: int
    serial: int
    part: int
    parts: int
    data: bytes
