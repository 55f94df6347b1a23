"""The decisions about a module, made before it is changed.

A *region* is a set of linear layers whose outputs are read by one further linear layer only, together with that layer,
whose input must be computed completely from these outputs: query, key and value before the output projection; up (and
gate) before down. If the outputs of the former and the input of the latter are split, one sum at the end is enough, for
any parameter-free code in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from lightning_megatron.mesh.parts.boxes import Range, block_range
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.divisible import Divisible
from lightning_megatron.parallelize.reading.heads import HeadSizes
from lightning_megatron.parallelize.reading.trace import Trace

Door = tuple[str, tuple[int | str, ...]]
"""A module that contains projections, and those of its arguments (positions or keywords) that the projections read."""


class ViewsInside(Protocol):
    """Gives views in the code between layers sizes of one rank (``trial/split_views.py``)."""

    def install(self, columns: Iterable[nn.Module], row: nn.Module) -> None:
        """Add hooks to the column-parallel layers and to the row-parallel one."""


@dataclass(frozen=True)
class ColumnCut:
    """How the output features of a column-parallel layer are cut.

    Attributes:
        segments: sizes of its packed parts.
        chosen: per part, None if it is cut into equal blocks. Sizes of the attention if its key/value heads cannot be
            divided over the ranks: every rank then computes the heads that its query heads read, and the parameter
            stays whole.
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
        """Whether every packed part can be cut for ``parts`` ranks."""
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
        gathered: whether the outputs of the columns are gathered and the input of the row is split again, because the
            code in between needs whole tensors.
        tables: embeddings of per-head biases (relative positions) that the region reads; split by head unless gathered.
        inner: names of further parameters used inside (norms on local heads); their gradients are partial sums unless
            gathered.
        others: names of unsplit layers whose outputs the region also reads; their gradients would be partial sums, so
            such a region can only be gathered.
        cuts: how each column-parallel layer is cut.
        attributes: (module name, attribute) -> local value.
        methods: (module name, method), which a run has called on the way to the columns; ``forward`` is not named.
        arguments: arguments of the scope with one entry per head (ALiBi, position biases), sliced before the call:
            position or keyword -> ``"heads"`` for a dim of that size, ``"batch"`` for [batch * heads, ..].
        sizes: attention sizes, if the region is an attention.
        narrowed: module and arguments whose width its code reads and must see as the local one (see ``narrowing``).
        views: what the views of code between the layers are given that reads the sizes of the model; None without any.
        tried: positions and keywords of the scope's arguments that were tensors in the trial; None without a trial.
        note: what was decided and why, for the report.
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
    methods: set[tuple[str, str]] = field(default_factory=set)
    arguments: dict[int | str, str] = field(default_factory=dict)
    sizes: HeadSizes | None = None
    narrowed: Door | None = None
    views: ViewsInside | None = None
    tried: frozenset[int | str] | None = None
    note: str = ""

    @property
    def members(self) -> list[str]:
        """Names of the column-parallel layers and of the row-parallel one."""
        return [*self.columns, self.row]

    def gather(self, cuts: dict[str, ColumnCut], note: str) -> Region:
        """The region with gathered outputs of its columns, which code of any kind may lie between."""
        own: dict[str, Any] = {"attributes": {}, "arguments": {}, "narrowed": None, "views": None}
        return replace(self, gathered=True, cuts=cuts, note=note, **own)


@dataclass
class Blueprint:
    """All decisions about a module.

    Attributes:
        source: origin of the plan: ``"argument"``, ``"hugging face"``, ``"drop-in layers"`` or ``"rules"``.
        styles: style of every module that changes, by name.
        regions: pairs of column- and row-parallel layers, with their final cuts.
        heads: names of vocabulary heads.
        products: of modules that are cut like a linear layer, how their tensors are cut.
        trace: the trace of the module, if it could be run.
        untraced: the reason why it could not be run.
        by_views: whether views between the layers may be given sizes of one rank.
    """

    source: str
    styles: dict[str, Style]
    regions: list[Region] = field(default_factory=list)
    heads: set[str] = field(default_factory=set)
    products: dict[str, Divisible] = field(default_factory=dict)
    trace: Trace | None = None
    untraced: str = ""
    by_views: bool = True
