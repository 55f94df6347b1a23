"""A tensor of global shape of which this rank holds the rows of some tokens.

What the layers compute from their cut input is one of these, and so is everything up to the loss. A function of torch
that is given one runs on the rows, if a rule knows how, or on the gathered whole; see
`lightning_megatron.layers.whole`. Tensors of integers (tokens, labels, positions) and masks are whole on every rank, so
that code which shifts labels, counts targets or makes a mask sees one process's numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_megatron.context_parallel.block_split import in_blocks
from lightning_megatron.context_parallel.mask_work import runs_by_work
from lightning_megatron.context_parallel.rules import (
    elementwise,
    joins,
    token_attention,
    token_losses,
    token_products,
    token_views,
)
from lightning_megatron.context_parallel.token_split import Scope, TokenSplit, runs_in_units
from lightning_megatron.layers.whole import RULES, NeedsWhole, Rule, WholeTensor
from lightning_megatron.mesh.messages.collectives import split_to_group
from lightning_megatron.mesh.torch_functions import getters, name_of, setters


def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    model = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, WholeTensor))
    raise RuntimeError(
        f"`{name_of(func)}` was asked of a tensor of shape {tuple(model.shape)} whose tokens are split over "
        f"{model.spread.group.size()} ranks (`context_parallel_size`): a rank knows part of such a gradient only. Take "
        "it in a run with `context_parallel_size=1`."
    )


def _detached(func: Any, model: Any) -> Any:
    """Rule of ``.data``: the same rows, without a gradient."""
    return model.detach()


def _called_otherwise(rule: Rule) -> Rule:
    """The rule, which leaves calls that name arguments in a way it does not know to the whole tensor."""

    @functools.wraps(rule)
    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return rule(func, *args, **kwargs)
        except TypeError as error:
            try:
                inspect.signature(rule).bind(func, *args, **kwargs)
            except TypeError:
                raise NeedsWhole from error
            raise

    return run


T = Tensor
_GRADIENTS = (
    *(T.register_hook, T.retain_grad, T.backward, torch.autograd.grad, torch.autograd.backward),
    *getters("grad"),
    *setters("grad", "data", "requires_grad"),
    *(T.requires_grad_, T.register_post_accumulate_grad_hook),
)
_KEPT = {
    *(T.logsumexp, torch.logsumexp, T.softmax, torch.softmax, torch.nn.functional.softmax),
    *(T.log_softmax, torch.log_softmax, torch.nn.functional.log_softmax),
    *(T.sum, torch.sum, T.mean, torch.mean, T.__format__),
    *getters("requires_grad", "grad_fn", "is_leaf"),
    *(T.data_ptr, T.untyped_storage, T.storage, T.storage_offset, T.set_, T.resize_),
    *(T.__dlpack__, T.share_memory_, T.as_strided_, T.detach_, T.numpy),
}
"""Rules that hold for a dim of tokens as for any other."""


_RULES: dict[Any, Rule] = {
    **{func: rule for func, rule in RULES.items() if func in _KEPT},
    **token_views.RULES,
    **elementwise.RULES,
    **joins.RULES,
    **token_products.RULES,
    **token_attention.RULES,
    **token_losses.RULES,
    **dict.fromkeys(_GRADIENTS, _refuse),
    **dict.fromkeys(getters("data"), _detached),
}


class TokenShards(WholeTensor):
    """A tensor of global shape [.., tokens, ..] that stores this rank's rows."""

    rules: ClassVar[Mapping[Any, Rule]] = {func: _called_otherwise(rule) for func, rule in _RULES.items()}


def cut(
    whole: Tensor,
    group: Any,
    dim: int = 1,
    balance: str = "zigzag",
    scope: Scope | None = None,
    blocks: Any | None = None,
    work: Sequence[int] | None = None,
) -> TokenShards:
    """The same tensor, of which this rank keeps some rows. No communication.

    Args:
        whole: [.., tokens, ..], the same on every rank of ``group``.
        group: the context ranks.
        dim: that of the tokens.
        balance: key of `BALANCES`.
        scope: of the module's steps.
        blocks: ranks of which each keeps one block of those rows (sequence parallelism), if any.
        work: of each piece of tokens, to be shared evenly in place of ``balance``, without ``blocks``.

    Raises:
        ValueError: tokens that cannot be shared in blocks.
    """
    dim %= whole.ndim
    if work is not None:
        runs = runs_by_work(work, whole.shape[dim], group.size())
    else:
        runs = runs_in_units(balance, whole.shape[dim], group.size(), 1 if blocks is None else blocks.size())
    split = TokenSplit(group, whole.shape[dim], runs, scope or Scope())
    rows = split.take(whole, dim, 0)
    if blocks is None:
        return TokenShards.show(rows.clone(), split, dim)
    return TokenShards.show(split_to_group(rows, dim, blocks), in_blocks(split, blocks), dim)
