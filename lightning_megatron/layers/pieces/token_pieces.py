"""Losses over classes, and reductions over them, of logits that are computed a piece of the tokens at a time.

Each piece is computed without being kept, and again in the backward (activation checkpointing, arXiv 1604.06174): of a
loss over s tokens and V classes in n pieces, s/n × V logits exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_megatron.layers.pieces.class_losses import ClassLoss
from lightning_megatron.layers.pieces.head_rows import HeadRows
from lightning_megatron.layers.pieces.lazy_logits import LazyLogits
from lightning_megatron.layers.whole import NeedsWhole, Rule, WholeTensor
from lightning_megatron.mesh.torch_functions import name_of


def _over_classes(func: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """``F.cross_entropy`` and ``F.nll_loss`` of classes in dim 1: [rows, classes, ..]."""
    if not isinstance(input, LazyLogits) or isinstance(target, LazyLogits) or input.along != 1:
        raise NeedsWhole
    loss = ClassLoss(func, input, target, *args, **kwargs)
    rows = input.local().movedim(1, -1)
    own, targets = _own(rows, loss.target)
    parts = _in_pieces(func, input, lambda part, wanted: loss.of_part(input.head.logits(part), wanted), own, targets)
    if loss.is_per_token:
        return _per_token(rows, torch.cat(parts))
    total = torch.stack(parts).sum()
    return loss.of_all(rows.spread.summed(total) if isinstance(rows, WholeTensor) else total)


def _own(rows: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """This rank's tokens in one dim: rows [.., hidden] -> [n, hidden], and tensors [..] of all tokens -> [n]."""
    if not isinstance(rows, WholeTensor):
        return rows.reshape(-1, rows.shape[-1]), *(other.reshape(-1) for other in others)
    found = (rows.spread.take_held(other, rows.along, 0) for other in others)
    return rows.local().reshape(-1, rows.shape[-1]), *(other.reshape(-1) for other in found)


def _per_token(rows: Tensor, found: Tensor) -> Tensor:
    """Results of this rank's tokens [n, ..] in the places of their rows [.., hidden]: [.., ..]."""
    local = rows.local() if isinstance(rows, WholeTensor) else rows
    found = found.reshape(*local.shape[:-1], *found.shape[1:])
    return rows.like(found) if isinstance(rows, WholeTensor) else found


def _in_pieces(func: Any, logits: LazyLogits, piece: Callable[..., Any], rows: Tensor, *others: Tensor) -> list[Any]:
    """``piece`` of some rows, and of what belongs to them, at a time."""
    head: HeadRows = logits.head
    size = head.pieces.size(rows.shape[0], head.length)
    head.pieces.done[name_of(func)] += 1
    head.shown[0] += 1  # what follows from them does not follow what is written into them later
    grad = torch.is_grad_enabled() and head.differentiable and rows.requires_grad
    parts = zip(*(tensor.split(size) for tensor in (rows, *others)), strict=True)
    with torch.set_grad_enabled(grad):
        if not grad:
            return [piece(*part) for part in parts]
        return [checkpoint(piece, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]


def _reduced(func: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Reductions over classes: ``logsumexp``, ``argmax``, ``sum``, ``topk`` and others, per token."""
    if not isinstance(model, LazyLogits):
        raise NeedsWhole
    counts, named = args[: func in _OF_COUNTS], dict(kwargs)
    rest = args[len(counts) :]
    dim = named.pop("dim", rest[0] if rest else -1 if func in _OF_COUNTS else None)
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if type(dim) is not int or dim % model.ndim != model.along or not all(type(n) is int for n in counts):
        raise NeedsWhole
    return _pieced(func, model, lambda logits: func(logits, *counts, -1, *rest[1:], **named))


def _gathered(func: Any, model: Any, dim: Any, index: Any, **kwargs: Any) -> Any:
    """Values at indices of classes, per token."""
    if not isinstance(model, LazyLogits) or isinstance(index, WholeTensor) or type(dim) is not int or kwargs:
        raise NeedsWhole
    rows = model.local().movedim(model.along, -1)
    index = index.movedim(dim, -1)
    if dim % model.ndim != model.along or index.shape[:-1] != rows.shape[:-1]:
        raise NeedsWhole
    if isinstance(rows, WholeTensor):
        index = rows.spread.take_held(index, rows.along, 0)
    return _pieced(func, model, lambda logits, at: func(logits, -1, at), index.reshape(-1, index.shape[-1]))


def _pieced(func: Any, model: LazyLogits, of_logits: Callable[..., Any], *others: Tensor) -> Any:
    rows = model.local().movedim(model.along, -1)
    found = _in_pieces(func, model, lambda part, *more: of_logits(model.head.logits(part), *more), *_own(rows), *others)

    def joined(parts: Any) -> Tensor:
        values = _per_token(rows, torch.cat(parts))
        return values.movedim(-1, model.along) if values.ndim == model.ndim else values

    if isinstance(found[0], Tensor):
        return joined(found)
    return type(found[0])(tuple(joined(parts) for parts in zip(*found, strict=True)))


T = Tensor
_OF_COUNTS = (T.topk, torch.topk)
_REDUCTIONS = (
    *(T.logsumexp, torch.logsumexp, T.argmax, torch.argmax, T.argmin, torch.argmin, T.amax, torch.amax),
    *(T.amin, torch.amin, T.max, torch.max, T.min, torch.min, T.sum, torch.sum, T.mean, torch.mean),
)
RULES: dict[Any, Rule] = {
    **dict.fromkeys((F.cross_entropy, F.nll_loss), _over_classes),
    **dict.fromkeys((*_REDUCTIONS, *_OF_COUNTS), _reduced),
    **dict.fromkeys((T.gather, torch.gather), _gathered),
}
