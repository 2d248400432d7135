from __future__ import annotations

import threading

import pytest


class Memory:
    """The smallest Rendezvous: a dict."""

    url = "memory://"
    trusted = True

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
        return total

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def close(self) -> None:
        pass


@pytest.fixture
def memory() -> Memory:
    return Memory()
