"""Values of spread weights that only their own code can tell (``reset_parameters``), made anew once shards are known.

A unit's values depend on the seed and on its name alone, so they need not be kept until then::

    at the start     unit 0 whole, initialised, hidden │ unit 1 ...       buffers and unspread weights keep their values
    shards known     unit 0 whole, the same numbers, this rank's shard of them kept │ unit 1 ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.layers.table import ParameterSharding


class UnitMember(NamedTuple):
    """A submodule of a unit.

    Attributes:
        name: of the submodule.
        module: it.
        pending: whether it holds tensors on the meta device itself.
    """

    name: str
    module: nn.Module
    pending: bool

    def parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Full names, names in the submodule, and the parameters that it holds itself."""
        for leaf, parameter in self.module._parameters.items():
            if parameter is not None:
                yield (f"{self.name}.{leaf}" if self.name else leaf), leaf, parameter


Initialise = Callable[[Sequence[UnitMember]], None]
"""Gives the tensors of a unit their values, which have memory; split ones are seen whole."""


class LaterUnits:
    """The hidden parameters of a module, by unit.

    Args:
        units: all that get values from their own code.
        hidden: names of parameters that are to have no memory for now.
        table: how each parameter is split over tensor-parallel ranks.
        device: where values are made.
        initialise: makes them.
    """

    def __init__(
        self,
        units: Sequence[Sequence[UnitMember]],
        hidden: Collection[str],
        table: Mapping[str, ParameterSharding],
        device: torch.device,
        initialise: Initialise,
    ) -> None:
        self._units, self._table, self._device, self._initialise = units, table, device, initialise
        held: dict[int, set[int]] = {}
        for number, members in enumerate(units):
            for *_, parameter in (each for member in members for each in member.parameters()):
                held.setdefault(id(parameter), set()).add(number)
        self._dtypes = {
            name: parameter.dtype
            for members in units
            for member in members
            for name, _, parameter in member.parameters()
            if name in hidden and parameter.is_meta and parameter.numel() > 1 and len(held[id(parameter)]) == 1
        }

    @property
    def hidden(self) -> frozenset[str]:
        """Names of the hidden parameters; those that several units hold are not among them."""
        return frozenset(self._dtypes)

    names = hidden

    def fill(self, into: Mapping[str, Callable[[Tensor], Any]]) -> None:
        """Make the values of the hidden parameters again, a unit at a time, and give them to what takes them.

        Args:
            into: by name, what takes this rank's part of a parameter.
        """
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            for members in self._units:
                if any(name in self._dtypes for member in members for name, *_ in member.parameters()):
                    with self._others_kept(members), self._whole(members) as values:
                        self._initialise(members)
                        for name, whole in values.items():
                            entry = self._table.get(name)
                            if name in into:
                                split = entry is not None and not entry.replicated
                                into[name](entry.spec.slice_full(whole) if entry and split else whole)

    @contextmanager
    def _whole(self, members: Sequence[UnitMember]) -> Iterator[dict[str, Tensor]]:
        """Around code that sees whole parameters with memory in the places of hidden ones; gives them by name."""
        places, values = list[tuple[nn.Module, str, nn.Parameter]](), dict[str, Tensor]()
        stands: dict[int, nn.Parameter] = {}
        hidden = {id(p) for member in members for name, _, p in member.parameters() if name in self._dtypes}
        for member in members:
            for name, leaf, parameter in list(member.parameters()):
                if id(parameter) not in hidden:
                    continue
                places.append((member.module, leaf, parameter))
                if id(parameter) not in stands:
                    entry = self._table.get(name)
                    shape = parameter.shape if entry is None or entry.replicated else entry.spec.global_shape
                    empty = torch.empty(shape, dtype=self._dtypes[name], device=self._device)
                    stands[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    values[name] = empty
                member.module._parameters[leaf] = stands[id(parameter)]
        try:
            yield values
        finally:
            for module, leaf, parameter in places:
                module._parameters[leaf] = parameter

    @contextmanager
    def _others_kept(self, members: Sequence[UnitMember]) -> Iterator[None]:
        """Around code after which buffers and other parameters have the values that they have now."""
        others = [p for member in members for name, _, p in member.parameters() if name not in self._dtypes]
        buffers = [each for member in members for each in member.module._buffers.values() if each is not None]
        hidden = {id(p) for member in members for name, _, p in member.parameters() if name in self._dtypes}
        kept = [(each, each.detach().clone()) for each in (*others, *buffers) if id(each) not in hidden]
        yield
        for tensor, values in kept:
            tensor.detach().copy_(values)
