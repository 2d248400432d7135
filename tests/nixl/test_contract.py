"""The contract of `contract.py`, kept by the in-memory agent and by real NIXL on both transports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest
import uvloop

from eplb_async.testing import MemoryFabric, VirtualClockLoop
from tests.nixl import contract
from tests.procs import Process, Zygote

FILE = Path(contract.__file__)
LOOPS = {"virtual": VirtualClockLoop, "asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
TRANSPORTS = {"default": {}, "tcp": {"UCX_TLS": "tcp,self"}}


@pytest.mark.parametrize("case", contract.CASES)
@pytest.mark.parametrize("loop", LOOPS)
def test_in_memory(case: str, loop: str) -> None:
    """The in-memory agent keeps the contract; its source has to make progress, as over tcp."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(contract.in_memory(case, MemoryFabric(needs_target_progress=True)))


@pytest.mark.parametrize("case", contract.CASES)
def test_in_memory_done_in_post(case: str) -> None:
    """The in-memory agent keeps it where READs are over when the post returns, as between neighbours."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(contract.in_memory(case, MemoryFabric(done_in_post=True)))


class Pair:
    """A source's process and a readers' process on one transport."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._source: Process | None = None
        self._reader: Process | None = None

    def run(self, case: str, loop: str) -> None:
        if self._reader is None:
            ours, theirs = Pipe()
            self._source = self._zygote.start(FILE, "serve", pipes=(ours,))
            blob, pid = self._source.receive()
            self._reader = self._zygote.start(FILE, "read", blob, pid, pipes=(theirs,))
        try:
            trouble = self._reader.ask((case, loop), timeout=70)
        except BaseException:
            self.end()
            raise
        if trouble and self._source is not None and self._source.pipe.poll(0):
            trouble += f"\nthe source has ended with {self._source.exit_code()}"
        if trouble or case in contract.FATAL:
            self.end()
        if trouble:
            pytest.fail(trouble, pytrace=False)

    def close(self) -> None:
        """Both processes end as they should."""
        if self._reader is not None and self._source is not None:
            assert self._reader.ask(None) == "done"
            assert self._reader.exit_code() == 0
            self._source.send("end")
            assert self._source.receive() is None
            assert self._source.exit_code() == 0
        self.end()

    def end(self) -> None:
        for process in (self._reader, self._source):
            if process is not None:
                self._zygote.end(process)
        self._reader = self._source = None


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Zygote(**TRANSPORTS[request.param]) as zygote:
        both = Pair(zygote)
        yield both
        both.close()


@pytest.mark.parametrize("case", [case for case in contract.CASES if case not in contract.WAITING])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("pair", TRANSPORTS, indirect=True, scope="module")
def test_real_nixl(pair: Pair, loop: str, case: str) -> None:
    """Real NIXL keeps it, in two processes, on the default transport and over tcp."""
    pair.run(case, loop)


@pytest.mark.parametrize("case", contract.WAITING)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("pair", ["tcp"], indirect=True, scope="module")
def test_real_nixl_waiting(pair: Pair, loop: str, case: str) -> None:
    """Real NIXL keeps it where a READ waits for its source."""
    pair.run(case, loop)
