"""Load for the server: ``python -m examples.moe_server.load --url http://127.0.0.1:8000 --rate 30 --check``.

Requests begin at a fixed rate, whether earlier ones are answered or not, and latency counts from when one was due.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import numpy as np
import torch
import uvloop

from examples.moe_server.model import ModelConfig
from examples.moe_server.traffic import Traffic

_ANSWER_SECONDS = 30.0
_SHOWN = 5


@dataclass(kw_only=True)
class Outcome:
    """What became of the requests.

    Attributes:
        sent: Requests that were due.
        wrong: Answers other than the reference's.
        failed: Requests without an answer, those that were not sent because too many were open included.
        seconds: From the first to the last answer.
        spans: When each answered request was due, and when its answer came; seconds of ``time.monotonic``.
        complaints: The first few failures, in words.
    """

    sent: int = 0
    wrong: int = 0
    failed: int = 0
    seconds: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list, repr=False)
    complaints: list[str] = field(default_factory=list)

    def complain(self, text: str) -> None:
        """Count a failure, and keep the first few."""
        self.failed += 1
        if len(self.complaints) < _SHOWN:
            self.complaints.append(text)

    def latency_ms(self, within: list[tuple[float, float]] | None = None) -> dict[str, float]:
        """Percentiles in milliseconds, of all, or of the requests that were open within one of these times."""
        found = [
            end - begin
            for begin, end in self.spans
            if within is None or any(begin < last and first < end for first, last in within)
        ]
        if not found:
            return {}
        values = np.percentile(np.array(found) * 1e3, [50, 90, 99, 100]).round(2).tolist()
        return dict(zip(("p50", "p90", "p99", "max"), values, strict=True)) | {"requests": len(found)}

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        record = {name: value for name, value in asdict(self).items() if name != "spans"}
        return record | {"latency_ms": self.latency_ms(), "answers_per_second": round(self.rate, 2)}

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.spans) / self.seconds if self.seconds else 0.0


class Client:
    """Asks the server, and checks what it answers.

    Args:
        url: The server.
        traffic: What to ask; answers are checked where it knows them.
        max_open: Most requests open at a time.
    """

    def __init__(self, url: str, traffic: Traffic, *, max_open: int = 512) -> None:
        self.traffic = traffic
        self._max_open = max_open
        limits = httpx.Limits(max_connections=max_open, max_keepalive_connections=max_open)
        self.http = httpx.AsyncClient(base_url=url, timeout=_ANSWER_SECONDS, limits=limits)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def ask(self, outcome: Outcome, due: float) -> None:
        """One request, whatever becomes of it."""
        prompt = self.traffic.next()
        try:
            answer = await self.http.post("/generate", json={"prompt": prompt, "max_tokens": self.traffic.max_tokens})
            if answer.status_code != 200:
                outcome.complain(f"{answer.status_code}: {answer.text}")
                return
            tokens = answer.json()["tokens"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            outcome.complain(f"{type(error).__name__}: {error}")
            return
        outcome.spans.append((due, time.monotonic()))
        if self.traffic.answers and tokens != self.traffic.answers[prompt]:
            outcome.wrong += 1
            outcome.complaints.append(f"{prompt}: {tokens}, not {self.traffic.answers[prompt]}")

    async def load(self, rate: float, seconds: float, *, alternate: float = 0.0) -> Outcome:
        """Requests at a fixed rate, all waited for; every ``alternate`` seconds other topics are popular."""
        outcome, started, turns = Outcome(), time.monotonic(), 0
        tasks: set[asyncio.Task[None]] = set()
        for number in range(int(rate * seconds)):
            due = started + number / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if alternate and (due - started) // alternate > turns:
                turns += 1
                self.traffic.alternate()
            outcome.sent += 1
            if len(tasks) >= self._max_open:
                outcome.complain(f"not sent: {self._max_open} requests are open")
                continue
            task = asyncio.ensure_future(self.ask(outcome, due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        outcome.seconds = time.monotonic() - started
        return outcome

    async def find_capacity(self, seconds: float, workers: int) -> Outcome:
        """What the server can do: so many clients, each of which asks again once it has its answer."""
        outcome, started = Outcome(), time.monotonic()

        async def work() -> None:
            while (now := time.monotonic()) < started + seconds:
                outcome.sent += 1
                await self.ask(outcome, now)

        await asyncio.gather(*(work() for _ in range(workers)))
        outcome.seconds = time.monotonic() - started
        return outcome


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="moe_server.load", description="Load for the server, answers checked.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default %(default)s)")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long (default %(default)s)")
    parser.add_argument("--skew", choices=("zipf", "uniform", "one"), default="zipf", help="how topics are asked")
    parser.add_argument("--alternate", type=float, default=0.0, help="seconds until other topics are popular; 0: never")
    parser.add_argument("--prompt-tokens", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare every answer with a single process's")
    parser.add_argument("--find-capacity", action="store_true", help="no fixed rate: as many as it answers")
    parser.add_argument("--workers", type=int, default=32, help="clients for --find-capacity (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args()


async def run(given: argparse.Namespace) -> Outcome:
    state = httpx.get(f"{given.url}/eplb", timeout=_ANSWER_SECONDS).raise_for_status().json()  # noqa: ASYNC210
    traffic = Traffic(
        ModelConfig(**state["model"]),
        prompt_tokens=given.prompt_tokens,
        max_tokens=given.max_tokens,
        skew=given.skew,
        seed=given.seed,
    )
    if given.check:
        traffic.solve()
    async with Client(given.url, traffic) as client:
        if given.find_capacity:
            return await client.find_capacity(given.seconds, given.workers)
        return await client.load(given.rate, given.seconds, alternate=given.alternate)


def main() -> int:
    given = arguments()
    try:
        torch.set_num_threads(1)
        outcome = uvloop.run(run(given))
    except httpx.HTTPError as error:
        print(f"no state from {given.url}/eplb: {error}", file=sys.stderr)
        return 1
    summary = outcome.summary()
    if given.json:
        print(json.dumps(summary))
    else:
        for name, value in summary.items():
            print(f"{name:20} {value}")
    return 1 if outcome.wrong or outcome.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
