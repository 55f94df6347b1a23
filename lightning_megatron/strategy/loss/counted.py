"""Candidates for what a loss is a mean over: entries of the batch's tensors that are not ignored, or weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of, tensors_of

IGNORED = (-100, -1, 0)  # torch's `ignore_index`, another usual one, and what most tokenizers pad with
NEXT_TO_NOTHING = 1e-30
"""Weight of a batch in which nothing counts, beside those of others; where nothing does anywhere, all are alike."""

_WEIGHTS = 2  # dims of tensors that may be weights of samples or of their tokens
_MOST = 48  # candidates
_CONSTANTS = 3  # of a step, that are tried as well
_ALL_TRIED = 16  # steps in which every batch is tried that may tell ways of counting apart


@dataclass(frozen=True)
class Counted:
    """Weighs by the entries of one tensor of the batch that are not ignored, or by their sum.

    Attributes:
        place: its place among the tensors of the batch, depth first.
        shifted: whether the first entry of each sample is no target, as for the next token.
        ignored: what entries that are no targets are; ``None``: entries are weights, such as a mask of ones and zeros,
            or lengths of samples.
    """

    place: int
    shifted: bool
    ignored: int | None

    def __call__(self, part: Any) -> float:
        """How many there are in a part of a batch.

        Raises:
            ValueError: the batch has fewer tensors.
        """
        tensors = tensors_of(part)
        if self.place >= len(tensors):
            raise ValueError(
                f"the loss of `training_step` is a mean over {self}, and this batch has {len(tensors)} tensors: give "
                "all batches the same tensors, or say what a batch counts with `micro_batch_loss_weight`."
            )
        tensor = tensors[self.place][:, 1:] if self.shifted else tensors[self.place]
        return float(tensor.double().sum() if self.ignored is None else (tensor != self.ignored).sum())

    def tells(self, batch: Any) -> bool:
        """Whether some entry of a batch is ignored, or has another weight than others."""
        return _some_tell([self], tensors_of(batch))

    def telling(self, tensors: Sequence[Tensor]) -> Tensor:
        """The same, of a batch's tensors; on their device, which is not waited for."""
        tensor = tensors[self.place] if self.place < len(tensors) else torch.empty(0)
        return (tensor != 1 if self.ignored is None else tensor == self.ignored).any()

    def __str__(self) -> str:
        which = "entries after the first of each sample" if self.shifted else "entries"
        what = "weighed by them" if self.ignored is None else f"that are not {self.ignored}"
        return f"{which} of tensor {self.place} of the batch {what}"


def candidates(*batches: Any, constants: Collection[int] = ()) -> list[Counted]:
    """Possible weights, present in all of some batches: tensors of integers, and of weights, one row per sample.

    A list of one tensor per sample has as many tensors as samples, so a place that one batch has another may lack.

    Args:
        batches: one or more.
        constants: what else may be ignored.
    """
    marks = (*IGNORED, *sorted(set(constants).difference(IGNORED))[:_CONSTANTS])
    first, *others = (_countable(batch, marks) for batch in batches)
    return [way for way in first if all(way in ways for ways in others)][:_MOST]


def _countable(batch: Any, marks: Sequence[int]) -> list[Counted]:
    found = []
    for place, tensor in integers_of(batch):
        shifts = (False, True) if tensor.ndim == 2 and tensor.shape[1] > 1 else (False,)
        found += [Counted(place, shifted, ignored) for ignored in marks for shifted in shifts]
    for place, tensor in _by_sample(batch):
        if tensor.is_floating_point() and tensor.ndim <= _WEIGHTS and bool((tensor >= 0).all()):
            found += [Counted(place, shifted, None) for shifted in ((False, True) if tensor.ndim > 1 else (False,))]
    return found + [Counted(place, False, None) for place, tensor in integers_of(batch) if _may_be_lengths(tensor)]


def _may_be_lengths(tensor: Tensor) -> bool:
    """Whether integers, one for each sample, may say how much of it counts."""
    return tensor.ndim == 1 and tensor.dtype != torch.bool and bool((tensor >= 0).all())


def integers_of(batch: Any) -> Iterator[tuple[int, Tensor]]:
    """Tensors of integers with one row per sample, and their places among those of the batch."""
    return ((place, x) for place, x in _by_sample(batch) if not (x.is_floating_point() or x.is_complex()))


def _by_sample(batch: Any) -> Iterator[tuple[int, Tensor]]:
    """Tensors with one row per sample, and their places among those of the batch."""
    size = batch_size_of(batch)
    return ((place, x) for place, x in enumerate(tensors_of(batch)) if x.ndim and x.shape[0] == size)


class Extremes:
    """The least and the largest value so far of each tensor of integers in a batch. What a loss leaves out lies outside
    of what it counts: -1, 255 in a map of segments, the length of a text as the place of an answer that was cut off.
    Of random values the n-th batch has new extremes with probability 1/n.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Tensor] = {}

    def grow(self, batch: Any) -> int | None:
        """A sample with values beyond those of earlier batches; ``None`` if there is none."""
        found = None
        for place, tensor in ((place, tensor) for place, tensor in integers_of(batch) if tensor.numel()):
            ends = torch.stack([tensor.min().long(), -tensor.max().long()])
            seen = self._seen.setdefault(place, ends)
            if bool((ends < seen).any()):
                found = int(((tensor < seen[0]) | (tensor > -seen[1])).reshape(len(tensor), -1).any(1).nonzero()[0])
                self._seen[place] = torch.minimum(ends, seen)
        return found


def unlike_weights(ways: Sequence[Counted], used: Any, batch: Any, parts: Sequence[Any]) -> dict[Counted, float]:
    """Ways of counting that give the micro-batches of this batch other weights than those in use, and by how much.

    Args:
        ways: of counting.
        used: what weighs now.
        batch: the whole.
        parts: its micro-batches.

    Returns:
        Largest difference of a share, by way; only where there is one.
    """
    if not _some_tell({*ways, used}, tensors_of(batch)):
        return {}
    weigh: Callable[[Any], float] = used if isinstance(used, Counted) else batch_size_of
    weights, tensors = _shares([weigh(part) for part in parts]), len(tensors_of(batch))
    each = {way: _shares([way(part) for part in parts]) for way in ways if way.place < tensors}
    return {
        way: max((abs(a - b) for a, b in zip(shares, weights, strict=False)), default=1.0)
        for way, shares in each.items()
        if shares != weights
    }


class Untold:
    """Ways of counting that weighed a batch otherwise than the one in use, and that its trial did not tell apart.

    A trial tells by the loss, which is off by the difference of the weights times that of the parts' losses. The latter
    grows in the first steps, which are all tried. Later, tokens with the number 0 are in nearly every text, so that
    "not 0" counts a little otherwise in nearly every batch: such a batch is tried again where it weighs twice as unlike
    as any that was tried, or after twice as many steps.
    """

    def __init__(self) -> None:
        self._tried: dict[Counted, tuple[float, int]] = {}

    def may_tell(self, unlike: Mapping[Counted, float], step: int) -> bool:
        """Whether a trial of this batch may tell what earlier ones did not; taken for tried, if so.

        Args:
            unlike: by how much each way weighs it otherwise.
            step: number of this one.
        """
        tried = {way: self._tried.get(way, (0.0, 0)) for way in unlike}
        new = (by > 2 * tried[way][0] or step >= 2 * tried[way][1] for way, by in unlike.items())
        if not unlike or (step > _ALL_TRIED and not any(new)):
            return False
        self._tried |= {way: (max(by, tried[way][0]), step) for way, by in unlike.items()}
        return True


def _some_tell(ways: Collection[Any], tensors: Sequence[Tensor]) -> bool:
    """Whether some of what could be counted tells anything, see :meth:`Counted.tells`; a device is waited for once."""
    found: dict[torch.device, list[Tensor]] = {}
    counted = [way for way in ways if isinstance(way, Counted)]
    for way in {(way.place, way.ignored) if type(way) is Counted else way: way for way in counted}.values():
        told = way.telling(tensors)
        found.setdefault(told.device, []).append(told)
    return any(bool(torch.stack(each).any()) for each in found.values())


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [round(weight / total, 9) for weight in weights] if total else []
