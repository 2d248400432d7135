"""One rank of a program without asyncio: ``python sync_rank.py RANK FOLDER HOW``; see ``test_sync``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from eplb_async import CommunicatorClosed, Placement
from eplb_async.service import ServiceSettings, SyncService
from eplb_async.testing.patterns import PatternWeights

OLD = Placement([[0, 1, 2, 3, 4, 0]] * 4, ep_size=2)
NEW = Placement([[4, 1, 2, 3, 0, 0]] * 4, ep_size=2)
ROW_BYTES = (300_000, 1000)


def serve(service: SyncService, rows: PatternWeights, rank: int) -> None:
    """Steps with skewed loads, a rebalance while they go on, a migration of one's own."""
    over = threading.Event()
    errors: list[BaseException] = []

    def engine() -> None:
        try:
            while not over.is_set():
                for layer in range(OLD.num_layers):
                    with service.using(layer) as placement:
                        check(rows, placement, rank, layer)
                service.record(np.array([[1, 1, 80, 1, 1]] * OLD.num_layers), by="experts")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    time.sleep(0.2)
    report = service.rebalance(force=True, timeout=30.0)
    assert report.outcome in ("moved", "not_worth_it"), report  # one round serves both, or the second finds it done
    assert report.balancedness_after == 1.0
    while service.health().phase != "idle":
        time.sleep(0.01)
    service.migrate(NEW, timeout=30.0)
    over.set()
    thread.join()
    assert not errors, errors
    assert service.placement == NEW
    assert rows.wrong_bytes(NEW) == 0


def check(rows: PatternWeights, placement: Any, rank: int, layer: int) -> None:
    for slot, expert in enumerate(placement.local(rank)[layer].tolist()):
        for tensor in range(len(ROW_BYTES)) if expert >= 0 else ():
            assert np.array_equal(rows.layers[layer][tensor][slot].numpy(), rows.expected(layer, tensor, expert))


def child(service: SyncService) -> None:
    """A fork's copy refuses; it ends as Python ends, and harms nobody."""
    refused = 0
    for call in (service.rebalance, service.close, lambda: service.using(0)):
        try:
            call()
        except CommunicatorClosed as error:
            refused += "fork" in str(error)
    sys.exit(0 if refused == 3 else 3)


def wait(service: SyncService, rank: int, told: Path) -> None:
    """Rank 0 is interrupted while it waits for rank 1, which does not come."""
    if rank == 1:
        while not told.exists():
            time.sleep(0.01)
        return
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    try:
        service.migrate(OLD, timeout=30.0)
    except KeyboardInterrupt:
        print("interrupted")
    told.touch()


def main(rank: int, folder: str, how: str) -> None:
    rows = PatternWeights(OLD, rank, ROW_BYTES)
    service = SyncService.open(
        rank=rank,
        ep_size=2,
        weights=rows.layers,
        placement=OLD,
        rendezvous=f"file://{folder}/rendezvous",
        timeout=60.0,
        service_settings=ServiceSettings(step_interval=0, min_interval=0.0),
    )
    serve(service, rows, rank)
    if how == "fork" and os.fork() == 0:
        child(service)
    if how == "fork":
        assert os.wait()[1] == 0, "the child did not end with 0"
        service.migrate(OLD, timeout=30.0)
        assert rows.wrong_bytes(OLD) == 0
    if how == "interrupt":
        wait(service, rank, Path(folder) / "interrupted")
    if how != "exit":
        assert service.close() == ()
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
