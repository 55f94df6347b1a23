"""Tensors of global shape that hold a part, and the rules by which torch functions run on the parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.layers.whole import graph, pointwise, sums, views
from lightning_megatron.layers.whole.base import GATHERED, NeedsWhole, Rule, WholeTensor
from lightning_megatron.layers.whole.split_dim import SplitDim

RULES: Mapping[Any, Any] = {**graph.RULES, **pointwise.RULES, **sums.RULES, **views.RULES}
"""Function of torch -> rule; a kind of `WholeTensor` takes them all, or those that it can keep."""

__all__ = ["GATHERED", "RULES", "NeedsWhole", "Rule", "SplitDim", "WholeTensor"]
