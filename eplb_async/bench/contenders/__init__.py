"""Everyone who is measured, by name."""

from __future__ import annotations

from eplb_async.bench.contenders.base import Contender
from eplb_async.bench.contenders.ceiling import Copies, CopyOnce, CopyTwice
from eplb_async.bench.contenders.gloo import Gloo
from eplb_async.bench.contenders.ours import Blocked, Late, Ours
from eplb_async.bench.contenders.raw import Raw
from eplb_async.bench.contenders.vllm_class import DropIn, VllmClass
from eplb_async.bench.contenders.vllm_way import VllmWay

__all__ = ["CONTENDERS", "Contender"]

CONTENDERS: dict[str, type[Contender]] = {
    kind.name: kind
    for kind in (Ours, Raw, VllmWay, VllmClass, DropIn, Gloo, CopyTwice, CopyOnce, Copies, Late, Blocked)
}
