"""Rendezvous over torch's Stores: a ``TCPStore`` of ours, or any Store that the caller already has.

Facts that shape this module, measured with torch 2.13:

- ``TCPStore("127.0.0.1", ...)`` listens on every interface, so rank 0 hands it a socket that we bound (N-45).
- A client of a stopped or silent ``TCPStore`` host waits for ever, in its constructor and in ``check``; its
  timeout covers neither. So every call runs on one daemon thread per rendezvous and is waited for with a
  deadline. More threads would gain nothing: a store does one call at a time.
- ``TCPStore.set`` returns before the host has the value, also where it never will; a call after it on the
  same connection is answered only then.
- ``get`` waits for a missing key, and holds up every other call meanwhile: ``check`` first.
- A ``FileStore`` can stop its whole process (see ``file.py``): prefer ``file://`` to making one.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as CallTimeout
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous.addresses import (
    all_loopback,
    find_addresses,
    first_line,
    require_secret,
    tcp_url,
    wait_until_up,
)
from eplb_async.threads import DaemonExecutor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 5.0
_ADVICE = "is the process that hosts it still running?"


class StoreRendezvous:
    """A rendezvous on a ``torch.distributed.Store`` of the caller, trusted as it is and never closed by us.

    Attributes:
        url: How messages name it.
        trusted: See ``Rendezvous``.
    """

    def __init__(self, store: Store, *, timeout: float = 60.0, url: str | None = None, trusted: bool = True) -> None:
        self.url = url or f"the caller's {type(store).__name__}"
        self.trusted = trusted
        self._timeout = timeout
        self._thread = DaemonExecutor(1, name="eplb-rendezvous")
        self._stores = [store]

    def set(self, key: str, value: bytes) -> None:
        """Store ``value`` under ``key``; after a timeout it may still happen."""

        def call(store: Any) -> None:  # torch's stub says str; bytes pass through unchanged
            store.set(key, value)
            store.check([key])  # comes back when the host has it

        self._call(f"write {key!r}", call)

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if it has none yet."""

        def call(store: Store) -> bytes | None:
            return bytes(store.get(key)) if store.check([key]) else None

        return self._call(f"read {key!r}", call)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, atomically over all ranks; after a timeout it may still happen."""
        return self._call(f"count {key!r}", lambda store: int(store.add(key, amount)))

    def delete(self, key: str) -> None:
        """Remove ``key`` where the store can."""
        with suppress(HandshakeError):
            self._call(f"delete {key!r}", lambda store: store.delete_key(key))

    def close(self) -> None:
        """Drop the store; a call that hangs keeps it alive until it returns, but not this one waiting."""
        with suppress(RuntimeError, CallTimeout):
            self._thread.submit(self._stores.clear).result(min(self._timeout, _CLOSE_TIMEOUT))
        self._thread.shutdown(cancel_futures=True)

    def _call(self, what: str, call: Callable[[Store], T]) -> T:
        stores = self._stores

        def run() -> T:
            return call(stores[0])

        try:
            future = self._thread.submit(run)
        except RuntimeError:
            raise HandshakeError(f"cannot {what}: the rendezvous {self.url} is closed") from None
        try:
            return future.result(self._timeout)
        except CallTimeout:
            future.cancel()
            raise HandshakeError(
                f"cannot {what}: the rendezvous {self.url} has not answered for {self._timeout:g} s; {_ADVICE}"
            ) from None
        except (RuntimeError, OSError, IndexError, CancelledError) as error:
            if not stores or isinstance(error, CancelledError):
                raise HandshakeError(f"cannot {what}: the rendezvous {self.url} is closed") from None
            raise HandshakeError(
                f"cannot {what}: the rendezvous {self.url} failed: {first_line(error)}; {_ADVICE}"
            ) from error


class TcpRendezvous(StoreRendezvous):
    """A rendezvous on a torch ``TCPStore``: rank 0 hosts it, the others connect.

    It ends when rank 0 closes it, so rank 0 keeps it open as long as others may still look for a peer: for
    the life of its communicator, not only until its own peers are found.
    """

    @classmethod
    def host(cls, host: str, port: int, *, timeout: float, secret: bytes | None) -> TcpRendezvous:
        """Listen on ``host`` and nothing else. Blocks: call it off the event loops.

        Args:
            host: Address or name of an interface of this machine.
            port: Port; 0 takes a free one, see ``url`` (logged at INFO).
            timeout: Seconds for each call.
            secret: The job's secret, needed unless ``host`` is loopback.

        Raises:
            HandshakeError: The port is taken, the address is not ours, or it needs a secret.
        """
        addresses = find_addresses(host, port)
        require_secret(host, addresses, secret)
        family, address = addresses[0]
        # Listening now claims the port: two sockets may both be bound with SO_REUSEADDR, only one listens.
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((address, port))
                listener.listen(512)
            except OSError as error:
                raise HandshakeError(
                    f"cannot host the rendezvous on {tcp_url(host, port)}: {error.strerror or error}; if the "
                    "port is taken, stop the process that has it (an earlier run?), or choose another on all "
                    "ranks (port 0 picks a free one and logs it); if the address is not this machine's, rank "
                    "0 must run where it is"
                ) from error
            port = int(listener.getsockname()[1])
            store = _open_store(tcp_url(host, port), address, port, timeout=timeout, limit=timeout, listener=listener)
        url = tcp_url(host, port)
        logger.info("rendezvous: listening on %s", url)
        return cls(store, timeout=timeout, url=url, trusted=all_loopback(addresses))

    @classmethod
    def connect(cls, host: str, port: int, *, timeout: float, secret: bytes | None) -> TcpRendezvous:
        """Connect to rank 0, trying until it is up. Blocks: call it off the event loops.

        Args:
            host: Where rank 0 listens.
            port: Its port.
            timeout: Seconds until rank 0 must be up, and for each call afterwards.
            secret: The job's secret, needed unless ``host`` is loopback.

        Raises:
            HandshakeError: Nobody answered in time, or what answered is no rendezvous, or it needs a secret.
        """
        url = tcp_url(host, port)
        deadline = time.monotonic() + timeout
        address, trusted = wait_until_up(url, host, port, deadline=deadline, timeout=timeout, secret=secret)
        store = _open_store(url, address, port, timeout=timeout, limit=max(0.1, deadline - time.monotonic()))
        return cls(store, timeout=timeout, url=url, trusted=trusted)


def _open_store(
    url: str, address: str, port: int, *, timeout: float, limit: float, listener: socket.socket | None = None
) -> Store:
    def make() -> Store:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, unlisted

        return TCPStore(
            address,
            port,
            None,
            listener is not None,
            timedelta(seconds=timeout if listener else limit),
            False,  # do not wait for the others
            master_listen_fd=None if listener is None else listener.detach(),
        )

    store = _bounded(
        make,
        limit,
        f"cannot reach the rendezvous {url}",
        "something listens there: is it rank 0 of this job, and is it not stopped?",
    )
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _bounded(make: Callable[[], T], timeout: float, doing: str, hint: str) -> T:
    """Make a store; its constructor may hang for ever, this does not."""
    thread = DaemonExecutor(1, name="eplb-rendezvous-open")
    future = thread.submit(make)
    thread.shutdown()
    try:
        return future.result(timeout)
    except CallTimeout:
        raise HandshakeError(f"{doing}: no answer in {timeout:.3g} s; {hint}") from None
    except (RuntimeError, OSError, MemoryError, ValueError) as error:
        raise HandshakeError(f"{doing}: {first_line(error)}; {hint}") from error
