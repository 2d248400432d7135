"""What ranks tell each other in a round: one record, one fixed struct, a keyed digest.

    magic 4s, version B, kind B, cause B, sender H, origin i, attempt Q, round Q, layer i, digest 16s, text, MAC 16s

The MAC is BLAKE2b under the key of this communicator, checked in constant time before anything is parsed. The key is
fresh for each communicator, so nothing recorded from another one is accepted.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

from eplb_async.core.text import is_one_line, one_line

__all__ = ["DIGEST_SIZE", "KEY_SIZE", "Cause", "Codec", "Kind", "Message", "MessageError"]

KEY_SIZE = 32
DIGEST_SIZE = 16
_MAC_SIZE = 16
_MAX_TEXT = 600
_MAX_COUNTER = (1 << 62) - 1
_MAGIC = b"EPLV"
_VERSION = 1
_HEADER = struct.Struct("!4sBBBHiQQi16s")


class Kind(IntEnum):
    """What a message says: JOIN, DONE, FAIL, SEEN to the coordinator, BEGIN, END, WAIT, PING from it; LEAVE by all."""

    JOIN = 0
    """My rows may be read: this is my call, its layer and the digest of its indices."""
    BEGIN = 1
    """All have joined; READs may be posted."""
    DONE = 2
    """My READs are over."""
    FAIL = 3
    """I am out of this call, for a cause."""
    END = 4
    """The round is over for this call: with no cause, everybody's READs are."""
    WAIT = 5
    """Not yet; the text says for whom."""
    PING = 6
    """Nothing; whether it can be sent at all is the question."""
    LEAVE = 7
    """My communicator closes."""
    SEEN = 8
    """I know that the round has ended well; so you may close."""


class Cause(IntEnum):
    """Why a round ended badly."""

    NONE = 0
    FAILED = 1
    TIMEOUT = 2
    GONE = 3


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        kind: What it says.
        sender: Rank that says it.
        attempt: Number of the member's call that it is about; each rank counts its own.
        round: Number of the round, which the coordinator gives.
        layer: Layer of the call, for JOIN.
        digest: Digest of the call, for JOIN.
        cause: Why, for FAIL and END.
        origin: Rank that it is due to, or -1.
        text: In words: the reason, or who is waited for.
    """

    kind: Kind
    sender: int
    attempt: int = 0
    round: int = 0
    layer: int = -1
    digest: bytes = bytes(DIGEST_SIZE)
    cause: Cause = Cause.NONE
    origin: int = -1
    text: str = ""


class MessageError(ValueError):
    """Bytes that are no message of this communicator. One text for each reason: it is what they are counted by."""


class Codec:
    """Encodes and decodes the messages of one communicator.

    Args:
        key: Its 32-byte key.
        size: Number of ranks.
    """

    def __init__(self, key: bytes, size: int) -> None:
        if len(key) != KEY_SIZE:
            raise ValueError(f"the key must be {KEY_SIZE} bytes, not {len(key)}")
        self._size = size
        self._hash = blake2b(key=key, digest_size=_MAC_SIZE, person=b"eplb-vllm")

    def __reduce__(self) -> str:
        raise TypeError("a Codec holds the key and is not pickled")

    def encode(self, message: Message) -> bytes:
        """The bytes of a message; its text on one line, and cut where it is too long."""
        text = one_line(message.text).encode("utf-8", "replace")[:_MAX_TEXT].decode("utf-8", "ignore").encode()
        head = _HEADER.pack(
            _MAGIC,
            _VERSION,
            message.kind,
            message.cause,
            message.sender,
            message.origin,
            message.attempt,
            message.round,
            message.layer,
            message.digest,
        )
        return head + text + self._mac(head + text)

    def decode(self, data: bytes) -> Message:
        """The message that some bytes are.

        Raises:
            MessageError: They are none: damaged, forged, of another version, or out of range.
        """
        if not _HEADER.size + _MAC_SIZE <= len(data) <= _HEADER.size + _MAX_TEXT + _MAC_SIZE:
            raise MessageError("it is too short or too long for a message")
        body, mac = data[:-_MAC_SIZE], data[-_MAC_SIZE:]
        if not hmac.compare_digest(self._mac(body), mac):
            raise MessageError("its digest is wrong: damaged, or of another communicator")
        magic, version, kind, cause, sender, origin, attempt, round_, layer, digest = _HEADER.unpack_from(body)
        if magic != _MAGIC or version != _VERSION:
            raise MessageError(f"it is of version {version}, this is {_VERSION}")
        if kind not in _KINDS or cause not in _CAUSES:
            raise MessageError("its kind or cause is unknown")
        if sender >= self._size or not -1 <= origin < self._size:
            raise MessageError(f"its sender or origin is no rank of {self._size}")
        if attempt > _MAX_COUNTER or round_ > _MAX_COUNTER or layer < -1:
            raise MessageError("a number is out of range")
        try:
            text = body[_HEADER.size :].decode()
        except UnicodeDecodeError:
            raise MessageError("its text is no UTF-8") from None
        if not is_one_line(text):
            raise MessageError("its text is not one line")
        return Message(Kind(kind), sender, attempt, round_, layer, digest, Cause(cause), origin, text)

    def _mac(self, data: bytes) -> bytes:
        state = self._hash.copy()
        state.update(data)
        return state.digest()


_KINDS = frozenset(map(int, Kind))
_CAUSES = frozenset(map(int, Cause))
