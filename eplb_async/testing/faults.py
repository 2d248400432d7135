"""Faults by address, not by chance: what goes wrong, and exactly where.

A plan is written as a chain, and its ``repr`` is that chain again, so a failure that prints its plan can be
repeated::

    plan = FaultPlan().fail_read("reader", nth=2, status="nixlBackendError").kill("source", at=1.5)
    fabric = MemoryFabric(plan)

READs are addressed by who posts them (``agent``), from whom (``peer``), how large they are (``min_bytes``),
and by their number ``nth`` among the READs that match the rest, counted from 0; ``nth=None`` means all of
them. Agents are addressed by a part of their name; ``""`` means any.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeVar

ReadPhase = Literal["make", "post", "poll"]


@dataclass(frozen=True, slots=True)
class ReadFault:
    """What happens to a READ, and to which.

    Attributes:
        agent: Part of the name of the agent that posts it.
        peer: Part of the name of the agent it reads from.
        nth: Its number among those that match; ``None`` for all.
        min_bytes: Smallest size that matches.
        status: NIXL's name of the error it ends with; empty if it does not fail.
        phase: Which call raises that error.
        lands: Whether the bytes are written although it failed (NIXL.md, 19).
        delay: Virtual seconds that the bytes are late.
        held: ``PROC`` until :meth:`MemoryFabric.unhold`.
        damaged: Whether the first byte lands as another one, and NIXL says ``DONE``.
    """

    agent: str = ""
    peer: str = ""
    nth: int | None = 0
    min_bytes: int = 0
    status: str = ""
    phase: ReadPhase = "poll"
    lands: bool = True
    delay: float = 0.0
    held: bool = False
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class NotifFault:
    """What happens to a notification, and to which.

    Attributes:
        sender: Part of the sender's name.
        receiver: Part of the receiver's name.
        nth: Its number among those that match; ``None`` for all.
        copies: How often it arrives: 0 drops it, 2 duplicates it.
        delay: Virtual seconds it is late; later ones overtake it.
    """

    sender: str = ""
    receiver: str = ""
    nth: int | None = 0
    copies: int = 1
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class AgentFault:
    """What happens to an agent, and when.

    Attributes:
        agent: Part of its name.
        at: Virtual seconds.
        what: Its process dies, is stopped (SIGSTOP), or goes on (SIGCONT).
    """

    agent: str
    at: float
    what: Literal["kill", "stop", "resume"]


@dataclass(frozen=True, slots=True)
class CallFault:
    """A native call that fails.

    Attributes:
        call: Name of the method of ``Native``: ``"add_remote"``, ``"connect"``, ``"register"``...
        agent: Part of the name of the agent that is called.
        nth: Its number among those that match; ``None`` for all.
        status: NIXL's name of the error.
    """

    call: str
    agent: str = ""
    nth: int | None = 0
    status: str = "nixlBackendError"


_Fault = TypeVar("_Fault", ReadFault, NotifFault, AgentFault, CallFault)


class FaultPlan:
    """Faults to come, in a chain. A plan counts what it has matched, so use a fresh one for each run."""

    def __init__(self) -> None:
        self._chain: list[str] = []
        self._reads: list[ReadFault] = []
        self._notifs: list[NotifFault] = []
        self._calls: list[CallFault] = []
        self._seen: dict[int, int] = {}
        self.agents: list[AgentFault] = []

    def fail_read(
        self,
        agent: str = "",
        *,
        peer: str = "",
        nth: int | None = 0,
        min_bytes: int = 0,
        status: str = "nixlBackendError",
        phase: ReadPhase = "poll",
        lands: bool = True,
    ) -> FaultPlan:
        """Have a READ fail; by default its bytes land all the same, since an error is not quiescence."""
        fault = ReadFault(agent, peer, nth, min_bytes, status, phase, lands)
        return self._add(self._reads, "fail_read", fault)

    def late_landing(
        self, agent: str = "", *, peer: str = "", nth: int | None = 0, min_bytes: int = 0, delay: float
    ) -> FaultPlan:
        """Have the bytes of a READ land ``delay`` virtual seconds late; it is ``PROC`` until then."""
        fault = ReadFault(agent, peer, nth, min_bytes, delay=delay)
        return self._add(self._reads, "late_landing", fault)

    def hold_read(self, agent: str = "", *, peer: str = "", nth: int | None = 0, min_bytes: int = 0) -> FaultPlan:
        """Keep a READ ``PROC`` until :meth:`MemoryFabric.unhold`."""
        fault = ReadFault(agent, peer, nth, min_bytes, held=True)
        return self._add(self._reads, "hold_read", fault, skip=("held",))

    def damage_read(self, agent: str = "", *, peer: str = "", nth: int | None = 0, min_bytes: int = 0) -> FaultPlan:
        """Have the first byte of a READ land as another one, and the READ end well all the same."""
        fault = ReadFault(agent, peer, nth, min_bytes, damaged=True)
        return self._add(self._reads, "damage_read", fault, skip=("damaged",))

    def drop_notif(self, sender: str = "", *, receiver: str = "", nth: int | None = 0) -> FaultPlan:
        """Lose a notification."""
        return self._add(self._notifs, "drop_notif", NotifFault(sender, receiver, nth, copies=0), skip=("copies",))

    def duplicate_notif(
        self, sender: str = "", *, receiver: str = "", nth: int | None = 0, copies: int = 2
    ) -> FaultPlan:
        """Deliver a notification several times."""
        return self._add(self._notifs, "duplicate_notif", NotifFault(sender, receiver, nth, copies))

    def delay_notif(self, sender: str = "", *, receiver: str = "", nth: int | None = 0, delay: float) -> FaultPlan:
        """Deliver a notification late, so that later ones of the same pair overtake it."""
        return self._add(self._notifs, "delay_notif", NotifFault(sender, receiver, nth, delay=delay))

    def fail_call(
        self, call: str, agent: str = "", *, nth: int | None = 0, status: str = "nixlBackendError"
    ) -> FaultPlan:
        """Have another native call fail: ``fail_call("add_remote", "reader")``."""
        return self._add(self._calls, "fail_call", CallFault(call, agent, nth, status))

    def kill(self, agent: str, *, at: float) -> FaultPlan:
        """Have an agent's process die (SIGKILL) at a virtual time."""
        return self._add(self.agents, "kill", AgentFault(agent, at, "kill"), skip=("what",))

    def stop(self, agent: str, *, at: float) -> FaultPlan:
        """Have an agent's process stopped (SIGSTOP) at a virtual time."""
        return self._add(self.agents, "stop", AgentFault(agent, at, "stop"), skip=("what",))

    def resume(self, agent: str, *, at: float) -> FaultPlan:
        """Have a stopped agent's process go on (SIGCONT) at a virtual time."""
        return self._add(self.agents, "resume", AgentFault(agent, at, "resume"), skip=("what",))

    def for_read(self, agent: str, peer: str, nbytes: int) -> list[ReadFault]:
        """Faults of the READ that is being made now; counts it."""
        return [
            fault
            for fault in self._reads
            if fault.agent in agent
            and fault.peer in peer
            and nbytes >= fault.min_bytes
            and self._is_nth(fault, fault.nth)
        ]

    def for_notif(self, sender: str, receiver: str) -> list[NotifFault]:
        """Faults of the notification that is being sent now; counts it."""
        return [
            fault
            for fault in self._notifs
            if fault.sender in sender and fault.receiver in receiver and self._is_nth(fault, fault.nth)
        ]

    def for_call(self, call: str, agent: str) -> CallFault | None:
        """Fault of the native call that is being made now; counts it."""
        found = [
            fault
            for fault in self._calls
            if fault.call == call and fault.agent in agent and self._is_nth(fault, fault.nth)
        ]
        return found[0] if found else None

    def _is_nth(self, fault: object, nth: int | None) -> bool:
        seen = self._seen.get(id(fault), 0)
        self._seen[id(fault)] = seen + 1
        return nth is None or seen == nth

    def _add(self, to: list[_Fault], method: str, fault: _Fault, *, skip: tuple[str, ...] = ()) -> FaultPlan:
        to.append(fault)
        parts = []
        for field in fields(fault):
            value = getattr(fault, field.name)
            if field.name in skip or value == field.default:
                continue
            leading = field.name in ("call", "agent", "sender")
            parts.append(repr(value) if leading else f"{field.name}={value!r}")
        self._chain.append(f".{method}({', '.join(parts)})")
        return self

    def __repr__(self) -> str:
        return "FaultPlan()" + "".join(self._chain)
