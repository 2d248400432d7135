"""Gloo groups whose ranks are threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def on_groups(size: int, call: Callable[[Any], Any], *, timeout: float = 20.0) -> list[Future[Any]]:
    """Run ``call(group)`` on every rank of a new group, each in a thread; returns what became of them."""
    store = dist.HashStore()

    def rank(number: int) -> Any:
        prefixed = dist.PrefixStore("gloo", store)
        return call(dist.ProcessGroupGloo(prefixed, number, size, timedelta(seconds=timeout)))

    with ThreadPoolExecutor(size) as threads:
        return [threads.submit(rank, number) for number in range(size)]
