"""The report of `parallelize`: a table of parameters for code, and a table of the plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from lightning_megatron.layers.table import ParameterSharding, ShardTable
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.parallelize.plan.patterns import generalize
from lightning_megatron.parallelize.plan.row import ModuleRow


@dataclass
class ParallelReport:
    """The plan that was applied to a module.

    Attributes:
        source: origin of the plan (``"argument"``, ``"hugging face"``, ``"drop-in layers"``, ``"rules"``, ``"none"``).
        tensor_parallel_size: size of the tensor group.
        sequence_parallel: whether activations between regions are split along the sequence.
        parameters: every parameter by its name in the module (all names of tied parameters): its `ShardSpec`, and
            whether its gradient is a partial sum that must be summed over the tensor group once.
        buffers: every buffer that is split, by its name, likewise.
        rows: the plan, one row per module.
        notes: remarks about the whole plan.
    """

    source: str
    tensor_parallel_size: int
    sequence_parallel: bool = False
    parameters: ShardTable = field(default_factory=dict)
    buffers: ShardTable = field(default_factory=dict)
    rows: list[ModuleRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def spec(self, name: str) -> ShardSpec:
        """The part of a parameter that this rank holds."""
        return self.parameters[name].spec

    @property
    def partial_gradients(self) -> list[str]:
        """Names of parameters whose gradients must be summed over the tensor group before they are used."""
        return [name for name, sharding in self.parameters.items() if sharding.sums_gradient]

    def grouped(self, every_layer: bool = False) -> list[tuple[ModuleRow, int]]:
        """Rows that are alike but for the numbers of their layers, each once with how many there are.

        Args:
            every_layer: whether numbered layers stay apart.
        """
        seen: dict[ModuleRow, int] = {}
        for row in self.rows:
            alike = row if every_layer else replace(row, name=_of_any_layer(row.name))
            seen[alike] = seen.get(alike, 0) + 1
        return list(seen.items())

    def explain(self, every_layer: bool = False) -> str:
        """The plan as a table.

        Args:
            every_layer: whether to list numbered layers separately instead of once with ``*``.
        """
        head = f"tensor parallel plan ({self.source}), {self.tensor_parallel_size} ranks"
        head += ", sequence parallel" if self.sequence_parallel else ""
        lines: list[tuple[str, ...]] = [("module", "style", "global", "local", "forward", "backward", "note")]
        for row, count in self.grouped(every_layer):
            shapes = _shape(row.global_shape), _shape(row.local_shape)
            note = "; ".join(filter(None, (row.note, f"x{count}" if count > 1 else "")))
            lines.append((row.name, row.style, *shapes, row.forward, row.backward, note))
        return "\n".join([head, *_columns(lines), *self.notes])


def whole_table(module: nn.Module) -> ShardTable:
    """A table in which every parameter of a module, with all names of tied ones, is replicated."""
    return {
        name: ParameterSharding(ShardSpec.whole(parameter.shape))
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _of_any_layer(name: str) -> str:
    """The name with layer numbers replaced by ``*``; a number as the last component, as in a ``Sequential``, stays."""
    holder, dot, last = name.rpartition(".")
    return f"{generalize(holder)}{dot}{last}"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else "x".join(map(str, shape))


def _columns(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
