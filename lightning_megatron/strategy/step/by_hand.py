"""Steps of manual optimization: backwards that they run themselves, and weights that they update themselves.

Gradients are summed over the ranks that share a parameter around a backward that Lightning runs. With manual
optimization a step may run its own, ``loss.backward()`` instead of ``self.manual_backward(loss)``, as often as it
likes, and one process does not tell the two apart. So while such a step runs, ``torch.autograd.backward``, which
``Tensor.backward`` calls, is this package's.

A step that updates weights by a norm over ``parameter.grad`` computes another norm on every tensor-parallel rank, from
its slices. The weights that all of these ranks hold show it: they are copies no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.layers.table import ParameterSharding
from lightning_megatron.mesh.messages.collectives import raw_all_reduce

_ALIKE = {torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative


class BackwardsByHand:
    """Inside, every backward that reaches parameters has its gradients summed.

    Args:
        summing: gives what is to be around a backward.
        shows_parts: gives what is to be around all of that in a step, which may see split parameters whole.
    """

    def __init__(
        self,
        summing: Callable[[], AbstractContextManager[None]],
        shows_parts: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._summing, self._shows_parts = summing, shows_parts
        self._torchs: Any = None
        self._running = False

    def __enter__(self) -> None:
        self._torchs, torch.autograd.backward = torch.autograd.backward, self._backward

    def __exit__(self, *_: object) -> None:
        torch.autograd.backward, self._torchs = self._torchs, None

    def summed(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run ``backward``, and sum what gradients it leaves."""
        self._running = True
        try:
            with self._summing():
                backward(*args, **kwargs)
        finally:
            self._running = False

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        """Stands for ``torch.autograd.backward``."""
        inputs = args[5] if len(args) > 5 else kwargs.get("inputs")
        if self._running or not _reaches_parameters(inputs):
            self._torchs(*args, **kwargs)
        else:
            with self._shows_parts():
                self.summed(self._torchs, *args, **kwargs)


def _reaches_parameters(inputs: Any) -> bool:
    """Whether a backward with these ``inputs=`` leaves gradients on parameters; ``None`` for all leaves there are."""
    if inputs is None:
        return True
    chosen = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    return any(isinstance(tensor, nn.Parameter) for tensor in chosen)


class WeightCopies:
    """The parameters that all tensor-parallel ranks hold whole.

    Args:
        module: this rank's part of the user's module.
        table: how parameters are split.
        group: these ranks.
    """

    def __init__(self, module: nn.Module, table: Mapping[str, ParameterSharding], group: dist.ProcessGroup) -> None:
        named = module.named_parameters()
        self._copies = {name: copy for name, copy in named if name not in table or table[name].replicated}
        self._group = group

    def compare(self) -> None:
        """Compare them over the ranks; collective.

        Raises:
            RuntimeError: they differ: a step computes with slices somewhere.
        """
        if not self._copies:
            return
        with torch.no_grad():
            sums = torch.stack([copy.sum(dtype=torch.float64) for copy in self._copies.values()])
            sizes = torch.stack([copy.abs().sum(dtype=torch.float64) for copy in self._copies.values()])
        highest, lowest = raw_all_reduce(torch.stack([sums, -sums]), self._group, maximum=True).unbind()
        apart = (highest + lowest) / sizes.clamp(min=1e-30)
        for (name, copy), difference in zip(self._copies.items(), apart.tolist(), strict=True):
            if difference > _ALIKE.get(copy.dtype, 1e-4):
                raise RuntimeError(
                    f"`{name}`, of which every tensor-parallel rank holds a copy, differs between them after this step "
                    f"(by {difference:.2g} of its size). The step updates weights by numbers that are not the same on "
                    "all ranks: random ones that each draws for itself, or those that code beyond torch's functions "
                    "(NumPy, an extension) makes of the slices on one rank. Draw them alike, compute by functions of "
                    "torch, or use `tensor_parallel_size=1`."
                )
