"""Attention sends what the page on long context says, message by message and byte by byte."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.context_parallel.rules import ring_attention
from lightning_megatron.tools.rehearsal import rehearse

BATCH, TOKENS, WIDTH, HEADS, LAYERS = 2, 24, 16, 2, 3
NUMBER = 4  # bytes
SIZES = [3, *(pytest.param(size, marks=pytest.mark.wide) for size in (2, 4))]


class Layer(nn.Module):
    """Attention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.projected, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in self.projected(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class Words(LightningModule):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def messages(size: int, method: Any) -> Counter[tuple[str, int]]:
    """How often a rank sends so many bytes in a step, by operation; those of losses and gradients left out."""
    strategy = MegatronStrategy(context_parallel_size=size, context_parallel_options={"method": method})
    found = rehearse(strategy, Words, torch.zeros(BATCH, TOKENS, dtype=torch.long), world_size=size)
    told = Counter[tuple[str, int]]()
    for each in found.communication:
        if each.phase == "step":
            told[each.operation, each.bytes] += each.count
    return told


@pytest.mark.parametrize("size", SIZES)
def test_gathered_attention_sends_three_messages_per_layer(size):
    rows = 2 * BATCH * TOKENS // size * WIDTH * NUMBER  # keys and values of one rank
    told = messages(size, "gather")
    gathered = {key: count for key, count in told.items() if key[0] in ("all-gather", "reduce-scatter")}
    assert sum(count for (name, _), count in gathered.items() if name == "all-gather") == 2 * LAYERS
    assert told["reduce-scatter", size * rows] == LAYERS
    assert set(size_ for name, size_ in gathered if name == "all-gather") == {size * rows}


@pytest.mark.parametrize("size", SIZES)
def test_attention_around_a_ring_passes_keys_on_and_brings_gradients_home(size):
    rows = 2 * BATCH * TOKENS // size * WIDTH * NUMBER
    told = messages(size, "ring")
    assert told["send", rows] == told["receive", rows] == LAYERS * (3 * size - 2)
    assert not any(name == "all-gather" for name, _ in told)


@pytest.mark.parametrize("size", [2])
def test_attention_by_heads_exchanges_tokens_four_times_and_back(size):
    part = BATCH * TOKENS // size * WIDTH * NUMBER
    told = messages(size, "ulysses")
    assert told["all-to-all", part] == (4 + 5) * LAYERS, told  # the output of the forward once more in the backward
    assert not any(name == "all-gather" for name, _ in told)


def test_attention_over_two_levels_exchanges_in_a_node_and_passes_keys_on_between_nodes():
    part, nodes = BATCH * TOKENS // 4 * WIDTH * NUMBER, 2
    told = messages(4, ("ulysses", 2))
    assert told["all-to-all", part] == (4 + 5) * LAYERS, told
    assert told["send", 2 * part] == told["receive", 2 * part] == LAYERS * (3 * nodes - 2), told
    assert not any(name == "all-gather" for name, _ in told)


@pytest.mark.wide
def test_stages_send_each_other_a_context_ranks_rows():
    """One of each micro-batch in each direction, and forwards once more, as the first step is tried."""
    strategy = MegatronStrategy(pipeline_parallel_size=3, context_parallel_size=2, micro_batch_size=1)
    rows, expected = TOKENS // 2 * WIDTH * NUMBER, {2: BATCH + 1, 1: 2 * BATCH + 1, 0: BATCH}  # the last has rank 0
    for rank in range(6):
        found = rehearse(strategy, Words, torch.zeros(BATCH, TOKENS, dtype=torch.long), world_size=6, rank=rank)
        sent = [each for each in found.communication if (each.phase, each.operation) == ("step", "send")]
        assert sum(each.count for each in sent if each.bytes == rows) == expected[rank // 2], rank
        assert {each.peer % 2 for each in sent} == {rank % 2}  # the same context rank of the next stage


@functools.cache
def kept_per_token(size: int, method: Any = "gather") -> float:
    """Bytes that a rank keeps for the backward, per token of the whole sequences."""
    kept = []
    for tokens in (64, 128):
        options = None if size == 1 else {"method": method}
        strategy = MegatronStrategy(context_parallel_size=size, context_parallel_options=options)
        found = rehearse(strategy, Words, torch.zeros(BATCH, tokens, dtype=torch.long), world_size=size)
        kept.append(found.bytes_by_kind["activations"])
    return (kept[1] - kept[0]) / (64 * BATCH)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("method", "sizes"), [("gather", (2, 4)), ("ring", (2, 4)), ("ulysses", (2,)), (("ulysses", 2), (4,))]
)
def test_what_is_kept_for_the_backward_falls_as_context_ranks_are_added(method, sizes):
    alone = kept_per_token(1)
    for size in sizes:
        assert kept_per_token(size, method) <= 1.05 / size * alone, size


def test_the_scores_of_a_ring_are_those_of_one_block_at_a_time(monkeypatch):
    peaks = []
    monkeypatch.setattr(ring_attention, "BLOCK", 128)
    for tokens in (512, 1024):
        strategy = MegatronStrategy(context_parallel_size=2, context_parallel_options={"method": "ring"})
        found = rehearse(strategy, Words, torch.zeros(1, tokens, dtype=torch.long), world_size=2)
        peaks.append(found.bytes_by_kind["peak"])
    assert peaks[1] <= 2.1 * peaks[0]
