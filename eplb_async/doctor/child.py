"""A probe in a process of its own, with a deadline: what it tries may hang, or abort the process.

The child is a fresh interpreter, so that nothing it imports is in the doctor's own process. It answers on a pipe of its
own, a line of JSON for each mapping that the probe yields; what it and the libraries print goes to a file, which is the
probe's log. It dies with the process that started it, whatever that dies of.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Answer", "Child", "ask"]

_PROBES = "eplb_async.doctor.probes."
_PR_SET_PDEATHSIG = 1
_LOG_BYTES = 1 << 20
_END_SECONDS = 1.0
_WITHOUT = ("UCX_LOG_FILE",)  # what a probe's log is read for would be elsewhere


class Answer:
    """What came of a probe.

    Attributes:
        found: What it answered; empty where it did not.
        problem: What went wrong, in one line; empty if nothing did.
        log: What it and the libraries in it printed.
    """

    def __init__(self, found: dict[str, Any], problem: str = "", log: str = "") -> None:
        self.found = found
        self.problem = problem
        self.log = log


def ask(probe: str, arguments: Mapping[str, Any], *, limit: float, environ: Mapping[str, str] | None = None) -> Answer:
    """Run a probe to its end; blocks for ``limit`` seconds at most. Interrupted: the child is killed.

    The last of its answers counts; where it came to no good end after that, there is a problem besides.

    Args:
        probe: ``"module.function"`` of ``eplb_async.doctor.probes``.
        arguments: Its keyword arguments, as JSON knows them. Everybody on the machine can see them.
        limit: Seconds.
        environ: Further environment variables for it.
    """
    with Child(probe, arguments, environ=environ) as child:
        return child.last(limit)


class Child:
    """A probe's process, to be used ``with``; leaving kills it.

    Args:
        probe: ``"module.function"`` of ``eplb_async.doctor.probes``.
        arguments: Its keyword arguments.
        environ: Further environment variables for it.
    """

    def __init__(self, probe: str, arguments: Mapping[str, Any], *, environ: Mapping[str, str] | None = None) -> None:
        self._probe = probe
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._answers, theirs = os.pipe()
        self._rest = b""
        root = str(Path(__file__).parents[2])
        environment = {k: v for k, v in os.environ.items() if k not in _WITHOUT} | dict(environ or {})
        environment["PYTHONUNBUFFERED"] = "1"  # nor does C buffer then: what UCX printed is there, however it ends
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(theirs), probe, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
                env=environment,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._answers)
            self._log.close()
            raise
        finally:
            os.close(theirs)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def receive(self, limit: float) -> Answer:
        """The next answer; blocks for ``limit`` seconds at most."""
        deadline = time.monotonic() + limit
        while b"\n" not in self._rest:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return Answer({}, f"no answer within {limit:.1f} s: it hangs, or the machine is busy", self._printed())
            got = os.read(self._answers, 1 << 16)
            if not got:
                return Answer({}, self._ended(), self._printed())
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return Answer(answer.get("found", {}), answer.get("problem", ""), self._printed())

    def last(self, limit: float) -> Answer:
        """Its last answer before it ends; blocks for ``limit`` seconds at most."""
        deadline = time.monotonic() + limit
        found: dict[str, Any] = {}
        while (answer := self.receive(max(0.0, deadline - time.monotonic()))).found:
            found = answer.found
        return Answer(found, answer.problem, answer.log)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._answers)
        self._log.close()

    def _ended(self) -> str:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its pipe without an answer"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with status {code}" if code else ""

    def _printed(self) -> str:
        return os.pread(self._log.fileno(), _LOG_BYTES, 0).decode(errors="replace")


def _main(parent: str, answers: str, probe: str, arguments: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return  # it had died before
    os.set_inheritable(int(answers), False)  # ours alone
    module, _, function = probe.rpartition(".")

    def say(answer: Mapping[str, Any]) -> None:
        with os.fdopen(int(answers), "wb", closefd=False) as out:
            out.write(json.dumps(answer).encode() + b"\n")

    try:
        call: Callable[..., Iterator[Mapping[str, Any]]] = getattr(importlib.import_module(_PROBES + module), function)
        for found in call(**json.loads(arguments)):
            say({"found": found})
    except Exception as error:
        lines = str(error).strip().splitlines()  # torch appends a stack of frames
        say({"problem": f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__})
    sys.stdout.flush()
    os._exit(0)  # how long libraries take to end is nobody's business here


if __name__ == "__main__":
    _main(*sys.argv[1:])
