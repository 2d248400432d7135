"""The example that torchrun starts, as README's reader does."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERIFIED = re.compile(r"^rank ([012]) of 3: 3 migrations, \d+ bytes read, verified$", re.M)


def torchrun(*arguments: str, secret: str = "", **variables: str) -> tuple[int, str, str]:
    """Run it; exit status, output and errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    environment.pop("EPLB_ASYNC_SECRET", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", *arguments],
        env=environment | ({"EPLB_ASYNC_SECRET": secret} if secret else {}),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks, which a SIGKILL of it would leave
        out, err = process.communicate(timeout=50)
    return process.returncode, out, err


def check(done: tuple[int, str, str]) -> None:
    status, out, err = done
    assert status == 0, out + err
    assert sorted(VERIFIED.findall(out)) == ["0", "1", "2"], out + err


def test_it_verifies() -> None:
    """With nothing but torchrun."""
    check(torchrun("examples/torchrun_migrate.py"))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("launcher", "rendezvous", "tls"),
    [
        (["--standalone"], "env", "tcp,self"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"], "env", "all"),
        (["--master-addr", "127.0.0.1", "--master-port", "PORT"], "group", "all"),
        ([], "group", "tcp,self"),
    ],
)
def test_it_verifies_however_it_is_launched(launcher: list[str], rendezvous: str, tls: str) -> None:
    """Both rendezvous, both transports, each of torchrun's own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launcher = [port if word == "PORT" else word for word in launcher]
    check(torchrun(*launcher, "examples/torchrun_migrate.py", "--rendezvous", rendezvous, UCX_TLS=tls))


@pytest.mark.faults
@pytest.mark.parametrize("alone", ["0", "1"], ids=["agent's store", "rank 0's store"])
def test_torchrun_starts_the_group_again(alone: str) -> None:
    """A rank dies with the group open; torchrun starts all anew, on the store that it kept or on another one."""
    done = torchrun("--max-restarts", "1", "tests/examples/dies_once.py", TORCH_DISABLE_SHARE_RDZV_TCP_STORE=alone)
    check(done)
    assert done[1].count("dies with the group open") == 1


@pytest.mark.faults
def test_a_host_by_name_needs_a_secret() -> None:
    """What torchrun gives as ``MASTER_ADDR`` may be this machine's address on the network."""
    address = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "0.0.0.0"]
    check(torchrun(*address, "examples/torchrun_migrate.py", secret="0123456789abcdef"))
