"""A rendezvous on a torch ``TCPStore`` that rank 0 hosts.

``TCPStore("127.0.0.1", ...)`` listens on every interface, so rank 0 hands it a socket that we bound (N-45).

The store ends with the process of rank 0, and a new process of rank 0 hosts a new one at the same address. The
others dial that one when they need it next. What the old one held is gone:

- Each store notes when it began, and starts of ranks are counted from there, a millisecond each, so that a
  start which a later store counted is newer than all before.
- Who dials it brings along what it has left in the old one, since it may wait there to be met.
- It brings the job's key, too, where that was kept in the store. A rank that opens there meanwhile, with
  a key of its own making, sees it change and joins again (``opener.py``).
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as CallTimeout
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous.addresses import (
    Address,
    all_loopback,
    find_addresses,
    first_line,
    require_secret,
    tcp_url,
    wait_until_up,
)
from eplb_async.rendezvous.store import StoreRendezvous
from eplb_async.threads import DaemonExecutor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BORN = "eplb_async/born"
DIAL_SECONDS = 2.0
"""How long a call may dial a store that was lost."""
_FREE_SECONDS = 2.0
"""How long a port that is taken is waited for: an ``open`` that failed gives it back behind the scenes."""


class TcpRendezvous(StoreRendezvous):
    """A rendezvous on a torch ``TCPStore``: rank 0 hosts it, the others connect.

    It ends when rank 0 closes it, so rank 0 keeps it open as long as others may still look for a peer: for
    the life of its communicator, not only until its own peers are found.

    Attributes:
        born: When the store began, in milliseconds since 1970 on the clock of whoever came first.
    """

    lasting = False

    def __init__(
        self, store: Store, *, timeout: float, url: str, trusted: bool, dial: Callable[[], Store] | None = None
    ) -> None:
        super().__init__(
            store, timeout=timeout, url=url, trusted=trusted, dial=dial and (lambda: self._restore(dial()))
        )
        self._kept: dict[str, bytes] = {}
        """What belongs into the store as far as this rank knows: jobs' keys, and what it has left there itself."""
        self.born = self._call("ask when the store began", _birth)

    def set(self, key: str, value: bytes) -> None:
        """Store ``value`` under ``key``, replacing what was there, unless it is a job's key: there the first wins."""
        if key.endswith("/key"):
            self._call(f"write {key!r}", lambda store: store.compare_set(key, "", value))  # type: ignore[arg-type]
        else:
            self._kept.pop(key, None)
            super().set(key, value)
            self._kept[key] = value

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if it has none yet."""
        found = super().get(key)
        if found and key.endswith("/key"):
            self._kept[key] = found
        return found

    def delete(self, key: str) -> None:
        """Remove ``key``."""
        self._kept.pop(key, None)
        super().delete(key)

    def _restore(self, store: Any) -> Any:
        """Give a store that may have begun anew what this rank knows: of a job's key its peers have the same."""
        for key, value in list(self._kept.items()):
            if key.endswith("/key"):
                store.set(key, value)
            else:
                store.compare_set(key, "", value)  # a newer start of this rank may be there
        self.born = max(self.born, _birth(store))
        return store

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
        with listen(tcp_url(host, port), addresses[0], port, patience=min(timeout, _FREE_SECONDS)) as listener:
            port = int(listener.getsockname()[1])
            url = tcp_url(host, port)
            store = open_store(url, addresses[0][1], port, timeout=timeout, limit=timeout, listener=listener)
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
        dial = partial(reach, url, host, port, timeout=timeout, secret=secret)
        store, trusted = dial(limit=timeout)
        again = min(timeout, DIAL_SECONDS)
        return cls(store, timeout=timeout, url=url, trusted=trusted, dial=lambda: dial(limit=again)[0])


def reach(
    url: str,
    host: str,
    port: int,
    *,
    timeout: float,
    limit: float,
    secret: bytes | None,
    hint: str = "is rank 0 of this job running, on that host and port, and does no firewall stand between?",
) -> tuple[Store, bool]:
    """Connect to a store, trying until it is up.

    Args:
        url: How messages name it.
        host: Where it is.
        port: Its port.
        timeout: Seconds for each call afterwards.
        limit: Seconds until it must be up.
        secret: The job's secret, needed unless ``host`` is loopback.
        hint: What to look at if it is not up in time.

    Returns:
        The store, and whether its host is loopback.

    Raises:
        HandshakeError: It cannot be reached, or needs a secret.
    """
    deadline = time.monotonic() + limit
    address, trusted = wait_until_up(url, host, port, deadline=deadline, timeout=limit, secret=secret, hint=hint)
    left = max(0.1, deadline - time.monotonic())
    return open_store(url, address, port, timeout=timeout, limit=left), trusted


def listen(url: str, where: Address, port: int, *, patience: float = 0.0) -> socket.socket:
    """Claim a port on one address; ``HandshakeError`` says why not, its cause is the ``OSError``.

    Args:
        url: How messages name it.
        where: The address.
        port: The port.
        patience: Seconds to wait for a port that is taken.
    """
    until = time.monotonic() + patience
    while True:
        try:
            return _listener(where, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise HandshakeError(
                    f"cannot host the rendezvous on {url}: {error.strerror or error}; if the port is taken, stop the "
                    "process that has it (an earlier run?), or choose another on all ranks (port 0 picks a free one "
                    "and logs it); if the address is not this machine's, rank 0 must run where it is"
                ) from error
        time.sleep(0.05)


def _listener(where: Address, port: int) -> socket.socket:
    family, address = where
    # Listening now claims the port: two sockets may both be bound with SO_REUSEADDR, only one listens.
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(512)
    except OSError:
        listener.close()
        raise
    return listener


def _birth(store: Any) -> int:
    """When the store began: as the first that asks says, for all after it."""
    said = bytes(store.compare_set(_BORN, "", str(time.time_ns() // 1_000_000)))
    if not said.isdigit() or len(said) > 14:
        raise RuntimeError(f"{_BORN!r} is {said[:40]!r}, which is no time: something else wrote there")
    return int(said)


def open_store(
    url: str,
    address: str,
    port: int,
    *,
    timeout: float,
    limit: float,
    listener: socket.socket | None = None,
    shared: bool = False,
) -> Store:
    """Make a ``TCPStore``.

    Args:
        url: How messages name it.
        address: Where it is.
        port: Its port.
        timeout: Seconds for each call.
        limit: Seconds to make it.
        listener: A socket to host it on; default connect to it.
        shared: Host it together with whatever else in this process hosts that port, also where there is no
            ``listener``, as torch.distributed does.

    Raises:
        HandshakeError: It cannot be reached, or hosted.
    """

    def make() -> Store:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, unlisted

        return TCPStore(
            address,
            port,
            None,
            listener is not None or shared,
            timedelta(seconds=timeout if listener else limit),
            False,  # do not wait for the others
            multi_tenant=shared,
            master_listen_fd=None if listener is None else listener.detach(),
        )

    store = _bounded(
        make,
        limit,
        f"cannot reach the rendezvous {url}",
        "something listens there: is it the store of this job and no other program, and is it not stopped?",
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
