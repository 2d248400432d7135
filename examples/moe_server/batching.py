"""Requests become batches: those that run take every step together, and others join as places get free."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from examples.moe_server.model import Trunk


class Overloaded(Exception):
    """The queue is full; try again later."""


class Unavailable(Exception):
    """The server answers nothing any more; says why."""


@dataclass(eq=False)
class Sequence:
    """One request: it takes a token of its prompt in each step, then the token that it said last.

    Attributes:
        prompt: Tokens.
        max_tokens: Tokens to answer.
        state: What it remembers, ``[width]``.
        future: Its answer; cancelled when nobody waits for it any more.
        taken: Steps that it has taken.
        answer: Tokens answered so far.
    """

    prompt: list[int]
    max_tokens: int
    state: torch.Tensor
    future: Future[list[int]] = field(default_factory=Future)
    taken: int = 0
    answer: list[int] = field(default_factory=list)

    @property
    def token(self) -> int:
        """The token of its next step."""
        return self.prompt[self.taken] if self.taken < len(self.prompt) else self.answer[-1]

    def advance(self, state: torch.Tensor, token: int) -> bool:
        """Take the outcome of a step; returns whether the answer is complete."""
        self.state = state
        self.taken += 1
        if self.taken >= len(self.prompt):
            self.answer.append(token)
        return len(self.answer) == self.max_tokens


class Batcher:
    """Between the event loop, which submits, and the engine's thread, which takes.

    Args:
        width: Values that a sequence remembers.
        max_batch: Most sequences in one step.
        max_wait: Seconds that the first request of an idle engine waits for others to join.
        max_queue: Most requests that wait for a place.
    """

    def __init__(self, *, width: int, max_batch: int, max_wait: float = 0.002, max_queue: int = 256) -> None:
        self.max_batch = max_batch
        self._width, self._max_wait, self._max_queue = width, max_wait, max_queue
        self._news = threading.Condition()
        self._queue: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._over = ""

    def submit(self, prompt: list[int], max_tokens: int) -> Future[list[int]]:
        """Queue a request; cancel the future to drop it.

        Raises:
            Overloaded: The queue is full.
            Unavailable: The server is closing, or has failed.
        """
        with self._news:
            if self._over:
                raise Unavailable(self._over)
            if len(self._queue) >= self._max_queue:
                raise Overloaded(f"{self._max_queue} requests are waiting")
            sequence = Sequence(prompt, max_tokens, torch.zeros(self._width))
            self._queue.append(sequence)
            self._news.notify()
        return sequence.future

    def take(self, timeout: float) -> list[Sequence] | None:
        """The sequences of the next step; empty if none came in time, None once it is closed and all is answered."""
        with self._news:
            self._drop()
            if not self._running and not self._queue:
                if self._over:
                    return None
                self._news.wait_for(lambda: self._queue or self._over, timeout)
                deadline = time.monotonic() + self._max_wait
                while 0 < len(self._queue) < self.max_batch and (left := deadline - time.monotonic()) > 0:
                    self._news.wait(left)
                self._drop()
            while self._queue and len(self._running) < self.max_batch:
                self._running.append(self._queue.popleft())
            return list(self._running)

    def advance(self, batch: list[Sequence], x: torch.Tensor, trunk: Trunk) -> None:
        """Take what came out of a step, ``[n, width]``; answers those that are complete."""
        tokens = trunk.next_tokens(x)
        done = [one for one, state, token in zip(batch, x, tokens, strict=True) if one.advance(state, token)]
        with self._news:
            self._running = [one for one in self._running if one not in done]
        for one in done:
            with suppress(InvalidStateError):  # cancelled: nobody waits
                one.future.set_result(one.answer)

    def close(self, why: str, *, at_once: bool = False) -> None:
        """Take no more requests; those that are there are answered, or refused ``at_once``."""
        with self._news:
            self._over = self._over or why
            refused = [*self._running, *self._queue] if at_once else []
            if at_once:
                self._running, self._queue = [], deque()
            self._news.notify()
        for one in refused:
            with suppress(InvalidStateError):
                one.future.set_exception(Unavailable(why))

    @property
    def depth(self) -> dict[str, int]:
        """How many run, and how many wait."""
        with self._news:
            return {"running": len(self._running), "waiting": len(self._queue)}

    def _drop(self) -> None:
        """Forget those whose clients are gone."""
        self._running = [one for one in self._running if not one.future.cancelled()]
        self._queue = deque(one for one in self._queue if not one.future.cancelled())
