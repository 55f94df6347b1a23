"""Biases that balance experts without a loss (Wang et al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437).

The scores by which experts are chosen get a bias each. After every update of the weights it moves by a step of fixed
length, up where an expert was chosen less often than the mean of the layer, and down where more often::

    chosen in the step's batches, of all replicas    10  6  8  0     mean 6
    moves by                                         -u  0 -u +u
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_megatron.experts.routers import Mixture
from lightning_megatron.layers import MoE

_NAMES = ("e_score_correction_bias", "expert_bias", "correction_bias")


def bias_of(mixture: Mixture) -> Tensor | None:
    """The bias with which a mixture chooses experts, of this package's or of Hugging Face's; ``None`` without one."""
    if isinstance(mixture.block, MoE):
        return mixture.block.bias
    below = {id(parameter) for parameter in mixture.experts.parameters()}
    for name, tensor in _state(mixture.block):
        named = name.rpartition(".")[2] in _NAMES
        if named and tensor.numel() == mixture.count and not tensor.requires_grad and id(tensor) not in below:
            return tensor
    return None


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_buffers(), *module.named_parameters()]


@torch.no_grad()
def move_bias(bias: Tensor, rows: Sequence[int], rate: float) -> None:
    """Move a bias by ``rate · sign(mean - rows)``, in place.

    Args:
        bias: of any shape with one element for each expert.
        rows: how often each was chosen.
        rate: length of a step.
    """
    total, count = sum(rows), len(rows)
    steps = [(total > count * each) - (total < count * each) for each in rows]  # integers: the same in any layout
    bias.add_(torch.tensor(steps, dtype=bias.dtype, device=bias.device).view_as(bias), alpha=rate)
