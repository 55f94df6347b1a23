"""Results of a rehearsal, for people and for programs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_megatron.mesh.layout import Layout

GIB = 2.0**30
_SHOWN = 24
"""Instructions that are printed from the start of a rank's list."""


@dataclass(frozen=True)
class Communication:
    """One kind of communication and how often it happens.

    Attributes:
        phase: ``setup``, ``step`` or ``optimizer``.
        operation: such as ``all-reduce`` or ``send``.
        axis: mesh axis of the group, ``world``, or ``shared`` for other groups (tied parameters).
        ranks: global ranks of the group.
        peer: global rank on the other side of a transfer, ``None`` for a collective.
        bytes: of one operation's tensor: what is summed, sent or broadcast, the result of a gather, the operand of a
            scatter.
        count: how often it happens on this rank.
    """

    phase: str
    operation: str
    axis: str
    ranks: tuple[int, ...]
    peer: int | None
    bytes: int
    count: int


@dataclass(frozen=True)
class Rehearsal:
    """Report of what one rank would build and do.

    Attributes:
        rank: global rank.
        layout: the grid.
        plan: the tensor-parallel plan as a table, where layers are split.
        layers: indices of the trunk's layers on this rank; all of them with one stage.
        parameters: elements of the parameters that this rank holds.
        whole_parameters: elements of the whole module's, tied ones counted once.
        bytes_by_kind: ``weights``, ``gradients``, ``optimizer``, ``activations`` (the most that waits for its backward)
            and ``peak`` (the most of all tensors at any moment of the step); with ``activation_offload`` also ``host``
            (the most activations in host memory, which the others leave out).
        instructions: this rank's list for one step, as drawn by ``lightning-megatron timeline``.
        communication: everything it sends, in order of first appearance.
        remarks: what a rehearsal could not know.
    """

    rank: int
    layout: Layout
    plan: str
    layers: tuple[int, ...]
    parameters: int
    whole_parameters: int
    bytes_by_kind: Mapping[str, int]
    instructions: tuple[str, ...]
    communication: tuple[Communication, ...]
    remarks: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rank": self.rank,
            "coordinates": asdict(self.layout.coordinates(self.rank)),
            "world_size": self.layout.world_size,
            "layers": list(self.layers),
            "parameters": self.parameters,
            "whole_parameters": self.whole_parameters,
            "bytes": dict(self.bytes_by_kind),
            "instructions": list(self.instructions),
            "communication": [asdict(entry) for entry in self.communication],
            "remarks": list(self.remarks),
        }

    def describe(self) -> str:
        """All of it on a page."""
        lines = [
            f"{self.layout.describe(self.rank)} of {self.layout.world_size}",
            f"layers        {_ranges(self.layers) or 'all'}",
            f"parameters    {self.parameters:,} of {self.whole_parameters:,}",
        ]
        lines += [f"{kind:<14}{_size(size)}" for kind, size in self.bytes_by_kind.items()]
        if self.instructions:
            kinds = Counter("".join(itertools.takewhile(str.isalpha, step)) for step in self.instructions)
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            more = " ..." if len(self.instructions) > _SHOWN else ""
            lines += [f"instructions  {len(self.instructions)}: {counts}"]
            lines += [f"              {' '.join(self.instructions[:_SHOWN])}{more}"]
        for phase in dict.fromkeys(entry.phase for entry in self.communication):
            lines += ["", f"{phase}: communication"]
            lines += [_line(entry) for entry in self.communication if entry.phase == phase]
        if self.plan:
            lines += ["", self.plan]
        lines += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(lines)


def _line(entry: Communication) -> str:
    where = f"with rank {entry.peer}" if entry.peer is not None else f"{len(entry.ranks)} ranks {_ranges(entry.ranks)}"
    return f"  {entry.count:>7} x {entry.operation:<14} {_size(entry.bytes):>11}  {entry.axis:<18} {where}"


def _size(size: float) -> str:
    """Bytes in a unit that people read."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _ranges(numbers: tuple[int, ...]) -> str:
    """``0-3, 8-11`` for runs, ``1202-1242 by 8`` for strides."""
    if len(numbers) > 2:
        stride = numbers[1] - numbers[0]
        if stride > 1 and all(b - a == stride for a, b in itertools.pairwise(numbers)):
            return f"{numbers[0]}-{numbers[-1]} by {stride}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:6])
    return shown + (", ..." if len(runs) > 6 else "")
