"""Hugging Face's key-value caches, which layers append to: what they hold, and copies for a further run of a layer.

A model that trains makes an empty one for each batch, and nobody reads it. Prefix tuning gives layers one that holds
keys and values already.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_megatron.mesh.parts.packages import comes_from


def with_own_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for one more run of a layer, which must not append to Hugging Face's key-value caches in them.

    Caches in which nothing is yet are left out; of the others, which hold a prefix, the run gets copies that share
    their tensors.
    """
    if has_caches(args, kwargs):
        args = tuple(_own(value) for value in args)
        kwargs = {name: _own(value) for name, value in kwargs.items()}
    return args, kwargs


def has_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether key-value caches are among a call's arguments."""
    return bool(caches_in(args, kwargs))


def caches_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The key-value caches among a call's arguments."""
    return [value for value in (*args, *kwargs.values()) if is_cache(value)]


def in_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors of the key-value caches in a call's arguments."""
    layers = [layer for cache in caches_in(args, kwargs) for layer in _layers_of(cache)]
    return [entry for layer in layers for entry in vars(layer).values() if isinstance(entry, Tensor)]


def is_cache(value: Any) -> bool:
    """Whether ``value`` is one of Hugging Face's caches, or a layer of one; not what layers hand on in a dictionary."""
    return comes_from(type(value), "transformers.cache_utils") and not isinstance(value, Mapping)


def _layers_of(cache: Any) -> list[Any]:
    parts = [part for part in vars(cache).values() if is_cache(part)]  # self- and cross-attention have one each
    return [*(vars(cache).get("layers") or ()), *(layer for part in parts for layer in _layers_of(part))]


def _own(value: Any) -> Any:
    if not is_cache(value):
        return value
    held = [entry for entry in in_caches((value,), {}) if entry.ndim > 1]  # not the width of a window
    return _copied(value) if any(entry.numel() for entry in held) else None


def _copied(cache: Any) -> Any:
    """A copy, down to the layers' own attributes; tensors and what else there is are shared."""
    own = copy.copy(cache)
    for name, entry in vars(cache).items():
        if is_cache(entry):
            setattr(own, name, _copied(entry))
        elif isinstance(entry, (list, dict)):
            setattr(own, name, copy.copy(entry))
    if type(getattr(own, "layers", None)) is list:
        own.layers = [copy.copy(layer) for layer in own.layers]
    return own
