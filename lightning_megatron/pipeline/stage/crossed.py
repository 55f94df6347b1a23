"""Tensors that go from stage to stage with the hidden state, or in the place of a stand-in, in one run of the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.pipeline.elsewhere.away import refuse_away
from lightning_megatron.pipeline.elsewhere.provenance import Provenance


class Crossed:
    """Tensors that arrived in a run besides those that stand-ins turn into, and those of layers that are sent on.

    Attributes:
        aliases: id of a stand-in that could not become what arrived -> itself, and what arrived.
        made: id -> what layers made that takes no gradient, such as counts.
        filled: index of an argument of the first layer -> what arrived where this stage has ``None``.
    """

    def __init__(self) -> None:
        self._sides: dict[tuple[int, str], tuple[int, ...]] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self.aliases: dict[int, tuple[Any, Tensor]] = {}
        self.made: dict[int, Tensor] = {}
        self.filled: dict[int, Tensor] = {}

    def side_of(
        self, leaves: list[Any], main: tuple[int, ...], stop: int, where: str, trunk: str, tracer: Provenance | None
    ) -> tuple[int, ...]:
        """Arguments besides the hidden state that the next stage cannot compute: found by tracing, then remembered.
        What has a gradient always belongs to them, and so does what a layer gave.

        Args:
            leaves: arguments of the layer that the next stage begins with.
            main: which of them are the hidden state.
            stop: number of that layer.
            where: name of the step.
            trunk: name of the layers.
            tracer: follows the step's values, in the first run of its kind.
        """
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in main]
        given = {i for i, leaf in tensors if id(leaf) in self.made or id(leaf) in self.aliases}
        known = self._sides.get((stop, where), ())
        if tracer is not None:
            foreign = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in self.aliases]
            refuse_away(foreign, f"an argument of layer {stop} of `{trunk}`")
            known = tuple(i for i, leaf in tensors if tracer.travels(leaf) or id(leaf) in self.aliases)
        if torch.is_grad_enabled():
            known = tuple(i for i, leaf in tensors if leaf.requires_grad or i in known)
            self._sides[stop, where] = known
        return tuple(i for i, _ in tensors if i in known or i in given)

    def fill(self, leaves: list[Any]) -> list[Any]:
        """Arguments of a layer, in which ``None`` is replaced by what the first layer got."""
        if not self.filled:
            return leaves
        return [self.filled.get(at) if leaf is None else leaf for at, leaf in enumerate(leaves)]

    def original(self, tensor: Tensor) -> Tensor:
        """The tensor that arrived for a stand-in that could not become it; any other tensor itself."""
        alias = self.aliases.get(id(tensor))
        return alias[1] if alias is not None else tensor
