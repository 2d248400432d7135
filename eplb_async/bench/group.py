"""The ranks of a run as each of them sees the others: barriers and gathering, with deadlines, JSON only."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from eplb_async.rendezvous import Rendezvous
from eplb_async.rendezvous.store import StoreRendezvous
from eplb_async.rendezvous.tcp import TcpRendezvous
from eplb_async.settings import Settings

__all__ = ["Group", "Place"]

_TIMEOUT = 120.0
_LOOK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands.

    Attributes:
        rank: Its number.
        size: Ranks of the run.
        host: Host of the store.
        port: Port of the store.
        hosted: Whether somebody hosts that store already; otherwise rank 0 does.
    """

    rank: int
    size: int
    host: str
    port: int
    hosted: bool

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Place | None:
        """As torchrun and its like say it: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``.

        Returns:
            The place, or ``None`` where these are not set.
        """
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(environ):
            return None
        return cls(
            int(environ["RANK"]),
            int(environ["WORLD_SIZE"]),
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


class Group:
    """One rank's view of the run; make it with :meth:`join`, close it.

    Attributes:
        rank: This rank.
        size: Ranks of the run.
        store: Rendezvous that all of them reach.
    """

    def __init__(self, place: Place, store: Rendezvous) -> None:
        self.rank = place.rank
        self.size = place.size
        self.store = store
        self._calls = 0

    @classmethod
    def join(cls, place: Place) -> Group:
        """Reach the store, and make gloo's process group.

        Args:
            place: Where this rank stands.

        Raises:
            HandshakeError: The store cannot be reached, or needs a secret.
        """
        limit = timedelta(seconds=_TIMEOUT)
        if place.hosted:
            # Whoever launched us hosts it: trusted as it is.
            store: Rendezvous = StoreRendezvous(_client(place, limit, ""), timeout=_TIMEOUT)
        else:
            make = TcpRendezvous.host if place.rank == 0 else TcpRendezvous.connect
            store = make(place.host, place.port, timeout=_TIMEOUT, secret=Settings.from_env().secret)
        dist.init_process_group(
            "gloo",
            store=_client(place, limit, "bench/gloo"),
            rank=place.rank,
            world_size=place.size,
            timeout=limit,
        )
        return cls(place, _Prefixed(store, "bench/"))

    def barrier(self) -> None:
        """Wait until all ranks are here; blocks. ``RuntimeError`` after two minutes or when one died."""
        dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """One JSON value of every rank, on every rank; blocks.

        Raises:
            TimeoutError: A rank did not give its value in time; names it.
        """
        self._calls += 1
        key = f"gather/{self._calls}/"
        self.store.set(f"{key}{self.rank}", json.dumps(value).encode())
        deadline = time.monotonic() + _TIMEOUT
        return [self._wait(f"{key}{rank}", rank, deadline) for rank in range(self.size)]

    def _wait(self, key: str, rank: int, deadline: float) -> Any:
        while (found := self.store.get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} gave nothing for {_TIMEOUT:g} s: is it alive, and at the same step?")
            time.sleep(_LOOK_SECONDS)
        return json.loads(found)

    def close(self) -> None:
        """Leave when all are here: rank 0 may host the store."""
        self.barrier()
        dist.destroy_process_group()
        self.gather(None)
        if self.rank == 0:
            time.sleep(0.1)  # the last answers are on their way
        self.store.close()


class _Prefixed:
    """A rendezvous whose keys begin with a prefix."""

    def __init__(self, inner: Rendezvous, prefix: str) -> None:
        self.url = inner.url
        self.trusted = inner.trusted
        self._inner = inner
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._inner.set(self._prefix + key, value)

    def get(self, key: str) -> bytes | None:
        return self._inner.get(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(self._prefix + key, amount)

    def delete(self, key: str) -> None:
        self._inner.delete(self._prefix + key)

    def close(self) -> None:
        self._inner.close()


def _client(place: Place, limit: timedelta, prefix: str) -> Any:
    torch_distributed: Any = dist  # its stores are exported, but unlisted
    store = torch_distributed.TCPStore(place.host, place.port, None, False, limit, False)
    return torch_distributed.PrefixStore(prefix, store) if prefix else store
