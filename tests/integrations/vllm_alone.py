"""One rank of a plain program: ``python vllm_alone.py RANK FOLDER HOW``; see ``test_vllm_life``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_async.errors import CommunicatorClosed, NixlTransferFailed
from eplb_async.integrations.vllm import AsyncNixlEplbCommunicator


def main(rank: int, folder: str, how: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group: Any = dist.group.WORLD
    weights = [[torch.full((2, 4096), rank + 1, dtype=torch.uint8)]]
    buffer = [torch.zeros(2, 4096, dtype=torch.uint8)]
    comm = AsyncNixlEplbCommunicator(group, weights, buffer)
    old = np.array([0, 1, 2, 3])

    def move() -> None:
        buffer[0].zero_()
        comm.set_transfer_context(old, 0)
        comm.add_recv([buffer[0][1]], 1 - rank, 2 * (1 - rank))
        comm.execute()
        assert buffer[0].tolist() == [[0] * 4096, [2 - rank] * 4096]

    worker = threading.Thread(target=move)  # made on one thread, used on another
    worker.start()
    worker.join()
    move()
    if how == "fork":
        if os.fork() == 0:
            try:
                comm.execute()
            except CommunicatorClosed as error:
                sys.exit(0 if "fork" in str(error) else 3)
            sys.exit(4)
        assert os.wait()[1] == 0, "the child did not end with 0"
        move()
    if how == "interrupt":
        try:
            if rank == 0:
                threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
                comm.execute()
        except KeyboardInterrupt:
            print("interrupted")
        dist.barrier()
        try:
            if rank == 1:  # it owes the call that rank 0 left
                move()
        except NixlTransferFailed as error:
            print("failed" if "rank 0: its call was interrupted" in str(error) else error)
        dist.barrier()
        move()
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
