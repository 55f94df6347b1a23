"""Rules for losses per token: each rank's own are added up, and divided by what the whole target says."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lightning_megatron.context_parallel.rules.elementwise import rows_of
from lightning_megatron.layers.pieces.class_losses import ClassLoss
from lightning_megatron.layers.whole import NeedsWhole, Rule, WholeTensor

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def _over_classes(func: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """``F.cross_entropy`` and ``F.nll_loss`` of classes in dim 1: [rows, classes, ..]."""
    if not isinstance(input, WholeTensor) or input.along == 1:
        raise NeedsWhole
    loss, dim = ClassLoss(func, input, target, *args, **kwargs), max(0, input.along - 1)
    found = loss.of_part(input.local(), input.spread.take_held(loss.target, dim, 0))
    return input.like(found, dim) if loss.is_per_token else loss.of_all(input.spread.summed(found))


def _of_elements(func: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Losses of single elements, such as ``F.mse_loss``."""
    reduction = kwargs.pop("reduction", "mean")
    if args or reduction not in ("mean", "sum", "none") or input.shape != target.shape:
        raise NeedsWhole
    if any(kwargs.get(name) is not None for name in ("size_average", "reduce", "weight", "pos_weight")):
        raise NeedsWhole
    model = input if isinstance(input, WholeTensor) else target
    if model.dtype in _SIXTEEN_BIT:
        raise NeedsWhole
    place = model.along - model.ndim
    rows = [rows_of(model, value, place) for value in (input, target)]
    if reduction == "none":
        return model.like(func(*rows, reduction="none", **kwargs))
    total = model.spread.summed(func(*rows, reduction="sum", **kwargs))
    return total if reduction == "sum" else total / model.numel()


RULES: dict[Any, Rule] = {
    **dict.fromkeys((F.cross_entropy, F.nll_loss), _over_classes),
    **dict.fromkeys(
        (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits), _of_elements
    ),
}
