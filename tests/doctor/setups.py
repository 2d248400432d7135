"""Broken set-ups, and programs that a test runs in them."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-m", "eplb_async.cli", "doctor"]
TINY_SHM = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
"""Put before a command: it runs with 1 MiB of ``/dev/shm``."""
NO_PTRACE = [sys.executable, "-P", __file__]
"""Put before a command: it runs with a seccomp filter as containers have, which refuses ``process_vm_readv``."""
_READV = {"x86_64": (310, 311), "aarch64": (270, 271)}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001


def run(command: Sequence[str], environ: Mapping[str, str] | None = None, *, limit: float = 90.0) -> Any:
    """Run a command to its end, as from this checkout."""
    return subprocess.run(
        command, env=environment(environ), capture_output=True, text=True, timeout=limit, check=False, cwd=ROOT
    )


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without what a developer may have set, and some more.

    Where Python is told not to buffer, C does not either, and what UCX prints would be read by chance.
    """
    theirs = ("EPLB_ASYNC_", "UCX_", "NIXL_", "PYTORCH_", "PYTHONUNBUFFERED")
    ours = {k: v for k, v in os.environ.items() if not k.startswith(theirs)}
    return {**ours, "PYTHONPATH": str(ROOT), **(more or {})}


def mounts() -> bool:
    """Whether this user may mount something in a namespace of its own."""
    return run([*TINY_SHM, "true"]).returncode == 0


def children_of(pid: int) -> dict[int, str]:
    """Probes that a process has started and that live, by their process ids."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "eplb_async.doctor.child" in words and str(pid) in words:
            found[int(path.parent.name)] = words[words.index(str(pid)) + 2]
    return found


def _refuse_ptrace() -> None:
    def instruction(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, k)

    load, equal, give = 0x20, 0x15, 0x06
    first, second = _READV[os.uname().machine]
    program = instruction(load, 0) + instruction(equal, first, 1, 0) + instruction(equal, second, 0, 1)
    program += instruction(give, _EPERM) + instruction(give, _ALLOW)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    buffer = ctypes.create_string_buffer(program, len(program))
    filtered = Program(len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _FILTER, ctypes.byref(filtered), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "no seccomp filter")


if __name__ == "__main__":
    _refuse_ptrace()
    os.execvp(sys.argv[1], sys.argv[1:])
