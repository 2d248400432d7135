"""Bytes of every rank of a ``torch.distributed`` group, by its collectives.

Only ``uint8`` tensors travel, lengths first, and nothing is unpickled. A collective has one deadline for the
whole group: it cannot say which rank is missing, and a group in which one ran out is out of step for good.

Facts that shape this module, measured with torch 2.13 and gloo:

- A collective cannot be taken back: it goes on until the group's own timeout (30 minutes unless
  ``init_process_group`` was told another), and a call may block. So all of it runs on a daemon thread.
- A thread that stands in a call of torch while the interpreter ends, and comes out of it then, aborts the process. So
  completion is polled, not waited for, and the polling ends before the interpreter does.
- A group without a CPU backend refuses a CPU tensor at once, on every rank, before anything is sent.
"""

from __future__ import annotations

import atexit
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous.addresses import first_line
from eplb_async.threads import DaemonExecutor

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

MAX_PAYLOAD = 64 << 20
"""Bytes that one rank may give to :func:`gather`."""

_SHORTEST, _LONGEST = 0.0005, 0.02
_END_SECONDS = 1.0
_MAGIC = b"EPLBGRP1"
_HEADER = struct.Struct(">8sQ")
_ending = threading.Event()
_running: weakref.WeakSet[Future[list[bytes]]] = weakref.WeakSet()


def gather(group: ProcessGroup, payload: bytes, *, timeout: float) -> list[bytes]:
    """Give every rank the bytes of all, in rank order. Blocks: call it off the event loops.

    It is collective: every rank of the group calls it, and none makes another collective of this group meanwhile.
    Two collectives: headers of 16 bytes, then payloads padded to the longest. After an error the group may be out
    of step and must not be used for another one.

    Args:
        group: The group; it needs a CPU backend such as gloo.
        payload: This rank's bytes, at most ``MAX_PAYLOAD``; may be empty.
        timeout: Seconds until all ranks must have called it, and all bytes be here.

    Raises:
        ValueError: It is no group that this process is in, has no CPU backend, or the payload is too long; nothing
            was sent.
        HandshakeError: Time ran out, a rank died, or what came is no answer to this; says which.
    """
    check_group(group)
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a payload of {len(payload)} bytes is too long to gather, {MAX_PAYLOAD} are allowed")
    if timeout <= 0:
        raise ValueError(f"the timeout of a gather must be positive, not {timeout} s")
    thread = DaemonExecutor(1, name="eplb-gather")
    future = thread.submit(_gather, group, payload, time.monotonic() + timeout)
    _running.add(future)
    thread.shutdown()
    try:
        return future.result(timeout + 0.5)  # its own waits end first, unless the backend's do not
    except (RuntimeError, OSError) as error:  # a TimeoutError is an OSError
        if "No backend type associated with device type cpu" in str(error):
            raise ValueError(
                f"the {_name(group)} has no backend for CPU tensors (nccl alone has none): make one on all ranks, "
                'torch.distributed.new_group(backend="gloo"), and give that'
            ) from error
        trouble = first_line(error).rstrip(".!") if str(error) else "its collective did not come back"
        raise HandshakeError(_out_of_step(group, timeout, trouble)) from error


def check_group(group: object) -> None:
    """Raise ``ValueError`` for what is no group that this process is in."""
    lacks = [name for name in ("size", "rank", "allgather") if not callable(getattr(group, name, None))]
    if lacks:
        raise ValueError(
            f"{group!r:.80} is no torch.distributed ProcessGroup of which this process is a member "
            f"(it lacks {', '.join(lacks)}); new_group gives members a group, and others something else"
        )


def _gather(group: ProcessGroup, payload: bytes, deadline: float) -> list[bytes]:
    headers = _all_gather(group, _HEADER.pack(_MAGIC, len(payload)), _HEADER.size, deadline)
    lengths = [_length(rank, header) for rank, header in enumerate(headers)]
    longest = max(lengths)
    if not longest:
        return [b""] * len(lengths)
    padded = _all_gather(group, payload.ljust(longest, b"\0"), longest, deadline)
    return [data[:length] for data, length in zip(padded, lengths, strict=True)]


@atexit.register
def _end() -> None:
    """Let nothing poll any more: what still stands in a call of torch then does not come out of it."""
    _ending.set()
    wait(list(_running), _END_SECONDS)


def _length(rank: int, header: bytes) -> int:
    magic, length = _HEADER.unpack(header)
    if magic != _MAGIC or length > MAX_PAYLOAD:
        raise HandshakeError(
            f"rank {rank} of the ProcessGroup answered with bytes of something else: every rank must open (or "
            "gather) at the same time, with the same release, and use the group for nothing else meanwhile"
        )
    return int(length)


def _all_gather(group: ProcessGroup, data: bytes, size: int, deadline: float) -> list[bytes]:
    import torch

    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    theirs = [torch.empty(size, dtype=torch.uint8) for _ in range(group.size())]
    work = group.allgather([theirs], [mine])
    pause = _SHORTEST
    while not work.is_completed():
        if time.monotonic() >= deadline:
            raise TimeoutError("not all ranks took part")
        if _ending.wait(pause):
            raise TimeoutError("this process ends")
        pause = min(_LONGEST, 2 * pause)
    work.wait()  # it is over: raises what it ended with
    return _bytes(theirs)


def _bytes(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]


def _out_of_step(group: ProcessGroup, timeout: float, trouble: str) -> str:
    return (
        f"rank {group.rank()} of {group.size()} could not gather over the {_name(group)} ({timeout:.3g} s were "
        f"allowed): {trouble}. A collective cannot say who is missing: did every rank of the group open at this "
        "moment, and do all live? The group is out of step now: make a new one for the next attempt"
    )


def _name(group: object) -> str:
    return f"caller's {type(group).__name__}"
