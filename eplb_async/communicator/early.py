"""Messages of peers that this rank has not met yet."""

from __future__ import annotations

from collections import Counter

from eplb_async.core.messages import Message, Ping, Pong, Word

_MOST = 16  # of each rank
_NOT_KEPT = (Ping, Pong, Word)  # they are sent again, or nobody can have subscribed yet


class Early:
    """Keeps the first few of each rank, in the order they came."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._count: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._messages)

    def keep(self, message: Message) -> bool:
        """Keep a message; returns whether it is one to keep, and there was room."""
        if isinstance(message, _NOT_KEPT) or self._count[message.sender] >= _MOST:
            return False
        self._messages.append(message)
        self._count[message.sender] += 1
        return True

    def take(self) -> list[Message]:
        """What was kept; from now on it is not."""
        messages, self._messages = self._messages, []
        self._count.clear()
        return messages
