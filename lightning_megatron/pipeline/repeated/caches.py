"""Hugging Face's key-value caches in passes through all stages: each stage holds the keys and values of its own layers.

The code around the layers asks a cache how much is in it (for positions, for masks), mostly its first layer. So where a
layer is skipped, an entry of the same length and no width takes the place of what its own stage keeps; reordering it
for beams, cropping it and growing it then work on every stage alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.mesh.key_value_caches import is_cache
from lightning_megatron.mesh.parts.packages import comes_from

_KNOWN = frozenset(
    ("DummyLayer", "DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
)


class Grown(NamedTuple):
    """Positions that a call added to one layer of a cache.

    Attributes:
        cache: which of the call's caches.
        part: which part of it: ``""``, or the attribute of a cache that is made of two.
        layer: of the cache.
        positions: how many.
        rows: of the batch, as the cache holds them; a hidden state may count something else first.
    """

    cache: int
    part: str
    layer: int
    positions: int
    rows: int


class Caches:
    """The caches in the arguments of one call.

    Args:
        args: of the call.
        kwargs: the same, by name.
        name: of what is called.

    Attributes:
        found: the caches.

    Raises:
        RuntimeError: one is of a class that is not known.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
        self.found: list[Any] = []
        for value in (*args, *kwargs.values()):
            if value is None or isinstance(value, (Tensor, bool, int, float, str, tuple)):
                continue
            kind = type(value)
            if is_cache(value):
                self.found.append(value)
                for _, part in _parts(value):
                    for held in set(map(type, part.layers)):
                        _check(held, name)
            elif comes_from(kind, "transformers") and "ache" in kind.__name__:
                _refuse(kind.__name__, name)

    def bare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with nothing in the place of caches."""
        if not self.found:
            return args, kwargs
        without = [None if is_cache(value) else value for value in args]
        return tuple(without), {key: None if is_cache(value) else value for key, value in kwargs.items()}

    def has(self, cache: Any) -> bool:
        """Whether a cache is one of these."""
        return any(one is cache for one in self.found)

    def added_to(self, notes: Sequence[Grown]) -> list[tuple[Any, Any]]:
        """Each cache that a call has added to, and the entry of it."""
        return [
            (self.found[note.cache], dict(_parts(self.found[note.cache]))[note.part].layers[note.layer])
            for note in notes
        ]

    def lengths(self) -> dict[tuple[int, str, int], int]:
        """Positions in each layer of each cache."""
        return {
            (place, part, at): int(layer.get_seq_length())
            for place, cache in enumerate(self.found)
            for part, half in _parts(cache)
            for at, layer in enumerate(half.layers)
            if type(layer).__name__ != "DummyLayer"  # of a layer that reads another's
        }

    def grown(self, before: dict[tuple[int, str, int], int]) -> tuple[Grown, ...]:
        """The entries added since."""
        found = ((key, length - before.get(key, 0)) for key, length in self.lengths().items())
        return tuple(Grown(*key, more, self._rows(*key)) for key, more in found if more)

    def _rows(self, cache: int, part: str, layer: int) -> int:
        return int(dict(_parts(self.found[cache]))[part].layers[layer].keys.shape[0])

    def grow(self, notes: Sequence[Grown], device: torch.device, dtype: torch.dtype) -> None:
        """Add as many positions as the stage that has the layer added there.

        Args:
            notes: what it added.
            device: of the entries.
            dtype: likewise.
        """
        for note in notes:
            cache = dict(_parts(self.found[note.cache]))[note.part]
            layer = cache.layers[note.layer] if note.layer < len(cache.layers) else None
            keys = getattr(layer, "keys", None)
            heads, width, out = 1, 1, 1
            if isinstance(keys, Tensor) and keys.ndim == 4:  # made beforehand, in its full size
                heads, width, out = keys.shape[1], keys.shape[3], layer.values.shape[3]  # type: ignore[union-attr]
            made = [
                torch.zeros(note.rows, heads, note.positions, size, dtype=dtype, device=device) for size in (width, out)
            ]
            cache.update(*made, note.layer)


def _parts(cache: Any) -> Iterator[tuple[str, Any]]:
    """A cache, or the two that it is made of, by name."""
    inner = [(name, part) for name, part in vars(cache).items() if is_cache(part)]
    yield from inner or [("", cache)]


def _check(kind: type, name: str) -> None:
    if kind.__name__ not in _KNOWN or not comes_from(kind, "transformers.cache_utils"):
        _refuse(kind.__name__, name)


def _refuse(kind: str, name: str) -> None:
    other = 'Generate with a dynamic or a static key-value cache (`cache_implementation="dynamic"`), with'
    if "LinearAttention" in kind:
        other = "The model keeps states there whatever cache is asked for. Generate with"
    raise RuntimeError(
        f"`{name}` is called with a cache of class `{kind}`, which is not supported under a pipeline: stages skip "
        f"layers, and only key-value caches can be skipped. {other} `use_cache=False`, or use "
        "`pipeline_parallel_size=1`."
    )
