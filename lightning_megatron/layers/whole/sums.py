"""Rules along the dim that is cut: reductions, losses, values at chosen indices, and products that contract it.

Every rank reduces what it holds, and one all-reduce puts the results together: they are whole, on every rank. 16-bit
parts are added up in float32 and rounded once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.layers.bounds import check_bounds
from lightning_megatron.layers.loss import vocab_parallel_cross_entropy
from lightning_megatron.layers.whole.base import NeedsWhole, Rule, WholeTensor
from lightning_megatron.mesh.messages.collectives import raw_all_reduce

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def split_sum(model: WholeTensor, held: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Sum over ``dims``, the cut one among them, of values at the held indices; whole on every rank."""
    wide = torch.float32 if held.dtype in _SIXTEEN_BIT else held.dtype
    return model.spread.summed(held.sum(dims, keepdim, dtype=wide)).to(held.dtype)


def _reduction(func: Any, model: WholeTensor, *args: Any, **kwargs: Any) -> Any:
    """``sum`` and ``mean``, of all elements or over some dims."""
    dim = kwargs.pop("dim", args[0] if args else None)
    keepdim = kwargs.pop("keepdim", args[1] if len(args) > 1 else False)
    if not isinstance(model, WholeTensor) or len(args) > 2 or not model.is_floating_point():
        raise NeedsWhole
    chosen = range(model.ndim) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    dims = tuple(entry % model.ndim for entry in chosen)
    if kwargs.pop("dtype", None) is not None or kwargs or model.ndim == 0:
        raise NeedsWhole
    if model.along not in dims:
        removed = 0 if keepdim else sum(entry < model.along for entry in dims)
        return model.like(func(model.local(), dims, keepdim), model.along - removed)
    count = math.prod(model.shape[entry] for entry in dims)
    total = split_sum(model, model.held(), dims, keepdim)
    return total if func in (torch.sum, Tensor.sum) else total / count


def split_logsumexp(model: WholeTensor, held: Tensor) -> Tensor:
    """``logsumexp`` over the cut dim, kept with size one; the largest value and the sum travel."""
    block = model.local().shape[model.along]
    lowest = model.spread.pad(held.detach(), model.along, block)
    if held.shape[model.along] < block:
        lowest.narrow(model.along, held.shape[model.along], block - held.shape[model.along]).fill_(-math.inf)
    if not lowest.shape[model.along]:  # a rank may hold nothing
        lowest = lowest.new_full(
            [1 if dim == model.along else size for dim, size in enumerate(lowest.shape)], -math.inf
        )
    highest = raw_all_reduce(lowest.amax(model.along, keepdim=True), model.spread.group, maximum=True)
    highest = highest.masked_fill(highest.isinf(), 0.0)
    return split_sum(model, (held - highest).exp(), (model.along,), keepdim=True).log() + highest


def _logsumexp(func: Any, model: WholeTensor, dim: Any, keepdim: bool = False) -> Any:
    if dim in ([model.along], (model.along,)):
        dim = model.along
    if not isinstance(dim, int):
        raise NeedsWhole
    dim %= model.ndim
    if dim != model.along:
        return model.like(func(model.local(), dim, keepdim), model.along - (not keepdim and dim < model.along))
    found = split_logsumexp(model, _wide(model)).to(model.dtype)
    return found if keepdim else found.squeeze(dim)


def _softmax(func: Any, model: WholeTensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``softmax`` and ``log_softmax``; split along the cut dim, they stay split."""
    kwargs.pop("_stacklevel", None)
    dtype = kwargs.pop("dtype", args[-1] if args and isinstance(args[-1], torch.dtype) else None)
    if not isinstance(model, WholeTensor) or not isinstance(dim, int) or kwargs or not model.is_floating_point():
        raise NeedsWhole
    name = func.__name__
    dim %= model.ndim
    if dim != model.along:
        return model.like(getattr(torch, name)(model.local(), dim, dtype=dtype))
    autocast = torch.is_autocast_enabled(model.device.type) and model.dtype in _SIXTEEN_BIT
    wanted = dtype or (torch.float32 if autocast else model.dtype)
    values = _wide(model) if dtype is None else model.held().to(dtype)
    found = values - model.spread.shared(split_logsumexp(model, values))
    return model.from_held((found.exp() if name == "softmax" else found).to(wanted))


def _wide(model: WholeTensor) -> Tensor:
    held = model.held()
    return held.float() if held.dtype in _SIXTEEN_BIT else held


def _product(func: Any, left: Any, right: Any, bias: Any = None) -> Any:
    """``F.linear`` and ``matmul`` with an ordinary matrix on the right."""
    if not isinstance(left, WholeTensor) or isinstance(right, WholeTensor) or right.ndim != 2 or left.ndim < 2:
        raise NeedsWhole
    contracted = int(func is F.linear)  # the matrix is [out, in] there, [in, out] elsewhere
    if left.shape[-1] != right.shape[contracted] or left.dtype != right.dtype or left.dtype in _SIXTEEN_BIT:
        raise NeedsWhole
    if left.along == left.ndim - 1:
        partial = func(left.held(), left.part_of(right, contracted))
        found = left.spread.summed(partial)
        return found if bias is None else found + bias
    options = () if bias is None else (left.spread.shared(bias),)
    return left.from_held(func(left.held(), left.spread.shared(right), *options))


_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def _options(input: Any, target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Options of a loss over classes, where its classes are what is cut."""
    options = {**dict(zip(_OPTIONS, args, strict=False)), **kwargs}
    if options.pop("size_average", None) is not None or options.pop("reduce", None) is not None:
        raise NeedsWhole
    classes = 0 if not isinstance(input, WholeTensor) or input.ndim == 1 else 1
    if not isinstance(input, WholeTensor) or isinstance(target, WholeTensor) or input.along != classes:
        raise NeedsWhole
    if target.is_floating_point():
        raise NeedsWhole
    return options


def _cross_entropy(func: Any, input: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    options = _options(input, target, args, kwargs)
    local, split = input.local().movedim(input.along, -1), input.spread
    place = {"group": split.group, "vocabulary": split.length, "span": split.span(local.shape[-1])}
    return vocab_parallel_cross_entropy(local, target, **options, **place)


def _nll_loss(func: Any, input: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Loss of log-probabilities: those of the targets are looked up where they are."""
    options = _options(input, target, args, kwargs)
    weight, ignore_index = options.get("weight"), options.get("ignore_index", -100)
    reduction = options.get("reduction", "mean")
    kept = target != ignore_index
    classes = target.where(kept, 0)
    picked = values_at(input, classes.unsqueeze(input.along)).squeeze(input.along)
    factor = kept.to(picked.dtype) if weight is None else weight.to(picked.dtype)[classes].where(kept, 0)
    loss: Tensor = -picked.where(kept, 0) * factor
    if reduction == "none":
        return loss
    total: Tensor = loss.sum()
    return total / factor.sum() if reduction == "mean" else total


def values_at(model: WholeTensor, index: Tensor) -> Tensor:
    """``gather`` along the cut dim; the same on every rank. index: [.., n, ..] -> [.., n, ..].

    Raises:
        IndexError: an index outside of the dim.
    """
    dim, length = model.along, model.spread.length
    check_bounds(index, length, "index")
    start, held = model.spread.span(model.local().shape[dim])
    here = (index >= start) & (index < start + held)
    found = model.local().gather(dim, (index - start).where(here, 0))
    return model.spread.summed(found.where(here, 0))


def _gather(func: Any, model: Any, dim: Any, index: Any, **kwargs: Any) -> Tensor:
    if not isinstance(model, WholeTensor) or isinstance(index, WholeTensor) or kwargs or not isinstance(dim, int):
        raise NeedsWhole
    if dim % model.ndim != model.along or not model.is_floating_point():
        raise NeedsWhole
    return values_at(model, index)


T = Tensor
RULES: dict[Any, Rule] = {
    **dict.fromkeys((T.sum, torch.sum, T.mean, torch.mean), _reduction),
    **dict.fromkeys((T.logsumexp, torch.logsumexp), _logsumexp),
    **dict.fromkeys((T.softmax, torch.softmax, F.softmax, T.log_softmax, torch.log_softmax, F.log_softmax), _softmax),
    **dict.fromkeys((F.linear, torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm), _product),
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    **dict.fromkeys((torch.gather, T.gather), _gather),
}
