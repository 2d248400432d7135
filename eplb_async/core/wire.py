"""Control messages as bytes: fixed structs, versioned, range-checked, with a keyed digest.

    magic 4s, version B, kind B, sender H, term Q, epoch Q, attempt Q, incarnations 2Q, body, digest 16s

All integers are big-endian. The digest (BLAKE2b under the job's key, salted with the layout) covers
everything before it and is checked, in constant time, before anything is parsed; what is read afterwards was
written by somebody who holds the key and has the same ``ep_size`` and ``num_layers``. Every value has one
encoding only.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from eplb_async.core import messages
from eplb_async.core.messages import Message
from eplb_async.core.text import is_one_line

VERSION = 1
MAGIC = b"EPLB"
KEY_SIZE = 32
DIGEST_SIZE = 16
MAX_REASON = 512
MAX_BLOB = 1 << 20
MAX_TOPIC = (1 << 16) - 1
MAX_WORD = 32 << 10
MAX_PARTS = 128
MAX_RANKS = 4096
MAX_LAYERS = 4096
MAX_COUNTER = (1 << 62) - 1
"""Terms, epochs and attempts that are accepted: whatever is counted up from one can still be sent."""
_MAX_SENT = 2 * MAX_COUNTER

_HEADER = struct.Struct("!4sBBHQQQQQ")
_U8, _U16, _U32, _U64, _I32 = (
    struct.Struct("!B"),
    struct.Struct("!H"),
    struct.Struct("!I"),
    struct.Struct("!Q"),
    struct.Struct("!i"),
)


class WireError(ValueError):
    """Bytes that are no message, or a message that cannot be bytes.

    Attributes:
        kind: Label to count it under: ``"truncated"``, ``"oversize"``, ``"forged"``, ``"foreign"``,
            ``"version"``, ``"unknown"``, ``"range"``, ``"trailing"`` or ``"text"``.
    """

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        super().__init__(f"control message {kind}: {detail}")


class _Reader:
    """Takes a body apart; never past its end."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise WireError("truncated", f"needs {end} bytes of body, has {len(self._data)}")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack(self.take(form.size))[0]
        return value

    def finish(self) -> None:
        if self._at != len(self._data):
            raise WireError("trailing", f"{len(self._data) - self._at} bytes after the body")


@dataclass(frozen=True, slots=True)
class _Form:
    """How the values of one field are packed, read back, and how long they may get."""

    pack: Callable[[Any], bytes]
    read: Callable[[_Reader], Any]
    size: int


class Codec:
    """Encodes and decodes the messages of one job and layout.

    Args:
        key: The job's 32-byte key.
        ep_size: Number of ranks.
        num_layers: Number of layers.

    Raises:
        ValueError: On a key of another length, or a layout that the format cannot hold.
    """

    __slots__ = ("_body", "_counters", "_forms", "_hash", "_layout", "_said", "max_size")

    def __init__(self, key: bytes, *, ep_size: int, num_layers: int) -> None:
        if len(key) != KEY_SIZE:
            raise ValueError(f"the key must be {KEY_SIZE} bytes, not {len(key)}")
        if not 0 < ep_size <= MAX_RANKS or not 0 < num_layers <= MAX_LAYERS:
            raise ValueError(f"ep_size={ep_size}, num_layers={num_layers}: at most {MAX_RANKS} and {MAX_LAYERS}")
        self._layout = (ep_size, num_layers)
        salt = struct.pack("!QQ", ep_size, num_layers)
        self._hash = blake2b(key=key, digest_size=DIGEST_SIZE, salt=salt, person=b"eplb-control")
        self._forms = _forms(ep_size, num_layers)
        self._said: Message | None = None
        self._counters = (0, 0, 0, 0)
        self._body = b""
        longest = max(sum(form.size for _, form in body) for _, body in self._forms.values())
        self.max_size = _HEADER.size + longest + DIGEST_SIZE

    def __repr__(self) -> str:
        return f"Codec(ep_size={self._layout[0]}, num_layers={self._layout[1]})"

    def __reduce__(self) -> str:
        raise TypeError("a Codec holds the job's key and is not pickled")

    def encode(self, message: Message) -> bytes:
        """Returns the bytes of a message.

        Raises:
            WireError: If a field is out of its range.
        """
        return self.address(
            message,
            sender=message.sender,
            sender_incarnation=message.sender_incarnation,
            receiver_incarnation=message.receiver_incarnation,
        )

    def address(self, message: Message, *, sender: int, sender_incarnation: int, receiver_incarnation: int) -> bytes:
        """As `encode`, with other addresses than the message's own.

        What is said to many in a row, as the same object, is packed once: only addresses and digest differ.

        Raises:
            WireError: If a field is out of its range.
        """
        if message is not self._said:
            self._counters, self._body = self._pack(message)
            self._said = message
        _check_range("sender", sender, self._layout[0] - 1)
        for incarnation in (sender_incarnation, receiver_incarnation):
            _check_range("incarnation", incarnation, (1 << 64) - 1)
        kind, *counters = self._counters
        header = _HEADER.pack(MAGIC, VERSION, kind, sender, *counters, sender_incarnation, receiver_incarnation)
        data = header + self._body
        return data + self._digest(data)

    def _pack(self, message: Message) -> tuple[tuple[int, int, int, int], bytes]:
        """Kind, term, epoch and attempt, and the body."""
        found = self._forms.get(type(message))
        if found is None:
            raise WireError("unknown", f"{type(message).__name__} is no control message")
        kind, body = found
        numbers = (message.term, message.epoch, message.attempt)
        for number in numbers:
            _check_range("counter", number, _MAX_SENT)
        return (kind, *numbers), b"".join([form.pack(getattr(message, name)) for name, form in body])

    def decode(self, data: bytes) -> Message:
        """Returns the message that some bytes are, if they are one.

        Raises:
            WireError: If they are not: damaged, forged, of another version or layout, or out of range (I-8).
        """
        if len(data) > self.max_size:
            raise WireError("oversize", f"{len(data)} bytes, at most {self.max_size}")
        if len(data) < _HEADER.size + DIGEST_SIZE:
            raise WireError("truncated", f"{len(data)} bytes, at least {_HEADER.size + DIGEST_SIZE}")
        data = bytes(data)
        signed, digest = data[:-DIGEST_SIZE], data[-DIGEST_SIZE:]
        if not hmac.compare_digest(self._digest(signed), digest):
            raise WireError("forged", "its digest does not match; is the secret the same on every rank?")
        magic, version, kind, sender, term, epoch, attempt, *incarnations = _HEADER.unpack_from(signed)
        if magic != MAGIC:
            raise WireError("foreign", "it does not begin as one")
        if version != VERSION:
            raise WireError("version", f"version {version}; this side speaks {VERSION}")
        if kind >= len(_KINDS):
            raise WireError("unknown", f"kind {kind}")
        _check_range("sender", sender, self._layout[0] - 1)
        for number in (term, epoch, attempt):
            _check_range("counter", number, MAX_COUNTER)
        reader = _Reader(signed[_HEADER.size :])
        make = _KINDS[kind]
        fields = {name: form.read(reader) for name, form in self._forms[make][1]}
        reader.finish()
        message: Message = make(
            term=term,
            epoch=epoch,
            attempt=attempt,
            sender=sender,
            sender_incarnation=incarnations[0],
            receiver_incarnation=incarnations[1],
            **fields,
        )
        return message

    def _digest(self, data: bytes) -> bytes:
        state = self._hash.copy()
        state.update(data)
        return state.digest()


def _check_range(name: str, value: int, most: int, least: int = 0) -> int:
    if not least <= value <= most:
        raise WireError("range", f"{name}={value} is not in [{least}, {most}]")
    return value


_KINDS: tuple[type[Message], ...] = (
    messages.Hello,
    messages.Introduce,
    messages.Ping,
    messages.Pong,
    messages.Join,
    messages.Begin,
    messages.Prepared,
    messages.Commit,
    messages.AbortRequest,
    messages.End,
    messages.View,
    messages.Term,
    messages.State,
    messages.Install,
    messages.Leave,
    messages.Met,
    messages.Word,
)
"""A kind's number on the wire is its index. Append only."""


def kind_of(data: bytes) -> str:
    """What kind of message some bytes say they are, unchecked: for counting."""
    return _KINDS[data[len(MAGIC) + 1]].__name__


def _forms(ep_size: int, num_layers: int) -> dict[type[Message], tuple[int, list[tuple[str, _Form]]]]:
    """Number and body of each kind of message: its fields in order, each with its form."""
    flag = _number(_U8, "flag", 1)
    upto = _number(_U32, "upto", num_layers)
    origin = _number(_I32, "origin", ep_size - 1, -1)
    counter = _number(_U64, "counter", MAX_COUNTER, most_sent=_MAX_SENT)
    ranks, steps = _bitset(ep_size), _steps(num_layers)
    boolean = _Form(lambda value: flag.pack(int(value)), lambda reader: bool(flag.read(reader)), flag.size)
    text = _text(MAX_REASON)
    bodies: dict[type[Message], dict[str, _Form]] = {
        messages.Hello: {},
        messages.Introduce: {"blob": _blob(MAX_BLOB)},
        messages.Ping: {"gone": ranks, "declared": ranks, "stride": counter},
        messages.Pong: {"stride": counter},
        messages.Join: {"digests": _DIGESTS, "last_epoch": counter},
        messages.Prepared: {"upto": upto, "holds": steps},
        messages.Commit: {"upto": upto, "at": steps},
        messages.AbortRequest: {"reason": text},
        messages.End: {"upto": upto, "at": steps, "origin": origin, "reason": text},
        messages.View: {"gone": ranks, "declared": ranks, "installed_term": counter, "members": ranks},
        messages.State: {
            "last_epoch": counter,
            "upto": upto,
            "ended": boolean,
            "at": steps,
            "highest_epoch": counter,
            "gone": ranks,
            "declared": ranks,
            "leaving": ranks,
            "installed_term": counter,
            "members": ranks,
            "last_attempt": counter,
        },
        messages.Install: {"members": ranks, "upto": upto, "at": steps, "next_epoch": counter},
        messages.Met: {"rank": _number(_U32, "rank", ep_size - 1), "start": counter, "digest": _DIGEST},
        messages.Word: {
            "topic": _number(_U16, "topic", MAX_TOPIC),
            "serial": counter,
            "part": _number(_U16, "part", MAX_PARTS - 1),
            "parts": _number(_U16, "parts", MAX_PARTS, 1),
            "data": _blob(MAX_WORD),
        },
    }
    return {make: (kind, list(bodies.get(make, {}).items())) for kind, make in enumerate(_KINDS)}


def _number(form: struct.Struct, name: str, most: int, least: int = 0, *, most_sent: int | None = None) -> _Form:
    return _Form(
        lambda value: form.pack(_check_range(name, value, most if most_sent is None else most_sent, least)),
        lambda reader: _check_range(name, reader.number(form), most, least),
        form.size,
    )


def _bitset(ep_size: int) -> _Form:
    size = -(-ep_size // 8)

    def check(value: int) -> int:
        if value < 0 or value >> ep_size:
            raise WireError("range", f"a set of ranks beyond ep_size={ep_size}")
        return value

    return _Form(
        lambda value: check(value).to_bytes(size, "big"),
        lambda reader: check(int.from_bytes(reader.take(size), "big")),
        size,
    )


def _steps(num_layers: int) -> _Form:
    form = struct.Struct(f"!{num_layers}I")

    def pack(value: tuple[int, ...]) -> bytes:
        if len(value) != num_layers:
            raise WireError("range", f"{len(value)} steps for {num_layers} layers")
        try:
            return form.pack(*value)
        except struct.error:
            raise WireError("range", f"a step of {value} is no unsigned 32-bit number") from None

    return _Form(pack, lambda reader: form.unpack(reader.take(form.size)), form.size)


def _blob(most: int) -> _Form:
    def pack(value: bytes) -> bytes:
        return _U32.pack(_check_range("length", len(value), most)) + value

    def read(reader: _Reader) -> bytes:
        return reader.take(_check_range("length", reader.number(_U32), most))

    return _Form(pack, read, _U32.size + most)


def _text(most: int) -> _Form:
    def check(value: str) -> str:
        if not is_one_line(value):
            raise WireError("text", "a reason that is not one line")
        return value

    def pack(value: str) -> bytes:
        try:
            data = check(value).encode()
        except UnicodeEncodeError:
            raise WireError("text", "a reason that is no UTF-8") from None
        return _U16.pack(_check_range("length", len(data), most)) + data

    def read(reader: _Reader) -> str:
        try:
            return check(reader.take(_check_range("length", reader.number(_U16), most)).decode())
        except UnicodeDecodeError:
            raise WireError("text", "a reason that is no UTF-8") from None

    return _Form(pack, read, _U16.size + most)


def _pack_digest(value: bytes) -> bytes:
    if len(value) != DIGEST_SIZE:
        raise WireError("range", f"a digest has {DIGEST_SIZE} bytes")
    return value


def _pack_digests(value: tuple[bytes, ...]) -> bytes:
    if len(value) != 3 or any(len(digest) != DIGEST_SIZE for digest in value):
        raise WireError("range", f"a JOIN carries three digests of {DIGEST_SIZE} bytes")
    return b"".join(value)


_DIGEST = _Form(_pack_digest, lambda reader: reader.take(DIGEST_SIZE), DIGEST_SIZE)
_DIGESTS = _Form(_pack_digests, lambda reader: tuple(reader.take(DIGEST_SIZE) for _ in range(3)), 3 * DIGEST_SIZE)
