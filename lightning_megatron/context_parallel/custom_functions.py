"""The user's own ``autograd.Function``s on tensors whose tokens are split: on a rank's rows, or on all of them.

``Function.apply`` does not ask a tensor what it is, and knows nothing of rows on other ranks::

    each token by itself     GeLU.apply(rows)     ──▶  rows of the result
    anything else            Scan.apply(whole)    ──▶  the whole result, on every rank

Which of the two a function is, is tried once on random rows: what it gives for some tokens, and their gradients, must
be what it gives for them among others; and gradients of other arguments, as of a weight, must add up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.context_parallel.token_shards import TokenShards
from lightning_megatron.layers.whole import GATHERED
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.mesh.torch_functions import around_functions, is_users_function

_ROWS, _FIRST = 4, 1  # tokens in a trial, and in its first part
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # relative to the largest
_NARROW = 2e-2


class CustomFunctions:
    """Lets the user's functions take split tensors, between :meth:`open` and :meth:`close`."""

    def __init__(self) -> None:
        self._replaced = Replacements()
        self._by_rows: dict[Hashable, bool] = {}

    def open(self) -> None:
        """Look at what functions are given, from now on."""
        around_functions(self._replaced, self._apply)

    def close(self) -> None:
        """Give torch's method back."""
        self._replaced.take_back()

    def _apply(self, cls: type[Function], call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not is_users_function(cls) or not any(isinstance(value, TokenShards) for value in tree_leaves(args)):
            return call(*args)
        shards = [value for value in args if isinstance(value, TokenShards)]
        if shards and _is_cut_alike(args, shards):
            key = (cls, shards[0].along, torch.is_grad_enabled(), *map(_kind_of, args))
            if key not in self._by_rows:
                self._by_rows[key] = _goes_by_rows(call, cls, args, shards[0].along)
            if self._by_rows[key]:
                found = call(*(value.local() if isinstance(value, TokenShards) else value for value in args))
                return tree_map(shards[0].like, found)
        GATHERED[cls.__qualname__] += 1
        return call(*tree_map(lambda value: value.full() if isinstance(value, TokenShards) else value, args))


def _is_cut_alike(args: Sequence[Any], shards: Sequence[TokenShards]) -> bool:
    """Whether rows of all split tensors belong together, and no other tensor has a row for each token."""
    first, length = shards[0], shards[0].shape[shards[0].along]
    others = [value for value in tree_leaves(tuple(args)) if isinstance(value, Tensor)]
    others = [value for value in others if not isinstance(value, TokenShards)]
    alike = all(each.spread == first.spread and each.along == first.along for each in shards)
    return (
        alike
        and len(shards) + len(others) == sum(isinstance(value, Tensor) for value in args)
        and not any(length in value.shape for value in others)
    )


def _kind_of(value: Any) -> Any:
    """Key of a trial: types and settings, without numbers of tokens and fractions, such as an annealed factor."""
    if isinstance(value, Tensor):
        shape = list(value.shape)
        if isinstance(value, TokenShards):
            shape[value.along] = _ROWS
        return type(value), tuple(shape), value.dtype, value.requires_grad
    if isinstance(value, float):
        return float
    try:
        hash(value)
    except TypeError:
        return type(value)
    return value


def _goes_by_rows(call: Callable[..., Any], cls: type[Function], args: Sequence[Any], dim: int) -> bool:
    """Whether a function treats each token by itself; the same answer on every rank.

    Args:
        call: the function.
        cls: its class, for messages.
        args: of a call.
        dim: that of the tokens in split ones.

    Raises:
        RuntimeError: it changes a split tensor in place.
    """
    return all(_tried(call, cls, args, dim, least) for least in (-1.0, 0.05))


def _tried(call: Callable[..., Any], cls: type[Function], args: Sequence[Any], dim: int, least: float) -> bool:
    generator = torch.Generator().manual_seed(7)
    held = [_random(value, dim, least, generator) if isinstance(value, TokenShards) else value for value in args]
    split = [isinstance(value, TokenShards) for value in args]
    runs = []
    for start, stop in ((0, _ROWS), (0, _FIRST), (_FIRST, _ROWS)):
        given = [
            _leaf(value.narrow(dim, start, stop - start) if cut else value, like)
            for value, cut, like in zip(held, split, args, strict=True)
        ]
        runs.append(_run(call, cls, given, dim, stop - start, (start, stop)))
    if None in runs:
        return False
    (whole, grads), *parts = [run for run in runs if run is not None]
    joined = [torch.cat(pieces, dim) for pieces in zip(*(outputs for outputs, _ in parts), strict=True)]
    if not all(map(_close, whole, joined)):
        return False
    for index, grad in enumerate(grads):
        first, second = (each[index] for _, each in parts)
        if grad is None or first is None or second is None:
            if not (grad is first is second):
                return False
        elif not _close(grad, torch.cat((first, second), dim) if split[index] else first + second):
            return False
    return True


def _random(value: TokenShards, dim: int, least: float, generator: torch.Generator) -> Tensor:
    shape = (*value.shape[:dim], _ROWS, *value.shape[dim + 1 :])
    if not value.is_floating_point():
        return torch.zeros(shape, dtype=value.dtype, device=value.device)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * (1 - least) + least
    return drawn.to(value.device, value.dtype)


def _leaf(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(like.requires_grad and torch.is_grad_enabled())


def _run(
    call: Callable[..., Any],
    cls: type[Function],
    given: Sequence[Any],
    dim: int,
    rows: int,
    span: tuple[int, int],
) -> tuple[list[Tensor], list[Tensor | None]] | None:
    """Outputs with ``rows`` tokens, and gradients of the arguments; nothing for outputs of another kind."""
    copies = [value.clone() if isinstance(value, Tensor) else value for value in given]  # a leaf cannot be written
    devices = [value.device for value in given if isinstance(value, Tensor) and value.is_cuda][:1]
    own = saved_tensors_hooks(_as_it_is, _as_it_is)  # a trial of the loss keeps nothing for a backward, as here is one
    with torch.random.fork_rng(devices), own:
        torch.manual_seed(7)
        found = call(*copies)
    if any(value._version for value in copies if isinstance(value, Tensor)):
        raise RuntimeError(
            f"`{cls.__qualname__}`, an `autograd.Function` of {cls.__module__}, changes its argument in place, and its "
            "tokens are split (`context_parallel_size`). Let it give its result in a new tensor, or use "
            "`context_parallel_size=1`."
        )
    outputs = list(found) if isinstance(found, tuple) else [found]
    if not all(isinstance(each, Tensor) and each.ndim > dim and each.shape[dim] == rows for each in outputs):
        return None
    roots = [output for output in outputs if output.requires_grad]
    grads: list[Tensor | None] = [None] * len(given)
    if roots:
        weights = [_weights(output, dim, span) for output in roots]
        wanted = [index for index, value in enumerate(given) if isinstance(value, Tensor) and value.requires_grad]
        told = torch.autograd.grad(roots, [given[index] for index in wanted], weights, allow_unused=True)
        for index, grad in zip(wanted, told, strict=True):
            grads[index] = grad
    return [output.detach() for output in outputs], grads


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _weights(output: Tensor, dim: int, span: tuple[int, int]) -> Tensor:
    """A gradient for the tokens of ``span``, the same whichever tokens are beside them."""
    shape = (*output.shape[:dim], _ROWS, *output.shape[dim + 1 :])
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64) + 0.5
    return drawn.narrow(dim, span[0], span[1] - span[0]).to(output.device, output.dtype)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = float(one.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    within = _TOLERANCE.get(one.dtype, _NARROW)
    return torch.allclose(one, other, rtol=within, atol=within * largest, equal_nan=True)
