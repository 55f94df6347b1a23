"""Rules for losses per token: each rank's own are added up, and divided by what the whole target says."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.context_parallel.rules.elementwise import rows_of
from lightning_megatron.context_parallel.rules.token_products import whole
from lightning_megatron.layers.pieces.token_pieces import mean_weight
from lightning_megatron.layers.whole import NeedsWhole, Rule, WholeTensor

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def _over_classes(
    func: Any,
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy`` and ``F.nll_loss`` of classes in dim 1: [rows, classes, ..]."""
    if not isinstance(input, WholeTensor) or input.ndim < 2 or input._dim == 1 or target.is_floating_point():
        raise NeedsWhole
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        raise NeedsWhole
    if target.shape != input.shape[:1] + input.shape[2:]:
        raise NeedsWhole  # torch says what is wrong with that
    dim, target = max(0, input._dim - 1), whole(target)
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index}
    if func is F.cross_entropy:
        options["label_smoothing"] = label_smoothing
    own = input._split.take_held(target, dim, 0)
    rows = input.local()
    if reduction == "none":
        return input.like(func(rows, own, reduction="none", **options), dim)
    summed = func(rows.float() if rows.dtype in _SIXTEEN_BIT else rows, own, reduction="sum", **options)
    total = input._split.summed(summed)
    if reduction == "mean":
        total = total / mean_weight(target, weight, ignore_index)
    return total if torch.is_autocast_enabled(rows.device.type) else total.to(rows.dtype)


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
    place = model._dim - model.ndim
    rows = [rows_of(model, value, place) for value in (input, target)]
    if reduction == "none":
        return model.like(func(*rows, reduction="none", **kwargs))
    total = model._split.summed(func(*rows, reduction="sum", **kwargs))
    return total if reduction == "sum" else total / model.numel()


RULES: dict[Any, Rule] = {
    **dict.fromkeys((F.cross_entropy, F.nll_loss), _over_classes),
    **dict.fromkeys(
        (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits), _of_elements
    ),
}
