"""The global gradient norm, with every element of the model counted once.

Callers pass only gradients that this rank counts. Copies on other stages (a tied embedding), and of parameters that are
replicated over the tensor group, are counted by one rank (SC21; megatron-core counts a tied head twice).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_megatron.mesh.messages.collectives import raw_all_reduce


def global_norm(counted: Sequence[Tensor], groups: Sequence[Any], device: torch.device) -> Tensor:
    """2-norm of all gradients of the model.

    Args:
        counted: this rank's gradients, without copies that another rank counts.
        groups: process groups whose ranks count different gradients (tensor, pipeline), innermost first.
        device: of the result.

    Returns:
        float64 scalar (float32 on devices without it), equal on all ranks of ``groups``.
    """
    total = squared_sum(counted, device)
    for group in groups:
        total = raw_all_reduce(total, group, keep=False)
    return total.sqrt()


def whole_norm(gradients: Sequence[Tensor]) -> Tensor:
    """2-norm of the gradients of a module that user code has split; collective over the meshes of its ``DTensor``s.

    Plain tensors are taken to be replicated on every rank.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.stack(whole).norm() if whole else torch.zeros(())


def squared_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over a list of gradients: a float64 scalar (float32 on MPS)."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not gradients:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch._foreach_norm([_wide(gradient) for gradient in gradients], 2)
    return torch.stack([norm.to(device=device, dtype=dtype) for norm in norms]).square().sum()


def _wide(gradient: Tensor) -> Tensor:
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


def clip_by(norm: Tensor, max_norm: float) -> Callable[[Tensor], Tensor]:
    """Function that scales a gradient in place by ``min(1, max_norm / (norm + 1e-6))``, as torch's clipping does."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return lambda gradient: gradient.mul_(factor.to(gradient.device, gradient.dtype))
