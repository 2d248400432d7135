"""UCX's environment: what is set, where, and what is said when it leads nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eplb_async.nixl import environment


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With eth0, lo and an RDMA device; nothing set."""
    for name in ("eth0", "lo"):
        (tmp_path / "net" / name).mkdir(parents=True)
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(environment, "_NETWORK", tmp_path / "net")
    monkeypatch.setattr(environment, "_FABRIC", tmp_path / "infiniband")
    monkeypatch.setattr(os, "environ", {})


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, "y"),
        ({"UCX_TLS": "tcp,self"}, "y"),
        ({"UCX_TLS": "^ib"}, "y"),
        ({"UCX_NET_DEVICES": "eth0"}, "y"),
        ({"UCX_NET_DEVICES": "^docker0"}, "y"),
        ({"UCX_NET_DEVICES": "eth[0-3]"}, "y"),
        ({"UCX_TCP_CONN_NB": "n"}, "n"),
        ({"UCX_TLS": "rc,sm,self"}, None),
        ({"UCX_TLS": "^tcp"}, None),
        ({"UCX_NET_DEVICES": "mlx5_0:1"}, None),
    ],
)
def test_connecting_does_not_wait_where_ucx_may_use_tcp(variables: dict[str, str], wanted: str | None) -> None:
    """Elsewhere UCX would warn of a variable that it does not read; what the user says stays."""
    os.environ.update(variables)
    environment.prepare()
    assert os.environ.get("UCX_TCP_CONN_NB") == wanted


def test_an_interface_that_is_not_there_is_named() -> None:
    """Of several, those that are missing; RDMA devices have a port behind their name."""
    os.environ["UCX_NET_DEVICES"] = "mlx5_0:1,eth0,eth7,mlx5_1:1"
    assert environment.advice() == (
        "UCX_NET_DEVICES names eth7, mlx5_1:1, which this host does not have; it has eth0, lo, mlx5_0"
    )


@pytest.mark.parametrize("devices", ["", "all", "^docker0", "eth[0-3]", "eth0,mlx5_0:1"])
def test_else_what_is_set_is_shown_beside_what_is_there(devices: str) -> None:
    """UCX does not say to the caller what it has looked for."""
    os.environ.update({"UCX_NET_DEVICES": devices, "UCX_TLS": "tcp,self"})
    said = environment.advice()
    assert f"UCX_NET_DEVICES is {devices or 'not set'} and UCX_TLS is tcp,self" in said
    assert "eth0, lo, mlx5_0" in said
