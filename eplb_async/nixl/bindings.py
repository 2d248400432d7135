"""NIXL's agent behind our interface: folds its exceptions and states into ours."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from eplb_async import descriptors
from eplb_async.errors import NixlPeerDisconnected, NixlTransferFailed
from eplb_async.nixl import environment, variants
from eplb_async.nixl.native import Descriptors, Extent, Handle, State
from eplb_async.nixl.variants import Variant

_STATES = {"DONE": State.DONE, "PROC": State.PROC}
_FINDING = ("create", "add", "connect")  # where UCX looks for a way, and may not say which it has not found
_MOVED_SECONDS = 40e-6  # an empty poll takes about 1 µs, 20 with cold caches; one this long was moving bytes
_making = threading.Lock()  # what appears while an agent is made is that agent's
_loaded: Variant | None = None


def _renew() -> None:
    global _making
    _making = threading.Lock()  # whoever held it is no thread of this process


os.register_at_fork(after_in_child=_renew)


def load() -> tuple[Any, Any]:
    """Import NIXL.

    Returns:
        Its ``_api`` and ``_bindings`` modules.

    Raises:
        EplbError: No variant is installed, or the one installed does not load.
    """
    global _loaded
    if _loaded is None:
        environment.prepare()
        _loaded = variants.find()
    return _loaded.api, _loaded.bindings


def variant() -> Variant:
    """Import NIXL, and say which it is: name and version of the package that was really loaded.

    Raises:
        EplbError: As ``load`` raises it.
    """
    load()
    assert _loaded is not None
    return _loaded


class NixlNative:
    """A real NIXL agent with the UCX backend; see :class:`~eplb_async.nixl.native.Native`.

    Bound to the thread that makes it: a call from any other raises, since the agent is not thread-safe (I-2).

    Args:
        name: Agent name, unique per incarnation (I-13).
        progress_thread: Run NIXL's progress thread.
    """

    def __init__(self, name: str, *, progress_thread: bool = False) -> None:
        api, bindings = load()
        self.name = name
        self.polls = 0
        self.moved = False
        self.longest_call = (0.0, "")
        self._thread = threading.get_ident()
        self._disconnected: type[Exception] = bindings.nixlRemoteDisconnectError
        config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=progress_thread)
        with _making:
            before = descriptors.epolls()
            self._agent: Any = self._call("create", "", api.nixl_agent, name, config)
            self.bells = tuple(_own(descriptors.epolls() - before - descriptors.loops))

    def register(self, extents: Sequence[Extent]) -> Any:
        blocks = np.array([(e.address, e.length, e.device) for e in extents], dtype=np.uint64)
        descriptors = self._agent.get_reg_descs(blocks, extents[0].memory)
        return self._call("register", "", self._agent.register_memory, descriptors)

    def deregister(self, token: Any) -> None:
        self._call("deregister", "", self._agent.deregister_memory, token)

    def metadata(self) -> bytes:
        return bytes(self._call("metadata", "", self._agent.get_agent_metadata))

    def add_remote(self, metadata: bytes) -> str:
        name: bytes | str = self._call("add", "", self._agent.add_remote_agent, metadata)
        return name.decode() if isinstance(name, bytes) else name

    def connect(self, peer: str) -> None:
        self._call("connect", peer, self._agent.make_connection, peer)

    def remove_remote(self, peer: str) -> None:
        self._call("remove", peer, self._agent.remove_remote_agent, peer)

    def make_read(
        self, local: Descriptors, local_memory: str, remote: Descriptors, remote_memory: str, peer: str
    ) -> Handle:
        ours = self._agent.get_xfer_descs(local, local_memory)
        theirs = self._agent.get_xfer_descs(remote, remote_memory)
        return Handle(self._call("make", peer, self._agent.initialize_xfer, "READ", ours, theirs, peer))

    def post(self, handle: Handle, notif: bytes = b"") -> State:
        return _STATES.get(self._call("post", "", self._agent.transfer, handle, notif), State.ERR)

    def check(self, handle: Handle) -> State:
        self.polls += 1
        return _STATES.get(self._call("poll", "", self._agent.check_xfer_state, handle), State.ERR)

    def release(self, handle: Handle) -> None:
        self._call("release", "", self._agent.release_xfer_handle, handle)
        handle._agent = None  # type: ignore[attr-defined]

    def abandon(self, handle: Handle) -> None:
        # The handle's destructor would release it, which is no cancel: the bytes would land all the same.
        # It also holds the agent; a traceback that somebody keeps must not keep it alive past destroy().
        handle._released = True  # type: ignore[attr-defined]
        handle._agent = None  # type: ignore[attr-defined]

    def notify(self, peer: str, message: bytes) -> None:
        self._call("notify", peer, self._agent.send_notif, peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        self.polls += 1
        found: dict[bytes | str, list[bytes]] = self._call("poll", "", self._agent.get_new_notifs)
        if not found:
            return []
        return [
            (peer.decode() if isinstance(peer, bytes) else peer, message)
            for peer, messages in found.items()
            for message in messages
        ]

    def destroy(self) -> None:
        started = time.perf_counter()
        self._check_thread("destroy")
        self._agent = None
        bells, self.bells = self.bells, ()
        for bell in bells:
            os.close(bell)
        self._note(started, "destroy")

    @property
    def agent(self) -> Any:
        """NIXL's own object, for those who must keep it alive across a fork."""
        return self._agent

    def _call(self, phase: str, peer: str, function: Callable[..., Any], *args: Any) -> Any:
        self._check_thread(phase)
        started = time.perf_counter()
        try:
            return function(*args)
        except self._disconnected as error:
            traceback.clear_frames(error.__traceback__)
            raise NixlPeerDisconnected(str(error), status=type(error).__name__, peer=peer, phase=phase) from error
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            said = f"{error}; {environment.advice()}" if phase in _FINDING else str(error)
            raise NixlTransferFailed(said, status=type(error).__name__, peer=peer, phase=phase) from error
        finally:
            del function, args  # both hold the agent, and a traceback of ours may be kept past destroy()
            self._note(started, phase)

    def _note(self, started: float, phase: str) -> None:
        elapsed = time.perf_counter() - started
        self.moved |= phase == "poll" and elapsed > _MOVED_SECONDS
        if elapsed > self.longest_call[0]:
            self.longest_call = (elapsed, phase)

    def _check_thread(self, phase: str) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"NIXL {phase} called off the engine loop's thread (I-2); this is a bug")


def _own(bells: Iterable[int]) -> Iterator[int]:
    """Duplicates of what UCX has made for its tcp sockets, which becomes readable when something has come.

    Nobody else closes them: a number that is given back may be anybody's next, and UCX gives no word of them.
    """
    for bell in sorted(bells):
        with contextlib.suppress(OSError):  # a stranger's, and closed by now
            yield os.dup(bell)
