"""Cross-entropy over a vocabulary that is split over the tensor group.

No rank ever holds [tokens, vocabulary]. Ranks all-reduce only one number per token each for the largest logit, the sum
of exponentials and the logit of the target. With z the logits of one token, y its target, w the class weights, e the
label smoothing and C the number of classes::

    log Z = log sum_c exp z_c
    loss  = (1 - e) w_y (log Z - z_y)  +  e/C sum_c w_c (log Z - z_c)

These are the numbers of `torch.nn.functional.cross_entropy`, for all its options. The forward costs one all-reduce of a
maximum and one of a sum; the backward costs none.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.layers.bounds import check_bounds
from lightning_megatron.mesh.autograd import differentiating_twice, first_order
from lightning_megatron.mesh.messages.collectives import raw_all_reduce, reduce_from_group
from lightning_megatron.mesh.parts.boxes import padded_vocabulary


def local_vocabulary(vocabulary: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """First vocabulary entry of this rank, and the number of its entries without padding."""
    if group.size() == 1:
        return 0, vocabulary
    length = padded_vocabulary(vocabulary, group.size()) // group.size()
    start = group.rank() * length
    return start, max(0, min(length, vocabulary - start))


class _TokenLoss(torch.autograd.Function):
    """Loss per token. logits: [tokens, vocab / group] (real entries only) -> [tokens].

    ``picked``: factor of (log Z - z_y) per token; ``spread``: factor of the sum over classes per token, or None;
    ``weight``: class weights of the local entries, or None; ``total_weight``: their sum over the whole vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        start: int,
        group: dist.ProcessGroup,
        picked: Tensor,
        spread: Tensor | None,
        weight: Tensor | None,
        total_weight: float,
    ) -> Tensor:
        highest = logits.new_full(target.shape, float("-inf"))
        if logits.shape[-1]:
            highest = logits.amax(-1)
        highest = raw_all_reduce(highest, group, keep=False, maximum=True)
        shifted = logits - highest.unsqueeze(-1)
        here = (target >= start) & (target < start + logits.shape[-1])
        index = (target - start).where(here, 0).unsqueeze(-1)
        sums = [shifted.new_zeros(target.shape)] * 3
        if logits.shape[-1]:
            sums[1] = shifted.gather(-1, index).squeeze(-1).where(here, 0)
            if spread is not None:
                sums[2] = (shifted if weight is None else shifted * weight).sum(-1)
            probabilities = shifted.exp_()
            sums[0] = probabilities.sum(-1)
        else:
            probabilities = shifted
        packed = raw_all_reduce(torch.stack(sums if spread is not None else sums[:2]), group, keep=False)
        log_z = packed[0].log()
        loss = picked * (log_z - packed[1])
        if spread is not None:
            loss = loss + spread * (total_weight * log_z - packed[2])
        probabilities.div_(packed[0].unsqueeze(-1))
        ctx.save_for_backward(probabilities, index, here, picked, spread, weight)
        ctx.total_weight = total_weight
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, index, here, picked, spread, weight = ctx.saved_tensors
        picked = picked * grad
        scale = picked if spread is None else picked + spread * grad * ctx.total_weight
        result = probabilities * scale.unsqueeze(-1)
        if probabilities.shape[-1]:
            result.scatter_add_(-1, index, -picked.where(here, 0).unsqueeze(-1))
        if spread is not None:
            flat = (spread * grad).unsqueeze(-1)
            result -= flat if weight is None else flat * weight
        return result, None, None, None, None, None, None, None


def _differentiable_token_loss(
    logits: Tensor,
    target: Tensor,
    start: int,
    group: dist.ProcessGroup,
    picked: Tensor,
    spread: Tensor | None,
    weight: Tensor | None,
    total_weight: float,
) -> Tensor:
    """:class:`_TokenLoss` by functions whose gradients have gradients; arguments as there."""
    held = logits.shape[-1]
    highest = logits.detach().amax(-1) if held else logits.new_full(target.shape, float("-inf"))
    shifted = logits - raw_all_reduce(highest, group, keep=False, maximum=True).unsqueeze(-1)
    here = (target >= start) & (target < start + held)
    index = (target - start).where(here, 0).unsqueeze(-1)
    own = shifted.gather(-1, index).squeeze(-1).where(here, 0) if held else shifted.sum(-1)
    log_z = reduce_from_group(shifted.exp().sum(-1), group).log()
    loss = picked * (log_z - reduce_from_group(own, group))
    if spread is None:
        return loss
    weighted = shifted if weight is None else shifted * weight
    return loss + spread * (total_weight * log_z - reduce_from_group(weighted.sum(-1), group))


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    group: dist.ProcessGroup | None = None,
    vocabulary: int | None = None,
    span: tuple[int, int] | None = None,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` on logits whose classes are split over the group.

    Without a group it calls `torch.nn.functional.cross_entropy`, which also accepts the logits of a split head.

    Args:
        logits: [.., vocab / group], this rank's classes; entries past the real vocabulary are ignored. Half-precision
            logits are reduced in float32.
        target: [..], class indices in the whole vocabulary, the same on every rank.
        weight: [vocabulary], factor of each class, the same on every rank.
        ignore_index: target of tokens that are left out.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: share of the target distributed evenly over all classes, in [0, 1].
        group: the tensor group.
        vocabulary: number of classes; required with a group.
        span: first class of this rank and number of its classes; by default those of the padded vocabulary.

    Returns:
        A scalar, or [..] for ``"none"``, in the dtype of ``logits``; under autocast, float32 for 16-bit logits, as in
        torch.

    Raises:
        ValueError: an unknown reduction, shapes that do not match, or a group without ``vocabulary``.
        IndexError: on the CPU, a target that is neither a class nor ``ignore_index``; on CUDA an assertion fails.
    """
    if group is None:
        return F.cross_entropy(
            logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    if vocabulary is None:
        raise ValueError("`vocab_parallel_cross_entropy(group=...)` needs `vocabulary=`, the number of all classes.")
    _check_shapes(logits, target, reduction)
    start, held = span or local_vocabulary(vocabulary, group)
    values = logits[..., :held].reshape(target.numel(), held)
    values = values.float() if logits.dtype in (torch.bfloat16, torch.float16) else values
    dtype = values.dtype if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    flat = target.reshape(-1)
    kept = flat != ignore_index
    check_bounds(flat, vocabulary, "Target", kept)
    classes = flat.where(kept, 0)
    factor = kept.to(values.dtype) if weight is None else weight.to(values.dtype)[classes].where(kept, 0)
    spread, total = None, float(vocabulary)
    local_weight = None
    if label_smoothing > 0:
        spread = kept.to(values.dtype) * (label_smoothing / vocabulary)
        if weight is not None:
            local_weight = weight.to(values.dtype)[start : start + held]
            total = float(weight.sum())
    picked = factor * (1 - label_smoothing)
    token_loss = _differentiable_token_loss if differentiating_twice else _TokenLoss.apply
    loss = cast(Tensor, token_loss(values, classes, start, group, picked, spread, local_weight, total))
    if reduction == "none":
        return loss.view(target.shape).to(dtype)
    summed = loss.sum()
    return (summed if reduction == "sum" else summed / factor.sum()).to(dtype)


def _check_shapes(logits: Tensor, target: Tensor, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction={reduction!r}` is not a reduction; use 'mean', 'sum' or 'none'.")
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"Logits of shape {tuple(logits.shape)} need a target of shape {tuple(logits.shape[:-1])}, "
            f"got {tuple(target.shape)}."
        )
