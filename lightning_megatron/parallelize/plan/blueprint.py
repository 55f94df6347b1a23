"""What is decided about a module before anything of it is changed.

A *region* is a set of linear layers whose outputs nothing reads but one further linear layer, and from which that
layer's input is computed completely: query, key and value before the output projection; up (and gate) before down.
Splitting the outputs of the first and the input of the second then needs one sum at the end, whatever
parameter-free code lies between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_megatron.mesh.parts.boxes import Range, block_range
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.heads import HeadSizes
from lightning_megatron.parallelize.reading.trace import Trace

Door = tuple[str, tuple[int | str, ...]]
"""A module around projections, and the arguments (positions or keywords) in which it is handed what they read."""


@dataclass(frozen=True)
class ColumnCut:
    """How the output features of a column-parallel layer are cut.

    Attributes:
        segments: sizes of its packed parts.
        chosen: per part, the attention's sizes where it holds fewer key/value heads than there are ranks: then every
            rank computes the heads that its query heads read, and the parameter stays whole. None for equal blocks.
    """

    segments: tuple[int, ...]
    chosen: tuple[HeadSizes | None, ...]

    @classmethod
    def blocks(cls, *segments: int) -> ColumnCut:
        """Every part cut into equal blocks."""
        return cls(segments, (None,) * len(segments))

    @property
    def keeps_parameter(self) -> bool:
        """Whether the parameter stays whole on every rank."""
        return any(self.chosen)

    def fits(self, parts: int) -> bool:
        """Whether every part can be cut."""
        return all(chosen or size % parts == 0 for size, chosen in zip(self.segments, self.chosen, strict=True))

    def ranges(self, parts: int, rank: int) -> tuple[Range, ...]:
        """Ranges of output features that one rank computes, in order."""
        ranges, base = [], 0
        for segment, heads in zip(self.segments, self.chosen, strict=True):
            inside = (block_range(segment, parts, rank),) if heads is None else heads.features_read_by(parts, rank)
            ranges += [(base + start, base + stop) for start, stop in inside]
            base += segment
        return tuple(ranges)


@dataclass
class Region:
    """Column-parallel layers and the row-parallel layer that ends them.

    Attributes:
        columns: names of the layers split by output, in execution order.
        row: name of the layer split by input.
        scope: name of the innermost module that holds them all.
        gathered: whether the columns' outputs are gathered and the row's input is split again, because the code between
            needs whole tensors.
        tables: embeddings of per-head biases (relative positions) that the region reads; split by head unless gathered.
        inner: names of further parameters that act inside (norms on local heads); their gradients are partial sums
            unless gathered.
        others: names of unsplit layers whose outputs it reads as well; their gradients would be partial, so such a
            region can only be gathered.
        cuts: how each column layer is cut.
        attributes: (module name, attribute) -> local value.
        arguments: arguments of the scope with one entry per head (ALiBi, position biases), cut on the way in: position
            or keyword -> ``"heads"`` for a dim of that size, ``"batch"`` for [batch * heads, ..].
        sizes: attention sizes, if it is an attention.
        narrowed: module and arguments whose width its code reads, to be shown the local one (see ``narrowing``).
        tried: positions and keywords of the scope's arguments that were tensors when the cuts were tried, if they were.
        note: what was decided and why, for people.
    """

    columns: list[str]
    row: str
    scope: str
    gathered: bool = False
    tables: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    cuts: dict[str, ColumnCut] = field(default_factory=dict)
    attributes: dict[tuple[str, str], int] = field(default_factory=dict)
    arguments: dict[int | str, str] = field(default_factory=dict)
    sizes: HeadSizes | None = None
    narrowed: Door | None = None
    tried: frozenset[int | str] | None = None
    note: str = ""

    @property
    def members(self) -> list[str]:
        """Columns and row."""
        return [*self.columns, self.row]


@dataclass
class Blueprint:
    """What is to become of a module.

    Attributes:
        source: where the plan came from: ``"argument"``, ``"hugging face"``, ``"drop-in layers"`` or ``"rules"``.
        styles: style of every module that is not simply left alone, by name.
        regions: settled pairs of column- and row-parallel layers.
        heads: names of vocabulary heads.
        trace: the trace that was read, if the module could be run.
        untraced: why it could not be.
    """

    source: str
    styles: dict[str, Style]
    regions: list[Region] = field(default_factory=list)
    heads: set[str] = field(default_factory=set)
    trace: Trace | None = None
    untraced: str = ""
