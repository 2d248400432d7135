"""Real ranks: one process each, real NIXL, driven over pipes and killed or stopped by pid.

Every byte of the weights says which layer, tensor and expert it belongs to, so a rank can say how many of its
bytes are not what a placement calls for.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.settings import Settings
from eplb_async.testing.patterns import PatternWeights


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What each rank opens.

    Attributes:
        placement: Where the experts are at first.
        rendezvous: URL.
        row_bytes: Bytes of an expert row in each tensor.
        transport: ``"auto"`` or ``"tcp"``.
        loop: ``"uvloop"`` or ``"asyncio"``.
        settings: Settings by name.
        timeout: Seconds for ``open``.
        method: ``"forkserver"`` starts in a tenth of the time, since torch is imported once; ``"spawn"`` runs a
            whole interpreter, its exit included.
        telemetry: Module whose ``hook(rank)`` gives each rank's telemetry hook; empty: none.
        variables: Environment variables of each rank's process; ``{rank}`` in a value stands for its rank.
        logs: Directory for what each rank prints, ``rank<n>.log``; empty: with what the parent prints.
        entries: What each rank's process calls before all else, as to enter a network namespace; picklable.
            Empty: nothing.
        nodes: Label of each rank's host; empty: the boot id, as by default.
    """

    placement: Placement
    rendezvous: str
    row_bytes: tuple[int, ...] = (4096, 1024)
    transport: str = "auto"
    loop: str = "asyncio"
    settings: dict[str, Any] = field(default_factory=dict)
    timeout: float = 60.0
    method: str = "forkserver"
    telemetry: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    logs: str = ""
    entries: tuple[Callable[[], object], ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """An error that a rank's call raised.

    Attributes:
        kind: Class name.
        bases: Names of all its classes.
        text: ``str()`` of it.
        parts: Its attributes.
    """

    kind: str
    bases: tuple[str, ...]
    text: str
    parts: dict[str, Any]


class RankProcesses:
    """N real ranks of one group on this machine, to be used ``with``.

    Commands by the name of a method of the communicator call that in the rank's process, and answer what it
    answers, records as dictionaries: ``open``, ``migrate`` (a placement, seconds), ``health``, ``placement``,
    ``exclude`` (a rank), ``reconnect`` (a rank, seconds), ``rebind``, ``suspend``, ``resume``, ``close``. Of the
    others, ``check`` answers how many bytes differ from a placement, by default the communicator's own; ``cancel``
    cancels the migration that runs; ``phase`` and ``reading`` answer once ``health()`` says so; ``update`` writes
    layers anew; ``run`` awaits a coroutine function of yours, given by the names of its module and itself, with the
    communicator and further arguments. While a migration that was sent with :meth:`send` runs, further commands are
    answered.

    Args:
        spec: What each opens.
        open_now: Whether to open all of them on entering.
    """

    def __init__(self, spec: Spec, *, open_now: bool = True) -> None:
        self.spec = spec
        self._open_now = open_now
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}
        self._replaced: list[Any] = []

    def __enter__(self) -> RankProcesses:
        try:
            for rank in range(self.spec.placement.ep_size):
                self.start(rank)
            if self._open_now:
                self.all("open")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank, process in self._processes.items():
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # killed, and its parent has not been told yet
                    self.resume(rank)
            self._pipes[rank].close()
        for process in self._replaced:
            process.kill()
        deadline = time.monotonic() + 15
        for process in (*self._processes.values(), *self._replaced):
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(10)

    def start(self, rank: int, placement: Placement | None = None) -> None:
        """Start a rank's process, also anew after it died, or was stopped for good.

        Args:
            rank: It.
            placement: Where it says the experts are; default the spec's.
        """
        spec = self.spec if placement is None else replace(self.spec, placement=placement)
        if rank in self._processes:
            self._replaced.append(self._processes[rank])
            self._pipes[rank].close()
        context: Any = multiprocessing.get_context(self.spec.method)
        context.set_forkserver_preload([__name__])
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(rank, spec, theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes[rank], self._pipes[rank] = process, ours

    def pid(self, rank: int) -> int:
        """A rank's process id."""
        return int(self._processes[rank].pid)

    def kill(self, rank: int) -> None:
        """SIGKILL."""
        os.kill(self.pid(rank), signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """SIGSTOP; returns when every thread stands still, which the signal alone does not wait for."""
        os.kill(self.pid(rank), signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not _stands_still(self.pid(rank)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank}, process {self.pid(rank)}, did not stop within 10 s")
            time.sleep(0.001)

    def resume(self, rank: int) -> None:
        """SIGCONT."""
        os.kill(self.pid(rank), signal.SIGCONT)

    def exit_code(self, rank: int, timeout: float = 30.0) -> int | None:
        """Wait for a rank's process to end."""
        self._processes[rank].join(timeout)
        code: int | None = self._processes[rank].exitcode
        return code

    def send(self, rank: int, command: str, *args: Any) -> None:
        """Start a command on a rank; :meth:`receive` its answer."""
        self._pipes[rank].send((command, args))

    def receive(self, rank: int, timeout: float = 60.0) -> Any:
        """The answer to the oldest command that has none yet: a value, or a :class:`Failure`.

        Raises:
            TimeoutError: None came.
        """
        if not wait([self._pipes[rank]], timeout):
            raise TimeoutError(f"rank {rank} did not answer within {timeout} s")
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            raise TimeoutError(f"rank {rank} is dead, exit code {self.exit_code(rank, 5)}") from None

    def call(self, rank: int, command: str, *args: Any, timeout: float = 60.0) -> Any:
        """Run a command on a rank and return its answer."""
        self.send(rank, command, *args)
        return self.receive(rank, timeout)

    def all(self, command: str, *args: Any, ranks: Iterable[int] | None = None, timeout: float = 60.0) -> list[Any]:
        """Run a command on several ranks at once; a failure is raised, naming the rank."""
        chosen = list(self._processes) if ranks is None else list(ranks)
        for rank in chosen:
            self.send(rank, command, *args)
        answers = [self.receive(rank, timeout) for rank in chosen]
        for rank, answer in zip(chosen, answers, strict=True):
            if isinstance(answer, Failure):
                raise AssertionError(f"rank {rank}, {command}: {answer.kind}: {answer.text}")
        return answers


class _Rank:
    """Commands of one rank's process. Each answers once; ``migrate`` may be cancelled by ``cancel``."""

    def __init__(self, rank: int, spec: Spec) -> None:
        self.rank = rank
        self.spec = spec
        self.rows = PatternWeights(spec.placement, rank, spec.row_bytes)
        self.pointers = self.rows.pointers()
        self.comm: AsyncEplbCommunicator | None = None
        self.running: asyncio.Task[Any] | None = None
        self.blocking: asyncio.Future[None] | None = None

    @property
    def opened(self) -> AsyncEplbCommunicator:
        assert self.comm is not None, "not opened"
        return self.comm

    async def open(self, placement: Placement | None = None) -> None:
        """Open, or open anew with the weights of another placement."""
        placement = self.spec.placement if placement is None else placement
        if self.rows.wrong_bytes(placement):
            self.rows.fill(placement)
        self.comm = await AsyncEplbCommunicator.open(
            rank=self.rank,
            ep_size=placement.ep_size,
            weights=self.rows.layers,
            placement=placement,
            rendezvous=self.spec.rendezvous,
            node=self.spec.nodes[self.rank] if self.spec.nodes else None,
            settings=Settings(**self.spec.settings),
            timeout=self.spec.timeout,
            telemetry=importlib.import_module(self.spec.telemetry).hook(self.rank) if self.spec.telemetry else None,
        )

    async def reopen(self) -> None:
        """Close, load again what the spec's placement says, and open again, in this process."""
        await self.opened.aclose()
        self.rows.fill(self.spec.placement)
        await self.open()

    async def reconnect(self, rank: int, timeout: float) -> None:
        await self.opened.reconnect(rank, timeout=timeout)

    async def migrate(self, placement: Placement, timeout: float, load: bool = False) -> dict[str, Any]:
        load_expert = self.rows.load if load else None
        self.running = asyncio.ensure_future(self.opened.migrate(placement, timeout=timeout, load_expert=load_expert))
        return asdict(await self.running)

    async def cancel(self) -> int:
        """Cancel the running migration; answers how many turns of the loop it took to end."""
        assert self.running is not None
        self.running.cancel()
        turns = 0
        while not self.running.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    async def reading(self) -> None:
        """Answer when a READ of this rank is in flight."""
        while not self.opened.health().reads_in_flight:
            await asyncio.sleep(0)

    async def phase(self, phase: str) -> None:
        """Answer when this rank is in a phase."""
        while self.opened.health().phase != phase:
            await asyncio.sleep(0.001)

    async def waiting_for(self, *ranks: int) -> None:
        """Answer when this rank waits for exactly these."""
        while self.opened.health().waiting_for != ranks:
            await asyncio.sleep(0.001)

    async def members(self, *ranks: int) -> None:
        """Answer when this rank is idle in a view of exactly these."""
        while (health := self.opened.health()).members != ranks or health.phase != "idle":
            await asyncio.sleep(0.001)

    async def check(self, placement: Placement | None = None) -> int:
        """Wrong bytes, against a placement or the one the communicator says is true."""
        wanted = self.opened.placement if placement is None else placement
        assert self.rows.pointers() == self.pointers, "a storage pointer changed"
        return self.rows.wrong_bytes(wanted)

    async def placement(self) -> Placement:
        return self.opened.placement

    async def health(self) -> dict[str, Any]:
        return asdict(self.opened.health())

    async def exclude(self, rank: int) -> None:
        await self.opened.exclude(rank)

    async def block(self, seconds: float) -> None:
        """Block the user's loop, again and again, as a server's forward passes do, until :meth:`unblock`."""

        async def forward_passes() -> None:
            while True:
                time.sleep(seconds)  # noqa: ASYNC251
                await asyncio.sleep(0.001)

        self.blocking = asyncio.ensure_future(forward_passes())

    async def unblock(self) -> None:
        """End :meth:`block`."""
        assert self.blocking is not None
        self.blocking.cancel()

    async def move_weights(self) -> None:
        """Give the first tensor new storage, as a reload does."""
        tensor = self.rows.layers[0][0]
        tensor.data = tensor.data.clone()
        self.pointers = self.rows.pointers()

    async def rebind(self) -> None:
        await self.opened.rebind()

    async def update(self, layers: list[int] | None = None) -> None:
        """Rewrite layers, as their owner does; default all."""
        async with self.opened.updating_weights(layers) as placement:
            self.rows.rewrite(placement, layers)

    async def scribble(self, layer: int, tensor: int, slot: int) -> None:
        """Change the last byte of a row behind everybody's back."""
        self.rows.layers[layer][tensor][slot, -1] ^= 0xFF

    async def suspend(self, timeout: float | None = None) -> None:
        """Suspend, and free the weights."""
        await self.opened.suspend(timeout=timeout)
        for tensors in self.rows.layers:
            for tensor in tensors:
                tensor.data = torch.empty(0, dtype=torch.uint8)

    async def resume(self) -> None:
        """Allocate the weights anew, fill them, and resume."""
        slots = self.spec.placement.num_local_experts
        for tensors in self.rows.layers:
            for tensor, nbytes in zip(tensors, self.rows.row_bytes, strict=True):
                tensor.data = torch.zeros(slots, nbytes, dtype=torch.uint8)
        self.rows.fill(self.opened.placement)
        self.pointers = self.rows.pointers()
        await self.opened.resume()

    async def close(self) -> tuple[str, ...]:
        return await self.opened.aclose()

    async def run(self, module: str, function: str, *args: Any) -> Any:
        """Await ``module.function(communicator, *args)``; the communicator is ``None`` before :meth:`open`."""
        return await getattr(importlib.import_module(module), function)(self.comm, *args)

    async def leave(self) -> None:
        """End the interpreter with whatever is running."""
        raise SystemExit(0)


def _stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped, or it has ended."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return set(states) <= set("TtZX")


def _main(rank: int, spec: Spec, pipe: Connection) -> None:
    if spec.entries:
        spec.entries[rank]()
    if spec.logs:
        log = os.open(os.path.join(spec.logs, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 2)
        os.close(log)
    os.dup2(2, 1)
    os.environ.update({name: value.format(rank=rank) for name, value in spec.variables.items()})
    if spec.transport == "tcp":
        os.environ["UCX_TLS"] = "tcp,self"
    torch.set_num_threads(1)
    main = _serve(_Rank(rank, spec), pipe)
    if spec.loop == "uvloop":
        import uvloop

        uvloop.run(main)
    else:
        asyncio.run(main)


async def _serve(rank: _Rank, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[Any] = asyncio.Queue()
    loop.add_reader(pipe.fileno(), _read, pipe, commands)
    tasks: set[asyncio.Task[None]] = set()
    while (received := await commands.get()) is not None:
        command, args = received
        if command == "leave":
            raise SystemExit(0)
        task = asyncio.ensure_future(_answer(getattr(rank, command), args, pipe))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    loop.remove_reader(pipe.fileno())
    if rank.comm is not None:
        await rank.comm.aclose()


def _read(pipe: Connection, commands: asyncio.Queue[Any]) -> None:
    try:
        commands.put_nowait(pipe.recv())
    except (EOFError, OSError):
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        commands.put_nowait(None)


async def _answer(command: Callable[..., Coroutine[Any, Any, Any]], args: Sequence[Any], pipe: Connection) -> None:
    try:
        answer = await command(*args)
    except (Exception, asyncio.CancelledError) as error:
        parts = {k: v for k, v in vars(error).items() if isinstance(v, int | float | str | tuple | dict | None)}
        bases = tuple(base.__name__ for base in type(error).__mro__)
        answer = Failure(type(error).__name__, bases, str(error), {k: v for k, v in parts.items() if k != "failures"})
    try:
        pipe.send(answer)
    except OSError:
        pass
