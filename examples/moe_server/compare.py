"""What rebalancing costs the requests: ``python -m examples.moe_server.compare``, on a machine that does nothing else.

Three servers, one after the other, under the same load at a share of what one can do, whose popular topics alternate.
In the middle of each turn the experts move: in the background, with the engine stopped (the vLLM way), or not at all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from examples.moe_server.load import Client, Outcome
from examples.moe_server.model import ModelConfig
from examples.moe_server.traffic import Traffic

_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS, _STOP_SECONDS, _CAPACITY_SECONDS = 120.0, 60.0, 8.0


class Server:
    """One server, as a user starts it."""

    def __init__(self, mode: str, arguments: list[str]) -> None:
        self.command = [sys.executable, "-m", "examples.moe_server", "--port", "0", "--rebalancing", mode, *arguments]

    async def __aenter__(self) -> str:
        """Start it; returns its URL."""
        self._process = await asyncio.create_subprocess_exec(
            *self.command, cwd=_ROOT, stdout=asyncio.subprocess.PIPE, stderr=sys.stderr
        )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), _START_SECONDS)
            if not line:
                raise RuntimeError("the server did not start; see its messages above")
            return line.decode().split()[-1]
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            raise

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()


class Turns:
    """The turns of a run: other topics become popular, and half a turn later the experts move.

    Attributes:
        reports: What the server said of each rebalance.
        moving: When each rebalance began and ended; seconds of ``time.monotonic``.
        before: Balancedness of what the ranks computed in the first half of each turn, mean over the layers.
        after: Likewise, in the second half.
    """

    def __init__(self, client: Client, seconds: float, *, rebalances: bool) -> None:
        self.reports: list[dict[str, Any]] = []
        self.moving: list[tuple[float, float]] = []
        self.before: list[float] = []
        self.after: list[float] = []
        self._client, self._seconds, self._rebalances = client, seconds, rebalances

    async def run(self) -> None:
        """Until it is cancelled."""
        due = time.monotonic()
        while True:
            first = await self._tokens()
            await asyncio.sleep(max(0.0, (due := due + self._seconds / 2) - time.monotonic()))
            self.before.append(_balancedness(await self._tokens() - first))
            if self._rebalances:
                began = time.monotonic()
                answer = await self._client.http.post("/eplb/rebalance?force=true", timeout=_START_SECONDS)
                self.moving.append((began, time.monotonic()))
                self.reports.append(answer.json())
            second = await self._tokens()
            await asyncio.sleep(max(0.0, (due := due + self._seconds / 2) - time.monotonic()))
            self.after.append(_balancedness(await self._tokens() - second))

    async def _tokens(self) -> np.ndarray:
        return np.array((await self._client.http.get("/eplb")).json()["rank_tokens"], np.float64)


def _balancedness(tokens: np.ndarray) -> float:
    return float((tokens.mean(axis=1) / np.maximum(tokens.max(axis=1), 1e-9)).mean())


async def measure(mode: str, given: argparse.Namespace, traffic: Traffic, rate: float) -> dict[str, Any]:
    """One server under load."""
    arguments = ["--step-interval", "0", "--window-steps", str(given.window_steps), "--ranks", str(given.ranks)]
    limit = given.max_bytes_per_second if mode == "service" else 0
    async with Server(mode, [*arguments, "--max-bytes-per-second", str(limit)]) as url, Client(url, traffic) as client:
        await client.load(rate, given.warm_up)
        turns = Turns(client, given.turn, rebalances=mode != "off")
        running = asyncio.ensure_future(turns.run())
        outcome = await client.load(rate, given.seconds, alternate=given.turn)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        expert_bytes = (await client.http.get("/eplb")).json()["expert_bytes"]
    return summary(outcome, turns, expert_bytes) | {"max_bytes_per_second": limit}


def summary(outcome: Outcome, turns: Turns, expert_bytes: int) -> dict[str, Any]:
    """The figures of one server."""
    moved = [report for report in turns.reports if report.get("outcome") == "moved"]
    return outcome.summary() | {
        "latency_ms_while_moving": outcome.latency_ms(turns.moving),
        "migrations": len(moved),
        "other_outcomes": [report for report in turns.reports if report not in moved],
        "bytes_moved": sum(report["num_moves"] for report in moved) * expert_bytes,
        "seconds_moving": round(sum(end - begin for begin, end in turns.moving), 3),
        "balancedness_before": round(float(np.mean(turns.before)), 4) if turns.before else None,
        "balancedness_after": round(float(np.mean(turns.after)), 4) if turns.after else None,
    }


async def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Capacity, then each way."""
    traffic = Traffic(ModelConfig(), prompt_tokens=given.prompt_tokens, max_tokens=given.max_tokens)
    traffic.solve()
    rate = given.rate
    found: dict[str, Any] = {"seconds": given.seconds, "turn_seconds": given.turn, "ranks": given.ranks}
    if not rate:
        async with Server("off", ["--ranks", str(given.ranks)]) as url, Client(url, traffic) as client:
            await client.find_capacity(2.0, given.workers)  # warm
            capacity = await client.find_capacity(_CAPACITY_SECONDS, given.workers)
        found["capacity"] = capacity.summary()
        rate = given.share * capacity.rate
    found["rate"] = round(rate, 2)
    for mode in given.modes:
        found[mode] = await measure(mode, given, traffic, rate)
    if {"off", "service"} <= set(given.modes):
        found["p99_ratio"] = {
            mode: round(found[mode]["latency_ms"]["p99"] / found["off"]["latency_ms"]["p99"], 3)
            for mode in given.modes
            if mode != "off"
        }
    return found


def table(found: dict[str, Any], modes: list[str]) -> str:
    """The figures for people."""
    rows = [["", *modes]]
    for name, path in (
        ("p50 ms", ("latency_ms", "p50")),
        ("p99 ms", ("latency_ms", "p99")),
        ("max ms", ("latency_ms", "max")),
        ("p99 ms while moving", ("latency_ms_while_moving", "p99")),
        ("requests", ("sent",)),
        ("wrong", ("wrong",)),
        ("failed", ("failed",)),
        ("migrations", ("migrations",)),
        ("bytes moved", ("bytes_moved",)),
        ("seconds moving", ("seconds_moving",)),
        ("balancedness before", ("balancedness_before",)),
        ("balancedness after", ("balancedness_after",)),
    ):
        row = [name]
        for mode in modes:
            value: Any = found[mode]
            for part in path:
                value = value.get(part, "") if isinstance(value, dict) else ""
            row.append(str(value))
        rows.append(row)
    lines = ["  ".join(f"{cell:>20}" for cell in row) for row in rows]
    return "\n".join([f"{found['rate']} requests a second for {found['seconds']:g} s", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(prog="moe_server.compare", description="What rebalancing costs the requests.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each way (default %(default)s)")
    parser.add_argument("--turn", type=float, default=5.0, help="seconds of a turn (default %(default)s)")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds before (default %(default)s)")
    parser.add_argument("--share", type=float, default=0.6, help="of the capacity (default %(default)s)")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second, instead of a share")
    parser.add_argument("--ranks", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--workers", type=int, default=32, help="clients that find the capacity (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--window-steps", type=int, default=100, help="that loads are of (default %(default)s)")
    parser.add_argument(
        "--max-bytes-per-second", type=int, default=200_000_000, help="of the service (default %(default)s)"
    )
    parser.add_argument("--modes", nargs="+", choices=("off", "service", "vllm"), default=["off", "service", "vllm"])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = uvloop.run(compare(given))
    print(json.dumps(found) if given.json else f"{json.dumps(found)}\n{table(found, given.modes)}")
    return 1 if any(found[mode]["wrong"] or found[mode]["failed"] for mode in given.modes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
