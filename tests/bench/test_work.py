"""The scenarios: their moves are what they say, the same for everyone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from eplb_async.bench.contenders.vllm_class import VllmClass
from eplb_async.bench.group import Place
from eplb_async.bench.scenario import SCENARIOS, Scenario, choose
from eplb_async.bench.work import Work
from eplb_async.core.plan import plan


class Alone:
    """A group whose other ranks are never waited for."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        pass


def work(scenario: Scenario, rank: int) -> Work:
    group: Any = Alone(rank, scenario.ranks)
    return Work(scenario, group)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_every_move_is_a_read_and_the_way_back_moves_as_much(scenario: Scenario) -> None:
    """Also in small: no local copies, none into two slots; otherwise the rivals would do other work."""
    for each in (scenario, scenario.quicker()):
        one, two = each.placements()
        there, back = plan(one, two), plan(two, one)
        assert there.num_reads == back.num_reads == len(there.layer) > 0
        reads = [
            sum(len(work(each, rank).incoming(layer)) for layer in range(each.layers)) for rank in range(each.ranks)
        ]
        assert sum(reads) == there.num_reads
        if each.moves == "cross":
            assert reads == [each.layers * each.experts] * each.ranks
            assert [there.reads_by_source(0).tolist()] == [[each.experts] * each.ranks]
        else:
            assert reads[0] == 0
            assert {int(source) for source in np.concatenate([there.source, back.source])} == {0}
        again = Scenario.from_json(json.loads(json.dumps(each.to_json())))
        assert again.placements() == each.placements()


def test_quick_is_smaller_and_leaves_out_most() -> None:
    """Unless it is asked for by name; what is set on the command line goes for all."""
    everything, quick = choose([], quick=False), choose([], quick=True)
    assert 0 < len(quick) < len(everything) == len(SCENARIOS)
    assert all(s.layers * s.experts * s.expert_bytes <= 64 << 20 for s in choose(list(SCENARIOS), quick=True))
    assert {s.transport for s in choose([], quick=True, transport="tcp", loop=None)} == {"tcp"}
    with pytest.raises(KeyError):
        choose(["nothing"], quick=False)


def test_a_place_is_taken_from_what_a_launcher_sets() -> None:
    """All four variables or none; torchrun says that it hosts the store."""
    given = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    place = Place(1, 4, "10.0.0.1", 29500, hosted=False)
    assert Place.from_env(given) == place
    assert Place.from_env({**given, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == replace(place, hosted=True)
    del given["RANK"]
    assert Place.from_env(given) is None


@pytest.mark.asyncio
async def test_vllms_own_class_is_driven_as_its_engine_drives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of its shape, whose READs are copies out of the other rank's rows: every byte arrives."""
    scenario = Scenario(name="tiny", what="", layers=2, experts=4, row_bytes=(64, 8))
    mine, other = work(scenario, 0), work(scenario, 1)
    calls: list[str] = []

    class StandIn:
        def __init__(self, cpu_group: Any, all_expert_weights: Any, expert_buffer: Any) -> None:
            assert all_expert_weights is mine.rows.layers

        def set_transfer_context(self, old_indices: Any, layer_idx: int) -> None:
            calls.append("context")
            self._layer, self._rows = layer_idx, np.asarray(old_indices).reshape(2, 4)

        def add_recv(self, tensors: Any, src_rank: int, expert_id: int) -> None:
            assert src_rank == 1
            (slot,) = np.flatnonzero(self._rows[1] == expert_id)
            for tensor, rows in zip(tensors, other.rows.layers[self._layer], strict=True):
                tensor.copy_(rows[int(slot)])

        def execute(self) -> None:
            calls.append("execute")

    name = "vllm.distributed.eplb.eplb_communicator"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    sys.modules["vllm"].__spec__ = sys.modules[name].__spec__ = object()  # type: ignore[assignment]
    assert "does not load" in VllmClass.why_not(mine)
    sys.modules[name].NixlEplbCommunicator = StandIn  # type: ignore[attr-defined]
    assert VllmClass.why_not(mine) == ""
    contender = VllmClass(mine)
    await contender.open()
    assert await contender.verify() == 0
    assert calls == ["context", "execute"] * 3  # one layer to wire up, then both
    await contender.close()


def test_without_vllm_the_report_says_so() -> None:
    """It is not a dependency."""
    assert "not installed" in VllmClass.why_not(work(SCENARIOS["reference"], 0))
