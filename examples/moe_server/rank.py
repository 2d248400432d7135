"""One rank: its part of the model, its engine, its communicator; on rank 0 the HTTP front end too."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop

from eplb_async import AsyncEplbCommunicator, Placement, Settings
from eplb_async.rendezvous import TcpRendezvous
from eplb_async.service import EplbService, ServiceSettings
from eplb_async.telemetry import PrometheusHook
from examples.moe_server.batching import Batcher
from examples.moe_server.engine import Engine
from examples.moe_server.front import CLOSE_SECONDS, front
from examples.moe_server.job import Job
from examples.moe_server.model import Model
from examples.moe_server.ranks import Ranks
from examples.moe_server.stop_world import StopTheWorld

_EXCHANGE_SECONDS = 15.0  # that a rank may keep the others waiting in a step; more than a step may wait to begin
_log = logging.getLogger("moe_server")


def main(rank: int, job: Job, pipe: Connection, sockets: dict[int, socket.socket]) -> None:
    """Entry point of a rank's process; it ends when the parent says so or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # signals are for the parent
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, format=f"rank {rank} %(name)s %(levelname)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.dup2(2, 1)  # NIXL and UCX log to stdout
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        uvloop.run(_run(rank, job, pipe, sockets))


async def _run(rank: int, job: Job, pipe: Connection, sockets: dict[int, socket.socket]) -> None:
    placement = job.config.initial_placement(job.ranks)
    model = Model(job.config, placement, rank)
    ranks = Ranks(rank, sockets, width=job.config.width, timeout=_EXCHANGE_SECONDS)
    batcher = None
    if rank == 0:
        batcher = Batcher(width=job.config.width, max_batch=job.max_batch, max_queue=job.max_queue)
    stop, ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell(event: asyncio.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(event.set)

    async with contextlib.AsyncExitStack() as stack:
        balancer: EplbService | StopTheWorld
        if job.rebalancing == "vllm":
            balancer = StopTheWorld(rank, model, ranks, placement)
            await balancer.open()
            stack.push_async_callback(balancer.close)
            await balancer.ready()
            rearrange: Callable[[], object] | None = balancer.rearrange
        else:
            balancer = await _opened(rank, job, pipe, model, placement, stack)
            rearrange = None

        def over() -> None:
            if engine.failed and isinstance(balancer, EplbService):
                balancer.pause()  # there is nothing to balance any more
            tell(ended)

        engine = Engine(rank, model, ranks, balancer, batcher=batcher, rearrange=rearrange, ended=over)
        threading.Thread(target=_watch, args=(pipe, lambda: tell(stop)), name="parent", daemon=True).start()
        engine.start()
        if batcher is None:
            pipe.send("ready")
            await stop.wait()
        else:
            await front(job, pipe, stop, engine, batcher, balancer)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), CLOSE_SECONDS)
        engine.request_stop()


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
    hook = PrometheusHook()
    comm = await stack.enter_async_context(
        AsyncEplbCommunicator.open(
            rank=rank,
            ep_size=job.ranks,
            weights=model.weights,
            placement=placement,
            rendezvous=rendezvous,
            settings=Settings.from_env(secret=job.secret, activation="step"),
            on_layer_applied=model.routing.refresh,
            telemetry=hook,
        )
    )
    settings = ServiceSettings.from_env(
        step_interval=job.step_interval if job.rebalancing == "service" else 0,
        window_steps=job.window_steps,
        max_bytes_per_second=job.max_bytes_per_second,
    )
    service = await stack.enter_async_context(EplbService(comm, settings=settings, telemetry=hook))
    hook.watch(service)
    if job.rebalancing == "off":
        service.pause()
    return service


def _watch(pipe: Connection, stop: Callable[[], object]) -> None:
    """Wait for the parent's word or its end; what has not closed in time then is ended."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    stop()
    time.sleep(3 * CLOSE_SECONDS)
    _log.critical("closing took longer than %g s; the process ends without it", 3 * CLOSE_SECONDS)
    os._exit(1)
