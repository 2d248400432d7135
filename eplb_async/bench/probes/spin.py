"""One READ by plain NIXL, as one would write it by hand: what an awaited READ is compared with.

The descriptor lists are prepared once, NIXL's own objects are called without anything between, and whoever waits
does nothing else meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from eplb_async.nixl.bindings import NixlNative
from eplb_async.nixl.card import unseal
from eplb_async.nixl.regions import extent_of

_LIMIT = 30.0
_CARD_BYTES = 1 << 22


class PlainReader:
    """A NIXL agent that reads one row at a time and polls until it is there. Blocks; used by one thread.

    Args:
        name: Agent name.
        card: Card of the agent to read from; its first region is read.
        nbytes: Bytes of each READ, from the beginning of a row.
    """

    def __init__(self, name: str, card: bytes, nbytes: int) -> None:
        peer = unseal(card, b"", limit=_CARD_BYTES)
        remote = peer.extents()[0]
        self._native = NixlNative(name)
        self._memory = np.zeros((remote.num_rows, nbytes), np.uint8)
        local = extent_of(self._memory, "plain")
        self._token = self._native.register([local])
        self._native.connect(self._native.add_remote(peer.metadata))
        agent = self._agent = self._native.agent
        self._local, self._remote = (
            agent.prep_xfer_dlist(whose, agent.get_xfer_descs(_rows(extent, nbytes), "DRAM"))
            for whose, extent in (("NIXL_INIT_AGENT", local), (peer.name, remote))
        )
        self._rows = [np.array([row], np.int32) for row in range(remote.num_rows)]

    def read(self, row: int, *, pause: float, notif: bytes) -> float:
        """Read a row; returns seconds.

        Args:
            row: Number of the row.
            pause: Seconds to sleep before each poll; 0 to spin.
            notif: Sent to the source when the bytes are there.

        Raises:
            TimeoutError: It did not end.
        """
        agent, rows = self._agent, self._rows[row]
        wait: Callable[[], None] = (lambda: time.sleep(pause)) if pause else (lambda: None)
        started = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", self._local, rows, self._remote, rows, notif)
        state = agent.transfer(handle)
        while state == "PROC":
            wait()
            state = agent.check_xfer_state(handle)
            if time.perf_counter() - started > _LIMIT:
                raise TimeoutError(f"a plain READ of row {row} did not end within {_LIMIT} s")
        agent.release_xfer_handle(handle)
        return time.perf_counter() - started

    def close(self) -> None:
        """Give everything back."""
        for prepared in (self._local, self._remote):
            self._agent.release_dlist_handle(prepared)
        self._agent = None
        self._native.deregister(self._token)
        self._native.destroy()


def _rows(extent: Any, nbytes: int) -> np.ndarray[Any, Any]:
    return np.array([(extent.address + i * extent.row_stride, nbytes, 0) for i in range(extent.num_rows)], np.uint64)
