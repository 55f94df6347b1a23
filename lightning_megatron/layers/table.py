"""How each parameter of a split module is held, as a table keyed by parameter name.

Gradient buckets, the global norm, checkpoints and export all need to know which part of a parameter this rank holds and
whether its gradient is complete. They read this table; no attributes are attached to the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.mesh.parts.names import called


@dataclass(frozen=True)
class ParameterSharding:
    """How one rank of the tensor group, or of an expert group, holds a parameter.

    Attributes:
        spec: the part of the logical parameter that this rank holds.
        sums_gradient: whether autograd's gradient is a partial sum, which must be summed over the tensor group once
            before it is used (norms and row-parallel biases under sequence parallelism, norms on local heads,
            replicated key/value heads).
        of_experts: whether the parts lie on the ranks of an expert group, of which one may hold all of a parameter.
    """

    spec: ShardSpec
    sums_gradient: bool = False
    of_experts: bool = False

    @property
    def replicated(self) -> bool:
        """Whether every rank of the group holds the whole parameter."""
        return self.spec.is_whole and not self.of_experts

    def describe(self) -> str:
        """A short phrase for tables: ``split``, ``replicated`` or ``replicated, gradient summed``."""
        if not self.replicated:
            return "split"
        return "replicated, gradient summed" if self.sums_gradient else "replicated"


ShardTable = dict[str, ParameterSharding]
"""Parameter name, relative to the split module -> its sharding."""


def replicated_table(module: nn.Module, sums_gradient: bool = False) -> ShardTable:
    """Table of a module whose parameters stay whole on every rank."""
    return {
        name: ParameterSharding(ShardSpec.whole(parameter.shape), sums_gradient)
        for name, parameter in module.named_parameters()
    }


def apply_specs(module: nn.Module, table: Mapping[str, ParameterSharding]) -> ShardTable:
    """Reduce the parameters, and buffers, in ``table`` to their local slices, in place.

    The parameter objects stay the same, so tied modules, optimizers and lists of parameters still refer to them. A
    parameter that is already local, because a tied module was split before, is not changed. Gradients of parameters
    that are sliced are dropped.

    Args:
        module: the module whose parameters ``table`` names.
        table: sharding of each parameter.

    Returns:
        A copy of ``table``.

    Raises:
        ValueError: a parameter has neither its logical nor its local shape.
    """
    for name, sharding in table.items():
        spec, parameter = sharding.spec, called(module, name)
        if tuple(parameter.shape) == spec.global_shape:
            if not spec.is_whole:
                with torch.no_grad():
                    parameter.data = spec.slice_full(parameter.data)
                    parameter.grad = None
        elif tuple(parameter.shape) != spec.local_shape:
            raise ValueError(
                f"Parameter {name!r} has shape {tuple(parameter.shape)}, neither its logical shape {spec.global_shape} "
                f"nor its local shape {spec.local_shape}; shard a tied parameter the same way everywhere."
            )
    return dict(table)
