"""Masks of integers, of which a trial sees one side: comparisons of a batch's integers, and masks that it brings.

A mean over ``y != 2`` is told by counting (:mod:`~lightning_megatron.strategy.loss.counted`), as long as a batch with
other counts is tried again. It is not where something else tells the counts, and this mask is met later::

    ok = (y != 2) & (y < 90)                   step 1: some y are 2, none is 90: the loss is a mean over y != 2
    F.cross_entropy(z[ok], y[ok])              step 9: some y are above 90, and the mean is over others

So masks are followed as what is found by comparing floats, with a name each. One that was met both ways has told, and
what remains matters where no other way of counting is open. Of integers that the step computes, no count tells: these
matter in any case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.mesh.parts.noted import TensorNotes

_COPIES = (
    *("clone", "contiguous", "cpu", "cuda", "detach", "to", "type", "long", "int", "bool", "float", "double"),
    *("view", "reshape", "flatten", "ravel", "squeeze", "unsqueeze", "transpose", "t", "permute", "expand", "select"),
    *("narrow", "unbind", "chunk", "split", "__getitem__", "view_as", "movedim", "type_as", "unflatten", "expand_as"),
)


class Mask(NamedTuple):
    """A comparison of integers, or a mask of the batch.

    Attributes:
        name: alike in all runs of the step, on all ranks.
        counted: whether it is one of the batch's own numbers, which a way of counting may tell.
        brought: whether the batch brings it as a tensor.
    """

    name: str
    counted: bool
    brought: bool = False


class Asked(NamedTuple):
    """A tensor or number that was computed of the result of a comparison alone.

    Attributes:
        line: of the comparison.
        entries: the fewest numbers that it was left with.
        value: a number of what was compared.
        masks: comparisons of integers alone, and masks of the batch, that it was computed of; none where floats were
            compared, which matters in any case.
        put: integers that were put in where these say.
        size: numbers that the comparison has given.
    """

    line: str
    entries: int
    value: float
    masks: frozenset[Mask] = frozenset()
    put: frozenset[int] = frozenset()
    size: int = 0

    @property
    def brought(self) -> bool:
        """Whether it is of masks that the batch brings, and of nothing else."""
        return bool(self.masks) and all(mask.brought for mask in self.masks)


class Masks(NamedTuple):
    """Those that a trial has met.

    Attributes:
        told: met both ways.
        bends: by which the loss may count or decide, each with the masks that it was made of.
    """

    told: frozenset[str] = frozenset()
    bends: tuple[tuple[Any, frozenset[Mask]], ...] = ()

    def joined(self, others: Collection[Masks]) -> Masks:
        """Those of all ranks."""
        every = (self, *others)
        bends = dict.fromkeys(bend for one in every for bend in one.bends)
        return Masks(frozenset().union(*(one.told for one in every)), tuple(bends))

    def untold(self, *, settled: bool) -> Any:
        """The first bend that some mask may bring, which none of the trials has met both ways; ``None`` for none.

        Args:
            settled: whether no other way of counting is open, so that a batch with other counts is not tried again.
        """
        for bend, masks in self.bends:
            if any(mask.name not in self.told and (settled or not mask.counted) for mask in masks):
                return bend
        return None


class SeenMasks:
    """Recognises them in the runs of a step.

    Attributes:
        told: names of those that were met both ways, in any run.
    """

    def __init__(self) -> None:
        self.told: set[str] = set()
        self._sides: dict[str, bool] = {}
        self.begin()

    def begin(self) -> None:
        """Before a run."""
        self._copies = TensorNotes[bool]()  # of tensors of the batch, or else what is computed of them
        self._calls = Counter[str]()

    def of_batch(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Mask]]:
        """Tensors that may be masks, of those of a batch; all others are followed as its numbers.

        Args:
            tensors: of the batch, as the step is given them.
        """
        for place, tensor in enumerate(tensors):
            self._copies[tensor] = True
            plain = tensor.layout is torch.strided and not (tensor.is_complex() or tensor.requires_grad)
            if not (plain and tensor.ndim and tensor.numel()):
                continue
            mask = Mask(f"tensor {place} of the batch", True, brought=True)
            if self._note_sides(mask, tensor):
                yield tensor, mask

    def follow(self, func: Any, found: Any, args: tuple[Any, ...], given: Sequence[Tensor]) -> None:
        """Follow what is computed of the batch, or with gradients."""
        known = [copy for each in given if (copy := self._copies.get(each)) is not None]
        if not known and not any(each.requires_grad for each in given):
            return
        copies = getattr(func, "__name__", "") in _COPIES and isinstance(args[0] if args else None, Tensor)
        is_copy = copies and bool(known) and bool(self._copies.get(args[0]))
        for made in (found,) if isinstance(found, Tensor) else found if isinstance(found, (tuple, list)) else args[:1]:
            if isinstance(made, Tensor):
                self._copies[made] = is_copy

    def compared(
        self, line: str, place: int, found: Tensor, integers: Sequence[Tensor], *, counts: bool = True
    ) -> Mask:
        """The mask that a comparison gives.

        Those that one place gives, of integers which the step computes, have one name: what a loop does with the tokens
        of one expert it does with those of another, which may have none in any trial.

        Args:
            line: of the comparison.
            place: in the code, as a line may have several.
            found: what it gives.
            integers: that are compared.
            counts: whether a way of counting may tell it, if they are the batch's own; none tells how many rows have
                any.
        """
        self._calls[line] += 1
        computed = any(self._copies.get(each) is False for each in integers)
        mask = Mask(f"{line} at {place}" if computed else f"{line}, {self._calls[line]}", counts and not computed)
        self._note_sides(mask, found)
        return mask

    def decided(self, line: str, side: bool) -> Mask:
        """The mask that stands for a decision of Python's by a number of integers.

        Args:
            line: of the comparison.
            side: what it gives.
        """
        mask = Mask(line, False)
        if self._sides.setdefault(mask.name, side) != side:
            self.told.add(mask.name)
        return mask

    def is_followed(self, tensor: Tensor) -> bool:
        """Whether a tensor is the batch's, or computed of it."""
        return tensor in self._copies

    def _note_sides(self, mask: Mask, tensor: Tensor) -> bool:
        """Take note of whether a mask has both sides; returns whether it has one alone."""
        first = tensor.flatten()[0]
        one = not bool((tensor != first).any())
        if not one or self._sides.setdefault(mask.name, bool(first)) != bool(first):
            self.told.add(mask.name)
        return one


def of_all(known: Sequence[Asked]) -> Asked | None:
    """Of what a tensor is computed of, that which was left with the fewest numbers, floats before masks.

    Args:
        known: of each.

    Returns:
        It, with all masks; ``None`` for nothing.
    """
    plain = [each for each in known if not each.masks]
    if plain or not known:
        return min(plain, key=lambda each: each.entries, default=None)
    masks, put = (frozenset().union(*each) for each in zip(*((one.masks, one.put) for one in known), strict=True))
    return min(known, key=lambda each: each.entries)._replace(masks=masks, put=put)


def put_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """Integers that a function puts where a mask says.

    Args:
        args: of the function.
        kwargs: likewise.
    """
    given = [*args, *kwargs.values()]
    found = {each for each in given if type(each) is int}
    for tensor in given:
        if isinstance(tensor, Tensor) and tensor.dtype in (torch.int64, torch.int32) and tensor.numel():
            first = tensor.flatten()[0]
            if not bool((tensor != first).any()):
                found.add(int(first))
    return frozenset(found)
