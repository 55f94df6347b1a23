"""Keeps the activations of layers in host memory between forward and backward, without the modules taking part.

What autograd saves in the forward of a layer is copied to the host, and its memory on the device is freed. The
backward gives the same bits as without. Parameters, buffers, and arguments other than the input (masks, tables) stay
where they are.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_megatron.context_parallel.rule_masks import RuleMask
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.cut.trunk import Trunk
from lightning_megatron.pipeline.elsewhere.abstract import is_ordinary
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, Wrapper
from lightning_megatron.strategy.activations.host_budget import CallSizes, HostBudget
from lightning_megatron.strategy.activations.host_copies import KeptCall, Traffic, View, memory_of
from lightning_megatron.strategy.activations.host_request import HostRequest


def chosen_layers(trunk: Trunk, request: HostRequest, owned: Sequence[str]) -> list[str]:
    """Names of the layers, among those on this rank, whose activations are kept in host memory.

    Raises:
        ValueError: a pattern matches no layer.
    """
    names = list(trunk.layer_names[:: request.every])
    for pattern in request.patterns or ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"`activation_offload` names {pattern!r}, which matches none of the layers {', '.join(names[:6])}, ..."
            )
    if request.patterns is not None:
        names = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in request.patterns)]
    here = Parts(list(owned))
    return [name for name in names if name in here]


class HostCall(Wrapper):
    """Runs a layer's forward; all that autograd saves in it is kept in host memory.

    Args:
        module: the layer.
        name: its name.
        traffic: counts, and copies.
        budget: checks that host memory has room.
    """

    slot = ForwardSlot.HOST

    def __init__(self, module: nn.Module, name: str, traffic: Traffic, budget: HostBudget) -> None:
        super().__init__(module)
        self._name, self._traffic, self._budget = name, traffic, budget

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or in_backward():
            return self.forward(*args, **kwargs)
        inputs = [x.local() if isinstance(x, WholeTensor) else x for x in tensors_in(args, kwargs)]
        call = KeptCall(self._name, self._traffic, self.staying(inputs))
        given = {memory_of(x) for x in inputs}

        def pack(tensor: Tensor) -> Tensor | View:
            if call.stays(tensor):
                return tensor
            view = call.whole(tensor, "input" if memory_of(tensor) in given else "other")
            view.copy.uses += 1
            return view

        def unpack(kept: Tensor | View) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            call.fetch()
            return kept.get()

        with saved_tensors_hooks(pack, unpack):
            found = self.forward(*args, **kwargs)
        size = inputs[0].nbytes if inputs else 0
        if self._budget.wants(self._name, size):
            self._budget.measured(self._name, size, CallSizes(sum(call.kinds.values()), 0.0), self._traffic.held)
        return found

    def staying(self, inputs: Sequence[Tensor]) -> set[int]:
        """Storages of the tensors that the layer uses and does not make."""
        module: nn.Module = self.module
        own = [tensor for tensor in (*module.parameters(), *module.buffers()) if is_ordinary(tensor)]
        with torch._C.DisableTorchFunction():  # no use of the weights, which would bring them here before their layer
            weights = {memory_of(x) for x in own}
        return weights | {memory_of(x) for x in inputs if not x.requires_grad and x is not inputs[0]}


def tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors of numbers, then all others, that a layer is given; but masks that are rules, which have no memory."""
    found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.layout == torch.strided]
    found = [x for x in found if not isinstance(x, RuleMask)]
    return [x for x in found if x.is_floating_point()] + [x for x in found if not x.is_floating_point()]
