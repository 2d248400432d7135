"""Rendezvous over torch's Stores: over TCP, in a file, or one that the caller already has.

Facts that shape this module, measured with torch 2.13:

- ``TCPStore("127.0.0.1", ...)`` listens on every interface, so rank 0 hands it a socket that we bound (N-45).
- A client of a stopped or silent ``TCPStore`` host waits for ever, in its constructor and in ``check``, and a
  ``FileStore`` waits for ever for a file lock that a stopped process holds; their timeouts cover neither. So
  every call runs on one daemon thread per rendezvous and is waited for with a deadline. More threads would
  gain nothing: a store does one call at a time.
- ``get`` waits for a missing key, and holds up every other call meanwhile: ``check`` first.
- A ``FileStore`` made for a number of workers deletes its file when the last of them is gone, also under a
  job that has just begun on it. Ours never deletes: the file stays until somebody removes it.
- A ``FileStore`` whose file was removed makes it again, readable by all. So its identity is checked before
  each call.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError as CallTimeout
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous._threads import DaemonExecutor
from eplb_async.rendezvous.addresses import (
    all_loopback,
    find_addresses,
    first_line,
    require_secret,
    tcp_url,
    wait_until_up,
)
from eplb_async.rendezvous.private_file import open_private, require_private

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 5.0


class StoreRendezvous:
    """A rendezvous on a ``torch.distributed.Store`` of the caller, trusted as it is and never closed by us.

    Attributes:
        url: How messages name it.
        trusted: See ``Rendezvous``.
    """

    def __init__(
        self, store: Store, *, timeout: float = 60.0, url: str | None = None, trusted: bool = True
    ) -> None:
        self.url = url or f"the caller's {type(store).__name__}"
        self.trusted = trusted
        self._timeout = timeout
        self._thread = DaemonExecutor(1, name="eplb-rendezvous")
        self._stores = [store]

    def set(self, key: str, value: bytes) -> None:
        """Store ``value`` under ``key``; after a timeout it may still happen."""

        def call(store: Any) -> None:  # torch's stub says str; bytes pass through unchanged
            store.set(key, value)

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
            self._precheck()
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
                f"cannot {what}: the rendezvous {self.url} has not answered for {self._timeout:g} s; "
                f"{self._advice()}"
            ) from None
        except (RuntimeError, OSError, IndexError) as error:
            if not stores:
                raise HandshakeError(f"cannot {what}: the rendezvous {self.url} is closed") from None
            raise HandshakeError(
                f"cannot {what}: the rendezvous {self.url} failed: {first_line(error)}; {self._advice()}"
            ) from error

    def _precheck(self) -> None:
        """Raise ``HandshakeError`` if the store must not be used any more; runs before each call."""

    def _advice(self) -> str:
        return "is the process that hosts it still running?"


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
            store = _open_store(
                tcp_url(host, port), address, port, timeout=timeout, limit=timeout, listener=listener
            )
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


class FileRendezvous(StoreRendezvous):
    """A rendezvous on a torch ``FileStore``: a file on a disk that all ranks share.

    The file is made 0600; one that exists must be a regular file, ours, and closed to everybody else. It is
    never deleted, so that a second run on the same path works and nobody's file vanishes: remove it yourself
    when no rank uses it. Locks on network file systems are only as good as those systems.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        self._path = Path(path).absolute()
        self._fd = open_private(self._path)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        try:
            store = _open_file_store(self._path, timeout)
        except BaseException:
            self._close_fd()
            raise
        super().__init__(store, timeout=timeout, url=f"file://{self._path}", trusted=True)

    def close(self) -> None:
        """Let go of the file, which stays."""
        if not self._close_fd.alive:
            return
        gone = not os.path.lexists(self._path)
        super().close()
        if gone:  # FileStore's destructor has made it again, only to count itself out
            self._path.unlink(missing_ok=True)
        self._close_fd()

    def _precheck(self) -> None:
        try:
            same = os.path.samestat(os.fstat(self._fd), os.lstat(self._path))
        except OSError:
            same = False
        if not same:
            raise HandshakeError(
                f"the rendezvous file {self._path} was removed or replaced since this rank opened it; "
                "use a path that nothing cleans up, and start all ranks again"
            )
        require_private(self._path, self._fd)

    def _advice(self) -> str:
        return "is its disk full or unreachable, or is a stopped process holding its lock?"


def _open_file_store(path: Path, timeout: float) -> Store:
    def make() -> Store:
        from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported, unlisted

        store = FileStore(str(path), -1)  # -1: never deletes the file
        store.set_timeout(timedelta(seconds=timeout))
        store.check(["/"])  # reads what an earlier run left, and so finds a file that is none of ours
        return store

    return _bounded(
        make, timeout, f"cannot use the rendezvous file {path}", "is it a file of something else?"
    )


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
