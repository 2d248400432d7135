"""The checks, one after the other: facts from here and from the probes, findings from the judges."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eplb_async.doctor.child import Answer, Child, ask
from eplb_async.doctor.finding import Finding, Status
from eplb_async.doctor.host import Host, look
from eplb_async.doctor.judges import environment, machine, meeting, software, transports

__all__ = ["Question", "examine"]

_NIXLS = ("nixl", "nixl-cu13", "nixl-cu12", "nixl-rocm", "rixl")
_LAG_SECONDS = 1.0
_GRACE = 2.0  # a probe that counts its own time answers before its limit
_TABLES = {"UCX_PROTO_INFO": "y"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to look at.

    Attributes:
        timeout: Seconds for everything.
        floor: GB/s that a READ must reach.
        memory: ``"cpu"``, ``"cuda"``, or ``"auto"``: on the GPU where there is one.
        peers: Whether to read from every peer.
        rendezvous: Where to meet them; None: nobody, or with ``peers`` two ranks that the doctor starts here.
        rank: This rank.
        ep_size: Ranks in the group; None: unknown.
        group: Group on the rendezvous.
    """

    timeout: float
    floor: float
    memory: str
    peers: bool
    rendezvous: str | None
    rank: int
    ep_size: int | None
    group: str


def examine(question: Question) -> Iterator[Finding]:
    """Run all checks; each finding comes as it is found.

    Every probe has a process of its own and at most an even share of the time that is left, so one that hangs leaves
    the others theirs. Closing the iterator, or an exception in it, kills what runs.
    """
    host = look()
    budget = _Budget(question.timeout, probes=4 if question.peers or question.rendezvous else 6)
    versions = _versions()
    yield software.versions(versions)
    settings = environment.settings(host.environ)
    yield settings
    plugins = environment.plugin_folders(host.environ)
    suspects = [environment.interfaces(host), *environment.ucx(host.environ, plugins)]
    with Child("software.torch", {}) as loading:  # both take a second, on a core each
        on_rocm = "rocm" in (versions["torch"] or "")
        nixl = ask("software.nixl", {"after_torch": on_rocm}, limit=budget.share())
        torch = loading.last(budget.share())
    yield software.nixl(nixl.found, nixl.problem, nixl.log, [s.remedy for s in suspects if s.status is Status.FAILED])
    devices: int = torch.found.get("devices", 0)
    yield software.gpu(torch.found, torch.problem, nixl.found.get("memory", []))
    yield environment.allocator(host.environ, devices)
    yield from suspects
    cma = ask("cma.cma", {}, limit=budget.share())
    yield machine.cma(cma.found, cma.problem, host)
    yield machine.shm(host)
    yield machine.locked(host)
    yield machine.cores(host, _number(host, "LOCAL_WORLD_SIZE"))
    memory = _memory(question.memory, host, devices)
    if question.peers or question.rendezvous:
        yield machine.files(host, None, question.ep_size)
        yield from _together(question, memory, budget)
    else:
        yield from _alone(question, host, memory, budget)


def _alone(question: Question, host: Host, memory: str, budget: _Budget) -> Iterator[Finding]:
    lag = ask("loops.loops", {"seconds": _LAG_SECONDS}, limit=budget.share())
    yield machine.lag(lag.found, lag.problem)
    tries: list[tuple[str, str, dict[str, str]]] = [("read", "cpu", {})]
    if memory != "cpu":
        tries.append(("read gpu", memory, {}))
    if host.rdma:
        tries.append(("read rdma", "cpu", {"UCX_TLS": "ib,self"}))
    tries.append(("read tcp", "cpu", {"UCX_TLS": "tcp,self"}))
    per_peer = None
    budget.more(len(tries) - 2)
    for check, where, forced in tries:
        share = budget.share()
        answer = ask(
            "reads.read",
            {"memory": where, "seconds": max(1.0, share - _GRACE)},
            limit=share,
            environ={**_TABLES, **forced},
        )
        found, problem = answer.found, answer.problem
        yield transports.reads(check, found, problem, answer.log, floor=question.floor, forced=bool(forced))
        per_peer = found.get("fds_per_peer", per_peer)
    yield machine.files(host, per_peer, question.ep_size)


def _together(question: Question, memory: str, budget: _Budget) -> Iterator[Finding]:
    limit = budget.share()
    if question.rendezvous is not None:
        assert question.ep_size is not None
        answer = ask(
            *_peers(question, question.rendezvous, question.rank, question.ep_size, memory, limit),
            limit=limit,
            environ=_TABLES,
        )
        yield from meeting.rendezvous(
            answer.found, answer.problem, url=question.rendezvous, rank=question.rank, ep_size=question.ep_size
        )
        if question.peers:
            yield from _judged(answer, question)
        return
    with tempfile.TemporaryDirectory(prefix="eplb-doctor-") as folder:
        url = f"file://{folder}/rendezvous"
        with Child(*_peers(question, url, 1, 2, memory, limit), environ=_TABLES) as second:
            answer = ask(*_peers(question, url, 0, 2, memory, limit), limit=limit, environ=_TABLES)
            other = second.last(_GRACE)
        yield from meeting.rendezvous(answer.found, answer.problem, url="two ranks here", rank=0, ep_size=2)
        ours, theirs = list(_judged(answer, question)), list(_judged(other, question))
        yield from (finding for finding in theirs if finding.check != "peers")
        yield from ours  # the summary last


def _peers(
    question: Question, url: str, rank: int, ep_size: int, memory: str, limit: float
) -> tuple[str, dict[str, Any]]:
    return "peers.peers", {
        "rendezvous": url,
        "rank": rank,
        "ep_size": ep_size,
        "group": question.group,
        "node": socket.gethostname(),
        "seconds": max(1.0, limit - _GRACE),
        "memory": memory if question.peers else None,
    }


def _judged(answer: Answer, question: Question) -> Iterator[Finding]:
    yield from meeting.peers(answer.found, answer.problem, answer.log, node=socket.gethostname(), floor=question.floor)


class _Budget:
    def __init__(self, seconds: float, *, probes: int) -> None:
        self._deadline = time.monotonic() + seconds
        self._probes = probes

    def share(self) -> float:
        """Seconds for the next probe."""
        left = max(0.1, self._deadline - time.monotonic())
        self._probes -= 1
        return left / (self._probes + 1)

    def more(self, probes: int) -> None:
        """There are more probes than were thought of."""
        self._probes += probes


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("eplb-async", *software.NEEDED):
        names = _NIXLS if name == "nixl" else (name,)
        found[name] = next(filter(None, map(_version, names)), None)
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _number(host: Host, name: str) -> int | None:
    text = host.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _memory(wanted: str, host: Host, devices: int) -> str:
    if wanted == "cpu" or (wanted == "auto" and not devices):
        return "cpu"
    return f"cuda:{(_number(host, 'LOCAL_RANK') or 0) % max(1, devices)}"
