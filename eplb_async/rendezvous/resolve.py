"""From what the caller wrote to a rendezvous."""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import urlsplit

from eplb_async.rendezvous.base import Rendezvous
from eplb_async.rendezvous.environment import EnvRendezvous, Launch
from eplb_async.rendezvous.file import FileRendezvous
from eplb_async.rendezvous.snapshot import GroupRendezvous
from eplb_async.rendezvous.store import StoreRendezvous
from eplb_async.rendezvous.tcp import TcpRendezvous

_SUPPORTED = (
    '"tcp://host:port", "file:///path", "env://", a torch.distributed Store or ProcessGroup, or a Rendezvous object'
)


def resolve(rendezvous: str | object, *, rank: int, ep_size: int, secret: bytes | None, timeout: float) -> Rendezvous:
    """Make or adapt a rendezvous. Blocks: call it off the event loops.

    Args:
        rendezvous: ``"tcp://host:port"`` (rank 0 hosts it), ``"file:///path"`` or ``"file://relative"``, ``"env://"``
            (the store that torchrun's variables name), a ``torch.distributed`` Store or ProcessGroup, or an object with
            the methods of ``Rendezvous``.
        rank: This rank.
        ep_size: Ranks in the group.
        secret: The job's secret, or None.
        timeout: Seconds to reach it, and for each call.

    Returns:
        The rendezvous; if it is not the caller's own object, whoever resolved it closes it.

    Raises:
        ValueError: It is not one of these, the URL is malformed, or a variable is missing; says what is supported.
        HandshakeError: It cannot be reached or may not be used; says why.
    """
    if not 0 <= rank < ep_size:
        raise ValueError(f"rank {rank} is not in a group of {ep_size}")
    if timeout <= 0:
        raise ValueError(f"the timeout of a rendezvous must be positive, not {timeout} s")
    if isinstance(rendezvous, str):
        return _from_url(rendezvous, rank=rank, ep_size=ep_size, secret=secret, timeout=timeout)
    if (adapted := _of_torch(rendezvous, rank=rank, ep_size=ep_size, timeout=timeout)) is not None:
        return adapted
    if isinstance(rendezvous, Rendezvous):
        return rendezvous
    lacks = [name for name in ("url", "trusted", *_METHODS) if not hasattr(rendezvous, name)]
    raise ValueError(f"a {type(rendezvous).__name__} is no rendezvous (it lacks {', '.join(lacks)}); use {_SUPPORTED}")


def _of_torch(rendezvous: Any, *, rank: int, ep_size: int, timeout: float) -> Rendezvous | None:
    """Adapt a Store or a ProcessGroup; they can only come from a torch that is imported already."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return None
    if isinstance(rendezvous, distributed.Store):
        return StoreRendezvous(rendezvous, timeout=timeout)
    if isinstance(rendezvous, distributed.ProcessGroup) or type(rendezvous).__name__.startswith("ProcessGroup"):
        return GroupRendezvous(rendezvous, rank=rank, ep_size=ep_size, timeout=timeout)
    if rendezvous is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this process is no member of the ProcessGroup: new_group gave it NON_GROUP_MEMBER. Open on the ranks of "
            "the group only"
        )
    return None


_METHODS = ("set", "get", "add", "delete", "close")


def _from_url(url: str, *, rank: int, ep_size: int, secret: bytes | None, timeout: float) -> Rendezvous:
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ValueError(f"the rendezvous {url!r} is no URL; use {_SUPPORTED}")
    if scheme == "file":
        if not rest:
            raise ValueError(f"the rendezvous {url!r} names no file; use file:///path")
        return FileRendezvous(rest, timeout=timeout)
    if scheme == "tcp":
        host, port = _host_port(url)
        if rank == 0:
            return TcpRendezvous.host(host, port, timeout=timeout, secret=secret)
        if port == 0:
            raise ValueError(f"the rendezvous {url!r}: rank {rank} needs the real port, which rank 0 logged")
        return TcpRendezvous.connect(host, port, timeout=timeout, secret=secret)
    if scheme == "env":
        if rest:
            raise ValueError(
                f'the rendezvous {url!r} has parts that mean nothing: variables say all; use "env://" or tcp://host:port'
            )
        launch = Launch.read()
        if ep_size > launch.world_size:
            raise ValueError(f"ep_size {ep_size} is more than the WORLD_SIZE={launch.world_size} of env://")
        return EnvRendezvous.open(launch, timeout=timeout, secret=secret)
    raise ValueError(f"the rendezvous {url!r} has an unknown scheme {scheme!r}; use {_SUPPORTED}")


def _host_port(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"the rendezvous {url!r} has a wrong port or address: {error}; use tcp://host:port") from None
    if not host or port is None:
        raise ValueError(f"the rendezvous {url!r} lacks a {'port' if host else 'host'}; use tcp://host:port")
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(
            f"the rendezvous {parts.scheme}://{host}:{port} has parts that mean nothing; use tcp://host:port"
        )
    return host, port
