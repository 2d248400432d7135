"""One real rank with tensors of many kinds: ``python -m tests.weights.rank RANK URL DEVICE`` (C15, C17, C26).

A process of its own, since what goes wrong in NIXL is a SIGSEGV. Says ``ok`` when all is right.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import torch

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.settings import Settings

PLACEMENTS = [
    Placement(rows, ep_size=2, num_logical=3)
    for rows in ([[0, 1, 2, 0], [2, 0, 1, -1]], [[2, 2, 0, 1], [1, -1, 2, 0]], [[1, 0, 2, 1], [2, 2, 0, 1]])
]
ROW_BYTES = 96 * 1024 + 8
DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.float32)


def pattern(layer: int, tensor: int, expert: int) -> torch.Tensor:
    """The bytes of a row: NaN payloads of every dtype among them, uint8 ``[ROW_BYTES]``."""
    seeded = torch.Generator().manual_seed((layer * 100 + tensor) * 100 + expert)
    row = torch.randint(0, 256, (ROW_BYTES,), dtype=torch.uint8, generator=seeded)
    row[:8] = torch.tensor([0x7F, 0xFF, 0xFF, 0x7F, 0x01, 0x7F, 0xFF, 0xFF], dtype=torch.uint8)
    return row


class Rows:
    """A rank's tensors, and the bytes below them."""

    def __init__(self, device: str, num_layers: int, slots: int) -> None:
        self.raw = [
            [torch.zeros(slots, ROW_BYTES, dtype=torch.uint8, device=device) for _ in DTYPES] for _ in range(num_layers)
        ]
        self.layers = [self._tensors(raw) for raw in self.raw]

    @staticmethod
    def _tensors(raw: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        named = {str(dtype): rows.view(dtype) for dtype, rows in zip(DTYPES, raw, strict=True)}
        scale = named["torch.float32"]
        named["torch.float32"] = scale.view(scale.shape[0], 2, -1).transpose(1, 2)  # as transposed scales are
        named["tied"] = named["torch.bfloat16"]
        named["g_idx"] = torch.zeros(scale.shape[0], 0, dtype=torch.int32, device=scale.device)
        return named

    def slots(self, placement: Placement, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each row that holds an expert, and the bytes that it must have."""
        return [
            (self.raw[layer][tensor][slot], pattern(layer, tensor, expert))
            for layer, slots in enumerate(placement.local(rank).tolist())
            for tensor in range(len(DTYPES))
            for slot, expert in enumerate(slots)
            if expert >= 0
        ]


async def main(rank: int, url: str, device: str) -> None:
    """Open, migrate through all placements, check every byte, close."""
    rows = Rows(device, PLACEMENTS[0].num_layers, PLACEMENTS[0].num_local_experts)
    for row, wanted in rows.slots(PLACEMENTS[0], rank):
        row.copy_(wanted)
    if device != "cpu":
        torch.cuda.synchronize()
    pointers = [tensor.data_ptr() for layer in rows.layers for tensor in layer.values()]
    async with AsyncEplbCommunicator.open(
        rank=rank,
        ep_size=2,
        weights=rows.layers,
        placement=PLACEMENTS[0],
        rendezvous=url,
        settings=Settings(max_post_bytes=65536),
        timeout=60,
    ) as comm:
        buffers = comm._session._staging.buffers
        kinds = {memory: buffer.device.type for memory, buffer in buffers.items()}
        assert kinds == ({"DRAM": "cpu"} if device == "cpu" else {"VRAM": "cuda", "DRAM": "cpu"}), kinds
        for placement in (*PLACEMENTS[1:], *PLACEMENTS):
            await comm.migrate(placement, timeout=60)
            wrong = sum(int((row.cpu() != wanted).sum()) for row, wanted in rows.slots(placement, rank))
            assert wrong == 0, f"{wrong} wrong bytes at {placement}"
        assert pointers == [tensor.data_ptr() for layer in rows.layers for tensor in layer.values()]
    print("ok", file=sys.stderr)


def run_both(tmp_path: Path, device: str, environment: dict[str, str]) -> None:
    """Run two ranks, each a process; both must say ``ok`` and exit with 0."""
    command = [sys.executable, "-W", "error", "-m", __name__]
    url = f"file://{tmp_path}/rendezvous"
    ranks = [
        subprocess.Popen(
            [*command, str(rank), url, device],
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, said = process.communicate(timeout=90)
            assert process.returncode == 0, said
            assert said.rstrip().endswith("ok"), said
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
