"""Entries that the parts of a batch append or set, put together as the entry of the whole batch.

Tensors with rows are stacked, numbers and tensors of one shape are averaged or added up, as a trial has shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.batches import merge_outputs
from lightning_megatron.pipeline.elsewhere.containers import MISSING


def merged(entries: Sequence[Any], weights: Sequence[float], sizes: Sequence[float]) -> Any:
    """The entry of the whole batch from those of its parts; :data:`MISSING` where they cannot be merged."""
    try:
        with torch.no_grad():
            return merge_outputs(entries, weights, [int(size) for size in sizes], "training_step")
    except (ValueError, KeyError, TypeError):
        return MISSING


def entry_of_all(entries: Sequence[Any], kind: Any, weights: Sequence[float], sizes: Sequence[float]) -> Any:
    """The entry of a list that the whole batch appends, of those that some of its parts have appended, one each;
    :data:`MISSING` where these stay entries of their own.

    Args:
        entries: one or more.
        kind: how they come together, as :data:`~lightning_megatron.strategy.loss.written.Kinds`.
        weights: of these parts, in a mean.
        sizes: their samples.
    """
    if kind in ("each", "sum", "set", "once", "same"):
        return MISSING
    if kind == "stacked":
        return stacked(entries)
    return total(entries) if kind == "total" else merged(entries, weights, sizes)


def stacked(entries: Sequence[Any]) -> Any:
    """The entry that has the rows of all; :data:`MISSING` where there is anything but tensors and arrays with rows, in
    tuples, lists and mappings of one form.

    Args:
        entries: of the parts.
    """
    first, *others = entries
    if isinstance(first, Tensor) and first.ndim:
        alike = all(isinstance(other, Tensor) and other.shape[1:] == first.shape[1:] for other in others)
        with torch.no_grad():
            return torch.cat(list(entries)) if alike and others else first if alike else MISSING
    if not isinstance(first, (dict, list, tuple)) or any(type(other) is not type(first) for other in others):
        return MISSING
    keys: list[Any] = list(first) if isinstance(first, dict) else list(range(len(first)))
    same = all(list(other) == keys if isinstance(first, dict) else len(other) == len(keys) for other in others)
    rows: list[Any] = [stacked([entry[key] for entry in entries]) for key in keys] if same else [MISSING]
    if not rows or any(row is MISSING for row in rows):
        return MISSING
    if isinstance(first, dict):
        return {**first, **dict(zip(keys, rows, strict=True))} if type(first) is dict else MISSING
    return type(first)(*rows) if hasattr(first, "_fields") else type(first)(rows)


def value_anew(values: Sequence[Any], way: Any, weights: Sequence[float]) -> Any:
    """Value that a batch sets, of those that its parts set, whatever was there; :data:`MISSING` where it is not known.

    Args:
        values: of the parts.
        way: "stacked", "total", or that of a mean.
        weights: of the parts, in a mean; of integers there is none.
    """
    if way in ("stacked", "total"):
        return stacked(values) if way == "stacked" else total(values)
    floats = all(isinstance(value, (float, Tensor)) and torch.as_tensor(value).is_floating_point() for value in values)
    if not floats or not sum(weights):
        return MISSING
    parts = zip(values, weights, strict=True)
    return total([value * (weight / sum(weights)) for value, weight in parts])


def total(entries: Sequence[Any]) -> Any:
    """The sum of numbers or of tensors of one shape; :data:`MISSING` of anything else."""
    alike = all(isinstance(entry, (int, float, Tensor)) for entry in entries)
    if not alike or len({torch.as_tensor(entry).shape for entry in entries}) > 1:
        return MISSING
    with torch.no_grad():
        return sum(entries[1:], entries[0])
