"""Rules for losses over the dim that is cut, and for the values at chosen indices of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.layers.loss import vocab_parallel_cross_entropy
from lightning_megatron.layers.whole.base import NeedsWhole, Rule, WholeTensor

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
    if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < length:
        raise IndexError(f"index {int(index.max())} is out of bounds for dimension {dim} with size {length}")
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


RULES: dict[Any, Rule] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    **dict.fromkeys((torch.gather, Tensor.gather), _gather),
}
