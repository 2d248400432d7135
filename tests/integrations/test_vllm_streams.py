"""Waiting for CUDA streams before a round, with stand-ins for them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from eplb_async.errors import NixlTransferTimeout
from eplb_async.integrations.vllm.streams import wait_for_streams


class Stream:
    """One that is busy for a number of looks; as its own event."""

    def __init__(self, looks: int) -> None:
        self.left = looks
        self.recorded = 0

    def record_event(self) -> Stream:
        self.recorded += 1
        return self

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_both_the_current_stream_and_the_given_one_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    current, given = Stream(3), Stream(5)
    devices: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: devices.append(device) or current)
    wait_for_streams(torch.device("cuda:1"), given, deadline=time.monotonic() + 10)
    assert (current.recorded, given.recorded) == (1, 1)
    assert devices == [torch.device("cuda:1")]
    assert current.left < 0 > given.left


def test_stream_that_does_not_end_runs_into_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(1 << 60))
    with pytest.raises(NixlTransferTimeout, match="what was queued on cuda:0"):
        wait_for_streams(torch.device("cuda:0"), None, deadline=time.monotonic() + 0.01)


def test_on_a_cpu_nothing_is_waited_for() -> None:
    wait_for_streams(torch.device("cpu"), Stream(1 << 60), deadline=0.0)
