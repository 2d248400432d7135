"""What a rank's process does in the tests of the vLLM drop-in: called by name through ``RankProcesses``' ``run``."""

from __future__ import annotations

import asyncio
import gc
import importlib
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_async.core.placement import Placement
from eplb_async.integrations.vllm import AsyncNixlEplbCommunicator, install
from eplb_async.settings import Settings
from eplb_async.testing.patterns import PatternWeights
from tests.integrations.vllm_files import use

MODULE = __name__


class State:
    """This process's rank; there is one."""

    group: Any
    rows: PatternWeights
    buffer: list[torch.Tensor]
    comm: Any
    rank: int
    placement: Placement


async def meet(_: object, rank: int, placement: Placement, store: str, row_bytes: tuple[int, ...]) -> None:
    """Join the process group, and load weights."""

    def work() -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=placement.ep_size)
        State.group, State.rank, State.placement = dist.group.WORLD, rank, placement
        State.rows = PatternWeights(placement, rank, row_bytes)
        State.buffer = [torch.zeros_like(tensor) for tensor in State.rows.layers[0]]

    await asyncio.to_thread(work)


async def make(_: object, timeout: float, bad: int = -1, **settings: Any) -> str:
    """Make the communicator; rank ``bad`` gives a buffer of other rows."""

    def work() -> str:
        buffer = State.buffer if State.rank != bad else [torch.zeros(4, 7, dtype=torch.uint8)] * len(State.buffer)
        State.comm = AsyncNixlEplbCommunicator(
            State.group, State.rows.layers, buffer, settings=Settings(**settings), timeout=timeout
        )
        return repr(State.comm)

    return await asyncio.to_thread(work)


async def move(_: object, new: Placement, layers: tuple[int, ...] | None = None) -> float:
    """Move to a placement as vLLM does; returns the seconds it took. The rows change only where it went well."""
    return await asyncio.to_thread(_move, new, layers)


def _move(new: Placement, layers: tuple[int, ...] | None = None) -> float:
    started = time.perf_counter()
    for layer in range(new.num_layers) if layers is None else layers:
        old, wanted = (np.asarray(p.physical_to_logical_map[layer]) for p in (State.placement, new))
        n = new.num_local_experts
        mine, target = (ids[State.rank * n : (State.rank + 1) * n] for ids in (old, wanted))
        rows, buffer = State.rows.layers[layer], State.buffer
        for slot in np.flatnonzero((mine != target) & (target >= 0)).tolist():
            if (held := np.flatnonzero(mine == target[slot])).size:
                for tensor, into in zip(rows, buffer, strict=True):
                    into[slot].copy_(tensor[int(held[0])])
        State.comm.set_transfer_context(old, layer)
        for slot in np.flatnonzero((mine != target) & (target >= 0)).tolist():
            if not (mine == target[slot]).any():
                source = int(np.flatnonzero(old == target[slot])[-1]) // n
                State.comm.add_recv([into[slot] for into in buffer], source, expert_id=int(target[slot]))
        State.comm.execute()
        for slot in np.flatnonzero((mine != target) & (target >= 0)).tolist():
            for tensor, into in zip(rows, buffer, strict=True):
                tensor[slot].copy_(into[slot])
    if layers is None:
        State.placement = new
    return time.perf_counter() - started


async def reading(_: object) -> None:
    """Answer when a READ of this rank is in flight."""
    while not State.comm._group.endpoint.transfers:
        await asyncio.sleep(0)


async def check(_: object, placement: Placement) -> int:
    """Wrong bytes."""
    return State.rows.wrong_bytes(placement)


async def moved(_: object) -> None:
    """Give a tensor other memory, as a reload does."""
    State.rows.layers[0][0].data = State.rows.layers[0][0].data.clone()


async def twice(_: object) -> list[str]:
    """Execute in two threads at once while no other rank comes; what each raised."""
    raised: list[str] = []

    def work() -> None:
        try:
            State.comm.execute()
        except Exception as error:
            raised.append(type(error).__name__)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    return sorted(raised)


async def idle_cpu(_: object, seconds: float) -> float:
    """CPU that this process uses between calls, in cores."""
    before, started = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (time.process_time() - before) / (time.perf_counter() - started)


async def close(_: object) -> None:
    """Close the communicator."""
    await asyncio.to_thread(State.comm.close)


async def drop(_: object) -> list[str]:
    """Forget the communicator, as vLLM does; the threads that are left once its engine has ended."""
    State.comm = None
    gc.collect()  # errors that it raised hold their frames, and those hold it
    deadline = time.monotonic() + 10
    while (left := [t.name for t in threading.enumerate() if "vllm" in t.name]) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return left


# ------------------------------------------------------------------ vLLM's own rearrangement, see ``vllm_files``
async def use_vllm(_: object, folder: str) -> tuple[bool, bool]:
    """Load vLLM's files and install ours as its entry point does; whether vLLM has our class, and knows its kind."""

    def work() -> tuple[bool, bool]:
        use(folder)
        installed = install() and install()
        module = importlib.import_module("vllm.distributed.eplb.eplb_communicator")
        return installed, issubclass(module.NixlEplbCommunicator, module.EplbCommunicator)

    return await asyncio.to_thread(work)


async def make_vllms(_: object, whose: str, timeout: float) -> str:
    """Make the communicator: ours through vLLM's factory's class, or vLLM's own, told that memory is on the CPU."""

    def work() -> str:
        module = importlib.import_module("vllm.distributed.eplb.eplb_communicator")
        given = {"cpu_group": State.group, "all_expert_weights": State.rows.layers, "expert_buffer": State.buffer}
        if whose == "ours":
            State.comm = module.NixlEplbCommunicator(**given)
            State.comm._timeout = timeout
        else:
            importlib.reload(module)  # as it was before install()
            State.comm = module.NixlEplbCommunicator(**given)
            State.comm._nixl_memory_type = "DRAM"
        return type(State.comm).__module__

    return await asyncio.to_thread(work)


class Timed:
    """A communicator, and the seconds that were spent in it."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._comm, name)

        def timed(*args: Any, **more: Any) -> Any:
            started = time.perf_counter()
            try:
                return value(*args, **more)
            finally:
                self.seconds += time.perf_counter() - started

        return timed if callable(value) else value


async def rearrange(_: object, new: Placement, batched: bool = False, together: bool = True) -> tuple[float, float]:
    """``rearrange_expert_weights_inplace``, or layer by layer in batches as the async worker does.

    Answers the seconds it took, and how many of them were the communicator's.
    """
    return await asyncio.to_thread(_rearrange, new, batched, together)


def _rearrange(new: Placement, batched: bool, together: bool) -> tuple[float, float]:
    execute = importlib.import_module("vllm.distributed.eplb.rebalance_execute")
    comm = Timed(State.comm)
    old_ids, new_ids = (torch.from_numpy(np.array(p.physical_to_logical_map)).long() for p in (State.placement, new))
    if together:
        dist.barrier()
    started = time.perf_counter()
    if not batched:
        execute.rearrange_expert_weights_inplace(old_ids, new_ids, State.rows.layers, State.buffer, State.group, comm)
    for layer in range(new.num_layers) if batched else ():
        metadata = execute.transfer_layer(
            old_layer_indices=old_ids[layer],
            new_layer_indices=new_ids[layer],
            expert_weights=State.rows.layers[layer],
            expert_weights_buffer=State.buffer,
            ep_group=State.group,
            communicator=comm,
            layer_idx=layer,
            enable_migration_batching=True,
        )
        execute.move_from_buffer(
            expert_weights=State.rows.layers[layer],
            expert_weights_buffers=State.buffer,
            transfer_metadata=metadata,
            new_indices=new_ids[layer].numpy(),
            ep_rank=State.rank,
        )
    State.placement = new
    return time.perf_counter() - started, comm.seconds
