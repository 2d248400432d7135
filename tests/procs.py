"""Real processes for tests: fresh ones, forked in milliseconds from one that has imported everything.

UCX reads its environment once, so a transport needs processes of its own: a `Zygote` per transport is started
with that environment, imports NIXL, and forks a process for each `start`. No agent ever lives in the zygote.

    with Zygote(UCX_TLS="tcp,self") as zygote:
        source = zygote.start(__file__, "serve", 4096)        # runs serve(pipe, 4096) in a new process
        blob = source.receive()
        source.kill()

Every wait has a deadline, and every process is killed when the zygote is closed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_SECONDS = 60.0
TESTS = Path(__file__).parent
ROOT = TESTS.parent
_FAILED = "raised in the process"


class Failed(AssertionError):
    """What a process raised, with its traceback."""


class Process:
    """A process of a test."""

    def __init__(self, zygote: Zygote, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self.pipe = pipe
        self._zygote = zygote

    def receive(self, timeout: float = 30.0) -> Any:
        """Take what the process sent; what it raised is raised here."""
        if not self.pipe.poll(timeout):
            raise TimeoutError(f"process {self.pid} sent nothing for {timeout} s\n{stacks(self.pid)}")
        try:
            item = self.pipe.recv()
        except EOFError:
            raise Failed(f"process {self.pid} ended without an answer: {self.exit_code()}") from None
        if isinstance(item, dict) and _FAILED in item:
            raise Failed(item[_FAILED])
        return item

    def send(self, item: Any) -> None:
        self.pipe.send(item)

    def ask(self, item: Any, timeout: float = 30.0) -> Any:
        self.send(item)
        return self.receive(timeout)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.exit_code()

    def stop(self) -> None:
        stop(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def exit_code(self, timeout: float = 30.0) -> int:
        """Wait for its end; negative for a signal."""
        return self._zygote.wait(self.pid, timeout)


class Zygote:
    """Imports once, forks often."""

    def __init__(self, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        self._codes: dict[int, int] = {}
        self._alive: set[int] = set()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error::ResourceWarning", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(ROOT), "NIXL_LOG_LEVEL": "WARN", **environment},
                cwd=ROOT,
            )
        self._socket = ours
        self._pipe = Connection(os.dup(ours.fileno()))
        if not self._pipe.poll(START_SECONDS):
            self._process.kill()
            raise TimeoutError(f"the zygote did not import NIXL within {START_SECONDS} s")
        self._pipe.recv()

    def start(self, file: str | Path, function: str, *args: Any, pipes: tuple[Connection, ...] = ()) -> Process:
        """Fork a process that runs ``function(pipe, *pipes, *args)`` of a file, then exits as usual."""
        ours, theirs = Pipe()
        self._pipe.send(("start", str(file), function, args, 1 + len(pipes)))
        for pipe in (theirs, *pipes):
            reduction.send_handle(self._pipe, pipe.fileno(), self._process.pid)
            pipe.close()
        pid = self._pipe.recv()
        self._alive.add(pid)
        return Process(self, pid, ours)

    def call(self, file: str | Path, function: str, *args: Any, timeout: float = 60.0, **more: Any) -> Any:
        """Run ``function(pipe, *args)`` in a process of its own, and return or raise what it does."""
        process = self.start(file, function, *args, **more)
        try:
            answer = process.receive(timeout)
            code = process.exit_code()
        except BaseException:
            self.end(process)
            raise
        assert code == 0, f"{function} answered {answer!r}, but its process ended with {code}"
        return answer

    def wait(self, pid: int, timeout: float) -> int:
        if pid not in self._codes:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                try:
                    if not select.select([fd], [], [], timeout)[0]:
                        raise TimeoutError(f"process {pid} has not ended after {timeout} s\n{stacks(pid)}")
                finally:
                    os.close(fd)
            self._pipe.send(("wait", pid))
            self._codes[pid] = self._pipe.recv()
            self._alive.discard(pid)
        return self._codes[pid]

    def end(self, process: Process) -> None:
        """End a process, whatever its state."""
        if process.pid in self._alive:
            process.kill()
        process.pipe.close()

    def sweep(self) -> None:
        """Kill whatever is left."""
        for pid in list(self._alive):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid, 30.0)

    def close(self) -> None:
        self.sweep()
        self._pipe.close()
        self._socket.close()
        self._process.wait(30)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stacks(pid: int) -> str:
    """What the kernel says that the threads of a process are doing."""
    lines = []
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
            state = (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
            lines.append(f"  thread {task.name} {(task / 'comm').read_text().strip()}: {state}")
    return "\n".join(lines)


def stop(pid: int) -> None:
    """Stop a process, and wait until every thread of it stands still: the signal alone returns before that."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(line.endswith((": T", ": t")) for line in stacks(pid).splitlines()), what="the stop")


def wait_until(condition: Any, timeout: float = 30.0, what: str = "") -> None:
    """Wait for a condition of the operating system, which has no event to wait on."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what or condition} did not become true within {timeout} s")
        select.select([], [], [], 0.005)


def load(file: str) -> Any:
    """Import a file by its path."""
    name = "loaded_" + Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(fd: int) -> None:
    import nixl._api  # noqa: F401

    import eplb_async  # noqa: F401

    pipe = Connection(fd)
    pipe.send("ready")
    children: set[int] = set()
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            break
        if command[0] == "wait":
            _, status = os.waitpid(command[1], 0)
            children.discard(command[1])
            pipe.send(os.waitstatus_to_exitcode(status))
            continue
        _, file, function, args, handles = command
        pipes = [Connection(reduction.recv_handle(pipe)) for _ in range(handles)]
        pid = os.fork()
        if pid == 0:
            pipe.close()
            _run(pipes, file, function, args)
            return
        children.add(pid)
        for one in pipes:
            one.close()
        pipe.send(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run(pipes: list[Connection], file: str, function: str, args: tuple[Any, ...]) -> None:
    try:
        answer = getattr(load(file), function)(*pipes, *args)
    except SystemExit:
        raise
    except BaseException:
        answer = {_FAILED: "in the process:\n" + traceback.format_exc()}
    with contextlib.suppress(OSError):
        pipes[0].send(answer)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
