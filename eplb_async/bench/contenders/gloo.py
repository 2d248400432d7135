"""gloo: ``batch_isend_irecv`` for each layer, then the copy into the rows."""

from __future__ import annotations

import torch.distributed as dist

from eplb_async.bench.contenders.base import Contender, Stopwatch
from eplb_async.bench.work import Turn

__all__ = ["Gloo"]


class Gloo(Contender):
    """torch.distributed's sends and receives, all of a layer in one batch, a request for each row."""

    name = "gloo"

    async def open(self) -> None:
        self._buffers = self.work.buffers()

    async def turn(self) -> Turn:
        work, watch = self.work, Stopwatch(self.work)
        for layer in range(work.one.num_layers):
            operations = [
                dist.P2POp(dist.isend, tensor[fetch.source_slot], fetch.reader)
                for fetch in work.outgoing(layer)
                for tensor in work.rows.layers[layer]
            ]
            operations += [
                dist.P2POp(dist.irecv, buffer[number], fetch.source)
                for number, fetch in enumerate(work.incoming(layer))
                for buffer in self._buffers
            ]
            if operations:
                for request in dist.batch_isend_irecv(operations):
                    request.wait()
            work.place(layer, self._buffers)
        return watch.turn()

    async def close(self) -> None:
        self._buffers.clear()
