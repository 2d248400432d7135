"""Neither the job's secret nor a key made of it is in any log, repr, error or health, whatever goes wrong."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core import messages
from eplb_async.core.wire import Codec
from eplb_async.engine import LoopEngine
from eplb_async.errors import EplbError, HandshakeError
from eplb_async.nixl import AsyncNixlAgent
from eplb_async.rendezvous import FileRendezvous, TcpRendezvous, join, resolve
from eplb_async.rendezvous.blob import open_sealed
from eplb_async.rendezvous.keys import derive_key, job_key
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster, MemoryRendezvous
from eplb_async.testing.patterns import PatternWeights
from tests.communicator.groups import NEW, OLD

SECRET, OTHER = b"correct-horse-battery-staple", b"another-horse-another-battery"


def shapes(secret: bytes) -> Iterator[str]:
    """How bytes show up in text."""
    yield repr(bytes(secret))[2:-1]
    yield secret.hex()
    yield secret.hex().upper()
    yield base64.b64encode(secret).decode().rstrip("=")
    yield base64.urlsafe_b64encode(secret).decode().rstrip("=")
    yield str(list(secret))[1:-1]


def needles(*more: bytes) -> list[str]:
    keys = [derive_key(secret, group) for secret in (SECRET, OTHER) for group in ("default", "g")]
    return [shape for secret in (SECRET, OTHER, *keys, *more) for shape in shapes(secret)]


class Told:
    """Everything that was said."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        self.caplog = caplog
        self.texts: list[str] = []

    def error(self, error: BaseException) -> None:
        """An error as logs show it, with all that its frames hold, and its attributes."""
        self.texts.append(str(error) + repr(error) + repr(vars(error)))
        self.texts += traceback.format_exception(error)
        one: BaseException | None = error
        while one is not None:  # frames of this library, with their locals
            frames = traceback.TracebackException.from_exception(one, capture_locals=True).stack
            self.texts += [repr(f.locals) for f in frames if "eplb_async/" in f.filename]
            one = one.__cause__ or one.__context__

    def thing(self, *things: object) -> None:
        """What somebody may print."""
        self.texts += [repr(thing) + str(thing) for thing in things]

    def check(self, *more: bytes) -> None:
        """Nothing of it shows a secret."""
        logged = [self.caplog.handler.format(record) for record in self.caplog.records]
        logged += [repr(record.args) for record in self.caplog.records]
        assert logged
        for text in (*self.texts, *logged):
            for needle in needles(*more):
                assert needle not in text, text


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    return Told(caplog)


async def opened(
    rank: int, secret: bytes | None, rendezvous: object, fabric: MemoryFabric, timeout: float = 0.5
) -> AsyncEplbCommunicator:
    return await AsyncEplbCommunicator.open(
        rank=rank,
        ep_size=2,
        weights=PatternWeights(OLD, rank, (64, 24)).layers,
        placement=OLD,
        rendezvous=rendezvous,
        settings=Settings(secret=secret, max_pause=0.02),
        timeout=timeout,
        engine=LoopEngine(asyncio.get_running_loop()),
        native=fabric.native,
    )


def watch_the_loop() -> None:
    """asyncio's own debug log shows each call that is slow, with its arguments: have it show all."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 0.0


def test_opening_that_fails(told: Told) -> None:
    """Unlike secrets, damaged and foreign introductions, a rank that is missing."""

    async def main() -> None:
        watch_the_loop()
        for other, damage in ((OTHER, 0), (SECRET, 40)):
            rendezvous, fabric = MemoryRendezvous(), MemoryFabric()
            if damage:
                get = rendezvous.get
                rendezvous.get = lambda key, get=get, n=damage: (get(key) or b"")[:-n] or None  # type: ignore
            results = await asyncio.gather(
                opened(0, SECRET, rendezvous, fabric), opened(1, other, rendezvous, fabric), return_exceptions=True
            )
            for result in results:
                assert isinstance(result, HandshakeError)
                told.error(result)
        with pytest.raises(HandshakeError) as caught:
            await opened(0, SECRET, MemoryRendezvous(), MemoryFabric())
        told.error(caught.value)

    run(main())
    told.check()


def test_a_refused_rendezvous(told: Told, tmp_path: Path) -> None:
    """Addresses without a secret or with a short one, closed and damaged stores, a setting that is malformed."""
    short = b"fifteen-bytes-x"
    for call in (
        lambda: TcpRendezvous.host("0.0.0.0", 0, timeout=1, secret=short),
        lambda: TcpRendezvous.connect("192.0.2.1", 9, timeout=0.2, secret=short),
        lambda: resolve("tcp://192.0.2.1:9", rank=1, ep_size=2, secret=short, timeout=0.2),
        lambda: resolve("gopher://x", rank=1, ep_size=2, secret=SECRET, timeout=0.2),
        lambda: resolve(f"file://{tmp_path}/missing/file", rank=1, ep_size=2, secret=SECRET, timeout=0.2),
        lambda: Settings(secret=short),
        lambda: Settings(secret=SECRET, verify="nonsense"),  # type: ignore[arg-type]
        lambda: Settings.from_env({"EPLB_ASYNC_SECRET": short.decode()}),
    ):
        with pytest.raises((EplbError, ValueError)) as caught:
            call()
        told.texts.append(str(caught.value) + repr(caught.value))
        told.texts += traceback.format_exception(caught.value)
    store = FileRendezvous(tmp_path / "file", timeout=1.0)
    assert job_key(store, group="g", rank=0, secret=None) is not None
    kept = store.get("g/key")
    assert kept is not None
    told.thing(store, asyncio.run(join(store, group="g", rank=0, secret=None, timeout=5.0)))
    store.set("g/key", b"too short")
    for close in (False, True):
        if close:
            store.close()
        with pytest.raises(HandshakeError) as caught:
            asyncio.run(join(store, group="g", rank=0, secret=None, timeout=5.0))
        told.error(caught.value)
    told.check(short, kept, derive_key(kept, "g"))


def test_migrations_that_fail(told: Told) -> None:
    """READs that fail, deadlines, doubt, forged messages, a rank that is fenced, a close that leaves READs."""
    faults = FaultPlan().fail_read("default/1.", nth=0).hold_read("default/0.", nth=1)

    async def main() -> None:
        watch_the_loop()
        settings = Settings(secret=SECRET, settle_timeout=0.3, watchdog_fraction=0.1, max_pause=0.02)
        async with LocalCluster(OLD, faults=faults, settings=settings) as cluster:
            driver = cluster.comms[0]._session.driver
            forged = Codec(b"f" * 32, ep_size=2, num_layers=3).encode(messages.Leave(sender=1))
            for data in (b"", b"garbage", forged):
                driver.notification("somebody", data)
            results: list[Any] = []
            for target in (NEW, OLD, NEW):
                results += await cluster.migrate(target, timeout=0.5)
            await cluster.comms[0].exclude(1)
            await asyncio.sleep(0.5)
            results += await cluster.migrate(OLD, timeout=0.5)
            assert sum(isinstance(result, EplbError) for result in results) > 4, results
            for result in results:
                told.error(result) if isinstance(result, EplbError) else told.thing(result)
            for comm in cluster.comms:
                told.thing(comm, comm.health(), asdict(comm.health()), comm._session, comm._session.endpoint)
                told.thing(comm._session.driver, comm._session.driver._codec, comm._session.driver.identity)
                told.thing(*comm._session.driver.roster, comm._session._introducer)
                told.thing(*vars(comm._session.driver).values())
                told.thing(*(v for k, v in vars(comm._session._introducer).items()))
            sealed = cluster.rendezvous.get("default/blob/1")
            assert sealed is not None
            assert SECRET not in sealed
            assert derive_key(SECRET, "default") not in sealed
            told.thing(open_sealed(sealed, derive_key(SECRET, "default")), settings, vars(cluster).keys())

    run(main())
    told.check()


def test_an_agent_of_another_secret(told: Told) -> None:
    """The agent layer: cards that do not open, and what can be printed of agents, peers and regions."""
    fabric = MemoryFabric()

    async def main() -> None:
        watch_the_loop()
        engine = LoopEngine(asyncio.get_running_loop())
        logging.getLogger("eplb_async").debug("an agent of another secret")
        agent = await AsyncNixlAgent.open("one", Settings(secret=SECRET), engine=engine, native=fabric.native)
        other = await AsyncNixlAgent.open("two", Settings(secret=OTHER), engine=engine, native=fabric.native)
        for blob in (await other.metadata(), (await other.metadata())[:-3], b"", await agent.metadata()):
            with pytest.raises(HandshakeError) as caught:
                await agent.add_peer(blob)
            told.error(caught.value)
        told.thing(agent, other, agent._endpoint.settings, await agent.stats())
        await agent.aclose()
        await other.aclose()

    run(main())
    told.check()


def test_settings_and_keys_hide_themselves_and_work() -> None:
    """What hides is still the bytes: equal, hashable, pickled, and a key for digests."""
    settings = Settings(secret=SECRET)
    assert settings.secret == SECRET
    assert settings == Settings(secret=SECRET)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert asdict(settings)["secret"] == SECRET
    assert "horse" not in f"{settings} {settings.secret!r} {settings.secret} {asdict(settings)}"
    assert derive_key(settings.secret or b"", "g") == derive_key(SECRET, "g")
