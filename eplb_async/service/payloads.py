"""What the services of a group say to each other: frozen records, and their bytes, which are checked before use.

Every payload begins with version, kind, term and round; little-endian, and arrays as the bytes of their rows. Nothing
here trusts a member: a payload that is not exactly what it should be is a :class:`PayloadError`, which says why.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_async.core.placement import Placement
from eplb_async.core.text import one_line
from eplb_async.errors import EplbError, PlacementError
from eplb_async.service.report import Outcome

__all__ = [
    "TOPIC",
    "Ask",
    "Declined",
    "Loads",
    "Message",
    "PayloadError",
    "Refused",
    "Verdict",
    "Want",
    "Why",
    "decode",
]

TOPIC = 65535
"""The service's topic in ``comm.mail``."""

_VERSION = 1
_HEAD = struct.Struct("<BBxxxxxxQQ")
_MOST_TEXT = 2048
_MOST_LOAD = 2.0**63
_EVEN = 1.0 + 1e-6
"""The highest balancedness, as rounding may leave it."""
_MOST = (1 << 64) - 1
_OUTCOMES: tuple[Outcome, ...] = ("moved", "not_worth_it", "too_soon", "paused", "no_load", "failed")


class PayloadError(EplbError):
    """A payload is not what a service sends."""


class Why(IntEnum):
    """Why a rank takes no part in a round."""

    FAILED = 0
    PAUSED = 1
    CLOSING = 2
    STALE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What every payload carries.

    Attributes:
        term: Number of the view that it was sent in.
        round: Number of the round, or of the sender's want (`Want`, `Declined`).
    """

    term: int
    round: int
    KIND: ClassVar[int] = 0

    def encode(self) -> bytes:
        """Its bytes."""
        return _HEAD.pack(_VERSION, self.KIND, self.term, self.round) + self._body()

    def _body(self) -> bytes:
        return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(Message):
    """The coordinator begins a round: answer with your loads, or say why not."""

    KIND: ClassVar[int] = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads(Message):
    """What a rank has counted.

    Attributes:
        loads: float64 ``[num_layers, num_logical]``, finite, 0 or more.
        steps: Steps that they were counted in.
    """

    loads: NDArray[np.float64]
    steps: int
    KIND: ClassVar[int] = 2

    def _body(self) -> bytes:
        return struct.pack("<Q", self.steps) + self.loads.astype("<f8").tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Message):
    """What the coordinator has decided.

    Attributes:
        outcome: Of the round; ``moved``: migrate to ``placement``.
        reason: Why, in words.
        before: Balancedness as the loads were; NaN where it is not known.
        after: As the placement makes it, by the same loads; NaN where it is not known.
        moves: Slots that receive an expert that their rank does not hold.
        placement: Where the experts are to be; ``None`` unless ``moved``.
    """

    outcome: Outcome
    reason: str = ""
    before: float = float("nan")
    after: float = float("nan")
    moves: int = 0
    placement: Placement | None = None
    KIND: ClassVar[int] = 3
    FIXED: ClassVar[struct.Struct] = struct.Struct("<BxxxxxxxddQ")

    def _body(self) -> bytes:
        slots = b"" if self.placement is None else self.placement.physical_to_logical_map.astype("<i4").tobytes()
        fixed = self.FIXED.pack(_OUTCOMES.index(self.outcome), self.before, self.after, self.moves)
        return fixed + _pack_text(self.reason) + slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Want(Message):
    """The sender wants a round."""

    force: bool
    KIND: ClassVar[int] = 4

    def _body(self) -> bytes:
        return bytes([self.force])


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined(Message):
    """The coordinator begins no round for the receiver's want."""

    outcome: Outcome
    reason: str
    KIND: ClassVar[int] = 5

    def _body(self) -> bytes:
        return bytes([_OUTCOMES.index(self.outcome)]) + _pack_text(self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """The sender takes no part in the round, or no part any more.

    Attributes:
        why: The kind of reason.
        reason: In words.
        seen: The highest round that the sender has seen.
    """

    why: Why
    reason: str
    seen: int = 0
    KIND: ClassVar[int] = 6

    def _body(self) -> bytes:
        return struct.pack("<BxxxxxxxQ", self.why, self.seen) + _pack_text(self.reason)


def decode(data: bytes, sizes: Placement) -> Message:
    """What a member sent.

    Args:
        data: The payload.
        sizes: Any placement of this group.

    Raises:
        PayloadError: It is not what a service of this group sends.
    """
    if len(data) < _HEAD.size:
        raise PayloadError(f"a payload of {len(data)} bytes")
    version, kind, term, number = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise PayloadError(f"version {version} of the service's payloads, this rank speaks {_VERSION}")
    body = data[_HEAD.size :]
    try:
        match kind:
            case Ask.KIND if not body:
                return Ask(term=term, round=number)
            case Loads.KIND:
                return _loads(term, number, body, sizes)
            case Verdict.KIND:
                return _verdict(term, number, body, sizes)
            case Want.KIND if body in (b"\0", b"\1"):
                return Want(term=term, round=number, force=body == b"\1")
            case Declined.KIND:
                outcome, (reason, rest) = _OUTCOMES[body[0]], _text(body[1:])
                if not rest and outcome != "moved":
                    return Declined(term=term, round=number, outcome=outcome, reason=reason)
            case Refused.KIND:
                why, seen = struct.unpack_from("<BxxxxxxxQ", body)
                reason, rest = _text(body[16:])
                if not rest:
                    return Refused(term=term, round=number, why=Why(why), reason=reason, seen=seen)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise PayloadError(f"a payload of kind {kind} that cannot be: {error}") from None
    raise PayloadError(f"a payload of kind {kind} and {len(data)} bytes")


def _loads(term: int, number: int, body: bytes, sizes: Placement) -> Loads:
    (steps,) = struct.unpack_from("<Q", body)
    shape = (sizes.num_layers, sizes.num_logical)
    if len(body) != 8 + 8 * shape[0] * shape[1]:
        raise PayloadError(f"loads of {len(body) - 8} bytes, which is not float64 {list(shape)}")
    loads = np.frombuffer(body, dtype="<f8", offset=8).reshape(shape)
    if not (loads.min() >= 0 and loads.max() <= _MOST_LOAD):  # NaN is neither
        raise PayloadError("loads that are negative, not finite or not a number")
    return Loads(term=term, round=number, loads=loads, steps=steps)


def _verdict(term: int, number: int, body: bytes, sizes: Placement) -> Verdict:
    outcome, before, after, moves = Verdict.FIXED.unpack_from(body)
    reason, slots = _text(body[Verdict.FIXED.size :])
    placement = None
    if _OUTCOMES[outcome] == "moved":
        shape = (sizes.num_layers, sizes.num_physical)
        if len(slots) != 4 * shape[0] * shape[1]:
            raise PayloadError(f"a placement of {len(slots)} bytes, which is not int32 {list(shape)}")
        ids = np.frombuffer(slots, dtype="<i4").reshape(shape)
        try:
            placement = Placement(ids, ep_size=sizes.ep_size, num_logical=sizes.num_logical)
        except PlacementError as error:
            raise PayloadError(f"a placement that cannot be: {error}") from None
    elif slots:
        raise PayloadError("a verdict with a placement that is not to be used")
    for balancedness in (before, after):
        if not 0.0 <= balancedness <= _EVEN and (placement is not None or not math.isnan(balancedness)):
            raise PayloadError(f"a verdict with a balancedness of {balancedness}")
    if moves > sizes.num_layers * sizes.num_physical:
        raise PayloadError(f"a verdict with {moves} moves, more than there are slots")
    return Verdict(
        term=term,
        round=number,
        outcome=_OUTCOMES[outcome],
        reason=reason,
        before=before,
        after=after,
        moves=moves,
        placement=placement,
    )


def _pack_text(text: str) -> bytes:
    data = one_line(text).encode(errors="replace")[:_MOST_TEXT]
    data = data.decode(errors="ignore").encode()  # not cut within a character
    return struct.pack("<H", len(data)) + data


def _text(data: bytes) -> tuple[str, bytes]:
    (size,) = struct.unpack_from("<H", data)
    if size > _MOST_TEXT or len(data) < 2 + size:
        raise PayloadError("a text that is cut short")
    return one_line(data[2 : 2 + size].decode()), data[2 + size :]
