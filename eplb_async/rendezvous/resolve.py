"""From what the caller wrote to a rendezvous."""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

from eplb_async.rendezvous.base import Rendezvous
from eplb_async.rendezvous.file import FileRendezvous
from eplb_async.rendezvous.store import StoreRendezvous
from eplb_async.rendezvous.tcp import TcpRendezvous

_SUPPORTED = '"tcp://host:port", "file:///path", a torch.distributed.Store, or a Rendezvous object'


def resolve(rendezvous: str | object, *, rank: int, ep_size: int, secret: bytes | None, timeout: float) -> Rendezvous:
    """Make or adapt a rendezvous. Blocks: call it off the event loops.

    Args:
        rendezvous: ``"tcp://host:port"`` (rank 0 hosts it), ``"file:///path"`` or ``"file://relative"``, a
            ``torch.distributed.Store``, or an object with the methods of ``Rendezvous``.
        rank: This rank.
        ep_size: Ranks in the group.
        secret: The job's secret, or None.
        timeout: Seconds to reach it, and for each call.

    Returns:
        The rendezvous; whoever resolved a string closes it.

    Raises:
        ValueError: It is not one of these, or the URL is malformed; says what is supported.
        HandshakeError: It cannot be reached or may not be used; says why.
    """
    if not 0 <= rank < ep_size:
        raise ValueError(f"rank {rank} is not in a group of {ep_size}")
    if timeout <= 0:
        raise ValueError(f"the timeout of a rendezvous must be positive, not {timeout} s")
    if isinstance(rendezvous, str):
        return _from_url(rendezvous, rank=rank, secret=secret, timeout=timeout)
    # An object of torch's can only come from a torch that is imported already.
    torch_distributed = sys.modules.get("torch.distributed")
    store_type = getattr(torch_distributed, "Store", None)
    if store_type is not None and isinstance(rendezvous, store_type):
        return StoreRendezvous(rendezvous, timeout=timeout)
    if isinstance(rendezvous, Rendezvous):
        return rendezvous
    if type(rendezvous).__name__.startswith("ProcessGroup"):
        raise ValueError(f"a ProcessGroup is not supported as a rendezvous yet; use {_SUPPORTED}")
    lacks = [name for name in ("url", "trusted", *_METHODS) if not hasattr(rendezvous, name)]
    raise ValueError(f"a {type(rendezvous).__name__} is no rendezvous (it lacks {', '.join(lacks)}); use {_SUPPORTED}")


_METHODS = ("set", "get", "add", "delete", "close")


def _from_url(url: str, *, rank: int, secret: bytes | None, timeout: float) -> Rendezvous:
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
        raise ValueError(
            f"the rendezvous {url!r} is not supported yet; use {_SUPPORTED}, e.g. tcp:// with MASTER_ADDR as "
            "host and a port of its own"
        )
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
