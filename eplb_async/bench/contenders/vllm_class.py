"""vLLM's own ``NixlEplbCommunicator``, where the package ``vllm`` is installed.

Its class names GPU memory in every descriptor; on CPU tensors that one name is set to CPU memory after it is made, and
it is told that there is one pipeline stage, since vLLM's own groups are not set up here. Nothing else of it is changed.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from eplb_async.bench.contenders.base import Spinning, Stopwatch
from eplb_async.bench.work import Turn, Work
from eplb_async.integrations.vllm import AsyncNixlEplbCommunicator

__all__ = ["DropIn", "VllmClass"]

_MODULE = "vllm.distributed.eplb.eplb_communicator"
_TAKES = {"cpu_group", "all_expert_weights", "expert_buffer"}


class VllmClass(Spinning):
    """As vLLM's engine drives it: context, receives and ``execute`` for each layer, then the copy into the rows."""

    name = "vllm"

    @classmethod
    def why_not(cls, work: Work) -> str:
        if importlib.util.find_spec("vllm") is None:
            return "the package vllm is not installed"
        try:
            kind = importlib.import_module(_MODULE).NixlEplbCommunicator
        except Exception as error:  # whatever its import does on a machine without its platform
            return f"vllm does not load here: {type(error).__name__}: {error}"
        missing = _TAKES - set(inspect.signature(kind.__init__).parameters)
        return f"this vllm's NixlEplbCommunicator takes no {', '.join(sorted(missing))}" if missing else ""

    async def open(self) -> None:
        await super().open()
        self._module = importlib.import_module(_MODULE)

    async def ready(self) -> None:
        module, work = self._module, self.work
        module.get_pp_group = lambda: SimpleNamespace(world_size=1, rank_in_group=0)  # type: ignore[attr-defined]
        self._communicator: Any = module.NixlEplbCommunicator(
            cpu_group=dist.group.WORLD, all_expert_weights=work.rows.layers, expert_buffer=self._buffers
        )
        self._communicator._nixl_memory_type = "DRAM"
        self._layer(0)  # the first READ of a peer wires up to it
        work.group.barrier()

    async def turn(self) -> Turn:
        work, watch = self.work, Stopwatch(self.work)
        for layer in range(work.one.num_layers):
            self._layer(layer)
            work.place(layer, self._buffers)
        return watch.turn()

    async def rest(self) -> None:
        self.work.group.barrier()
        del self._communicator
        gc.collect()  # its agent's thread spins until the last reference is gone

    def _layer(self, layer: int) -> None:
        work, communicator = self.work, self._communicator
        old = np.asarray(work.one.physical_to_logical_map[layer])
        communicator.set_transfer_context(old, layer)
        for number, fetch in enumerate(work.incoming(layer)):
            expert = int(old[fetch.source * work.scenario.experts + fetch.source_slot])
            communicator.add_recv([buffer[number] for buffer in self._buffers], fetch.source, expert)
        communicator.execute()


class DropIn(VllmClass):
    """This library's class for vLLM, driven in the same way; its agent is idle between turns, so that it stays."""

    name = "vllm_drop_in"

    @classmethod
    def why_not(cls, work: Work) -> str:
        return ""

    async def open(self) -> None:
        await Spinning.open(self)
        group: Any = dist.group.WORLD
        self._communicator = AsyncNixlEplbCommunicator(group, self.work.rows.layers, self._buffers)

    async def ready(self) -> None:
        """Nothing: it is there."""

    async def rest(self) -> None:
        """Nothing: it stays."""

    async def close(self) -> None:
        self._communicator.close()
        await super().close()
