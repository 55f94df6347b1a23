"""Experts that look at more than one of their rows are found out, however they are called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.experts.kinds.blocks import try_blocks
from lightning_megatron.experts.kinds.probe import try_listed, try_stacked
from lightning_megatron.experts.kinds.sized import try_sized
from tests.experts.strangers import EXPERTS, WIDTH, Batched, Stacked


class OfRows(nn.Module):
    """An expert; ``centred`` if it takes the mean of its rows away."""

    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.inner, self.centred = nn.Linear(WIDTH, WIDTH), centred

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return made - made.mean(0, keepdim=True) if self.centred else made


class BySequence(nn.Module):
    """Calls its experts once for each sequence."""

    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([OfRows(centred) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in range(len(x)):
            for expert in range(EXPERTS):
                mask = index[number] == expert
                if mask.any():
                    out[number, mask] = self.experts[expert](x[number, mask]) * weight[number, mask, None]
        return out


class StackOfRows(Stacked):
    """The same, stacked."""

    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.centred = centred

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if not self.centred:
            return super().forward(hidden, index, weights)
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = torch.where(index == expert)
            if len(token):
                made = hidden[token] @ self.up[expert] @ self.down[expert] + self.bias[expert]
                out = out.index_add(0, token, (made - made.mean(0)) * weights[token, place, None])
        return out


class BlocksOfRows(Batched):
    """The same, given a block of rows each."""

    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made - made.mean(1, keepdim=True) if self.centred else made


class SizedRows(nn.Module):
    """The same, given rows and how many each expert has."""

    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.weight, self.centred = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH)), centred

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        made = [part @ weight for part, weight in zip(rows.split(sizes), self.weight, strict=True)]
        return torch.cat([part - part.mean(0) if self.centred and len(part) else part for part in made])


@pytest.mark.parametrize("centred", [False, True])
def test_experts_are_tried_on_a_part_of_their_rows(centred):
    found = [
        try_listed(BySequence(centred).double(), "experts")[0],
        try_stacked(StackOfRows(centred).double(), EXPERTS, 2),
        try_blocks(BlocksOfRows(centred).double(), EXPERTS, 2),
        try_sized(SizedRows(centred).double(), EXPERTS, 2)[0],
    ]
    assert [bool(why) for why in found] == [centred] * 4, found


class TakesTwo(nn.Module):
    """Gives its experts their weights, too, beside a layer of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.narrow = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH // 2)
        self.experts = nn.ModuleList([nn.Bilinear(WIDTH, WIDTH // 2, WIDTH) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        weights, narrow = self.gate(x).softmax(-1), self.narrow(x)
        made = [expert(x, narrow) * weights[..., [number]] for number, expert in enumerate(self.experts)]
        return torch.stack(made).sum(0)


def test_the_reason_is_that_of_tokens_that_the_module_takes():
    why = try_listed(TakesTwo().double(), "experts")[0]
    assert why == "its experts do not take one tensor and give one"


class OtherOrder(Stacked):
    """Takes its weights first."""

    def forward(self, weights: Tensor, index: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden, index, weights)


def test_stacked_experts_may_take_their_arguments_in_any_order():
    assert try_stacked(OtherOrder().double(), EXPERTS, 2) == ""
