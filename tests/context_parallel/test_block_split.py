"""Sequence parallelism under context ranks: which tokens a rank holds between regions, and what is refused there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.context_parallel.block_split import BlockSplit, from_described, in_blocks
from lightning_megatron.context_parallel.token_shards import TokenShards
from lightning_megatron.context_parallel.token_split import Scope, TokenSplit, runs_in_units, zigzag_runs
from tests.checkpoints.reshard_scenarios import HIDDEN
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.train import make_trainer
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import TokenTask


class Place:
    """A group of ``size`` ranks, seen by one of them."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def of(context: int, tensor: int, length: int = 16) -> Any:
    """What one of two context × two tensor ranks holds."""
    runs = runs_in_units("zigzag", length, 2, 2)
    split: Any = TokenSplit(Place(context, 2), length, runs, Scope())  # type: ignore[arg-type]
    return in_blocks(split, Place(tensor, 2))  # type: ignore[arg-type]


def test_every_token_is_on_one_rank_and_regions_see_those_of_the_context_rank():
    held = [[of(context, tensor).mine for tensor in range(2)] for context in range(2)]
    assert held == [[((0, 4),), ((12, 16),)], [((4, 8),), ((8, 12),)]]
    assert of(0, 1).together().mine == ((0, 4), (12, 16))
    uneven = [run for context in range(2) for tensor in range(2) for run in of(context, tensor, 22).mine]
    assert sorted(token for start, stop in uneven for token in range(start, stop)) == list(range(22))


def test_units_stay_together_and_lengths_that_have_none_are_refused():
    assert runs_in_units("zigzag", 11, 2, 1) == zigzag_runs(11, 2)
    assert all((stop - start) % 3 == 0 for own in runs_in_units("block", 21, 2, 3) for start, stop in own)
    with pytest.raises(
        ValueError, match=r"length 11 is not divisible by tensor_parallel_size=2.*pad or cut to 12 or 10"
    ):
        runs_in_units("zigzag", 11, 2, 2)


def test_another_stage_knows_the_same_blocks():
    split = of(1, 0)
    again = from_described(split.described, Place(1, 2), Scope(), Place(0, 2))  # type: ignore[arg-type]
    assert isinstance(again, BlockSplit) and again.mine == split.mine and again.together().runs == split.together().runs


def test_what_reads_other_tokens_between_regions_is_refused():
    split = of(0, 0)
    x = TokenShards.show(torch.randn(2, 4, 6), split, 1)
    assert isinstance(x.relu() + x, TokenShards)
    for use in (lambda: x.mean(1), lambda: x.cumsum(1), lambda: x.sum(), lambda: x.full()):
        with pytest.raises(RuntimeError, match="`sequence_parallel=True` with `context_parallel_size=2`"):
            use()
    with pytest.raises(RuntimeError, match="reads other tokens than its own"):
        nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])
    for part in (x.flatten(0, 1), x[:, 2:9]):
        with pytest.raises(RuntimeError, match="given a stretch of tokens"):
            part.spread.together()


class Attention(nn.Module):
    """Over heads, with projections of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (part(x).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (self.query, self.key, self.value))
        found = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a gated MLP, with a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.attention, self.scale = Attention(), nn.Parameter(torch.ones(HIDDEN))
        self.gate, self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x)) * self.scale
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)) * self.scale


class Shared(nn.Module):
    """A decoder with learned positions; or one that mixes tokens between its layers."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.positions = nn.Parameter(torch.randn(8, HIDDEN))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.mixes = mixes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
            x = x + x.mean(1, keepdim=True) if self.mixes else x
        return self.head(x)


def train(info: RankInfo, options: dict[str, Any] | None, mixes: bool = False) -> dict[str, Any]:
    """Metrics and weights of a run; a plain one without options."""
    torch.manual_seed(7)
    module = TokenTask(Shared(mixes))
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    trainer = make_trainer(info, strategy, max_steps=2, limit_val_batches=1)
    trainer.fit(module)
    found: dict[str, Any] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    state = module.state_dict() if options is None else trainer.strategy.full_state_dict()
    return found | {name: value.detach().double() for name, value in state.items()}


BOTH = {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}
ROWS = [
    (4, {}),
    *(
        pytest.param(*row, marks=pytest.mark.wide)
        for row in (
            (4, {"context_parallel_options": {"method": "ring", "balance": "block"}, "activation_recompute": "full"}),
            (4, {"context_parallel_options": {"method": "ulysses"}, "loss_chunks": 3}),
            (8, {"pipeline_parallel_size": 2, "micro_batch_size": 1}),
            (8, {"pipeline_parallel_size": 2, "pipeline_schedule": "zb-h1", "activation_recompute": "full"}),
        )
    ),
]


@pytest.mark.parametrize(("devices", "options"), ROWS)
def test_sequence_shards_under_context_ranks_train_as_in_one_process(devices, options):
    wanted = one_process(train, None)
    for rank, outcome in enumerate(run_trainers(train, BOTH | options, devices=devices)):
        for name, value in wanted.items():
            if rank == 0 or name in ("train_loss", "val_loss"):
                found = torch.as_tensor(outcome.value[name])
                assert torch.allclose(found, torch.as_tensor(value), rtol=1e-9, atol=1e-9), (rank, name)


def test_a_mean_over_tokens_between_layers_is_refused_on_every_rank():
    for outcome in run_trainers(train, BOTH, True, devices=4, check=False, grace=20.0):
        assert "sequence_parallel" in f"{outcome.error}\n{outcome.output}", outcome
