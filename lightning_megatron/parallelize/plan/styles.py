"""Styles of a plan: Hugging Face's names for how a module is split, and what each means here."""

from __future__ import annotations

import difflib
from enum import StrEnum


class Style(StrEnum):
    """How one module is split over the tensor group."""

    COLWISE = "colwise"
    ROWWISE = "rowwise"
    COLWISE_GATHER_OUTPUT = "colwise_gather_output"
    ROWWISE_SPLIT_INPUT = "rowwise_split_input"
    PACKED_COLWISE = "packed_colwise"
    PACKED_ROWWISE = "packed_rowwise"
    EMBEDDING_ROWWISE = "embedding_rowwise"
    REPLICATE = "replicate"
    REPLICATED_WITH_GRAD_ALLREDUCE = "replicated_with_grad_allreduce"
    SEQUENCE_PARALLEL = "sequence_parallel"
    MLA_KV_A_PROJ = "mla_kv_a_proj"
    HEADS = "heads"

    @property
    def is_column(self) -> bool:
        """Whether the output features are split."""
        return self in (Style.COLWISE, Style.COLWISE_GATHER_OUTPUT, Style.PACKED_COLWISE)

    @property
    def is_row(self) -> bool:
        """Whether the input features are split."""
        return self in (Style.ROWWISE, Style.ROWWISE_SPLIT_INPUT, Style.PACKED_ROWWISE)


MEANINGS = {
    Style.COLWISE: "output features split; output stays split",
    Style.ROWWISE: "input features split; input arrives split, output is summed",
    Style.COLWISE_GATHER_OUTPUT: "output features split; output is gathered (a vocabulary's logits: on demand)",
    Style.ROWWISE_SPLIT_INPUT: "input features split; a whole input is split first",
    Style.PACKED_COLWISE: "as colwise, every packed part (gate and up; query, key and value) split by itself",
    Style.PACKED_ROWWISE: "as rowwise, for an input packed in two parts",
    Style.EMBEDDING_ROWWISE: "vocabulary entries split",
    Style.REPLICATE: "whole on every rank",
    Style.REPLICATED_WITH_GRAD_ALLREDUCE: "whole on every rank, acting on local heads; gradient summed",
    Style.SEQUENCE_PARALLEL: "whole on every rank, acting on a sequence shard; gradient summed",
    Style.MLA_KV_A_PROJ: "whole on every rank; the rotary part of its output is read by local heads directly",
    Style.HEADS: "attention heads split (`torch.nn.MultiheadAttention`)",
}

ALIASES = {
    "colwise_rep": Style.COLWISE_GATHER_OUTPUT,
    "rowwise_rep": Style.ROWWISE_SPLIT_INPUT,
    "replicated": Style.REPLICATE,
    "local_colwise": Style.COLWISE,
    "local_rowwise": Style.ROWWISE,
    "local_packed_rowwise": Style.PACKED_ROWWISE,
    "vocab_parallel": Style.EMBEDDING_ROWWISE,
    "sequence": Style.SEQUENCE_PARALLEL,
}


def is_style(name: str | Style) -> bool:
    """Whether ``name`` is a style or an alias of one."""
    return isinstance(name, Style) or name in {style.value for style in Style} | set(ALIASES)


def parse_style(name: str | Style, pattern: str) -> Style:
    """The style with this name or alias.

    Args:
        name: a style, or its name.
        pattern: the plan entry that it belongs to, for the message.

    Raises:
        ValueError: an unknown name; the message lists the known ones and the closest.
    """
    if isinstance(name, Style):
        return name
    known = {style.value: style for style in Style} | ALIASES
    if name in known:
        return known[name]
    close = difflib.get_close_matches(str(name), known, n=2)
    hint = f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
    raise ValueError(f"Plan entry {pattern!r}: {name!r} is not a style.{hint} Styles: {', '.join(sorted(known))}.")
