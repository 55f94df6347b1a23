"""Modules inside of a layer that get all tokens where sequence parallelism has split them.

Code that mixes tokens and that no region covers (an attention which the plan leaves whole, weights that are made by
calling layers on something else than tokens) runs on every rank as in one process::

    norm ─ tokens of this rank ─[gather]─ module, whole ─[split]─ tokens of this rank ─ +

Every rank computes the same, so the gradients of the module's parameters are whole, and each rank takes its own tokens'
part of the input's gradient.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_megatron.layers.all_here import all_tokens_here
from lightning_megatron.layers.streams import RankStream
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.messages.collectives import gather_from_group, split_to_group
from lightning_megatron.mesh.pickling import RankHook
from lightning_megatron.parallelize.swap.token_edges import gathered, replace, stands_in
from lightning_megatron.parallelize.trial.between_tokens import AllTokens


class AllTokensInside:
    """Gathers the tokens in front of a module of a layer, and splits them again after it.

    Args:
        stream: the random numbers of the layer on this rank, which the module does not draw from.
        group: the tensor group.
        dim: dim of the tokens.
        tokens: what has tokens.
    """

    def __init__(self, stream: RankStream, group: dist.ProcessGroup, dim: int, tokens: AllTokens) -> None:
        self._stream, self._group, self._dim, self._tokens = stream, group, dim, tokens
        self._shape: tuple[int, ...] = ()

    def install(self, module: nn.Module) -> None:
        """Add the hooks; those of the user run between them, on all tokens."""
        module.register_forward_pre_hook(RankHook(self._gather), with_kwargs=True, prepend=True)
        module.register_forward_hook(RankHook(self._split))

    def _gather(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stream.close()
        if all_tokens_here():
            return None

        def whole(x: Tensor) -> Tensor:
            self._shape = tuple(x.shape)
            return gathered(x, self._dim, self._group, gather_from_group)

        return replace(args, kwargs, self._tokens.given, whole)

    def _split(self, module: nn.Module, args: Any, output: Any) -> Any:
        if all_tokens_here():
            return None
        leaves, form = tree_flatten(output)
        has_tokens = [index in self._tokens.left for index in range(len(leaves))]
        leaves = [self._part(x) if split else x for x, split in zip(leaves, has_tokens, strict=True)]
        first = leaves[self._tokens.left[0]]
        self._stream.open(first.device, tokens=(self._dim, self._shape), training=module.training)
        return tree_unflatten(leaves, form)

    def _part(self, x: Tensor) -> Tensor:
        if stands_in(x):
            return x.narrow(self._dim, 0, x.shape[self._dim] // self._group.size()).clone()
        if not isinstance(x, WholeTensor):
            return split_to_group(x, self._dim, self._group)
        return x.like(split_to_group(x.local(), self._dim, self._group), split=x.spread.in_blocks(self._group))
