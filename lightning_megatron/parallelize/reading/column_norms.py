"""Parts that divide by norms of a weight over its inputs, as DoRA does (Liu et al., arXiv 2402.09353).

``y = m / |W + s B A| * (W + s B A) x``, with a magnitude ``m`` and a norm for each feature of the output. The norm is a
constant in the backward. Split by output, each rank has whole rows, and so their norms. Split by input, ``y`` is a sum
over the ranks once the norms are those of whole rows, whose squares are sums over the ranks.

PEFT's layers ask a part of theirs, by ``get_weight_norm``, and that is what is held for a trial, or summed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.parallelize.reading.replay import Prepare

Norms = Mapping[str, Tensor]
"""Path of a part -> what it gave last."""


def parts_with_norms(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The parts of a module that are asked for norms of a weight, with their paths."""
    for name, part in module.named_modules():
        if hasattr(part, "get_weight_norm") and hasattr(part, "fan_in_fan_out"):
            yield name, part


def squares_of(part: Any, weight: Tensor, update: Tensor, scaling: float) -> tuple[Tensor, torch.dtype]:
    """Squares of the norms of an updated weight's rows ``[out]``, in float32 at least, and the dtype of the norms."""
    weight = (weight.T if part.fan_in_fan_out else weight) + scaling * update
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.linalg.vector_norm(weight.detach(), dim=1, dtype=wide).square(), weight.dtype


def noting(norms: dict[str, Tensor]) -> Prepare:
    """Notes the norms of a copy's parts as it runs, and fails where :func:`squares_of` gives others."""

    def prepare(copied: nn.Module) -> None:
        for name, part in parts_with_norms(copied):
            part.get_weight_norm = _noted(name, part, norms)

    return prepare


def holding(norms: Norms) -> Prepare:
    """Lets a copy's parts give these norms, whatever the weight."""

    def prepare(copied: nn.Module) -> None:
        for name, part in parts_with_norms(copied):
            if name in norms:
                part.get_weight_norm = _held(norms[name])

    return prepare


def _noted(name: str, part: Any, norms: dict[str, Tensor]) -> Any:
    own = part.get_weight_norm

    def get_weight_norm(weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None) -> Tensor:
        found: Tensor = own(weight, lora_weight, scaling, adapter_name=adapter_name)
        squares, kind = squares_of(part, weight, lora_weight, scaling)
        torch.testing.assert_close(squares.sqrt().to(kind), found.detach())
        norms[name] = found.detach()
        return found

    return get_weight_norm


def _held(norm: Tensor) -> Any:
    def get_weight_norm(*args: Any, **kwargs: Any) -> Tensor:
        return norm

    return get_weight_norm
