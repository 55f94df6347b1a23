"""The edges of layers under sequence parallelism: where tokens are split before a layer, and gathered after it.

Layers that are called one after the other keep their parts of the tokens from one to the next. Code between them that
was not tried on parts of the tokens sees whole tensors instead::

    tried        x ─[split]─ layer 0 ───────────────────────────── layer 1 ─[gather]─ head
    not tried    x ─[split]─ layer 0 ─[gather]─ exit loss, + ─[split]─ layer 1 ─[gather]─ head

Without gradients, a pass whose tokens cannot be shared evenly has all of them on every rank.

What a layer is given beside tokens is whole on every rank, and acts there on a part of the tokens: where it has a
gradient, that is summed over the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_megatron.layers.all_here import all_tokens_here, begin_pass, end_pass
from lightning_megatron.layers.streams import RankStream
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.messages.collectives import copy_to_group, gather_from_group, split_to_group
from lightning_megatron.mesh.pickling import RankHook
from lightning_megatron.parallelize.swap.hooks_on_tokens import TokenHooks
from lightning_megatron.parallelize.trial.tokens import Tokens

_CALL = nn.Module._call_impl.__code__


class LayerEdge:
    """Splits the tokens that a layer is given and gathers those that it gives, where its surroundings have them whole.

    Args:
        stream: the layer's random numbers on this rank.
        group: the tensor group.
        dim: dim of the tokens in the hidden state.
        tokens: what has tokens in the layer's arguments and its output.
        hooks: shows hooks of the user all tokens.
        root: code between the layers that runs in a call of this module has parts of the tokens; ``None``: all of it
            has whole tensors.
        outside: names of parameters whose gradients are partial where that code has parts of the tokens.
        splits: whether the first layer splits its input.
        ends: whether the layer is the first, and the last.

    Attributes:
        stream: as given.
    """

    def __init__(
        self,
        stream: RankStream,
        group: dist.ProcessGroup,
        dim: int,
        tokens: Tokens,
        *,
        hooks: TokenHooks,
        root: nn.Module | None,
        outside: Sequence[str],
        splits: bool,
        ends: tuple[bool, bool],
    ) -> None:
        self.stream, self._group, self._dim, self._tokens = stream, group, dim, tokens
        self._hooks = hooks
        self._root, self._outside, self._splits, self._ends = root, outside, splits, ends
        self._alone = splits and root is None

    def install(self, layer: nn.Module) -> None:
        """Add the hooks to the layer; those that the user has put on it run in between."""
        layer.register_forward_pre_hook(RankHook(self._open), with_kwargs=True, prepend=True)
        layer.register_forward_pre_hook(RankHook(self._split), with_kwargs=True)
        layer.register_forward_hook(RankHook(self._gather))
        layer.register_forward_hook(RankHook(lambda *_: self.stream.close()))
        layer.register_forward_hook(RankHook(lambda *_: self.stream.forget()), always_call=True)

    def _open(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Switch to the layer's random numbers."""
        if self._root is not None and self._splits and not (in_backward() or torch.compiler.is_compiling()):
            self._alone = not _runs(self._root, sys._getframe())  # a backward recomputes it as it was computed
            if self._alone and self._outside:
                _refuse_other_code(self.stream.name, self._root, self._outside[0])
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        if tensors:
            shape, whole = list(tensors[0].shape), self._ends[0] or self._alone
            shape[self._dim] //= self._group.size() if whole else 1
            self._hooks.open(tensors[0], whole=whole)
            self.stream.open(tensors[0].device, tokens=(self._dim, tuple(shape)), training=layer.training)

    def _split(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._splits or not (self._ends[0] or self._alone):
            return None
        begin_pass(uneven=self._is_uneven(args, kwargs))
        if all_tokens_here():
            return None
        if self._alone:
            args, kwargs = self._summed(args, kwargs)
        for key in self._tokens.given:
            part = self._hidden_part if key == self._tokens.given[0] else self._part
            args, kwargs = replace(args, kwargs, (key,), part)
        return args, kwargs

    def _summed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments without tokens with a sum of their gradients over the ranks."""

        def summed(x: Any) -> Any:
            plain = isinstance(x, Tensor) and x.requires_grad and not isinstance(x, WholeTensor)
            return copy_to_group(x, self._group) if plain else x

        given = self._tokens.given
        found = tuple(x if key in given else tree_map(summed, x) for key, x in enumerate(args))
        return found, {key: x if key in given else tree_map(summed, x) for key, x in kwargs.items()}

    def _is_uneven(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the ranks cannot have equally many tokens."""
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        hidden = next((given[key] for key in self._tokens.given if key in given), None)
        return hidden is not None and hidden.dim() == 3 and hidden.shape[self._dim] % self._group.size() != 0

    def _hidden_part(self, x: Tensor) -> Tensor:
        check_hidden(x, self.stream.name)
        return self._part(x)

    def _part(self, x: Tensor) -> Tensor:
        length, size = x.shape[self._dim], self._group.size()
        if length % size:
            below, above = length // size * size, (length // size + 1) * size
            raise ValueError(
                f"The sequence length {length} is not divisible by tensor_parallel_size={size}, which "
                f"sequence_parallel=True needs: pad or cut to {above} or {below}, or set sequence_parallel=False."
            )
        if stands_in(x):
            return x.narrow(self._dim, 0, length // size).clone()
        return split_to_group(x, self._dim, self._group)

    def _gather(self, layer: nn.Module, args: Any, output: Any) -> Any:
        if not (self._ends[1] or self._alone):
            return None
        if all_tokens_here():
            return end_pass()
        leaves, form = tree_flatten(output)
        dims = self._tokens.left
        if len(dims) != len(leaves):  # gives more or less than in the trial: the hidden state comes first
            dims = (self._dim, *[None] * (len(leaves) - 1))
        gather = partial(gathered, group=self._group, gather=gather_from_group)
        return tree_unflatten([x if dim is None else gather(x, dim) for x, dim in zip(leaves, dims, strict=True)], form)


def check_hidden(x: Tensor, layer: str) -> None:
    """Refuse to cut what has no tokens.

    Raises:
        ValueError: with what to change.
    """
    if x.dim() != 3:
        raise ValueError(
            f"`sequence_parallel=True`: {layer!r} gets a hidden state of shape {tuple(x.shape)}; it needs "
            "[batch, seq, hidden] or [seq, batch, hidden]. Turn sequence parallelism off for layers without tokens."
        )


def _refuse_other_code(layer: str, root: nn.Module, name: str) -> NoReturn:
    raise RuntimeError(
        f"`sequence_parallel=True`: layer `{layer}` is called by other code than that of `{type(root).__name__}`, in "
        f"which the gradient of `{name}` is a sum over the ranks and in this code is not. Call the "
        f"`{type(root).__name__}`, rather than its layers, or turn sequence parallelism off."
    )


def _runs(module: nn.Module, frame: FrameType | None) -> bool:
    """Whether a call of ``module`` is under way in ``frame``, or in what has called it."""
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def stands_in(x: Tensor) -> bool:
    """Whether a tensor without numbers, of a layer that another pipeline stage computes, follows torch's functions by a
    class of its own, which collectives would take off.
    """
    kind = type(x)
    follows = kind is not Tensor and kind.__torch_function__ is not torch._C._disabled_torch_function_impl
    return follows and not isinstance(x, WholeTensor)


def replace(
    args: tuple[Any, ...], kwargs: dict[str, Any], keys: Sequence[int | str], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the tensor at ``keys`` of the arguments by its changed form, which is computed once.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        keys: places or names; those that are not there are left out.
        change: applied to the first of them.
    """
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    changed: Any = None
    for key in keys:
        if key in named:
            changed = change(named[key]) if changed is None else changed
            named[key] = changed
    return tuple(named[index] for index in range(len(args))), {key: named[key] for key in kwargs}


def gathered(x: Tensor, dim: int, group: dist.ProcessGroup, gather: Callable[..., Tensor]) -> Tensor:
    """All of the tokens; of one whose tokens are split over context ranks as well, all of this context rank's.

    Args:
        x: [.., tokens of this rank, ..].
        dim: dim of the tokens.
        group: the tensor group.
        gather: the collective.
    """
    if stands_in(x):
        return torch.cat([x] * group.size(), dim)
    if not isinstance(x, WholeTensor):
        return gather(x, dim, group)
    return x.like(gather(x.local(), dim, group), split=x.spread.together())
