"""NIXL in memory: agents of one process, on one loop, whose READs move real bytes in scripted time.

``MemoryFabric`` is the network, ``MemoryNative`` an agent on it, with the habits that the real one was
measured to have (NIXL.md, cited by row): an error is not quiescence, a released READ lands all the same, a
source that makes no progress starves its readers. What a correct caller never does is not an error there but
noted in :attr:`MemoryFabric.violations`, so that a test ends with ``assert not fabric.violations``::

    fabric = MemoryFabric(FaultPlan().hold_read("reader"))
    agent = await AsyncNixlAgent.open("reader", settings, engine=LoopEngine(loop), native=fabric.native)

Only memory that is registered at that moment is ever touched.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from eplb_async.errors import NixlPeerDisconnected, NixlTransferFailed
from eplb_async.nixl.native import Descriptors, Extent, Handle, State
from eplb_async.settings import Settings
from eplb_async.testing.faults import FaultPlan, ReadFault

_MAGIC = b"MEMFABRIC1"
_DISCONNECTED = "nixlRemoteDisconnectError"
_STALE = 0xDD  # what a READ brings from memory that its owner has deregistered (real NIXL: whatever is there)

Block = tuple[int, int]


class Life(Enum):
    """What an agent's process does."""

    RUNNING = "running"
    STOPPED = "stopped"
    DEAD = "dead"


class MemoryFabric:
    """The network between in-memory agents.

    Args:
        faults: What goes wrong.
        latency: Seconds of the loop's clock that a READ or a notification takes.
        bytes_per_second: Speed of a READ beyond its latency.
        done_in_post: READs are over when the post returns (as between processes of one host), unless a fault
            or a stopped peer says otherwise.
        needs_target_progress: A READ completes only after its source has polled since the post (as over tcp).
        clock: Seconds; default the running loop's clock.

    Attributes:
        violations: What a correct caller never does, in words, in the order it was done.
        open_handles: Requests made and neither released nor abandoned.
        log: Every READ posted: (reader, source, bytes).
    """

    def __init__(
        self,
        faults: FaultPlan | None = None,
        *,
        latency: float = 50e-6,
        bytes_per_second: float = 10e9,
        done_in_post: bool = False,
        needs_target_progress: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.faults = faults or FaultPlan()
        self.latency = latency
        self.bytes_per_second = bytes_per_second
        self.done_in_post = done_in_post
        self.needs_target_progress = needs_target_progress
        self.violations: list[str] = []
        self.open_handles = 0
        self.log: list[tuple[str, str, int]] = []
        self.agents: dict[str, MemoryNative] = {}
        self._clock = clock
        self._ids = itertools.count(1)
        self._life: dict[str, Life] = {}
        self._cut: set[frozenset[str]] = set()
        self._pending_agent_faults = sorted(self.faults.agents, key=lambda fault: fault.at)

    def native(self, name: str, settings: Settings) -> MemoryNative:
        """Make an agent; pass this method as ``native=`` to ``AsyncNixlAgent.open``."""
        agent = MemoryNative(name, settings, self)
        self.agents[name] = agent
        self._life[name] = Life.RUNNING
        return agent

    @property
    def posts(self) -> int:
        """READs posted so far."""
        return len(self.log)

    @property
    def open_registrations(self) -> int:
        """Registrations made and not given back, of agents that live."""
        return sum(agent.registrations for agent in self.agents.values())

    def now(self) -> float:
        """Seconds of the fabric's clock."""
        return self._clock() if self._clock else asyncio.get_running_loop().time()

    def kill(self, agent: str) -> None:
        """Have the process of every agent whose name contains ``agent`` die, as SIGKILL does."""
        self._set(agent, Life.DEAD)

    def stop(self, agent: str) -> None:
        """Stop the process of every agent whose name contains ``agent``, as SIGSTOP does.

        What it posts and sends meanwhile takes effect when it goes on.
        """
        self._set(agent, Life.STOPPED)

    def resume(self, agent: str) -> None:
        """Have a stopped process go on, as SIGCONT does."""
        self._set(agent, Life.RUNNING)

    def cut(self, one: str, other: str) -> None:
        """Cut the link between two agents, given by their whole names: each takes the other for dead."""
        self._cut.add(frozenset((one, other)))

    def unhold(self, agent: str = "") -> None:
        """Let the READs that ``hold_read`` holds go on, of agents whose name contains ``agent``."""
        for native in self.agents.values():
            if agent in native.name:
                native.unhold()

    def life(self, agent: str) -> Life:
        """What an agent's process does; an agent that never was, or was destroyed, is dead."""
        while self._pending_agent_faults and self._pending_agent_faults[0].at <= self.now():
            fault = self._pending_agent_faults.pop(0)
            self._set(fault.agent, {"kill": Life.DEAD, "stop": Life.STOPPED, "resume": Life.RUNNING}[fault.what])
        return self._life.get(agent, Life.DEAD)

    def reachable(self, one: str, other: str) -> bool:
        """Whether the other's process exists and no link is cut."""
        return self.life(other) is not Life.DEAD and frozenset((one, other)) not in self._cut

    def begin_read(self, reader: str, source: str, nbytes: int) -> Callable[[], float]:
        """A READ is on its way; returns what says when its bytes are there. For a model of a network to change."""
        taken = 0.0 if self.done_in_post else self.latency + nbytes / self.bytes_per_second
        arrives = self.now() + taken
        return lambda: arrives

    def begin_message(self, sender: str, receiver: str, message: bytes) -> float:
        """A notification is on its way; returns when it is there. For a model of a network to change."""
        return self.now() + self.latency

    def gone(self, agent: MemoryNative) -> None:
        """An agent has been destroyed; called by the agent."""
        if self.agents.get(agent.name) is agent:
            self._life[agent.name] = Life.DEAD

    def next_id(self) -> int:
        """A number never given before."""
        return next(self._ids)

    def _set(self, part: str, life: Life) -> None:
        for name, was in self._life.items():
            if part in name and was is not Life.DEAD:
                self._life[name] = life
                if life is Life.RUNNING:
                    self.agents[name].resumed()

    def __repr__(self) -> str:
        lives = ", ".join(f"{name} {life.value}" for name, life in self._life.items())
        return f"<MemoryFabric of {lives or 'nobody'}; {self.faults!r}>"


@dataclass(eq=False)
class _Request:
    """One READ."""

    peer: str
    incarnation: int
    pairs: list[tuple[Block, Block]]
    nbytes: int
    faults: list[ReadFault]
    posted_at: float | None = None
    arrival: Callable[[], float] = lambda: 0.0
    delay: float = 0.0
    held_until: float = 0.0
    source_laps: int = 0
    notif: bytes = b""
    held: bool = False
    landed: bool = False
    removed: bool = False
    released: bool = False

    @property
    def in_flight(self) -> bool:
        return self.posted_at is not None and not self.landed

    @property
    def due(self) -> float:
        return max(self.held_until, self.arrival() + self.delay)

    def failing(self, phase: str) -> ReadFault | None:
        return next((f for f in self.faults if f.status and f.phase == phase), None)


@dataclass(slots=True)
class _Remote:
    incarnation: int
    blocks: list[Block] = field(default_factory=list)


class MemoryNative:
    """An agent of a :class:`MemoryFabric`; see :class:`~eplb_async.nixl.native.Native`."""

    def __init__(self, name: str, settings: Settings, fabric: MemoryFabric) -> None:
        self.name = name
        self.settings = settings
        self.fabric = fabric
        self.polls = 0
        self.moved = False
        self.longest_call = (0.0, "")
        self.bells: tuple[int, ...] = ()
        self.incarnation = fabric.next_id()
        self.laps = 0
        self.destroyed = False
        self._registered: dict[int, Block] = {}
        self._remotes: dict[str, _Remote] = {}
        self._poisoned: set[str] = set()
        self._flying: dict[_Request, None] = {}
        self._inbox: list[tuple[float, int, str, bytes]] = []  # a heap: due, number, sender, message
        self._outbox: list[tuple[str, bytes]] = []

    # ------------------------------------------------------------------------------------- registration
    def register(self, extents: Sequence[Extent]) -> Any:
        """Register memory."""
        self._enter("register")
        tokens = []
        for extent in extents:
            block = (extent.address, extent.length)
            if block in self._registered.values():
                self._violation(f"registers {extent.name!r} twice; deregistering both is a SIGSEGV (26)")
            token = self.fabric.next_id()
            self._registered[token] = block
            tokens.append(token)
        return tuple(tokens)

    @property
    def registrations(self) -> int:
        """Registrations made and not given back; none after ``destroy``."""
        return len(self._registered)

    def deregister(self, token: Any) -> None:
        """Deregister memory; a READ that may still write it is a violation (18)."""
        self._enter("deregister")
        for one in token:
            block = self._registered.pop(one, None)
            if block is None:
                self._violation("deregisters what is not registered; a SIGSEGV in real NIXL (26)")
            elif any(_overlap(block, local) for r in self._flying for local, _ in r.pairs):
                self._violation("deregisters memory that a READ may still write (18)")

    def metadata(self) -> bytes:
        """Metadata: name, incarnation, registered blocks, checksum."""
        self._enter("metadata")
        body = json.dumps([self.incarnation, list(self._registered.values())]).encode()
        name = self.name.encode()
        payload = _MAGIC + len(name).to_bytes(2) + name + body
        return payload + zlib.crc32(payload).to_bytes(4)

    # -------------------------------------------------------------------------------------------- peers
    def add_remote(self, metadata: bytes) -> str:
        """Load a peer's metadata; damage poisons the peer's name for good (23)."""
        self._enter("add_remote", "add")
        if not metadata.startswith(_MAGIC):
            raise NixlTransferFailed("no metadata", status="nixlMismatchError", phase="add")
        at = len(_MAGIC)
        size = int.from_bytes(metadata[at : at + 2])
        name = metadata[at + 2 : at + 2 + size].decode(errors="replace")
        if zlib.crc32(metadata[:-4]).to_bytes(4) != metadata[-4:] or name in self._poisoned:
            self._poisoned.add(name)
            self._violation(f"loads damaged metadata, which poisons {name!r} for good (23)")
            raise NixlTransferFailed("damaged metadata", status="nixlMismatchError", peer=name, phase="add")
        if name == self.name:
            raise NixlTransferFailed("own metadata", status="nixlInvalidParamError", peer=name, phase="add")
        incarnation, blocks = json.loads(metadata[at + 2 + size : -4])
        known = self._remotes.get(name)
        if known is not None and known.incarnation != incarnation:
            raise NixlTransferFailed("a second live agent", status="nixlNotAllowedError", peer=name, phase="add")
        remote = self._remotes.setdefault(name, _Remote(incarnation))
        remote.blocks += [(address, length) for address, length in blocks]  # additive (25)
        return name

    def connect(self, peer: str) -> None:
        """Wire up to a peer."""
        self._enter("connect", peer=peer)
        if peer not in self._remotes:
            raise NixlTransferFailed("no such agent", status="nixlNotFoundError", peer=peer, phase="connect")

    def remove_remote(self, peer: str) -> None:
        """Forget a peer; its READs in flight fail, and their bytes land all the same (19)."""
        self._enter("remove_remote", "remove", peer)
        if self._remotes.pop(peer, None) is None:
            raise NixlTransferFailed("no such agent", status="nixlNotFoundError", peer=peer, phase="remove")
        for request in self._flying:
            if request.peer == peer:
                request.removed = True
                self._violation(f"removes {peer!r} while a READ from it may still write (19)")

    # --------------------------------------------------------------------------------------------- READ
    def make_read(
        self, local: Descriptors, local_memory: str, remote: Descriptors, remote_memory: str, peer: str
    ) -> Handle:
        """Make a READ request."""
        self._enter("make_read", "make", peer)
        ours = [(int(a), int(n)) for a, n, _ in local.tolist()]
        theirs = [(int(a), int(n)) for a, n, _ in remote.tolist()]
        nbytes = sum(n for _, n in ours)
        faults = self.fabric.faults.for_read(self.name, peer, nbytes)
        known = self._remotes.get(peer)
        if not ours or not theirs:
            raise NixlTransferFailed("empty descriptor list", status="IndexError", peer=peer, phase="make")
        if known is None or not (
            all(_inside(block, self._registered.values()) for block in ours)
            and all(_inside(block, known.blocks) for block in theirs)
        ):
            raise NixlTransferFailed("not registered", status="nixlNotFoundError", peer=peer, phase="make")
        if [n for _, n in ours] != [n for _, n in theirs]:
            raise NixlTransferFailed("lengths differ", status="nixlInvalidParamError", peer=peer, phase="make")
        request = _Request(peer, known.incarnation, list(zip(ours, theirs, strict=True)), nbytes, faults)
        self._raise_fault(request, "make")
        self.fabric.open_handles += 1
        return Handle(request)

    def post(self, handle: Handle, notif: bytes = b"") -> State:
        """Post a READ."""
        self._enter("post")
        request = _request(handle)
        if request.in_flight:
            raise NixlTransferFailed("active", status="nixlRepostActiveError", peer=request.peer, phase="post")
        self._refuse_unreachable(request, "post")
        now = self.fabric.now()
        self.fabric.log.append((self.name, request.peer, request.nbytes))
        source = self._source(request)
        request.posted_at = now
        request.landed = False
        request.notif = notif
        request.source_laps = source.laps if source else 0
        request.held = any(f.held for f in request.faults)
        request.arrival = self.fabric.begin_read(self.name, request.peer, request.nbytes)
        request.delay = sum(f.delay for f in request.faults)
        self._flying[request] = None
        self._raise_fault(request, "post")
        if self.fabric.done_in_post:
            self._land(request)
        return State.DONE if request.landed and not request.failing("poll") else State.PROC

    def check(self, handle: Handle) -> State:
        """Ask for a READ's state."""
        self._enter("check", "poll")
        self.polls += 1
        request = _request(handle)
        if request.posted_at is None:
            raise NixlTransferFailed("never posted", status="nixlNotPostedError", phase="poll")
        if self._life is not Life.RUNNING:
            return State.PROC
        if request.removed:
            raise NixlTransferFailed("removed", status="nixlNotFoundError", peer=request.peer, phase="poll")
        if not request.landed:
            self._refuse_unreachable(request, "poll")
        fault = request.failing("poll")
        if fault is not None and self.fabric.now() >= min(request.due, request.posted_at + self.fabric.latency):
            self._raise_fault(request, "poll")
        self._land(request)
        return State.DONE if request.landed and fault is None else State.PROC

    def release(self, handle: Handle) -> None:
        """Free a request; one that may still be written by is a violation, and is written by (17)."""
        self._enter("release")
        request = _request(handle)
        if request.released:
            self._violation("releases a handle twice")
            return
        request.released = True
        self.fabric.open_handles -= 1
        if request in self._flying:
            self._violation(f"releases a READ of {request.nbytes} bytes that is PROC (17)")

    def abandon(self, handle: Handle) -> None:
        """Let go of a request right before :meth:`destroy`."""
        self._enter("abandon")
        request = _request(handle)
        if not request.released:
            request.released = True
            self.fabric.open_handles -= 1

    # ----------------------------------------------------------------------------------- notifications
    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification."""
        self._enter("notify", peer=peer)
        if peer not in self._remotes:
            raise NixlTransferFailed("no such agent", status="nixlNotFoundError", peer=peer, phase="notify")
        if not self._reaches(peer, self._remotes[peer].incarnation):
            raise NixlPeerDisconnected("peer is gone", status=_DISCONNECTED, peer=peer, phase="notify")
        if self._life is Life.STOPPED:
            self._outbox.append((peer, message))
        else:
            self._send(peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """Make progress: land what is due, and take the notifications that have come."""
        self._enter("notifications", "poll")
        self.polls += 1
        if self._life is not Life.RUNNING:
            return []
        self.laps += 1
        for request in list(self._flying):
            self._land(request)
        now = self.fabric.now()
        found: list[tuple[str, bytes]] = []
        while self._inbox and self._inbox[0][0] <= now:
            _, _, sender, message = heapq.heappop(self._inbox)
            found.append((sender, message))
        return found

    def destroy(self) -> None:
        """Destroy the agent: nothing lands in its memory afterwards (38)."""
        self._enter("destroy")
        self.destroyed = True
        self._flying.clear()
        self._registered.clear()
        self._inbox.clear()
        self.fabric.gone(self)

    # ------------------------------------------------------------------------------------------- within
    def unhold(self) -> None:
        """Let held READs go on; called by the fabric."""
        now = self.fabric.now()
        for request in self._flying:
            if request.held:
                request.held = False
                request.held_until = now

    def resumed(self) -> None:
        """Send what was sent while stopped; called by the fabric."""
        held, self._outbox = self._outbox, []
        for peer, message in held:
            self._send(peer, message)

    def receive(self, sender: str, message: bytes, due: float) -> None:
        """Take in a notification that arrives at ``due``; called by the sender."""
        heapq.heappush(self._inbox, (due, self.fabric.next_id(), sender, message))

    @property
    def _life(self) -> Life:
        return self.fabric.life(self.name)

    def _source(self, request: _Request) -> MemoryNative | None:
        source = self.fabric.agents.get(request.peer)
        return source if source and source.incarnation == request.incarnation and not source.destroyed else None

    def _reaches(self, peer: str, incarnation: int) -> bool:
        target = self.fabric.agents.get(peer)
        return (
            target is not None
            and target.incarnation == incarnation
            and not target.destroyed
            and self.fabric.reachable(self.name, peer)
        )

    def _send(self, peer: str, message: bytes) -> None:
        target = self.fabric.agents.get(peer)
        if target is None or target.destroyed or self._life is Life.DEAD:
            return
        faults = self.fabric.faults.for_notif(self.name, peer)
        copies = min((fault.copies for fault in faults if fault.copies != 1), default=1)
        delay = sum(fault.delay for fault in faults)
        for _ in range(copies):
            target.receive(self.name, message, self.fabric.begin_message(self.name, peer, message) + delay)

    def _land(self, request: _Request) -> None:
        """Move the bytes, if it is time."""
        if request.landed or request.held or request not in self._flying or self._life is not Life.RUNNING:
            return
        source = self._source(request)
        if source is None or not self.fabric.reachable(self.name, request.peer):
            return
        waits = self.fabric.needs_target_progress and source.laps <= request.source_laps
        if self.fabric.now() < request.due or source._life is not Life.RUNNING or waits:
            return
        del self._flying[request]
        request.landed = self.moved = True
        if all(fault.lands for fault in request.faults if fault.status):
            for ours, theirs in request.pairs:
                self._move(ours, theirs, source)
        if any(fault.damaged for fault in request.faults):
            first = request.pairs[0][0][0]
            ctypes.memset(first, ctypes.string_at(first, 1)[0] ^ 0xFF, 1)
        if request.notif and request.peer in self._remotes and not any(f.status for f in request.faults):
            self._send(request.peer, request.notif)

    def _move(self, ours: Block, theirs: Block, source: MemoryNative) -> None:
        if not _inside(ours, self._registered.values()):
            self._violation(f"{ours[1]} bytes would land in memory that is no longer registered (18)")
        elif _inside(theirs, source._registered.values()):
            ctypes.memmove(ours[0], theirs[0], ours[1])
        else:
            ctypes.memset(ours[0], _STALE, ours[1])

    def _refuse_unreachable(self, request: _Request, phase: str) -> None:
        if not self._reaches(request.peer, request.incarnation):
            self._flying.pop(request, None)
            raise NixlPeerDisconnected("peer is gone", status=_DISCONNECTED, peer=request.peer, phase=phase)

    def _raise_fault(self, request: _Request, phase: str) -> None:
        if (fault := request.failing(phase)) is None:
            return
        detail = f"scripted: {fault}"
        if fault.status == _DISCONNECTED:
            self._flying.pop(request, None)
            raise NixlPeerDisconnected(detail, status=fault.status, peer=request.peer, phase=phase)
        raise NixlTransferFailed(detail, status=fault.status, peer=request.peer, phase=phase)

    def _enter(self, call: str, phase: str = "", peer: str = "") -> None:
        if self.destroyed:
            self._violation(f"{call} after destroy")
            raise NixlTransferFailed("destroyed", status="nixlBackendError", phase=phase or call, peer=peer)
        if (fault := self.fabric.faults.for_call(call, self.name)) is not None:
            kind = NixlPeerDisconnected if fault.status == _DISCONNECTED else NixlTransferFailed
            raise kind(f"scripted: {fault}", status=fault.status, phase=phase or call, peer=peer)

    def _violation(self, what: str) -> None:
        self.fabric.violations.append(f"{self.name} {what}")

    def __repr__(self) -> str:
        return f"<MemoryNative {self.name!r} {self._life.value}, {len(self._flying)} READs in flight>"


def _request(handle: Handle) -> _Request:
    assert isinstance(handle, _Request)
    return handle


def _inside(block: Block, registered: Any) -> bool:
    start, length = block
    return any(address <= start and start + length <= address + size for address, size in registered)


def _overlap(one: Block, other: Block) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]
