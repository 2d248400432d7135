"""The front end as rank 0 runs it: its socket, its start, its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import uvicorn

from eplb_async.integrations.asgi import eplb_app
from eplb_async.service import EplbService
from examples.moe_server.app import make_app
from examples.moe_server.batching import Batcher
from examples.moe_server.engine import Engine
from examples.moe_server.job import Job
from examples.moe_server.stop_world import StopTheWorld

CLOSE_SECONDS = 10.0  # for open requests to be answered, and as long again for what closes after them


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are for the parent


async def front(
    job: Job,
    pipe: Connection,
    stop: asyncio.Event,
    engine: Engine,
    batcher: Batcher,
    balancer: EplbService | StopTheWorld,
) -> None:
    """Serve HTTP until it is time to stop, and let what is open be answered.

    Args:
        job: The server.
        pipe: Where the port is told.
        stop: Set when it is time.
        engine: Rank 0's.
        batcher: Its requests.
        balancer: What moves the experts.
    """
    if isinstance(balancer, StopTheWorld):
        balancer.request = engine.request_rearrange

    def state() -> dict[str, Any]:
        found = {name: getattr(job, name) for name in ("rebalancing", "ranks", "max_batch", "step_interval")}
        found |= {"model": dataclasses.asdict(job.config), "expert_bytes": job.config.expert_bytes}
        if isinstance(balancer, StopTheWorld):
            return found | {"placement": balancer.placement.physical_to_logical_map.tolist()}
        return found | {
            "placement": balancer.comm.placement.physical_to_logical_map.tolist(),
            "service": dataclasses.asdict(balancer.health()),
            "communicator": dataclasses.asdict(balancer.comm.health()),
        }

    app = make_app(
        engine,
        batcher,
        rebalance=lambda force: balancer.rebalance(force=force),
        state=state,
        rank=None if isinstance(balancer, StopTheWorld) else eplb_app(balancer),
    )
    listener = socket.create_server(("127.0.0.1", job.port), backlog=1024)
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=int(CLOSE_SECONDS))
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    stopping = asyncio.ensure_future(stop.wait())
    pipe.send(listener.getsockname()[1])
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    batcher.close("the server is closing")
    server.should_exit = True
    await serving
