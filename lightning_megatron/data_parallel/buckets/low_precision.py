"""Chooses the parameters that layers hold in 16 bits while the optimizer keeps float32 master weights.

Under autocast a linear or a convolution casts its float32 weight to 16 bits whenever it runs. Holding the weight in 16
bits gives the same results, and saves the cast and half the memory. Embeddings are held in 16 bits too, so that hidden
states are in 16 bits from the start. All other parameters (of norms, and those that a module's own code uses) stay in
float32, as autocast computes with them in float32.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_megatron.data_parallel.buckets.bucket import NARROW
from lightning_megatron.mesh.parts.packages import module_of

_KINDS = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


def lowered_parameters(module: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Parameters that layers hold in ``dtype``: name -> ``dtype``; empty for ``None``."""
    if dtype is None:
        return {}
    found = {id(p) for child in module.modules() if _computes_low(child) for p in child.parameters(recurse=False)}
    return {
        name: dtype
        for name, parameter in module.named_parameters()
        if id(parameter) in found and parameter.dtype in (torch.float32, dtype)
    }


def _computes_low(module: nn.Module) -> bool:
    own = type(module).__name__ == "Conv1D" and module_of(type(module)) == "transformers.pytorch_utils"
    return own or isinstance(module, _KINDS)


def has_narrow_weights(module: nn.Module) -> bool:
    """Whether weights have 16 bits, so that gradients of several backwards lose digits where they add up."""
    return any(parameter.dtype in NARROW for parameter in module.parameters())
