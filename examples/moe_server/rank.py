"""One rank: its part of the model, its engine, its communicator; on rank 0 the HTTP front end too."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import uvicorn
import uvloop

from eplb_async import AsyncEplbCommunicator, Placement, Settings
from eplb_async.rendezvous import TcpRendezvous
from eplb_async.service import EplbService, ServiceSettings
from examples.moe_server.app import make_app
from examples.moe_server.batching import Batcher
from examples.moe_server.engine import Engine
from examples.moe_server.model import Model, ModelConfig
from examples.moe_server.ranks import Ranks
from examples.moe_server.stop_world import StopTheWorld

_CLOSE_SECONDS = 10.0  # for open requests to be answered, and as long again for all that closes after them
_EXCHANGE_SECONDS = 15.0  # that a rank may keep the others waiting in a step; more than a step may wait to begin
_log = logging.getLogger("moe_server")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks are given.

    Attributes:
        ranks: How many there are.
        port: Port of the front end; 0 takes a free one.
        rebalancing: ``service``: in the background. ``vllm``: the engine stops for it. ``off``: never.
        config: The model.
        max_batch: Most requests in one step.
        max_queue: Most requests that wait for a place.
        step_interval: Steps between rebalances; 0 for none but those that are asked for.
        window_steps: Steps that the loads are summed over.
        max_bytes_per_second: What a rank's READs may bring in a second; 0 for no limit.
        secret: The job's secret.
    """

    ranks: int
    port: int
    rebalancing: Literal["service", "vllm", "off"]
    config: ModelConfig
    max_batch: int
    max_queue: int
    step_interval: int
    window_steps: int
    max_bytes_per_second: int
    secret: bytes = dataclasses.field(repr=False)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield  # signals are for the parent


def main(rank: int, job: Job, pipe: Connection, sockets: dict[int, socket.socket]) -> None:
    """Entry point of a rank's process; it ends when the parent says so or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, format=f"rank {rank} %(name)s %(levelname)s: %(message)s", stream=sys.stderr
    )
    os.dup2(2, 1)  # NIXL and UCX log to stdout
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        uvloop.run(_run(rank, job, pipe, sockets))


async def _run(rank: int, job: Job, pipe: Connection, sockets: dict[int, socket.socket]) -> None:
    placement = job.config.initial_placement(job.ranks)
    model = Model(job.config, placement, rank)
    ranks = Ranks(rank, sockets, width=job.config.width, timeout=_EXCHANGE_SECONDS)
    stop, ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell(event: asyncio.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(event.set)

    async with contextlib.AsyncExitStack() as stack:
        if job.rebalancing == "vllm":
            way = StopTheWorld(rank, model, ranks, placement)
            await way.open()
            await way.ready()
            service = None
        else:
            service = await _opened(rank, job, pipe, model, placement, stack)
        batcher = None
        if rank == 0:
            batcher = Batcher(width=job.config.width, max_batch=job.max_batch, max_queue=job.max_queue)
        engine = Engine(
            rank,
            model,
            ranks,
            way if service is None else service,
            batcher=batcher,
            rearrange=way.rearrange if service is None else None,
            ended=lambda: tell(ended),
        )
        threading.Thread(target=_watch, args=(pipe, lambda: tell(stop)), name="parent", daemon=True).start()
        engine.start()
        if batcher is None:
            pipe.send("ready")
            await stop.wait()
        else:
            if service is None:
                way.request = engine.request_rearrange
            await _front(job, pipe, stop, engine, batcher, service or way)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _CLOSE_SECONDS)
        engine.request_stop()
        if service is None:
            await way.close()


async def _opened(
    rank: int, job: Job, pipe: Connection, model: Model, placement: Placement, stack: contextlib.AsyncExitStack
) -> EplbService:
    """The communicator and its service."""
    rendezvous: Any
    if rank == 0:
        rendezvous = await asyncio.to_thread(TcpRendezvous.host, "127.0.0.1", 0, timeout=60.0, secret=job.secret)
        pipe.send(rendezvous.url)
    else:
        rendezvous = await asyncio.to_thread(pipe.recv)
    comm = await stack.enter_async_context(
        AsyncEplbCommunicator.open(
            rank=rank,
            ep_size=job.ranks,
            weights=model.weights,
            placement=placement,
            rendezvous=rendezvous,
            settings=Settings.from_env(secret=job.secret, activation="step"),
            on_layer_applied=model.routing.refresh,
        )
    )
    settings = ServiceSettings.from_env(
        step_interval=job.step_interval if job.rebalancing == "service" else 0,
        window_steps=job.window_steps,
        max_bytes_per_second=job.max_bytes_per_second,
    )
    service = await stack.enter_async_context(EplbService(comm, settings=settings))
    if job.rebalancing == "off":
        service.pause()
    return service


async def _front(
    job: Job,
    pipe: Connection,
    stop: asyncio.Event,
    engine: Engine,
    batcher: Batcher,
    balancer: EplbService | StopTheWorld,
) -> None:
    """Serve HTTP until it is time to stop, and let what is open be answered."""

    def state() -> dict[str, Any]:
        found = {
            "rebalancing": job.rebalancing,
            "ranks": job.ranks,
            "model": dataclasses.asdict(job.config),
            "expert_bytes": job.config.expert_bytes,
            "max_batch": job.max_batch,
        }
        if isinstance(balancer, StopTheWorld):
            return found | {"placement": balancer.placement.physical_to_logical_map.tolist()}
        comm = balancer.comm
        return found | {
            "placement": comm.placement.physical_to_logical_map.tolist(),
            "service": dataclasses.asdict(balancer.health()),
            "communicator": dataclasses.asdict(comm.health()),
        }

    def degraded() -> dict[int, str]:
        return {} if isinstance(balancer, StopTheWorld) else dict(balancer.comm.health().degraded)

    async def rebalance(force: bool) -> Any:
        return await balancer.rebalance(force=force)

    app = make_app(engine, batcher, rebalance=rebalance, state=state, degraded=degraded, metrics=None)
    listener = socket.create_server(("127.0.0.1", job.port), backlog=1024)
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=int(_CLOSE_SECONDS))
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    pipe.send(listener.getsockname()[1])
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    batcher.close("the server is closing")
    server.should_exit = True
    await serving


def _watch(pipe: Connection, stop: Any) -> None:
    """Wait for the parent's word or its end; what has not closed in time then is ended."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    stop()
    time.sleep(3 * _CLOSE_SECONDS)
    os._exit(1)
