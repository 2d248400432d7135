"""The program of docs/deployment.md, started on two hosts as that page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.conftest import PORT, SECRET
from tests.hosts.netns import Network

ROOT = Path(__file__).parents[2]
LOCAL = 2
RANKS = 2 * LOCAL


@pytest.mark.faults
def test_torchrun_starts_the_program_of_the_page_on_two_hosts(tmp_path: Path) -> None:
    """Every rank ends well, and holds what it should."""
    body = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "deployment.md").read_text(), re.DOTALL)
    assert body is not None
    program = tmp_path / "rank.py"
    program.write_text(body[1])
    more = {"EPLB_ASYNC_SECRET": SECRET.decode(), "UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp,self"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    outputs = [tmp_path / "first", tmp_path / "second"]
    launchers = []
    with Network(2) as network:
        master = ["--master-addr", network.hosts[0].address(), "--master-port", str(PORT)]
        try:
            for host, output in zip(network.hosts, outputs, strict=True):
                where = ["--nnodes", "2", "--node-rank", str(host.number), "--nproc-per-node", str(LOCAL)]
                torchrun = [sys.executable, "-m", "torch.distributed.run", *where, *master, str(program)]
                with output.open("wb") as log:
                    command = ["ip", "netns", "exec", host.namespace, *torchrun]
                    launchers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            codes = [launcher.wait(60) for launcher in launchers]
        finally:
            for launcher in launchers:
                launcher.terminate()  # which ends its ranks
                launcher.wait(30)
    said = "\n".join(output.read_text() for output in outputs)
    assert codes == [0, 0], said
    for rank in range(RANKS):
        last = 4 * (RANKS - rank) - 1
        assert re.search(rf"rank {rank}: \d+ bytes read, layer 0 holds \[{last}, {last - 1}, ", said), said
