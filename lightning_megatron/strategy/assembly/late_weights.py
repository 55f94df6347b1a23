"""Weights of layers that a rank never has whole before it trains: they were built on the meta device, and are spread.

Of a stage that is larger than memory, each replica keeps its shard. Shards are known once the optimizers are, so until
then these weights are hidden, and read as NaN::

    divided         layers hidden, the rest has memory     no values
    optimizers      made from hidden parameters            values at once, and whole, if `configure_optimizers` looks
    prepared        shards have memory                     values of the shards, one tensor at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoints.loading.as_built import is_hidden
from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.data_parallel.windows.reported_uses import ReportedUses
from lightning_megatron.mesh.messages import objects


class LateValues(Protocol):
    """Values of a module's tensors that are given when they are asked for, once."""

    @property
    def hidden(self) -> frozenset[str]:
        """Names of parameters without memory."""

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors that get values from here, hidden ones among them."""

    def fill(self, into: Mapping[str, Callable[[Tensor], Any]]) -> None:
        """Give them.

        Args:
            into: by name of a hidden parameter, what takes this rank's part of it.
        """


class JoinedValues:
    """Those of several sources, of which each has other names.

    Args:
        sources: one or more.
    """

    def __init__(self, sources: Sequence[LateValues]) -> None:
        self._sources = sources

    @property
    def hidden(self) -> frozenset[str]:
        """See :class:`LateValues`."""
        return frozenset().union(*(each.hidden for each in self._sources))

    @property
    def names(self) -> frozenset[str]:
        """See :class:`LateValues`."""
        return frozenset().union(*(each.names for each in self._sources))

    def fill(self, into: Mapping[str, Callable[[Tensor], Any]]) -> None:
        """See :class:`LateValues`."""
        for each in self._sources:
            each.fill({name: take for name, take in into.items() if name in each.hidden})


class LateWeights:
    """Fills them when the time has come.

    Args:
        module: this rank's part of the module.
        built: the values.
        device: where the weights lie.

    Attributes:
        names: of those that are hidden now.
        filled: of all that are filled with them.
        load: reads weights from files, over those that were built; ``None`` for none.
    """

    def __init__(self, module: nn.Module, built: LateValues, device: torch.device) -> None:
        self._module, self._built, self._device = module, built, device
        self.names, self.filled, self._pending = built.hidden, built.names, True
        self._parameters = {name: module.get_parameter(name) for name in sorted(built.hidden)}
        self._dtypes = {name: parameter.dtype for name, parameter in self._parameters.items()}
        self.load: Callable[[], None] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around code of the user's that may look at the module's tensors, which then get all of their values, on all
        ranks; collective over them.
        """
        tensors = [*self._module.parameters(), *self._module.buffers()]
        with ReportedUses({id(tensor) for tensor in tensors}, lambda _: self.show()):
            yield
        if any(objects.gather(not self._pending, None)):
            self.show()

    def show(self) -> None:
        """Fill the weights whole, if that has not been done."""
        if not self._pending:
            return
        self._pending, whole = False, dict[str, Callable[[Tensor], Any]]()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for name, parameter in self._parameters.items():
                if is_hidden(parameter):  # not under another of its names
                    parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
                whole[name] = parameter.data.copy_
            self.names = frozenset()
            self._fill(whole)

    def settle(self, gradients: ModelGradients) -> None:
        """Fill the shards of weights that are spread by now."""
        if self._pending:
            self._pending = False
            takers = gradients.weights.takers(self.names)  # into float32 too, of what the module has rounded
            self._fill({name: partial(_rounded, self._dtypes[name], take) for name, take in takers.items()})
            self.names = frozenset()

    def _fill(self, into: dict[str, Callable[[Tensor], Any]]) -> None:
        self._built.fill(into)
        if self.load is not None:
            self.load()


def _rounded(dtype: torch.dtype, take: Callable[[Tensor], Any], values: Tensor) -> None:
    take(values.to(dtype))
