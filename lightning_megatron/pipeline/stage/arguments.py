"""Arguments of layers: taken apart into leaves, and put back into the nests in which they came."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_LEAVES = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str})


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Leaves of a call's arguments; pytree is asked only where there is a nest."""
    values = [*args, *kwargs.values()]
    if all(type(value) in _LEAVES for value in values):
        return values
    return pytree.tree_leaves((args, kwargs))


def same_nests(old: Any, new: Any) -> Any:
    """``new``, in the lists and dictionaries of ``old``: a layer may append to one that the step reads afterwards.

    Args:
        old: a nest.
        new: a copy of it with some other leaves.
    """
    if isinstance(old, list):
        for place, entry in enumerate(new):
            if old[place] is not (same := same_nests(old[place], entry)):
                old[place] = same
        return old
    if isinstance(old, dict):
        for key, entry in new.items():
            if old[key] is not (same := same_nests(old[key], entry)):
                old[key] = same
        return old
    if type(old) is tuple:
        entries = tuple(map(same_nests, old, new))
        return old if all(map(is_, old, entries)) else entries
    unchanged = all(map(is_, pytree.tree_leaves(old), pytree.tree_leaves(new)))
    return old if unchanged else new


def made_by_layers(before: dict[int, Tensor], handed: tuple[Any, ...], output: Any) -> dict[int, Tensor]:
    """Tensors without gradient that layers made, such as counts, by id, for as long as they are handed on.

    Args:
        before: those made by earlier layers.
        handed: the arguments of this layer.
        output: its output.
    """
    kept = {id(leaf) for leaf in pytree.tree_leaves(handed)} if before else set()
    outputs = () if type(output) is Tensor else pytree.tree_leaves(output)
    new = {id(leaf): leaf for leaf in outputs if isinstance(leaf, Tensor) and not leaf.requires_grad}
    return {key: leaf for key, leaf in before.items() if key in kept} | new


def other_tensors(leaves: list[Any], main: tuple[int, ...]) -> tuple[int, ...]:
    """All tensors but the hidden state: at the first layer, for the micro-batches of a whole batch."""
    return tuple(at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and at not in main)
