"""Health, metrics and state of one rank as a small ASGI application, to be mounted in any server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from eplb_async.errors import EplbError
from eplb_async.integrations.complaints import complaints

__all__ = ["eplb_app"]

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]
_Answer = tuple[int, str, bytes]

_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"


def eplb_app(service_or_comm: Any, *, registry: Any = None) -> _App:
    """An ASGI application of ``/health``, ``/metrics`` and ``/state``; it never waits for anything.

    ``/health`` answers 200, or 503 with what is wrong, which ranks, and what to do. ``/metrics`` is for Prometheus, and
    501 without the package prometheus_client; its first scrape has the registry watch what is given, if it is not
    watched yet. ``/state`` is what ``health()`` says, in JSON; ``?placement=1`` adds where the experts are.

    Nothing secret is shown, but nobody is asked who he is either: mount it where only operators get at it.

    Args:
        service_or_comm: An ``EplbService`` or an ``AsyncEplbCommunicator``; used from any loop.
        registry: The ``CollectorRegistry`` whose metrics are shown; default ``prometheus_client.REGISTRY``.
    """
    rank = _Rank(service_or_comm, registry)
    pages: dict[str, Callable[[_Scope], _Answer]] = {
        "/health": rank.health,
        "/metrics": rank.metrics,
        "/state": rank.state,
    }

    async def app(scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await _answer(scope, send, pages)
        else:
            await send({"type": "websocket.close", "code": 1000})

    return app


class _Rank:
    """What is told of one rank."""

    def __init__(self, target: Any, registry: Any) -> None:
        self._target = target
        self._comm = getattr(target, "comm", target)
        self._registry = registry
        self._watched = False

    def health(self, scope: _Scope) -> _Answer:
        health, service = self._comm.health(), self._service()
        wrong = complaints(health, service)
        told = {
            "status": "unwell" if wrong else "ok",
            "group": health.group,
            "rank": health.rank,
            "phase": health.phase,
            "members": health.members,
            "problems": wrong,
            "health": str(health),
            "service": None if service is None else str(service),
        }
        return 503 if wrong else 200, _JSON, msgspec.json.encode(told)

    def state(self, scope: _Scope) -> _Answer:
        told = {"health": self._comm.health(), "service": self._service()}
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        if query.get("placement", ["0"])[-1] not in ("", "0"):
            told["placement"] = self._comm.placement.physical_to_logical_map.tolist()
        return 200, _JSON, msgspec.json.encode(told)

    def metrics(self, scope: _Scope) -> _Answer:
        try:
            from eplb_async.telemetry.prometheus import PrometheusHook, exposition
        except EplbError as missing:
            return 501, _TEXT, f"{missing}\n".encode()
        hook = PrometheusHook(self._registry)
        if not self._watched:
            hook.watch(self._target)
            self._watched = True
        accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
        kind, body = exposition(hook.registry, accept.decode("latin-1"))
        return 200, kind, body

    def _service(self) -> Any:
        return None if self._comm is self._target else self._target.health()


async def _answer(scope: _Scope, send: _Send, pages: dict[str, Callable[[_Scope], _Answer]]) -> None:
    page = pages.get(_path(scope))
    headers = [(b"cache-control", b"no-store")]
    if page is None:
        status, kind, body = 404, _TEXT, f"there are {', '.join(pages)}\n".encode()
    elif scope["method"] not in ("GET", "HEAD"):
        status, kind, body = 405, _TEXT, b"GET or HEAD\n"
        headers.append((b"allow", b"GET, HEAD"))
    else:
        status, kind, body = page(scope)
    headers += [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _path(scope: _Scope) -> str:
    """The path below where this is mounted; servers differ in whether ``path`` has that in front."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    if root and path.startswith(root + "/"):
        path = path[len(root) :]
    return path.rstrip("/")


async def _live(receive: _Receive, send: _Send) -> None:
    """Nothing is to be started or stopped: who opened the communicator closes it."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
