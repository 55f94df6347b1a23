"""The shape of a module in the planner's words, read while the module is whole: once it is cut, its layers differ."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
from torch import nn

from lightning_megatron.experts.routers import mixtures_of
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.planner import ModelShape
from lightning_megatron.planner.model.module_shape import shape_from_module


@dataclass(frozen=True)
class WholeShape:
    """Attached to the module.

    Attributes:
        shape: with one token, as nobody knows yet how many there are; or why there is none.
    """

    shape: ModelShape | str


def note_shape(module: pl.LightningModule) -> None:
    """Read the shape, unless an earlier run has; what cannot be read is no error before somebody asks for it."""
    if Marks.of(module).get(WholeShape) is None:
        Marks.of(module).put(_read(module))


def shape_of(module: pl.LightningModule) -> ModelShape | str:
    """The shape that was read, or, of a module that is whole, the one that can be; or why there is none."""
    return (Marks.of(module).get(WholeShape) or _read(module)).shape


def counted(module: nn.Module, *, seq: int, heads: int | None = None) -> ModelShape:
    """The shape of a whole module, whose mixtures of experts are found by their structure.

    Args:
        module: as it is written.
        seq: tokens of a sequence.
        heads: of attention, where the module does not say how many.

    Raises:
        ValueError: its sizes cannot be read.
    """
    experts = {mixture.path: mixture.count for mixture in mixtures_of(module)}
    return shape_from_module(module, seq=seq, heads=heads, experts=experts)


def _read(module: pl.LightningModule) -> WholeShape:
    try:
        return WholeShape(counted(module, seq=1))
    except Exception as error:  # of a module that nobody has asked to be read
        return WholeShape(str(error).partition("\n")[0])
