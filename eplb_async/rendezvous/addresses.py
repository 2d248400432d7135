"""Where a TCP rendezvous may be, and who may use it there."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Sequence

from eplb_async.errors import HandshakeError

Address = tuple[socket.AddressFamily, str]

MIN_SECRET = 16
"""Bytes of secret below which a non-loopback address is refused: a short one can be guessed."""


def wait_until_up(
    url: str,
    host: str,
    port: int,
    *,
    deadline: float,
    timeout: float,
    secret: bytes | None,
    hint: str,
) -> tuple[str, bool]:
    """Return the address that answers, and whether the host is loopback."""
    pause = 0.02
    while True:
        trouble: Exception
        try:
            addresses = find_addresses(host, port)
        except HandshakeError as error:  # names appear late in some clusters
            trouble = error
        else:
            require_secret(host, addresses, secret)
            for family, address in addresses:
                try:
                    _knock(family, address, port, limit=max(0.05, min(5.0, deadline - time.monotonic())))
                except OSError as error:
                    trouble = error
                else:
                    return address, all_loopback(addresses)
        if time.monotonic() + pause >= deadline:
            raise HandshakeError(
                f"cannot reach the rendezvous {url} in {timeout:g} s: {first_line(trouble)}; {hint}"
            ) from trouble
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)


def _knock(family: socket.AddressFamily, address: str, port: int, *, limit: float) -> None:
    """See whether somebody listens: torch's own client fills the log with stack traces while nobody does."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(limit)
        probe.connect((address, port))
        if probe.getsockname() == probe.getpeername():  # a connection to itself, which Linux allows
            raise ConnectionRefusedError("connection refused")


def find_addresses(host: str, port: int) -> Sequence[Address]:
    """Look a host up, IPv4 first; ``HandshakeError`` where it has no address."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HandshakeError(
            f"cannot find the rendezvous host {host!r}: {first_line(error)}; check its name"
        ) from error
    addresses = [(family, str(where[0])) for family, _, _, _, where in found]
    return sorted(addresses, key=lambda address: address[0] != socket.AF_INET)


def all_loopback(addresses: Sequence[Address]) -> bool:
    """Whether a host is this machine and nothing else."""
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for _, address in addresses)


def require_secret(host: str, addresses: Sequence[Address], secret: bytes | None) -> None:
    """Raise ``HandshakeError`` for a host that is not loopback, unless there is a secret worth the name."""
    if all_loopback(addresses) or (secret is not None and len(secret) >= MIN_SECRET):
        return
    have = "no secret is set" if not secret else f"the secret has only {len(secret)} bytes, {MIN_SECRET} are needed"
    raise HandshakeError(
        f"refusing the rendezvous host {host!r}: it is not loopback and {have}, so anybody on the network "
        "could join as a peer and read this process's memory. Set the same EPLB_ASYNC_SECRET on every "
        'rank, e.g. export EPLB_ASYNC_SECRET="$(openssl rand -hex 32)", and keep the network isolated'
    )


def tcp_url(host: str, port: int) -> str:
    """The URL of a host and port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def first_line(error: BaseException) -> str:
    """What an error says, without the stack trace that torch appends."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
