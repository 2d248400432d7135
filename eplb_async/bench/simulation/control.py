"""What the coordinator's part costs, for real: its messages through the real codec, driver and protocol."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eplb_async.communicator.driver import Driver
from eplb_async.communicator.members import GENERATION_BITS, Identity, Member, Roster
from eplb_async.core import events, messages
from eplb_async.core.layout import Layout
from eplb_async.core.wire import KEY_SIZE, Codec
from eplb_async.engine import LoopEngine
from eplb_async.nixl.peers import Peer
from eplb_async.settings import Settings
from eplb_async.testing import run

__all__ = ["START", "ControlCost", "Sink", "coordinator", "coordinator_cost"]

START = 1 << GENERATION_BITS
"""Incarnation of every rank."""


@dataclass(frozen=True, slots=True)
class ControlCost:
    """What an epoch costs its coordinator.

    Attributes:
        seconds_per_layer: CPU seconds for the votes and decisions of one layer; NIXL's sending is not in it.
        seconds_to_begin: CPU seconds for all JOINs and BEGINs.
        messages_per_layer: Messages that it takes and sends for one layer.
        bytes_per_layer: Bytes of these.
    """

    seconds_per_layer: float
    seconds_to_begin: float
    messages_per_layer: float
    bytes_per_layer: float


def coordinator_cost(ranks: int, layers: int) -> ControlCost:
    """Has a real coordinator hear what ``ranks - 1`` members say in one epoch of ``layers`` layers.

    All members vote for a layer before any votes for the next, so that each layer is decided by itself.
    """
    return run(_coordinator_cost(ranks, layers))


async def _coordinator_cost(ranks: int, layers: int) -> ControlCost:
    codec = Codec(bytes(KEY_SIZE), ep_size=ranks, num_layers=layers)
    sink = Sink()
    driver = coordinator(ranks, layers, sink)
    driver.start()
    digests = (b"old placement...", b"new placement...", b"all else that is")

    def said(make: type[messages.Message], **fields: Any) -> list[bytes]:
        addressed = {"sender_incarnation": START, "receiver_incarnation": START, **fields}
        return [codec.encode(make(sender=rank, **addressed)) for rank in range(1, ranks)]

    joins = said(messages.Join, attempt=1, digests=digests, last_epoch=0)
    began = time.process_time()
    driver.feed(events.Migrate(digests))
    for data in joins:
        driver.notification("", data)
    to_begin = time.process_time() - began
    votes = [
        said(messages.Prepared, epoch=driver.protocol.epoch, upto=layer + 1, holds=(0,) * layers)
        for layer in range(layers)
    ]
    sink.forget()
    began = time.process_time()
    for layer, data_of_layer in enumerate(votes):
        driver.feed(events.Staged(layer + 1))
        for data in data_of_layer:
            driver.notification("", data)
    spent = time.process_time() - began
    assert driver.protocol.phase is events.Phase.IDLE, "the simulated epoch did not complete"
    driver.stop()
    taken = sum(len(data) for data_of_layer in votes for data in data_of_layer)
    return ControlCost(
        seconds_per_layer=spent / layers,
        seconds_to_begin=to_begin,
        messages_per_layer=(sink.messages + layers * (ranks - 1)) / layers,
        bytes_per_layer=(sink.nbytes + taken) / layers,
    )


def coordinator(ranks: int, layers: int, sink: Sink) -> Driver:
    """The driver of rank 0, which has been introduced to all others and not yet met them: see ``start``."""
    roster = Roster()
    for rank in range(1, ranks):
        roster.put(Member(rank, START, "", Peer(f"default/{rank}", b"", []), Layout(())))
    driver = Driver(
        Identity(0, ranks, "default", "", START),
        engine=LoopEngine(asyncio.get_running_loop()),
        settings=Settings(),
        key=bytes(KEY_SIZE),
        roster=roster,
        num_layers=layers,
    )
    driver.endpoint = sink  # type: ignore[assignment]
    return driver


class Sink:
    """An endpoint that counts what is sent."""

    closed = False

    def __init__(self) -> None:
        self.messages = self.nbytes = 0

    def forget(self) -> None:
        """Count from zero."""
        self.messages = self.nbytes = 0

    def notify(self, peer: Peer, message: bytes, *, stir: bool = True) -> None:
        """Count a message."""
        self.messages += 1
        self.nbytes += len(message)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Nobody reads."""
        yield
