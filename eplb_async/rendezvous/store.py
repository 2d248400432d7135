"""Rendezvous over torch's Stores: one that the caller has, or one of ours (``tcp.py``).

Facts that shape this module, measured with torch 2.13:

- A client of a stopped or silent ``TCPStore`` host waits for ever, in its constructor and in ``check``; its
  timeout covers neither. So every call runs on one daemon thread per rendezvous and is waited for with a
  deadline. More threads would gain nothing: a store does one call at a time.
- ``TCPStore.set`` returns before the host has the value, also where it never will; a call after it on the
  same connection is answered only then.
- ``get`` waits for a missing key, and holds up every other call meanwhile: ``check`` first.
- A ``FileStore`` can stop its whole process (see ``file.py``): prefer ``file://`` to making one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as CallTimeout
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous.addresses import first_line
from eplb_async.threads import DaemonExecutor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_CLOSE_TIMEOUT = 1.0
_ADVICE = "is the process that hosts it still running?"


class StoreRendezvous:
    """A rendezvous on a ``torch.distributed.Store`` of the caller, trusted as it is and never closed by us.

    Attributes:
        url: How messages name it.
        trusted: See ``Rendezvous``.
        lasting: Whether it outlives the ranks, so that what they leave there is worth removing.
    """

    lasting = True

    def __init__(
        self,
        store: Store,
        *,
        timeout: float = 60.0,
        url: str | None = None,
        trusted: bool = True,
        dial: Callable[[], Store] | None = None,
    ) -> None:
        """Take a store.

        Args:
            store: The store.
            timeout: Seconds for each call.
            url: How messages name it.
            trusted: See ``Rendezvous``.
            dial: Reaches the store again once its host has ended and come back: the call that notices fails, and
                the next one dials.
        """
        self.url = url or f"the caller's {type(store).__name__}"
        self.trusted = trusted
        self._timeout = timeout
        self._dial = dial
        self._line = _Line(store)
        self._thread = _new_thread()
        self._closed = False

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
        self._closed = True
        line = self._line
        with suppress(RuntimeError, CallTimeout):
            self._thread.submit(line.drop).result(min(self._timeout, _CLOSE_TIMEOUT))
        self._thread.shutdown(cancel_futures=True)

    def _call(self, what: str, call: Callable[[Store], T]) -> T:
        line, dial = self._line, self._dial

        def run() -> T:
            return line.use(call, dial)

        try:
            future = self._thread.submit(run)
        except RuntimeError:
            raise HandshakeError(f"cannot {what}: the rendezvous {self.url} is closed") from None
        try:
            return future.result(self._timeout)
        except CallTimeout:
            future.cancel()
            if dial is not None and line is self._line and not self._closed:
                self._line, self._thread = _Line(None), _new_thread()  # the old thread hangs with the old host
            raise HandshakeError(
                f"cannot {what}: the rendezvous {self.url} has not answered for {self._timeout:g} s; {_ADVICE}"
            ) from None
        except (RuntimeError, OSError, IndexError, CancelledError) as error:
            if self._closed or isinstance(error, CancelledError):
                raise HandshakeError(f"cannot {what}: the rendezvous {self.url} is closed") from None
            raise HandshakeError(
                f"cannot {what}: the rendezvous {self.url} failed: {first_line(error)}; {_ADVICE}"
            ) from error


class _Line:
    """The connection to a store; used on one thread only."""

    def __init__(self, store: Store | None) -> None:
        self._store = store

    def use(self, call: Callable[[Store], T], dial: Callable[[], Store] | None) -> T:
        """Make a call, dialling first where the connection was lost."""
        if self._store is None:
            if dial is None:
                raise RuntimeError("closed")
            self._store = dial()
        try:
            return call(self._store)
        except (RuntimeError, OSError):
            if dial is not None:
                self._store = None
            raise

    def drop(self) -> None:
        """Let go of the store."""
        self._store = None


def _new_thread() -> DaemonExecutor:
    return DaemonExecutor(1, name="eplb-rendezvous")
