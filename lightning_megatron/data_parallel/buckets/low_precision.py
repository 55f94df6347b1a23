"""Which parameters layers hold in 16 bits while the optimizer keeps them in 32.

Under autocast a linear or a convolution casts its float32 weight to 16 bits whenever it runs, so keeping it in 16 bits
changes none of its results and saves the cast and half the memory. Embeddings are held so too, which makes the hidden
state start out in 16 bits. Everything else (norms, and parameters that a module's own code uses) stays in float32:
there autocast computes in float32.
"""

from __future__ import annotations

import torch
from torch import nn

_KINDS = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


def lowered_parameters(module: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Names of the parameters that layers hold in ``dtype``; none for ``None``."""
    if dtype is None:
        return {}
    found = {id(p) for child in module.modules() if _computes_low(child) for p in child.parameters(recurse=False)}
    return {
        name: dtype
        for name, parameter in module.named_parameters()
        if id(parameter) in found and parameter.dtype in (torch.float32, dtype)
    }


def _computes_low(module: nn.Module) -> bool:
    own = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    return own or isinstance(module, _KINDS)
