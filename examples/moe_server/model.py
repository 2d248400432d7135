"""The toy model: whole numbers in float32, so that its answers do not depend on batch, order or placement.

All weights and activations are whole numbers, and every sum stays below 2**24, so float32 adds them exactly in any
order. Between layers values are squashed to [-8, 8] by a remainder, so one wrong expert changes all that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from eplb_async import Placement

VOCABULARY = 256  # a token is a byte
TOP_K = 2
_BOUND = 8  # activations are whole numbers in [-8, 8]
_HIDDEN_BOUND = 15
_FAVOURED = (20, 12)  # how much a gate favours the two experts of a token's topic


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; equal configs make equal models.

    Attributes:
        layers: MoE layers.
        experts: Logical experts of each layer, and topics of the vocabulary.
        width: Values of one token between layers.
        hidden: Values inside an expert.
        seed: Seed of all weights.
    """

    layers: int = 6
    experts: int = 32
    width: int = 256
    hidden: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        widest = 4 * self.hidden * _HIDDEN_BOUND
        if not 2 <= self.experts < self.width or max(widest, self.width * 1024) >= 1 << 24:
            raise ValueError(f"{self} is too large to be exact in float32, or has no room for its topics")

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return 2 * self.width * self.hidden * 4

    def initial_placement(self, ranks: int, redundant: int = 2) -> Placement:
        """The experts in order, with at least ``redundant`` slots to spare on each rank."""
        local = -(-self.experts // ranks) + (redundant if ranks > 1 else 0)
        return Placement.initial(self.layers, self.experts, ep_size=ranks, num_redundant=local * ranks - self.experts)


class Trunk:
    """What every rank holds whole: embedding, gates, and the way back to a token.

    The first ``experts`` channels say the topic of a token. No expert writes there, and the gates look there first, so
    the tokens of a topic mostly go to the same experts: traffic on few topics is skewed.
    """

    def __init__(self, config: ModelConfig) -> None:
        rng = np.random.default_rng([config.seed, 1])
        topics, tokens = config.experts, np.arange(VOCABULARY)
        embedding = rng.integers(-_BOUND, _BOUND + 1, (VOCABULARY, config.width)).astype(np.float32)
        embedding[:, :topics] = 0
        embedding[tokens, tokens % topics] = _BOUND
        unembedding = embedding.T.copy()
        unembedding[:topics] *= 25  # an answer stays on its topic
        gates = rng.integers(-1, 2, (config.layers, config.width, topics)).astype(np.float32)
        gates[:, :topics] = 0
        for gate in gates:
            for favour in _FAVOURED:
                gate[np.arange(topics), rng.permutation(topics)] += favour
        self._topics = topics
        self._embedding = torch.from_numpy(embedding)
        self._unembedding = torch.from_numpy(unembedding)
        self._gates = torch.from_numpy(gates)

    def start(self, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer, ``[n, width]``: the tokens, and what each sequence remembers."""
        embedded = self._embedding[tokens]
        x = _squash(embedded + states)
        x[:, : self._topics] = embedded[:, : self._topics]
        return x

    def gate(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two best experts of each token, int64 ``[n, 2]``, and their weights, which add up to 4."""
        logits = x @ self._gates[layer]
        best = _distinct(logits).topk(TOP_K, dim=1).indices
        chosen = logits.gather(1, best)
        first = 2.0 + (chosen[:, 0] - chosen[:, 1] >= 64)
        return best, torch.stack([first, 4 - first], dim=1)

    def combine(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What leaves a layer: what went in, and what its experts say."""
        y = torch.floor(y / 32)
        y[:, : self._topics] = 0
        return _squash(x + y)

    def next_tokens(self, x: torch.Tensor) -> list[int]:
        """The likeliest token after each, ``[n]``."""
        tokens: list[int] = _distinct(x @ self._unembedding).argmax(dim=1).tolist()
        return tokens


class Routing:
    """Where each expert is, refreshed in place; copies of an expert take turns by the token's index."""

    def __init__(self, placement: Placement) -> None:
        most = placement.num_redundant + 1
        self._slots = np.zeros((placement.num_layers, placement.num_logical, most), np.int64)
        self._count = np.ones((placement.num_layers, placement.num_logical), np.int64)
        for layer in range(placement.num_layers):
            self.refresh(layer, placement)

    def refresh(self, layer: int, placement: Placement) -> None:
        """Take over one layer of a placement."""
        slots = placement.logical_to_physical_map[layer]
        self._slots[layer, :, : slots.shape[1]] = slots
        self._count[layer] = placement.logical_replica_count[layer]

    def physical(self, layer: int, experts: np.ndarray) -> np.ndarray:
        """The slot for each token and expert, ``[n, 2]``."""
        turn = np.arange(len(experts))[:, None] % self._count[layer][experts]
        slots: np.ndarray = self._slots[layer][experts, turn]
        return slots


class Model:
    """One rank's part of the model; with one rank, the whole of it.

    Attributes:
        weights: ``[layers]`` of its slots' tensors, ``[slots, width, hidden]`` and ``[slots, hidden, width]``.
        slots: Slots of one rank.
        num_physical: Slots of all ranks.
    """

    def __init__(self, config: ModelConfig, placement: Placement, rank: int) -> None:
        self.config = config
        self.trunk = Trunk(config)
        self.routing = Routing(placement)
        self.slots = placement.num_local_experts
        self._first = rank * self.slots
        self.num_physical = placement.num_physical
        self.weights: list[list[torch.Tensor]] = []
        for layer, experts in enumerate(placement.local(rank).tolist()):
            made = {expert: expert_weights(config, layer, expert) for expert in set(experts)}
            self.weights.append([torch.stack([made[expert][tensor] for expert in experts]) for tensor in range(2)])

    def forward(
        self, x: torch.Tensor, exchange: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, np.ndarray]:
        """All layers.

        Args:
            x: ``[n, width]``, the same on all ranks.
            exchange: Adds up what the ranks say of a layer, ``[n, width]``.

        Returns:
            What comes out, ``[n, width]``, and the tokens of each slot of all ranks, ``[layers, slots]``.
        """
        counts = np.zeros((self.config.layers, self.num_physical), np.int64)
        for layer in range(self.config.layers):
            experts, gate = self.trunk.gate(layer, x)
            physical = self.routing.physical(layer, experts.numpy())
            counts[layer] = np.bincount(physical.ravel(), minlength=self.num_physical)
            y = self._local(layer, x, torch.from_numpy(physical), gate, counts[layer])
            x = self.trunk.combine(x, exchange(layer, y))
        return x, counts

    def own(self, counts: np.ndarray) -> np.ndarray:
        """The columns of this rank's slots, ``[layers, slots]``."""
        return counts[:, self._first : self._first + self.slots]

    def _local(
        self, layer: int, x: torch.Tensor, physical: torch.Tensor, gate: torch.Tensor, counts: np.ndarray
    ) -> torch.Tensor:
        into, out = self.weights[layer]
        y = torch.zeros_like(x)
        for slot in np.flatnonzero(counts[self._first : self._first + self.slots]).tolist():
            row, which = torch.nonzero(physical == self._first + slot, as_tuple=True)
            hidden = torch.floor((x[row] @ into[slot]) / 16).clamp_(0, _HIDDEN_BOUND)
            y.index_add_(0, row, (hidden @ out[slot]) * gate[row, which, None])
        return y


def expert_weights(config: ModelConfig, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two tensors of one expert, ``[width, hidden]`` and ``[hidden, width]``: -1, 0 and 1."""
    rng = np.random.default_rng([config.seed, 2, layer, expert])
    made = rng.integers(-1, 2, (2, config.width * config.hidden), np.int8).astype(np.float32)
    into, out = torch.from_numpy(made)
    return into.view(config.width, config.hidden), out.view(config.hidden, config.width)


def _squash(x: torch.Tensor) -> torch.Tensor:
    return torch.remainder(x + _BOUND, 2 * _BOUND + 1) - _BOUND


def _distinct(logits: torch.Tensor) -> torch.Tensor:
    """No two equal: of equals the first is the largest."""
    n = logits.shape[1]
    return logits * n + torch.arange(n - 1, -1, -1)
