"""Learns where a drawn tensor has the samples of its batch, from two runs of a step with unlike numbers of samples.

A shape alone does not tell: ``[4, 8]`` may be 4 samples, or 4 heads. So the step runs once on a few samples and once on
twice as many, and what doubles are the samples::

    1 sample     dropout [1, 16, 8]    rand [8]       bernoulli [4, 16, 16]
    2 samples    dropout [2, 16, 8]    rand [8]       bernoulli [8, 16, 16]
                 dim 0 has samples     none has       dim 0 has samples, 4 entries of each

Where samples and something else share a dim, the order of the two is seen from the values that are dropped: in both
runs all draws are constants, and the second run has every sample twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.mesh.draws.counters import uniform
from lightning_megatron.mesh.draws.global_rows import Batched

_SOME = 64
Place = tuple[int, int, int]
"""Segment, how often it was entered before, number of the draw in it."""


class Known(NamedTuple):
    """A draw of a step.

    Attributes:
        function: what draws.
        ndim: of what it draws.
        batched: where the samples are; ``None`` where the draw is one for the whole batch.
    """

    function: str
    ndim: int
    batched: Batched | None

    def seen(self, shape: Sequence[int], count: int) -> Batched | str | None:
        """Position of the samples in a later draw of this place, or why it is another one.

        Args:
            shape: of what it draws.
            count: samples of the micro-batch.
        """
        if self.batched is None or (self.batched.each == 1 and shape[self.batched.dim] == count):
            return self.batched
        each, rest = divmod(shape[self.batched.dim], count)
        if rest or self.batched.each == 1:
            return f"whose dim {self.batched.dim} had the samples in the first step, of which {count} are here"
        return self.batched._replace(each=each)


class Lesson:
    """The two runs of a step, made with small numbers and again with large ones: code may branch by what it draws.

    Args:
        count: samples of the first run.

    Attributes:
        run: 0 or 1, which of them runs.
        large: whether all draws are large.
        known: what was found, by place.
    """

    def __init__(self, count: int) -> None:
        self._count, self.run, self.large = count, 0, False
        self._first: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._matched: set[int] = set()
        self.known: dict[Place, list[Known]] = {}

    def indices(self, key: int, shape: Sequence[int], device: torch.device) -> Tensor:
        """The same element for all of a draw: the smallest or largest number of some."""
        some = uniform(torch.arange(_SOME), key, torch.float64)
        chosen = int(some.argmax() if self.large else some.argmin())
        return torch.full(tuple(shape), chosen, dtype=torch.int64, device=device)

    def note(self, key: int, place: Place, function: str, shape: Sequence[int], values: Tensor | None) -> str:
        """Take note of a draw; why it cannot be the same in any layout, or "".

        Args:
            key: of the draw, the same in both runs.
            place: of the draw.
            function: what draws.
            shape: of what it draws.
            values: what it draws for, of that shape.
        """
        if self.run == 0:
            self._first[key] = (function, tuple(shape))
            return ""
        before = self._first.get(key)
        self._matched.add(key)
        if before is None or before[0] != function or len(before[1]) != len(shape):
            return "how often it does depends on the number of samples"
        found = self._samples(before[1], tuple(shape), values)
        if isinstance(found, str):
            return found
        known, others = Known(function, len(shape), found), self.known.setdefault(place, [])
        if any(other[:2] == known[:2] and other != known for other in others):
            return "what it draws for depends on what was drawn before"
        if known not in others:  # pieces of one rank repeat the code before the layers
            others.append(known)
        return ""

    def left_over(self) -> str:
        """A draw of the first run that the second did not make, or "". Both are forgotten."""
        missed = next((function for key, (function, _) in self._first.items() if key not in self._matched), "")
        self._first.clear()
        self._matched.clear()
        return missed

    def _samples(self, one: tuple[int, ...], two: tuple[int, ...], values: Tensor | None) -> Batched | str | None:
        grown = [dim for dim in range(len(one)) if one[dim] != two[dim]]
        if 0 in one:
            return f"in the first step its shape was {one}, which does not tell what it is otherwise"
        if not grown:
            return None
        if len(grown) > 1 or two[grown[0]] != 2 * one[grown[0]] or one[grown[0]] % self._count:
            return f"its shape {one} becomes {two} for twice as many samples"
        dim, each = grown[0], one[grown[0]] // self._count
        if each == 1:
            return Batched(dim)
        outer, inner = _order(values, dim, each, self._count)
        if outer == inner:
            return f"dim {dim} of its shape {one} has {each} entries of each sample, and nothing shows in which order"
        return Batched(dim, each, inner)


def _order(values: Tensor | None, dim: int, each: int, count: int) -> tuple[bool, bool]:
    """Whether values of samples, each of which is there twice, have sample after sample, or entry after entry."""
    if values is None or values.ndim <= dim:
        return False, False
    rows = values.detach().movedim(dim, 0)
    return _alike(rows.unflatten(0, (2 * count, each)), 0, count), _alike(
        rows.unflatten(0, (each, 2 * count)), 1, count
    )


def _alike(values: Tensor, dim: int, count: int) -> bool:
    one, other = values.narrow(dim, 0, count), values.narrow(dim, count, count)
    return bool(torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-6))
