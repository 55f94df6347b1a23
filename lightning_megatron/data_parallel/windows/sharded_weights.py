"""The values of ``weight_sharding``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_megatron.data_parallel.option_dicts import option_dict, quoted

WeightSharding = bool | Mapping[str, Any]
"""``weight_sharding``: whether, or over how many replicas, when weights are freed, and when gradients are summed."""

_FREES, _SUMS = ("auto", "layer", "step"), ("micro_batch", "step")
_KEYS = ("shard", "free", "sum")


@dataclass(frozen=True)
class ShardedWeights:
    """How weights are shared out over replicas.

    Attributes:
        shard: how many neighbouring replicas share one copy; ``None`` for all of them.
        free: when the whole weights of a layer are freed: after the ``layer``, or at the end of the ``step``;
            ``auto``: of the step, where it has several micro-batches and that fits.
        sums: when gradients are summed and cut: after each ``micro_batch``, or once a ``step``.
    """

    shard: int | None = None
    free: Literal["auto", "layer", "step"] = "auto"
    sums: Literal["micro_batch", "step"] = "step"


def sharded_weights_of(value: Any) -> ShardedWeights | None:
    """The value of ``weight_sharding``; ``None`` for ``False``.

    Raises:
        ValueError: it cannot be meant so; the message says what can.
    """
    said = option_dict("weight_sharding", value, _KEYS)
    if said is None:
        return None
    shard, free, sums = said.get("shard"), said.get("free", "auto"), said.get("sum", "step")
    if shard is not None and (isinstance(shard, bool) or not isinstance(shard, int) or shard < 2):
        raise ValueError(
            f"`weight_sharding={{'shard': {shard!r}}}` must be a whole number of replicas above 1; without 'shard', "
            "all replicas share one copy."
        )
    for name, given, known in (("free", free, _FREES), ("sum", sums, _SUMS)):
        if given not in known:
            raise ValueError(f"`weight_sharding={{{name!r}: {given!r}}}` must be one of {quoted(known)}.")
    return ShardedWeights(shard, free, sums)
