"""The way of vLLM's NIXL communicator, as it is described: written anew for CPU memory.

For each layer and each expert a pair of descriptor lists and a request, posted as they are made; then all are
polled with pauses of half a millisecond; a barrier of the group; the lists and requests are released; the buffer is
copied into the rows. NIXL's progress thread is on, which is NIXL's default.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch.distributed as dist

from eplb_async.bench.contenders.base import Spinning, Stopwatch
from eplb_async.bench.contenders.link import agent_name, exchange, remote
from eplb_async.bench.work import Fetch, Turn
from eplb_async.nixl.bindings import load

__all__ = ["VllmWay"]

_PAUSE = 0.0005
_TIMEOUT = 60.0


class VllmWay(Spinning):
    """See the module."""

    name = "vllm_way"

    async def ready(self) -> None:
        work = self.work
        api, _ = load()
        self._agent = api.nixl_agent(
            agent_name("vllm-way", work.rank), api.nixl_agent_config(backends=["UCX"], enable_prog_thread=True)
        )
        tensors = [tensor for layer in work.rows.layers for tensor in layer] + self._buffers
        self._registered = self._agent.register_memory(self._agent.get_reg_descs(tensors))
        blobs, self._rows = exchange(work, self._agent.get_agent_metadata())
        self._names = {rank: self._agent.add_remote_agent(blob) for rank, blob in blobs.items()}
        # The first READ of a peer wires up to it: not what is measured.
        first = {fetch.source: fetch for fetch in work.incoming(0)}
        entries = [self._post(0, 0, fetch) for fetch in first.values()]
        self._wait(entries)
        self._release(entries)
        work.group.barrier()

    async def turn(self) -> Turn:
        work, watch, polls = self.work, Stopwatch(self.work), 0
        for layer in range(work.one.num_layers):
            entries = [self._post(layer, number, fetch) for number, fetch in enumerate(work.incoming(layer))]
            polls += self._wait(entries)
            dist.monitored_barrier()
            self._release(entries)
            work.place(layer, self._buffers)
        return watch.turn(polls=polls)

    def _post(self, layer: int, number: int, fetch: Fetch) -> tuple[Any, Any, Any]:
        agent = self._agent
        ours = [(buffer.data_ptr() + number * buffer.shape[1], buffer.shape[1], 0) for buffer in self._buffers]
        theirs = [
            (remote(self._rows, layer, tensor, fetch, buffer.shape[1]), buffer.shape[1], 0)
            for tensor, buffer in enumerate(self._buffers)
        ]
        local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(ours, "DRAM"))
        far = agent.prep_xfer_dlist(self._names[fetch.source], agent.get_xfer_descs(theirs, "DRAM"))
        indices = list(range(len(ours)))
        request = agent.make_prepped_xfer("READ", local, indices, far, indices)
        agent.transfer(request)
        return local, far, request

    def _wait(self, entries: list[tuple[Any, Any, Any]]) -> int:
        """Poll until all are done; returns the polls."""
        agent, polls = self._agent, 0
        pending = {number: request for number, (_, _, request) in enumerate(entries)}
        deadline = time.monotonic() + _TIMEOUT
        while pending:
            for number, request in list(pending.items()):
                polls += 1
                state = agent.check_xfer_state(request)
                if state == "DONE":
                    del pending[number]
                elif state != "PROC":
                    raise RuntimeError(f"the vLLM way: a READ ended in state {state}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the vLLM way: {len(pending)} READs did not end in {_TIMEOUT:g} s")
            if pending:
                time.sleep(_PAUSE)
        return polls

    def _release(self, entries: list[tuple[Any, Any, Any]]) -> None:
        for local, far, request in entries:
            self._agent.release_xfer_handle(request)
            self._agent.release_dlist_handle(local)
            self._agent.release_dlist_handle(far)

    async def rest(self) -> None:
        self.work.group.barrier()
        for name in self._names.values():
            self._agent.remove_remote_agent(name)
        self._agent.deregister_memory(self._registered)
        del self._agent
        gc.collect()  # what still refers to the agent keeps its thread spinning
