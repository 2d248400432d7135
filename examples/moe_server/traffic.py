"""What clients ask, and what the answers must be: the same model, made from the same seed, in this process."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from examples.moe_server.batching import Batcher
from examples.moe_server.model import VOCABULARY, Model, ModelConfig
from examples.moe_server.ranks import MAX_BATCH

Skew = Literal["zipf", "uniform", "one"]


class Traffic:
    """Prompts of one topic each, whose tokens the gates mostly send to the same experts.

    Args:
        config: The server's model.
        prompt_tokens: Tokens of each prompt.
        max_tokens: Tokens of each answer.
        variants: Different prompts of each topic.
        skew: How often topics are asked: by Zipf's law (1.5), all as often, or only one.
        seed: Seed of the prompts and of their order.

    Attributes:
        max_tokens: Tokens of each answer.
        answers: The right answer to each prompt, once :meth:`solve` has run.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        prompt_tokens: int = 4,
        max_tokens: int = 8,
        variants: int = 4,
        skew: Skew = "zipf",
        seed: int = 1,
    ) -> None:
        self.config, self.max_tokens = config, max_tokens
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self._rng = np.random.default_rng(seed)
        topics = config.experts
        share = {"zipf": np.arange(1, topics + 1) ** -1.5, "uniform": np.ones(topics), "one": np.arange(topics) == 0}
        self._share = share[skew] / share[skew].sum()
        self._order = self._rng.permutation(topics)
        self._prompts: list[list[tuple[int, ...]]] = [
            [
                tuple((self._rng.integers(0, VOCABULARY // topics, prompt_tokens) * topics + topic).tolist())
                for _ in range(variants)
            ]
            for topic in range(topics)
        ]

    def next(self) -> tuple[int, ...]:
        """The next prompt."""
        topic = int(self._order[self._rng.choice(len(self._share), p=self._share)])
        prompts = self._prompts[topic]
        return prompts[int(self._rng.integers(len(prompts)))]

    def alternate(self) -> None:
        """Other topics are the popular ones from now on."""
        self._order = np.roll(self._order, len(self._order) // 3)

    def solve(self) -> None:
        """Compute every answer, in one process that holds all experts."""
        prompts = [prompt for topic in self._prompts for prompt in topic]
        self.answers = dict(zip(prompts, reference(self.config, prompts, self.max_tokens), strict=True))


def reference(config: ModelConfig, prompts: list[tuple[int, ...]], max_tokens: int) -> list[list[int]]:
    """The answers of a single process that holds all experts."""
    return answers(Model(config, config.initial_placement(1), 0), prompts, max_tokens)


def answers(
    model: Model, prompts: list[tuple[int, ...]], max_tokens: int, max_batch: int = MAX_BATCH
) -> list[list[int]]:
    """The answers of a model that one process holds whole."""
    batcher = Batcher(width=model.config.width, max_batch=max_batch, max_wait=0.0, max_queue=len(prompts))
    futures = [batcher.submit(list(prompt), max_tokens) for prompt in prompts]
    with torch.inference_mode():
        while batch := batcher.take(0.0):
            x = model.trunk.start([one.token for one in batch], torch.stack([one.state for one in batch]))
            x, _ = model.forward(x, lambda _, y: y)
            batcher.advance(batch, x, model.trunk)
    return [future.result() for future in futures]
