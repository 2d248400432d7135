"""Mail in parts: how a message is cut into words, and put together again where they arrive.

A peer is believed nothing: what it can make this rank keep is one unfinished message, of ``MAX_MAIL`` bytes.
"""

from __future__ import annotations

from collections import Counter

from eplb_async.core.messages import Word
from eplb_async.core.wire import MAX_PARTS, MAX_WORD

MAX_MAIL = MAX_PARTS * MAX_WORD
"""Bytes of the largest message."""


def num_parts(nbytes: int) -> int:
    """How many words a message of that size takes; an empty one takes one too."""
    return max(1, -(-nbytes // MAX_WORD))


class _Half:
    """A message of which parts are missing."""

    __slots__ = ("missing", "parts", "serial", "topic")

    def __init__(self, word: Word) -> None:
        self.serial = word.serial
        self.topic = word.topic
        self.parts: list[bytes | None] = [None] * word.parts
        self.missing = word.parts


class Assembly:
    """What has come of each sender's mail in one view: whole messages come out, in the order of their serials.

    Args:
        dropped: Where words that move nothing are counted, by why (I-8).
    """

    __slots__ = ("_done", "_dropped", "_halves")

    def __init__(self, dropped: Counter[str]) -> None:
        self._dropped = dropped
        self._halves: dict[int, _Half] = {}
        self._done: dict[int, int] = {}

    def add(self, word: Word) -> bytes | None:
        """Take a word of a member; parts of one message may come in any order.

        Returns:
            The message, if that was its last missing part.
        """
        half = self._halves.get(word.sender)
        if word.serial <= self._done.get(word.sender, -1) or (half is not None and word.serial < half.serial):
            self._dropped["stale"] += 1
            return None
        if not _is_well_cut(word):
            self._dropped["impossible"] += 1
            return None
        if half is None or word.serial > half.serial:
            if half is not None:
                self._dropped["incomplete"] += 1
            half = self._halves[word.sender] = _Half(word)
        if (word.topic, word.parts) != (half.topic, len(half.parts)):
            self._dropped["impossible"] += 1
            return None
        if half.parts[word.part] is not None:
            self._dropped["duplicate"] += 1
            return None
        half.parts[word.part] = word.data
        half.missing -= 1
        if half.missing:
            return None
        del self._halves[word.sender]
        self._done[word.sender] = word.serial
        return b"".join(part for part in half.parts if part is not None)

    def clear(self) -> None:
        """Another view: what has come of unfinished messages is dropped, and senders may count anew."""
        self._dropped["incomplete"] += len(self._halves)
        self._halves.clear()
        self._done.clear()

    def __len__(self) -> int:
        return len(self._halves)


def _is_well_cut(word: Word) -> bool:
    """Whether a word is as `num_parts` cuts: all parts but the last are full, and none is empty but of an empty one."""
    if word.part >= word.parts:
        return False
    if word.part < word.parts - 1:
        return len(word.data) == MAX_WORD
    return bool(word.data) or word.parts == 1
