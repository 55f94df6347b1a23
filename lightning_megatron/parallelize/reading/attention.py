"""Attention sizes as modules write them down, and what they become on one rank.

Attention code reads its sizes from attributes (``num_heads``, ``split_size``, ``embed_dim``, ...) or from the
shapes it gets. Attributes that hold a number of heads or a width have to hold the local one afterwards; which of
them the code really uses is found out by trying (see ``probe``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_megatron.mesh.parts.boxes import Range, block_range, key_value_heads

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "num_query_heads", "heads")
KEY_VALUE = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_head_kv", "kv_heads")
HEAD_SIZE = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv", "d_head")
_NO_WIDTHS = r"vocab|_idx|_id$|position|head_dim|(?<!all_)head_size|d_kv|d_head|key_value_proj_dim"
GROUPS = ("num_key_value_groups", "n_rep", "num_groups", "n_groups")


@dataclass(frozen=True)
class HeadSizes:
    """Numbers of query heads, of key/value heads, and features per head."""

    heads: int
    key_value: int
    size: int

    def read_by(self, parts: int, rank: int) -> tuple[int, ...]:
        """Key/value heads that the query heads of one rank read."""
        return key_value_heads(self.heads, self.key_value, parts, rank)


@dataclass(frozen=True)
class ColumnCut:
    """How the output features of a column-parallel layer are cut.

    Attributes:
        segments: sizes of its packed parts.
        chosen: per part, whether it holds key/value heads fewer than ranks: then every rank computes the heads that
            its query heads read, and the parameter stays whole.
        heads: sizes of the attention, where a part is chosen from.
    """

    segments: tuple[int, ...]
    chosen: tuple[bool, ...]
    heads: HeadSizes | None = None

    @classmethod
    def blocks(cls, *segments: int) -> ColumnCut:
        """Every part cut into equal blocks."""
        return cls(segments, (False,) * len(segments))

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
        for segment, chosen in zip(self.segments, self.chosen, strict=True):
            if chosen:
                assert self.heads is not None
                size = self.heads.size
                ranges += [(base + h * size, base + (h + 1) * size) for h in self.heads.read_by(parts, rank)]
            else:
                start, stop = block_range(segment, parts, rank)
                ranges.append((base + start, base + stop))
            base += segment
        return tuple(ranges)


def head_sizes(owner: nn.Module, widths: Iterable[int]) -> HeadSizes | None:
    """Sizes of an attention module, from its attributes or its ``config``; None where it does not look like one.

    Args:
        owner: the module that holds the projections.
        widths: output sizes of the projections; the number of heads must divide the largest.
    """
    sources = [owner, getattr(owner, "config", None)]
    heads = _first(sources[:1], HEADS) or (_first(sources[1:], HEADS) if _looks_like_attention(owner) else None)
    widest = max(widths, default=0)
    if not heads or widest % heads:
        return None
    key_value = _first(sources, KEY_VALUE) or heads
    if getattr(owner, "multi_query", False) and not getattr(owner, "new_decoder_architecture", False):
        key_value = 1
    size = _first(sources[:1], HEAD_SIZE) or _first(sources[1:], HEAD_SIZE[:1])
    if not size:
        total = widest if widest in (getattr(owner, n, None) for n in ("embed_dim", "hidden_size", "n_embd")) else 0
        size = (total or widest) // heads
    return HeadSizes(heads, key_value if heads % key_value == 0 else heads, size)


def local_attributes(
    owners: Mapping[str, nn.Module], sizes: HeadSizes | None, widths: set[int], parts: int, read: int
) -> list[dict[tuple[str, str], int]]:
    """Sets of attributes to try as local ones, fewest changes first.

    Args:
        owners: modules whose code runs between the column- and the row-parallel layer, by name.
        sizes: attention sizes, if any.
        widths: logical widths that become ``width / parts``.
        parts: size of the tensor group.
        read: key/value heads per rank.

    Returns:
        Each a table (module name, attribute) -> local value.
    """
    ratios: dict[tuple[str, str], int] = {}
    heads: dict[tuple[str, str], int] = {}
    wide: dict[tuple[str, str], int] = {}
    for name, owner in owners.items():
        for attribute, value in _integers(owner):
            local = _local_heads(attribute, value, sizes, parts, read)
            if local == value:
                continue
            if local is not None:
                (ratios if attribute in GROUPS else heads)[name, attribute] = local
            elif value in widths and value % parts == 0 and not re.search(_NO_WIDTHS, attribute):
                wide[name, attribute] = value // parts
    plain: list[dict[tuple[str, str], int]] = [{}, heads, wide, heads | wide]
    options = [*(ratios | option for option in plain), *plain]  # a masked batch may take a way that was not tried
    for key, value in _unnamed(owners, widths, parts).items() if not heads else ():
        options += [{key: value}, {key: value} | wide]
    return [option for i, option in enumerate(options) if option not in options[:i]]


def _unnamed(owners: Mapping[str, nn.Module], widths: set[int], parts: int) -> dict[tuple[str, str], int]:
    """Attributes that may be a number of heads although their names do not say so (``self.h``)."""
    return {
        (name, attribute): value // parts
        for name, owner in owners.items()
        for attribute, value in _integers(owner)
        if value not in widths
        and value % parts == 0
        and all(width % value == 0 for width in widths)
        and not re.search(_NO_WIDTHS, attribute)
    }


def _local_heads(attribute: str, value: int, sizes: HeadSizes | None, parts: int, read: int) -> int | None:
    if attribute in GROUPS:
        return None if sizes is None or value != sizes.heads // sizes.key_value else sizes.heads // parts // read
    if attribute in KEY_VALUE or (sizes is not None and "kv" in attribute and value == sizes.key_value):
        return None if sizes is None or value != sizes.key_value else read
    if "head" in attribute and not re.search(r"dim|size", attribute):
        if sizes is not None and value == sizes.heads:
            return value // parts
        return value // parts if sizes is None and value % parts == 0 else None
    return None


def _integers(owner: nn.Module) -> list[tuple[str, int]]:
    skipped = {"in_features", "out_features", "nf", "nx", "layer_idx", "layer_id"}
    return [
        (name, value)
        for name, value in vars(owner).items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1 and name not in skipped
    ]


def _first(sources: Iterable[Any], names: Iterable[str]) -> int | None:
    for source in sources:
        for name in names:
            value = getattr(source, name, None) if source is not None else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _looks_like_attention(owner: nn.Module) -> bool:
    return "attention" in type(owner).__name__.lower() or "attn" in type(owner).__name__.lower()
