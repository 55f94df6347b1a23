"""Biases that balance experts without a loss (Wang et al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437).

The scores by which experts are chosen get a bias each. After every update of the weights it moves by a step of fixed
length, up where an expert was chosen less often than the mean of the layer, and down where more often::

    chosen in the step's batches, of all replicas    10  6  8  0     mean 6
    moves by                                         -u  0 -u +u

A module's own code may move such a bias, too. One process does so by the choices of the whole batch. A micro-batch, and
a replica, has a part of these, and a step by the sign of its own counts is not a part of that step. So a batch stays
whole where layers keep counts beside a bias, and biases that differ between replicas are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_megatron.experts.routers import Mixture, mixtures_of
from lightning_megatron.layers import MoE
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.names import leaf_of

_NAMES = ("e_score_correction_bias", "expert_bias", "correction_bias")


def bias_of(mixture: Mixture) -> Tensor | None:
    """The bias with which a mixture chooses experts, this package's or Hugging Face's; ``None`` without one."""
    if isinstance(mixture.block, MoE):
        return mixture.block.bias
    below = {id(parameter) for parameter in mixture.experts.parameters()}
    for name, tensor in _state(mixture.block):
        named = leaf_of(name) in _NAMES
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


class OwnBiases:
    """Looks after the routers' biases in a module; those of this package's mixtures are moved by all ranks' choices.

    Args:
        module: the user's, divided.

    Attributes:
        some: whether there are any.
    """

    def __init__(self, module: nn.Module) -> None:
        found = [each for each in mixtures_of(module) if not isinstance(each.block, MoE)]
        self._mixtures = [mixture for mixture in found if _biases(mixture)]
        self.some = bool(self._mixtures)

    def keep_counts(self) -> bool:
        """Whether a forward has kept something with a number for each expert beside a bias, in an attribute."""
        return any(
            _is_count(value, mixture.count)
            for mixture in self._mixtures
            for child in mixture.block.modules()
            for value in vars(child).values()
        )

    def check(self, world: dist.ProcessGroup) -> None:
        """Refuse biases that differ between replicas; collective over the world.

        Raises:
            ValueError: naming one; on every rank.
        """
        mine = {
            f"{mixture.name}.{name}" if mixture.name else name: bias.detach().double().flatten().tolist()
            for mixture in self._mixtures
            for name, bias in _biases(mixture).items()
        }
        seen: dict[str, list[float]] = {}
        for told in objects.gather(mine, world):
            for name, values in told.items():
                if seen.setdefault(name, values) != values:
                    raise ValueError(
                        f"`{name}` differs between replicas: the module's own code moves it by what its router has "
                        "chosen, of which each replica has a part, and one process moves it by all tokens of the "
                        "batch. Add the counts of all replicas up before, in a hook by `self.trainer.strategy.reduce("
                        "counts, reduce_op='sum')`, or call it `expert_bias` and let `MegatronStrategy("
                        "expert_balance='bias')` move it; `expert_balance='replica'` says that each replica's own is "
                        "meant."
                    )


def _biases(mixture: Mixture) -> dict[str, Tensor]:
    """Numbers for each expert, by name, that are not trained: buffers and frozen parameters, but for norms'."""
    norms = {id(b) for child in mixture.block.modules() if isinstance(child, _NormBase) for b in child.buffers()}
    norms |= {id(parameter) for parameter in mixture.experts.parameters()}
    state = [*mixture.block.named_buffers(), *mixture.block.named_parameters()]
    return {
        name: value
        for name, value in state
        if value.numel() == mixture.count and not value.requires_grad and id(value) not in norms
    }


def _is_count(value: object, count: int) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == count and not value.requires_grad
    return isinstance(value, list) and len(value) == count and all(isinstance(each, int | float) for each in value)
