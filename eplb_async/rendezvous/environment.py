"""``env://``: the store that a launcher's variables name, as ``torch.distributed`` uses them.

torchrun, and whoever exports the same variables, gives every process ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT``. Facts that shape this module, measured with torchrun of torch 2.13 and read in older ones:

- With ``TORCHELASTIC_USE_AGENT_STORE=True`` torchrun's agent hosts a ``TCPStore`` there, and every process is a
  client of it. The agent keeps that store when it restarts its processes: what the ones before wrote is still there.
- Else the process with ``RANK=0`` hosts it, and ``torch.distributed`` does so when it is initialised. Stores of one
  process on one port share a server if each says ``multi_tenant``, so it does not matter who comes first.
- Either way the store listens on every interface, whatever ``MASTER_ADDR`` is, unless it is ours.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous.addresses import (
    MIN_SECRET,
    Address,
    all_loopback,
    find_addresses,
    require_secret,
    tcp_url,
)
from eplb_async.rendezvous.store import StoreRendezvous
from eplb_async.rendezvous.tcp import DIAL_SECONDS, TcpRendezvous, listen, open_store, reach

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ATTEMPT = struct.Struct(">Q")
_MAX_WORLD = 1 << 16
_MAX_RUN = 256


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher's variables say.

    Attributes:
        rank: Of this process in the world.
        world_size: Processes in the world.
        host: Where the store is.
        port: Its port.
        by_agent: Whether torchrun's agent hosts it; else the process with rank 0 does.
        run: Id of the run.
        attempt: How often torchrun has started the processes anew.
    """

    rank: int
    world_size: int
    host: str
    port: int
    by_agent: bool
    run: str
    attempt: int

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Launch:
        """Read the variables.

        Args:
            environment: Where; default the process's own.

        Raises:
            ValueError: One is missing or wrong; names it.
        """
        variables = os.environ if environment is None else environment
        if missing := [name for name in _NEEDED if not variables.get(name)]:
            raise ValueError(
                f'the rendezvous "env://" needs {", ".join(missing)}, which {"are" if missing[1:] else "is"} not set: '
                "start the processes with torchrun, export what it would set, or give tcp://host:port instead"
            )
        world_size = _number(variables, "WORLD_SIZE", range(1, _MAX_WORLD + 1))
        run = variables.get("TORCHELASTIC_RUN_ID", "none")
        if len(run) > _MAX_RUN:
            raise ValueError(f"TORCHELASTIC_RUN_ID has {len(run)} characters, {_MAX_RUN} are allowed")
        return cls(
            rank=_number(variables, "RANK", range(world_size)),
            world_size=world_size,
            host=variables["MASTER_ADDR"],
            port=_number(variables, "MASTER_PORT", range(1, 1 << 16)),
            by_agent=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run=run,
            attempt=_number(variables, "TORCHELASTIC_RESTART_COUNT", range(1 << 32), default="0"),
        )


class EnvRendezvous(TcpRendezvous):
    """A rendezvous on the store of a launch.

    Values carry the number of the attempt: those of an earlier one are as good as absent, and are overwritten. So
    a store that outlives its processes neither misleads the next ones nor grows. Counters go on.

    Attributes:
        place: Which process of the world this is.
    """

    def __init__(
        self, store: Store, launch: Launch, *, timeout: float, trusted: bool, dial: Callable[[], Store] | None = None
    ) -> None:
        super().__init__(store, timeout=timeout, url=_url(launch), trusted=trusted, dial=dial)
        self.lasting = launch.by_agent
        self.place = f"RANK={launch.rank}"
        self._prefix = f"eplb_async/{launch.run}/"
        self._attempt = _ATTEMPT.pack(launch.attempt)

    @classmethod
    def open(cls, launch: Launch, *, timeout: float, secret: bytes | None) -> EnvRendezvous:
        """Host the store of a launch, or connect to it. Blocks: call it off the event loops.

        Args:
            launch: Where it is.
            timeout: Seconds until it must be up, and for each call afterwards.
            secret: The job's secret, needed unless ``MASTER_ADDR`` is loopback.

        Raises:
            HandshakeError: It cannot be reached or hosted, or needs a secret.
        """
        url = _url(launch)
        dial = partial(reach, url, launch.host, launch.port, timeout=timeout, secret=secret, hint=_hint(launch))
        store, trusted, ours = None, False, False
        if launch.rank == 0 and not launch.by_agent:
            addresses = find_addresses(launch.host, launch.port)
            require_secret(launch.host, addresses, secret)
            store, ours = _host(url, launch, _interface(launch.host, addresses, secret), timeout)
            trusted = all_loopback(addresses)
        if store is None:
            store, trusted = dial(limit=timeout)
        if launch.rank == 0 and not ours and not secret:
            logger.warning(
                "the store at %s is not ours: it listens on every interface, and whoever reaches it can join this "
                "job. Set EPLB_ASYNC_SECRET, unless nobody else reaches the ports of this machine",
                url,
            )
        again = min(timeout, DIAL_SECONDS)
        return cls(store, launch, timeout=timeout, trusted=trusted, dial=None if ours else lambda: dial(limit=again)[0])

    def set(self, key: str, value: bytes) -> None:
        """Store ``value`` under ``key``, for this attempt."""
        where, tagged = self._prefix + key, self._attempt + value
        if key.endswith("/key") and self._is_stale(where):
            self._call(f"write {key!r}", lambda store: store.set(where, tagged))  # type: ignore[arg-type]
        else:
            super().set(where, tagged)

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if this attempt has given it none yet."""
        where = self._prefix + key
        found = super().get(where)
        if found is None or found.startswith(self._attempt):
            return found and found[_ATTEMPT.size :]
        self._kept.pop(where, None)
        return None

    def _is_stale(self, where: str) -> bool:
        """Whether an earlier attempt has left that; one of a later attempt is not to be overwritten."""
        found = StoreRendezvous.get(self, where)
        return found is not None and found[: _ATTEMPT.size] < self._attempt

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, atomically over all ranks and attempts."""
        return super().add(self._prefix + key, amount)

    def delete(self, key: str) -> None:
        """Remove ``key``."""
        super().delete(self._prefix + key)


def _host(url: str, launch: Launch, where: Address, timeout: float) -> tuple[Store | None, bool]:
    """Host it, or share what this process hosts there; no store if another process has the port.

    Returns:
        The store, and whether it listens where we said and nowhere else.
    """
    port = launch.port
    try:
        with listen(url, where, port) as listener:
            store = open_store(url, where[1], port, timeout=timeout, limit=timeout, listener=listener, shared=True)
    except HandshakeError as error:
        if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
            raise
    else:
        logger.info("rendezvous: listening on %s", url)
        return store, True
    with contextlib.suppress(HandshakeError):  # another process has it
        return open_store(url, where[1], port, timeout=timeout, limit=timeout, shared=True), False
    return None, False


def _interface(host: str, addresses: Sequence[Address], secret: bytes | None) -> Address:
    """Where to listen: everywhere, with a secret, since others may reach ``host`` by an address unknown here."""
    family, address = addresses[0]
    named = host != "localhost" and not all(address == host for _, address in addresses)
    if secret is None or len(secret) < MIN_SECRET or (all_loopback(addresses) and not named):
        return family, address
    return family, "0.0.0.0" if family == socket.AF_INET else "::"


def _url(launch: Launch) -> str:
    return f"env:// ({tcp_url(launch.host, launch.port)})"


def _hint(launch: Launch) -> str:
    if launch.by_agent:
        return "torchrun's agent hosts it: does it run, and does no firewall stand between?"
    return (
        "the process with RANK=0 hosts it: does it run, does it open env:// too or initialise torch.distributed, "
        "and does no firewall stand between?"
    )


def _number(variables: Mapping[str, str], name: str, allowed: range, default: str = "") -> int:
    text = variables.get(name) or default
    if not text.isdecimal() or int(text) not in allowed:
        raise ValueError(f"{name}={text!r:.40} is no number from {allowed[0]} to {allowed[-1]}")
    return int(text)
