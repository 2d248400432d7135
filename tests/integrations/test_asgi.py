"""The application: what a load balancer, a scraper and an operator see of one rank, mounted or alone."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Mount

from eplb_async.communicator import Health
from eplb_async.core.events import Phase
from eplb_async.core.placement import Placement
from eplb_async.integrations.asgi import eplb_app
from eplb_async.integrations.complaints import complaints
from eplb_async.settings import Settings
from eplb_async.testing import run
from eplb_async.testing.cluster import LocalCluster

OLD = Placement([[0, 1, 3, 2, 3, 0, 2, 0, 1]] * 3, ep_size=3)
NEW = Placement([[2, 3, 0, 1, 0, 2, 0, 1, 3]] * 3, ep_size=3)
WITHOUT_2 = Placement([[2, 3, 0, 1, 0, 2, -1, -1, -1]] * 3, ep_size=3)
SECRET = b"the job's own secret"


def health(**more: Any) -> Health:
    """Of a rank that is well."""
    well: dict[str, Any] = {
        "phase": "idle",
        "seconds_in_phase": 1.0,
        "seconds_left": None,
        "rank": 0,
        "term": 0,
        "members": (0, 1),
        "epoch": 0,
        "layer": None,
        "prepared": 0,
        "committed": 0,
        "num_layers": 3,
        "waiting_for": (),
        "degraded": {},
        "reads_in_flight": 0,
        "oldest_read_seconds": 0.0,
        "oldest_read_peer": "",
        "oldest_read_rank": None,
        "oldest_read_layer": None,
        "oldest_read_bytes": 0,
        "quarantined_bytes": 0,
        "recycled": 0,
    }
    return Health(**{**well, **more})


class Comm:
    """A communicator that says what it was told to."""

    def __init__(self, **more: Any) -> None:
        self.told = health(**more)
        self.placement = OLD

    def health(self) -> Health:
        return self.told


def service_of(comm: Any, **more: Any) -> Any:
    says = {"failures": 0, "last_error": "", "seconds_left": 0.0, "closed": "", "rounds": {}, **more}
    return type("Service", (), {"comm": comm, "health": lambda _: SimpleNamespace(**says)})()


def get(app: Any, path: str, method: str = "GET", **more: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rank") as client:
            return await client.request(method, path, **more)

    return run(main())


def in_cluster(scenario: Callable[[LocalCluster, httpx.AsyncClient], Coroutine[Any, Any, None]]) -> None:
    """A scenario of three ranks, with a client of rank 0's application."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=Settings(secret=SECRET, hot_seconds=0)) as cluster:
            app = eplb_app(cluster.comms[0], registry=CollectorRegistry())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rank") as client:
                await scenario(cluster, client)

    run(main())


def test_a_rank_that_is_well_answers_200_also_while_it_moves() -> None:
    """Idle, and within a migration."""

    async def scenario(cluster: LocalCluster, client: httpx.AsyncClient) -> None:
        answer = await client.get("/health")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        told = answer.json()
        assert (told["status"], told["phase"], told["rank"], told["problems"]) == ("ok", "idle", 0, [])
        assert told["members"] == [0, 1, 2]
        assert told["service"] is None
        moving = asyncio.ensure_future(cluster.migrate(NEW))
        while (answer := await client.get("/health")).json()["phase"] != "open":
            assert answer.status_code == 200
            await asyncio.sleep(0)  # a request to an application in the same loop need not yield
        await moving

    in_cluster(scenario)


def test_a_dead_rank_is_named_with_what_to_do() -> None:
    """503 until it is back, and the state says the same."""

    async def scenario(cluster: LocalCluster, client: httpx.AsyncClient) -> None:
        cluster.kill(2)
        await cluster.migrate(WITHOUT_2, ranks=(0, 1))
        answer = await client.get("/health")
        assert answer.status_code == 503
        (problem,) = answer.json()["problems"]
        assert (problem["rank"], problem["what"]) == (2, "disconnected")
        assert "await reconnect(2)" in problem["do"]
        state = (await client.get("/state")).json()
        assert state["health"]["degraded"] == {"2": "disconnected"}
        back = asyncio.ensure_future(cluster.restart(2, OLD))
        await cluster.reconnect(2)
        await back
        assert (await client.get("/health")).status_code == 200

    in_cluster(scenario)


def test_the_state_has_the_placement_when_asked_and_nothing_secret_ever() -> None:
    """Lists of lists, -1 for an empty slot."""

    async def scenario(cluster: LocalCluster, client: httpx.AsyncClient) -> None:
        await cluster.migrate(NEW)
        state = (await client.get("/state")).json()
        assert state.keys() == {"health", "service"}
        assert (state["health"]["epoch"], state["health"]["phase"]) == (1, "idle")
        assert "placement" not in (await client.get("/state?placement=0")).json()
        full = await client.get("/state?placement=1")
        assert full.json()["placement"] == NEW.physical_to_logical_map.tolist()
        for path in ("/health", "/state?placement=1", "/metrics"):
            answer = await client.get(path)
            assert SECRET not in answer.content
            assert SECRET.hex().encode() not in answer.content
        await cluster.comms[0].aclose()
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/state?placement=1")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200

    in_cluster(scenario)


def test_metrics_are_those_of_the_registry_and_the_rank_is_watched_by_itself() -> None:
    """As text, or OpenMetrics where the scraper asks for it."""

    async def scenario(cluster: LocalCluster, client: httpx.AsyncClient) -> None:
        answer = await client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'eplb_async_members{group="default",rank="0"} 3.0' in answer.text
        await cluster.migrate(NEW)
        modern = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert modern.headers["content-type"].startswith("application/openmetrics-text")
        assert modern.text.endswith("# EOF\n")
        assert 'eplb_async_epoch{group="default",rank="0"} 1.0' in modern.text
        strange = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=x"})
        assert strange.status_code == 200

    in_cluster(scenario)


def test_without_the_package_metrics_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """501, and the rest works."""
    for name in [name for name in sys.modules if name.startswith("eplb_async.telemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    app = eplb_app(Comm())
    answer = get(app, "/metrics")
    assert answer.status_code == 501
    assert "pip install 'eplb-async[prometheus]'" in answer.text
    assert get(app, "/health").status_code == 200


def test_methods_and_paths() -> None:
    """HEAD has the headers of GET and no body; what is not there is 404, other methods 405."""
    app = eplb_app(Comm())
    full, head = get(app, "/health"), get(app, "/health", "HEAD")
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers == full.headers
    assert int(full.headers["content-length"]) == len(full.content)
    assert get(app, "/health/").status_code == 200
    for path in ("/", "/healthy", "/state/x", "//health"):
        assert get(app, path).status_code == 404, path
    assert "/health, /metrics, /state" in get(app, "/").text
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer = get(app, "/state", method)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_mounted_anywhere() -> None:
    """Below Starlette, twice over, and below a server that leaves the root path away from the path."""
    app = eplb_app(Comm())
    server = Starlette(routes=[Mount("/ops", routes=[Mount("/eplb", app=app)])])
    assert get(server, "/ops/eplb/health").json()["status"] == "ok"
    assert get(server, "/ops/eplb/nothing").status_code == 404

    async def bare(root: str, path: str) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "root_path": root, "headers": []}
        await app(scope, None, send)  # type: ignore[arg-type]
        return int(sent[0]["status"])

    assert run(bare("/api", "/health")) == 200
    assert run(bare("/api", "/api/health")) == 200
    assert run(bare("/health", "/health/health")) == 200
    assert run(bare("/a", "/api/health")) == 404


def test_it_lives_alone_and_refuses_websockets() -> None:
    """Lifespan has nothing to do, and says so."""

    async def exchange(scope: Any, messages: list[Any]) -> list[str]:
        sent: list[str] = []
        waiting = iter(messages)

        async def receive() -> Any:
            return {"type": next(waiting)}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await eplb_app(Comm())(scope, receive, send)
        return sent

    both = ["lifespan.startup", "lifespan.shutdown"]
    assert run(exchange({"type": "lifespan"}, both)) == [f"{name}.complete" for name in both]
    assert run(exchange({"type": "websocket", "path": "/health"}, ["websocket.connect"])) == ["websocket.close"]


@pytest.mark.parametrize(
    ("told", "what", "do"),
    [
        ({"phase": "fenced", "last_error": "fenced: by 1"}, "go on without this rank: fenced: by 1", "reconnect(0)"),
        ({"phase": "closed"}, "is closed", "open it again"),
        ({"phase": "closing"}, "is closing", "nothing"),
        ({"phase": "suspended"}, "is suspended", "await resume()"),
        ({"phase": "in_doubt", "last_error": "no majority"}, "how the migration ends: no majority", "exclude(rank)"),
        (
            {"phase": "joined", "seconds_left": -2.0, "waiting_for": (1,)},
            "past its deadline, waiting for ranks [1]",
            "",
        ),
        ({"phase": "activating", "seconds_left": -1.0, "behind": (3,)}, "waiting for ranks [3]", "stuck in a step"),
        ({"phase": "settling", "seconds_left": -1.0, "in_use": {2: 1}}, "users of layers [2]", "using()"),
        ({"half_written": (4, 5)}, "layers [4, 5]", "updating_weights()"),
        ({"degraded": {1: "excluded by the caller"}}, "excluded by the caller", "reconnect(1)"),
        ({"degraded": {1: "a READ from it failed: x"}}, "a READ from it failed", "exclude(1)"),
    ],
    ids=lambda value: str(value.get("phase", next(iter(value)))) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_503_and_says_what_to_do(told: dict[str, Any], what: str, do: str) -> None:
    """One problem each, in words."""
    answer = get(eplb_app(Comm(**told)), "/health")
    assert answer.status_code == 503
    (problem,) = answer.json()["problems"]
    assert what in problem["what"]
    assert do in problem["do"]
    assert problem["rank"] == next(iter(told.get("degraded", {0: ""})))


def test_every_other_phase_is_well() -> None:
    """Joined, open, activating, settling and a view change are what a server serves through."""
    bad = {"fenced", "closed", "closing", "suspended", "in_doubt"}
    phases = {phase.value for phase in Phase} | {"activating", "view_change", "closing", "suspended"}
    assert {phase for phase in phases if complaints(health(phase=phase, seconds_left=1.0))} == bad & phases


def test_a_service_that_fails_is_unwell_and_one_failure_is_none() -> None:
    """Two in a row; and a service that is over while its communicator is not."""
    comm = Comm()
    assert get(eplb_app(service_of(comm, failures=1)), "/health").status_code == 200
    failing = get(eplb_app(service_of(comm, failures=2, last_error="no answer", seconds_left=4.6)), "/health")
    assert failing.status_code == 503
    (problem,) = failing.json()["problems"]
    assert problem["what"] == "2 rebalances failed in a row, the last because: no answer"
    assert "tried again in 5 s" in problem["do"]
    over = get(eplb_app(service_of(comm, closed="it broke")), "/health").json()["problems"]
    assert [problem["what"] for problem in over] == ["the service is over: it broke"]
    fenced = get(eplb_app(service_of(Comm(phase="fenced"), closed="fenced")), "/health").json()["problems"]
    assert len(fenced) == 1


@pytest.mark.asyncio
async def test_a_real_server_serves_it() -> None:
    """uvicorn on a socket, lifespan on, below a root path."""
    config = uvicorn.Config(eplb_app(Comm()), lifespan="on", root_path="/rank0", log_config=None, ws="none")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            while not server.started:
                assert not serving.done(), serving
                await asyncio.sleep(0.001)
            base = f"http://127.0.0.1:{listening.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=base, timeout=30) as client:
                assert (await client.get("/health")).json()["status"] == "ok"
                assert (await client.head("/state")).status_code == 200
                assert (await client.get("/metrics/x")).status_code == 404
        finally:
            server.should_exit = True
            await serving
