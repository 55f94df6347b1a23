"""The user's ``autograd.Function``s on split tokens give, with gradients, what they give on the whole tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_megatron.context_parallel.custom_functions import CustomFunctions
from tests.context_parallel.test_rules import BATCH, TOKENS, WIDTH, Square, Sum, check_table, trained
from tests.harness import run_ranks
from tests.harness.twins import tensor_group

PLACES = torch.arange(TOKENS, dtype=torch.float64)[:, None].expand(TOKENS, WIDTH).contiguous()


class Graphed(Function):
    """Its backward is that of ``value``, by autograd."""

    @staticmethod
    def value(*args: Any) -> Any:
        """Of the arguments."""
        raise NotImplementedError

    @classmethod
    def forward(cls, ctx: Any, *args: Any) -> Any:
        """Keep the graph of the arguments."""
        with torch.enable_grad():
            ctx.inputs = [v.detach().requires_grad_(v.is_floating_point()) if torch.is_tensor(v) else v for v in args]
            ctx.found = cls.value(*ctx.inputs)
        several = isinstance(ctx.found, tuple)
        return tuple(v.detach() for v in ctx.found) if several else ctx.found.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Go through it."""
        wanted = [v for v in ctx.inputs if torch.is_tensor(v) and v.requires_grad]
        roots = ctx.found if isinstance(ctx.found, tuple) else (ctx.found,)
        told = iter(torch.autograd.grad(roots, wanted, grads, allow_unused=True, retain_graph=True))
        return tuple(next(told) if torch.is_tensor(v) and v.requires_grad else None for v in ctx.inputs)


def function(value: Any) -> Any:
    return type("Of", (Graphed,), {"value": staticmethod(value)}).apply


class Centred(Square):
    """Each token by itself, but for its backward."""

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(1, keepdim=True)


class Rounded(Function):
    """Straight through."""

    @staticmethod
    def forward(ctx, x, step):
        return (x / step).round() * step

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Written(Function):
    """Changes what it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


normed = function(lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w)
gated = function(lambda x, y: x * torch.sigmoid(y))
two = function(lambda x: (x * 2, x.sum(-1, keepdim=True)))
summed = function(lambda x: x.cumsum(1))
shares = function(lambda x: x.softmax(1))
placed = function(lambda x, p: x + p)
blocks = function(lambda x: (x.reshape(-1, 4) - x.reshape(-1, 4).mean(-1, keepdim=True)).view(x.shape))
flipped = function(lambda x: x.flip(1))
whole_mean = function(lambda x, w: x * w + w.exp().mean())

BY_ROWS = {
    "square": lambda x: Square.apply(x) * 2,
    "rounded": lambda x: Rounded.apply(x, 0.25) + x,
    "two of them": lambda x: gated(x, x * 2),
    "several results": lambda x: two(x)[0] * two(x)[1],
    "in rows": lambda x: Square.apply(x.flatten(0, 1)).view(BATCH, TOKENS, WIDTH),
    "in heads": lambda x: Square.apply(x.view(BATCH, TOKENS, 2, 3).transpose(1, 2)).transpose(1, 2).flatten(2),
    "other features": lambda x: two(x)[1],
}
MIXES = {
    "running sum": lambda x: summed(x),
    "softmax of tokens": lambda x: shares(x) * x,
    "backward": lambda x: Centred.apply(x) * 3,
    "places of tokens": lambda x: placed(x, PLACES) * 2,
    "blocks across tokens": lambda x: blocks(x),
    "order": lambda x: flipped(x) + x,
    "a number": lambda x: Sum.apply(x),
}
TRAINED = {
    "weight": trained(lambda x, w: normed(x, w[:, 0])),
    "weight of all": trained(lambda x, w: summed(x) @ w),
    "weight apart": trained(lambda x, w: whole_mean(x, w[:, 1])),
}


def check(group: dist.ProcessGroup) -> None:
    functions = CustomFunctions()
    functions.open()
    try:
        check_table(BY_ROWS, group, kept=True, gathers=False)
        check_table(MIXES, group, gathers=True)
        check_table(TRAINED, group)
    finally:
        functions.close()


@run_ranks(tensor=2)
def test_functions_give_what_the_whole_tensor_gives(mesh):
    check(tensor_group(mesh))


@pytest.mark.wide
@run_ranks(tensor=3)
def test_functions_over_three_ranks_give_what_the_whole_tensor_gives(mesh):
    check(tensor_group(mesh))


@run_ranks(tensor=2)
def test_functions_that_write_into_split_tokens_are_refused(mesh):
    functions = CustomFunctions()
    functions.open()
    try:
        table = {"in place": lambda x: Written.apply(x * 1)}
        with pytest.raises(AssertionError, match=r"`Written`, an `autograd.Function` of .*, changes its argument"):
            check_table(table, tensor_group(mesh))
    finally:
        functions.close()
    assert "apply" not in vars(Function.__base__)
