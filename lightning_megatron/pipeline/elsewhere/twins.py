"""A module as it is in one process, for code that names and counts its tensors and computes nothing.

Summaries, ``configure_optimizers`` and the numbering of optimizer states go over all parameters. For as long as they
do, what another stage owns, and what is split over tensor-parallel ranks, has its twin on the meta device in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.pipeline.elsewhere.presence import Phase, Presence, Sight, TensorPlace, owner_of

_Table = dict[str, Any]


@contextmanager
def shown_whole(module: nn.Module, presence: Presence, *, slices: bool = True) -> Iterator[None]:
    """Show ``module`` as in :attr:`Phase.WHOLE`.

    Args:
        module: the user's module, divided.
        presence: what of it is here.
        slices: whether parameters of which a slice is here have twins too. Without, they stay what they are, for code
            that keeps what it finds, as ``configure_optimizers`` does.
    """
    hidden: list[tuple[_Table, str, _Table, Any]] = []  # attributes of a module, name, table it is shown in, zeros
    swapped: list[tuple[_Table, str, Tensor]] = []
    whole: dict[str, Tensor] = {}  # shown in the place of slices, by first name
    places = {name: place for place, name in enumerate(presence.entries)}
    for name, entry in presence.entries.items():
        if presence.sight(name, Phase.WHOLE) is not Sight.TWIN:
            continue
        owner, leaf = owner_of(module, name)
        if owner is None:
            continue
        table: _Table = owner._parameters if isinstance(entry.twin, nn.Parameter) else owner._buffers
        if not presence.is_here(name):
            if leaf in owner.__dict__:  # not where a module of two names is shown already
                hidden.append((owner.__dict__, leaf, table, owner.__dict__.pop(leaf)))
                table[leaf] = entry.twin
                _sort(table, name.removesuffix(leaf), places)
        elif slices and _is_slice(table.get(leaf), entry):
            swapped.append((table, leaf, table[leaf]))
            table[leaf] = whole.setdefault(entry.first, _like(table[leaf], entry))
    try:
        yield
    finally:
        for attributes, leaf, table, zeros in hidden:
            table.pop(leaf, None)
            attributes[leaf] = zeros
        for table, leaf, real in swapped:
            table[leaf] = real


@contextmanager
def shown_absent(module: nn.Module, names: Iterable[str], places: dict[str, int]) -> Iterator[None]:
    """Let what stands for tensors of other stages be where ``state_dict`` finds tensors, and its hooks see them.

    Args:
        module: a module that has parts elsewhere.
        names: of these tensors, below it.
        places: of names below it, in a listing of one process.
    """
    moved: list[tuple[_Table, str, _Table]] = []
    for name in names:
        owner, leaf = owner_of(module, name)
        if owner is not None and leaf in owner.__dict__:
            value = owner.__dict__.pop(leaf)
            table: _Table = owner._buffers if value.twin is None else owner._parameters
            table[leaf] = value
            moved.append((owner.__dict__, leaf, table))
            _sort(table, name.removesuffix(leaf), places)
    try:
        yield
    finally:
        for attributes, leaf, table in moved:
            attributes[leaf] = table.pop(leaf)


def _sort(table: _Table, prefix: str, places: dict[str, int]) -> None:
    """Bring names back into the order in which they were registered: optimizers number parameters by it."""
    last = len(places)
    ordered = sorted(table.items(), key=lambda item: places.get(f"{prefix}{item[0]}", last))
    table.clear()
    table.update(ordered)


def _is_slice(tensor: Tensor | None, entry: TensorPlace) -> bool:
    return tensor is not None and tuple(tensor.shape) == entry.sharding.spec.local_shape


def _like(real: Tensor, entry: TensorPlace) -> nn.Parameter:
    empty = torch.empty(entry.twin.shape, dtype=real.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=real.requires_grad)
