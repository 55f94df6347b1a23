"""Assigns parameters to buckets: neighbours of one kind and with the same holders, up to a size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_megatron.data_parallel.buckets.holders import Sharing

Members = list[tuple[str, nn.Parameter]]


def fill(
    members: Iterable[tuple[str, nn.Parameter]],
    bucket_bytes: int,
    lowered: Mapping[str, torch.dtype],
    apart: Mapping[str, str],
) -> list[Members]:
    """Group consecutive parameters of one dtype, device, layer into runs of at most ``bucket_bytes``, or of one.

    Args:
        members: names and parameters, in the order in which backward reaches them.
        bucket_bytes: buffer size in bytes at which a new bucket starts.
        lowered: name -> dtype in which layers hold the parameter, where the optimizer keeps a float32 master weight.
        apart: name -> layer, for parameters whose weights are there only while their layer needs them.
    """
    runs: list[Members] = []
    kind, size = None, 0
    for name, parameter in members:
        bytes_ = parameter.numel() * parameter.element_size()
        now = (parameter.dtype, parameter.device, lowered.get(name), apart.get(name))
        if kind != now or size + bytes_ > bucket_bytes:
            runs.append([])
            kind, size = now, 0
        runs[-1].append((name, parameter))
        size += bytes_
    return runs


def fill_by_holders(
    parameters: Mapping[str, nn.Parameter], shared: Mapping[str, Sharing], lowered: Mapping[str, torch.dtype]
) -> list[Members]:
    """Group parameters of the same holders and dtypes.

    Args:
        parameters: by name; others of ``shared`` are left out.
        shared: name -> the ranks that hold it; its order is that of the groups.
        lowered: see :func:`fill`.
    """
    groups: dict[Any, Members] = {}
    for name, sharing in shared.items():
        if name in parameters:
            key = (id(sharing.group), parameters[name].dtype, lowered.get(name))
            groups.setdefault(key, []).append((name, parameters[name]))
    return list(groups.values())
