"""Attention sizes from the attributes of modules, and arguments of a call with one entry per head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.parts.boxes import Range, block_range, key_value_heads
from lightning_megatron.parallelize.reading.inputs import BATCH
from lightning_megatron.parallelize.reading.trace import Call

HEADS = (
    "num_attention_heads",
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "num_attn_heads",
    "num_query_heads",
    "heads",
)
KEY_VALUE = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_head_kv", "kv_heads")
HEAD_SIZE = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv", "d_head")
GROUPS = ("num_key_value_groups", "n_rep", "num_groups", "n_groups")


@dataclass(frozen=True)
class HeadSizes:
    """Number of query heads, number of key/value heads, and features per head."""

    heads: int
    key_value: int
    size: int

    def read_by(self, parts: int, rank: int) -> tuple[int, ...]:
        """Key/value heads that the query heads of ``rank`` of ``parts`` read."""
        return key_value_heads(self.heads, self.key_value, parts, rank)

    def features_read_by(self, parts: int, rank: int) -> tuple[Range, ...]:
        """Ranges of key (or value) features that the query heads of one rank read."""
        return tuple((head * self.size, (head + 1) * self.size) for head in self.read_by(parts, rank))


def head_sizes(owner: nn.Module, widths: Iterable[int]) -> HeadSizes | None:
    """Sizes of an attention module, from its attributes or its ``config``; None if it does not look like one.

    Args:
        owner: the module that contains the projections.
        widths: output sizes of the projections; the largest must be divisible by the number of heads.
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


def _first(sources: Iterable[Any], names: Iterable[str]) -> int | None:
    for source in sources:
        for name in names:
            value = getattr(source, name, None) if source is not None else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _looks_like_attention(owner: nn.Module) -> bool:
    return "attention" in type(owner).__name__.lower() or "attn" in type(owner).__name__.lower()


def head_arguments(call: Call, heads: int) -> dict[int | str, str]:
    """Arguments of a recorded call with one entry per head: position or keyword -> ``"heads"`` or ``"batch"``."""
    found: dict[int | str, str] = {}
    named: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    for key, value in named:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 3:
            continue
        if value.shape[-3] == heads:
            found[key] = "heads"
        elif value.dim() == 3 and value.shape[0] == BATCH * heads:
            found[key] = "batch"
    return found


def tensor_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int | str]:
    """Positions and keywords of the arguments that are tensors."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return frozenset(key for key, value in named if isinstance(value, Tensor))


def holders(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Names, for an error, of the arguments that may hold tensors, such as a cache."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    plain = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)
    return [
        f"{f'argument {key}' if isinstance(key, int) else f'`{key}`'} ({type(value).__name__})"
        for key, value in named
        if not isinstance(value, plain)
    ]


def slice_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], which: dict[int | str, str], heads: int, parts: int, rank: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Slice arguments with one entry per head to the heads of one rank; arguments that are local already stay.

    ``"heads"``: [.., heads, queries, keys] is sliced along that dim; ``"batch"``: [batch * heads, ..] within dim 0.
    """
    start, stop = block_range(heads, parts, rank)

    def cut(key: int | str, value: Any) -> Any:
        if key not in which or not isinstance(value, Tensor):
            return value
        if which[key] == "batch":
            return value.unflatten(0, (-1, heads))[:, start:stop].flatten(0, 1)
        return value.narrow(-3, start, stop - start) if value.shape[-3] == heads else value

    return tuple(cut(i, v) for i, v in enumerate(args)), {k: cut(k, v) for k, v in kwargs.items()}
