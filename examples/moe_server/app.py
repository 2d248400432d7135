"""The HTTP front end, on rank 0's event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from eplb_async import EplbError
from examples.moe_server.batching import Batcher, Overloaded, Unavailable
from examples.moe_server.engine import Engine
from examples.moe_server.model import VOCABULARY

MAX_TOKENS = 256
_ANSWER_SECONDS = 60.0
_MAX_BODY = 1 << 16


class BadField(ValueError):
    """A field of a request is wrong.

    Attributes:
        field: Its name.
    """

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


def make_app(
    engine: Engine,
    batcher: Batcher,
    *,
    rebalance: Callable[[bool], Awaitable[Any]],
    state: Callable[[], dict[str, Any]],
    rank: ASGIApp | None,
) -> Starlette:
    """The application.

    Args:
        engine: For its state.
        batcher: Takes the requests.
        rebalance: Rebalances now, whether it is worth it or not if true; returns a report.
        state: What ``GET /eplb`` says.
        rank: The library's own application; answers for health, and all paths that are not named here.
    """

    async def generate(request: Request) -> JSONResponse:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                prompt, max_tokens = await _question(request)
            future = asyncio.wrap_future(batcher.submit(prompt, max_tokens))
        except BadField as bad:
            return JSONResponse({"error": str(bad), "field": bad.field}, 400)
        except (ClientDisconnect, TimeoutError):
            return JSONResponse({"error": f"the request did not come whole within {_ANSWER_SECONDS:g} s"}, 408)
        except (Overloaded, Unavailable) as error:
            return _refused(error)
        gone = asyncio.ensure_future(_gone(request))
        either: set[asyncio.Future[Any]] = {future, gone}
        try:
            await asyncio.wait(either, timeout=_ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():  # nobody waits for it any more, or it takes too long
                return JSONResponse({"error": f"no answer within {_ANSWER_SECONDS:g} s"}, 504)
            return JSONResponse({"tokens": future.result()})
        except Unavailable as error:
            return _refused(error)
        finally:
            future.cancel()
            gone.cancel()

    class Health:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            answer: ASGIApp
            if engine.lost is not None:
                problem = {"rank": engine.lost, "what": engine.failed, "do": "restart the job"}
                answer = JSONResponse({"status": "unwell", "problems": [problem]}, 503)
            else:
                answer = rank or JSONResponse({"status": "ok"})
            await answer(scope, receive, send)

    async def eplb(_: Request) -> JSONResponse:
        found = {"steps": engine.steps, "rank_tokens": engine.rank_tokens.tolist(), "queue": batcher.depth}
        return JSONResponse(json.loads(json.dumps(found | state(), default=str)))

    async def eplb_rebalance(request: Request) -> JSONResponse:
        force = request.query_params.get("force", "false").lower()
        if force not in ("true", "false", "1", "0"):
            return JSONResponse({"error": f"force: {force!r} is not true or false", "field": "force"}, 400)
        try:
            report = await rebalance(force in ("true", "1"))
        except (EplbError, TimeoutError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 503)
        return JSONResponse(json.loads(json.dumps(dataclasses.asdict(report), default=str)))

    routes: list[Any] = [
        Route("/generate", generate, methods=["POST"]),
        Route("/health", Health(), methods=["GET", "HEAD"]),
        Route("/eplb", eplb),
        Route("/eplb/rebalance", eplb_rebalance, methods=["POST"]),
    ]
    return Starlette(routes=routes if rank is None else [*routes, Mount("/", rank)])


def checked(body: Any) -> tuple[list[int], int]:
    """The prompt and ``max_tokens`` of a request's JSON.

    Raises:
        BadField: One is wrong.
    """
    if not isinstance(body, dict):
        raise BadField("body", "not a JSON object")
    prompt, max_tokens = body.get("prompt"), body.get("max_tokens", 16)
    if isinstance(prompt, str):
        prompt = list(prompt.encode())
    if not isinstance(prompt, list) or not 1 <= len(prompt) <= MAX_TOKENS:
        raise BadField("prompt", f"not a text or a list of 1 to {MAX_TOKENS} tokens")
    if not all(type(token) is int and 0 <= token < VOCABULARY for token in prompt):
        raise BadField("prompt", f"a token is not a whole number from 0 to {VOCABULARY - 1}")
    if type(max_tokens) is not int or not 1 <= max_tokens <= MAX_TOKENS:
        raise BadField("max_tokens", f"not a whole number from 1 to {MAX_TOKENS}")
    return prompt, max_tokens


async def _question(request: Request) -> tuple[list[int], int]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            raise BadField("body", f"longer than {_MAX_BODY} bytes")
    try:
        return checked(json.loads(body))
    except BadField:
        raise
    except (ValueError, RecursionError):  # the latter of brackets without end
        raise BadField("body", "not JSON") from None


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused(error: Exception) -> JSONResponse:
    retry = {"Retry-After": "1"} if isinstance(error, Overloaded) else {}
    return JSONResponse({"error": str(error)}, 503, headers=retry)
