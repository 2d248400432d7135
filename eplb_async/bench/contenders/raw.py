"""NIXL by hand: a request for each peer and layer, polled without a pause, then the copy into the rows."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np

from eplb_async.bench.contenders.base import Contender, Stopwatch
from eplb_async.bench.contenders.link import agent_name, blocks, exchange, remote
from eplb_async.bench.work import Fetch, Turn
from eplb_async.nixl.bindings import NixlNative
from eplb_async.nixl.native import Extent, Handle, State
from eplb_async.settings import Settings

__all__ = ["Raw"]

_TIMEOUT = 60.0


class Raw(Contender):
    """The least that is right: READs with a notif, which is the source's leave to overwrite its rows."""

    name = "raw"

    async def open(self) -> None:
        work = self.work
        self._native = NixlNative(agent_name("raw", work.rank))
        self._buffers = work.buffers()
        tensors = [tensor for layer in work.rows.layers for tensor in layer] + self._buffers
        self._token = self._native.register(
            [Extent(str(n), t.data_ptr(), t.shape[1], t.shape[1], t.shape[0]) for n, t in enumerate(tensors)]
        )
        blobs, self._rows = exchange(work, self._native.metadata())
        self._names = {rank: self._native.add_remote(blob) for rank, blob in blobs.items()}
        for name in self._names.values():
            self._native.connect(name)
        self._done: dict[str, int] = defaultdict(int)
        self._turns = 0

    async def turn(self) -> Turn:
        work = self.work
        watch, polls = Stopwatch(work), self._native.polls
        self._turns += 1
        deadline = time.monotonic() + _TIMEOUT
        for layer in range(work.one.num_layers):
            self._read(layer, deadline)
            self._await_readers(layer, deadline)
            work.place(layer, self._buffers)
        return watch.turn(polls=self._native.polls - polls)

    def _read(self, layer: int, deadline: float) -> None:
        native = self._native
        handles = [(handle, native.post(handle, notif)) for handle, notif in self._requests(layer)]
        pending = [handle for handle, state in handles if state is State.PROC]
        while pending:
            pending = [handle for handle in pending if native.check(handle) is State.PROC]
            if time.monotonic() > deadline:
                raise TimeoutError(f"raw NIXL: {len(pending)} READs of layer {layer} did not end in {_TIMEOUT:g} s")
        for handle, _ in handles:
            native.release(handle)

    def _requests(self, layer: int) -> list[tuple[Handle, bytes]]:
        """Posts as large as the library's for each peer; the last one carries the notif."""
        by_source: dict[int, list[tuple[int, Fetch]]] = defaultdict(list)
        for number, fetch in enumerate(self.work.incoming(layer)):
            by_source[fetch.source].append((number, fetch))
        per_post = max(1, Settings().max_post_bytes // self.work.scenario.expert_bytes)
        requests = []
        for source, wanted in by_source.items():
            for first in range(0, len(wanted), per_post):
                chosen = wanted[first : first + per_post]
                ours, theirs = [], []
                for tensor, buffer in enumerate(self._buffers):
                    nbytes = buffer.shape[1]
                    ours.append(blocks([buffer.data_ptr() + number * nbytes for number, _ in chosen], nbytes))
                    theirs.append(
                        blocks([remote(self._rows, layer, tensor, fetch, nbytes) for _, fetch in chosen], nbytes)
                    )
                handle = self._native.make_read(
                    np.concatenate(ours), "DRAM", np.concatenate(theirs), "DRAM", self._names[source]
                )
                last = first + per_post >= len(wanted)
                requests.append((handle, f"{self._turns}/{layer}".encode() if last else b""))
        return requests

    def _await_readers(self, layer: int, deadline: float) -> None:
        """Wait until everyone who reads from us in this layer has read."""
        readers = len({fetch.reader for fetch in self.work.outgoing(layer)})
        key = f"{self._turns}/{layer}"
        while self._done[key] < readers:
            for _, message in self._native.notifications():
                self._done[message.decode()] += 1
            if time.monotonic() > deadline:
                raise TimeoutError(f"raw NIXL: readers of layer {layer} did not end in {_TIMEOUT:g} s")
        del self._done[key]

    async def close(self) -> None:
        self._native.deregister(self._token)
        self._native.destroy()
        self._buffers.clear()
