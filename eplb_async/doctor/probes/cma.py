"""Whether one process of this user may read another's memory: UCX's way between processes of one host."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

_WORD = b"eplb-async doctor"
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Block(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def cma() -> Iterator[dict[str, Any]]:
    """Fork a process, and read its memory from a sibling, which is what ranks are to each other."""
    memory = ctypes.create_string_buffer(_WORD)
    blocked, goes_on = os.pipe()
    ready, tells = os.pipe()
    read = os.fork()
    if read == 0:
        os.close(goes_on)
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # as UCX does, so that Yama's scope 1 does no harm
        os.write(tells, b"1")
        os.read(blocked, 1)  # until nobody has the other end
        os._exit(0)
    os.close(blocked)
    os.read(ready, 1)
    answer, told = os.pipe()
    reader = os.fork()
    if reader == 0:
        os.write(told, str(_read(read, memory)).encode())
        os._exit(0)
    os.close(told)
    text = os.read(answer, 32).decode()
    os.close(goes_on)
    for pid in (reader, read):
        os.waitpid(pid, 0)
    code = int(text or "-1")
    yield {"allowed": code == 0, "errno": code, "error": os.strerror(code) if code > 0 else ""}


def _read(pid: int, memory: ctypes.Array[ctypes.c_char]) -> int:
    """0, or the errno of ``process_vm_readv``; -1 where it read something else."""
    got = ctypes.create_string_buffer(len(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    local = _Block(ctypes.addressof(got), len(memory))
    remote = _Block(ctypes.addressof(memory), len(memory))
    count = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if count < 0:
        return ctypes.get_errno()
    return 0 if got.value == _WORD else -1
