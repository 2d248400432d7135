"""From what the caller wrote to a rendezvous."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous import FileRendezvous, StoreRendezvous, TcpRendezvous, resolve


def resolved(rendezvous: object, rank: int = 0, secret: bytes | None = None) -> Any:
    return resolve(rendezvous, rank=rank, ep_size=2, secret=secret, timeout=20)


def test_tcp_rank_0_hosts_and_the_others_connect() -> None:
    """One URL serves all ranks."""
    host = resolved("tcp://127.0.0.1:0")
    client = resolved(host.url, rank=1)
    assert (type(host), type(client)) == (TcpRendezvous, TcpRendezvous)
    client.set("k", b"v")
    assert host.get("k") == b"v"
    client.close()
    host.close()


def test_tcp_over_ipv6() -> None:
    """An address in brackets works as well."""
    try:
        host = resolved("tcp://[::1]:0")
    except HandshakeError as error:
        pytest.skip(f"no IPv6 here: {error}")
    client = resolved(host.url, rank=1)
    client.set("k", b"v")
    assert host.get("k") == b"v"
    assert host.url.startswith("tcp://[::1]:")
    client.close()
    host.close()


@pytest.mark.parametrize("relative", [False, True])
def test_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool) -> None:
    """Absolute and relative paths; characters are taken as they are."""
    monkeypatch.chdir(tmp_path)
    rendezvous = resolved("file://a%20b" if relative else f"file://{tmp_path}/a%20b")
    assert isinstance(rendezvous, FileRendezvous)
    rendezvous.close()
    assert (tmp_path / "a%20b").exists()


def test_objects(memory: Any) -> None:
    """A torch Store is wrapped, a Rendezvous is taken as it is."""
    wrapped = resolved(dist.PrefixStore("job", dist.HashStore()))
    assert isinstance(wrapped, StoreRendezvous)
    wrapped.set("k", b"v")
    assert wrapped.get("k") == b"v"
    wrapped.close()
    assert resolved(memory) is memory


@pytest.mark.parametrize(
    ("rendezvous", "says"),
    [
        ("", "no URL"),
        ("10.0.0.1:29500", "no URL"),
        ("etcd://10.0.0.1:29500", "unknown scheme 'etcd'"),
        ("env://10.0.0.1", "parts that mean nothing"),
        ("tcp://127.0.0.1", "lacks a port"),
        ("tcp://127.0.0.1:", "lacks a port"),
        ("tcp://:29500", "lacks a host"),
        ("tcp://127.0.0.1:x", "wrong port"),
        ("tcp://127.0.0.1:65536", "wrong port"),
        ("tcp://127.0.0.1:-1", "wrong port"),
        ("tcp://[::1:29500", "wrong port or address"),
        ("tcp://127.0.0.1:29500/path", "parts that mean nothing"),
        ("tcp://user:word@127.0.0.1:29500", "parts that mean nothing"),
        ("file://", "names no file"),
        (object(), "it lacks url, trusted, set"),
        (None, "it lacks url, trusted, set"),
    ],
)
def test_what_is_no_rendezvous_says_what_is(rendezvous: object, says: str) -> None:
    """Every refusal names what was given and what is supported."""
    with pytest.raises(ValueError, match=says) as caught:
        resolved(rendezvous)
    assert "tcp://host:port" in str(caught.value) or "file:///path" in str(caught.value)
    assert "word" not in str(caught.value)


def test_a_process_group_of_others_is_refused() -> None:
    """``new_group`` gives those outside it a number."""
    with pytest.raises(ValueError, match="this process is no member of the ProcessGroup"):
        resolved(dist.GroupMember.NON_GROUP_MEMBER)


def test_only_rank_0_may_leave_the_port_open() -> None:
    """Port 0 means nothing to those who connect."""
    with pytest.raises(ValueError, match="needs the real port"):
        resolved("tcp://127.0.0.1:0", rank=1)


@pytest.mark.parametrize(("rank", "timeout"), [(2, 1.0), (-1, 1.0), (0, 0.0)])
def test_wrong_numbers_are_refused(memory: Any, rank: int, timeout: float) -> None:
    """A rank outside the group or a time already over is the caller's mistake."""
    with pytest.raises(ValueError, match=r"rank|timeout"):
        resolve(memory, rank=rank, ep_size=2, secret=None, timeout=timeout)


def test_other_hosts_need_a_secret() -> None:
    """The rule of the store holds for URLs."""
    with pytest.raises(HandshakeError, match="EPLB_ASYNC_SECRET"):
        resolved("tcp://0.0.0.0:0")
    resolved("tcp://0.0.0.0:0", secret=b"0123456789abcdef").close()
