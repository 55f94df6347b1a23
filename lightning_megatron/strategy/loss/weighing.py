"""Composition of the loss of a batch, read from the losses of two of its parts and of both together.

::

    parts of 2 and 2 samples, with 5 and 15 targets      losses 2.0 and 1.0      together
        a mean over samples                              (2·2.0 + 2·1.0) / 4      1.50
        a mean over targets                              (5·2.0 + 15·1.0) / 20    1.25
        a sum                                            2.0 + 1.0                3.00
        anything else                                    the batch has to stay whole
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of, tensors_of
from lightning_megatron.strategy.logs.combining import Logged, fitting, likeliest

IGNORED = (-100, -1, 0)  # torch's `ignore_index`, another usual one, and what most tokenizers pad with
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-5}  # relative, of the losses
_EXACT = 1e-10
_ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6}
_LOGGED = 3e-5  # likewise of logged numbers, which often are float32
_NARROW = 2e-3
_SPACINGS = 1.5  # half of one for the loss of the whole, half for those of its parts, and what led to them
_WEIGHTS = 2  # dims of tensors that may be weights of samples or of their tokens
_MOST = 36  # candidates


@dataclass(frozen=True)
class Counted:
    """Weighs by the entries of one tensor of the batch that are not ignored, or by their sum.

    Attributes:
        place: its place among the tensors of the batch, depth first.
        shifted: whether the first entry of each sample is no target, as for the next token.
        ignored: what entries that are no targets are; ``None``: entries are weights, such as a mask of ones and zeros.
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
        """Whether some entry of a batch is ignored, or has another weight than one."""
        return _some_tell([self], tensors_of(batch))

    def __str__(self) -> str:
        which = "entries after the first of each sample" if self.shifted else "entries"
        what = "weighed by them" if self.ignored is None else f"that are not {self.ignored}"
        return f"{which} of tensor {self.place} of the batch {what}"


def candidates(*batches: Any) -> list[Counted]:
    """Possible weights, present in all of some batches: tensors of integers, and of weights, one row per sample.

    A list of one tensor per sample has as many tensors as samples, so a place that one batch has another may lack.
    """
    first, *others = (_countable(batch) for batch in batches)
    return [way for way in first if all(way in ways for ways in others)][:_MOST]


def _countable(batch: Any) -> list[Counted]:
    found = []
    for place, tensor in integers_of(batch):
        shifts = (False, True) if tensor.ndim == 2 and tensor.shape[1] > 1 else (False,)
        found += [Counted(place, shifted, ignored) for ignored in IGNORED for shifted in shifts]
    for place, tensor in _by_sample(batch):
        if tensor.is_floating_point() and tensor.ndim <= _WEIGHTS and bool((tensor >= 0).all()):
            found += [Counted(place, shifted, None) for shifted in ((False, True) if tensor.ndim > 1 else (False,))]
    return found


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


@dataclass(frozen=True)
class TrialRun:
    """One run of the step.

    Attributes:
        loss: what it returned.
        dtype: of the loss, or of a narrower type that layers compute in.
        logs: logged numbers by key.
        spacing: relative distance of the loss to the next number of its own type; 2⁻⁷ for bfloat16.
    """

    loss: float
    dtype: torch.dtype
    logs: Mapping[str, Logged]
    spacing: float = 0.0


@dataclass
class Finding:
    """Findings of one trial; of several replicas, those that all of them share.

    Attributes:
        fits: the ways of weighing after which the loss is that of the whole, each with its distance; ``None`` stands
            for the number of samples, ``"sum"`` for no weighing.
        writes: name of a value on the module that only the whole batch can write, or "".
        logs: logged key -> how the parts' values may combine
            (:mod:`~lightning_megatron.strategy.logs.combining`), each way with its relative distance.
        wide: logged keys whose values are float64.
        lines: logged key -> line of the user's code.
        rounding: relative, of logged numbers that are not float64.
        tells: whether the losses of the parts differ, so that the trial could tell.
        numbers: loss of the whole, and the mean of the parts' losses.
        opaque: whether a loss is no finite number, which tells nothing about others.
        empty: whether a part has no targets, which accounts for that.
        failed: why the step does not run on a part of a batch, or "".
        gathers: whether the step itself gathers or reduces over the replicas.
        draws: what the step draws for every sample, and micro-batches would draw alike, or "".
        undecided: name of a value that only one part has changed in every trial, so that it may add up or not, or "".
    """

    fits: dict[Any, float] = field(default_factory=dict)
    writes: str = ""
    logs: dict[str, dict[Any, float]] = field(default_factory=dict)
    wide: set[str] = field(default_factory=set)
    lines: dict[str, str] = field(default_factory=dict)
    rounding: float = _ROUNDING[torch.float32]
    tells: bool = True
    numbers: tuple[float, float] = (0.0, 0.0)
    opaque: bool = False
    empty: bool = False
    failed: str = ""
    gathers: bool = False
    draws: str = ""
    undecided: str = ""

    def settle(self, writes: str, draws: str = "", undecided: str = "", *, exact: bool, weigh: Any = None) -> None:
        """Take over what all ranks have found.

        Args:
            writes: see above.
            draws: likewise.
            undecided: likewise.
            exact: whether everything was computed in float64, so that ways which fit as in float32 do not.
            weigh: what loss and logs are weighed by, where the user says so.
        """
        self.writes, self.draws, self.undecided = writes, draws, undecided
        for key, ways in self.logs.items():
            strict = exact and key in self.wide
            floor = _ROUNDING[torch.float64] if strict else self.rounding  # below which the usual way is the likeliest
            self.logs[key] = {how: max(off, floor) for how, off in ways.items() if off <= _EXACT or not strict}
        scale = max(abs(number) for number in self.numbers)
        if exact and math.isfinite(scale):
            self.fits = {way: off for way, off in self.fits.items() if off <= _EXACT * scale}
        if weigh is not None:
            self.fits, self.logs, self.tells, self.opaque, self.failed = {weigh: 0.0}, {}, True, False, ""

    def joined(self, others: Sequence[Finding]) -> Finding:
        """The findings that all share."""
        every = [self, *others]
        fits = {way: max(one.fits[way] for one in every) for way in self.fits if all(way in one.fits for one in every)}
        logs: dict[str, dict[Any, float]] = {}
        for one in every:
            logs = _both(logs, one.logs)
        writes = next((one.writes for one in every if one.writes), "")
        failed = next((one for one in every if not one.fits), self)
        return replace(
            failed,
            fits=fits,
            writes=writes,
            logs=logs,
            wide=set.intersection(*(one.wide for one in every)),
            rounding=max(one.rounding for one in every),
            lines={key: line for one in every for key, line in one.lines.items()},
            tells=any(one.tells for one in every),
            opaque=any(one.opaque and not one.empty for one in every) or all(one.opaque for one in every),
            failed=next((one.failed for one in every if one.failed), ""),
            gathers=any(one.gathers for one in every),
        )


def find(
    parts: Sequence[TrialRun], whole: TrialRun, sizes: Sequence[float], counts: Mapping[Counted, Sequence[float]]
) -> Finding:
    """Compare the loss and the logged numbers of a batch with those of its parts.

    Args:
        parts: the parts, in order.
        whole: all of them at once.
        sizes: samples of each part.
        counts: by candidate, the targets of each part.
    """
    losses = [part.loss for part in parts]
    within = max(_TOLERANCE.get(whole.dtype, _NARROW), _SPACINGS * whole.spacing)
    if not all(math.isfinite(loss) for loss in (*losses, whole.loss)):
        if math.isfinite(whole.loss):  # what a part lacks, the whole has: it counts where it has targets
            fits = _fits_of_some(losses, whole.loss, counts, within)
            finite = [loss for loss in losses if math.isfinite(loss)]
            tells = not fits or max(finite) - min(finite) > 10 * within * max(map(abs, finite))
            return Finding(fits, tells=tells, numbers=(whole.loss, _mean(losses, sizes)))
        every: dict[Any, float] = {way: 0.0 for way in (None, *counts, "sum")}
        empty = any(not all(count) for count in counts.values())
        return Finding(every, tells=False, numbers=(whole.loss, _mean(losses, sizes)), opaque=True, empty=empty)
    scale = max(abs(loss) for loss in (*losses, whole.loss))
    tolerance = within * scale
    ways: dict[Any, Sequence[float]] = {None: sizes, **{way: count for way, count in counts.items() if sum(count)}}
    means = {way: _mean(losses, weights) for way, weights in ways.items()}
    predicted = {**means, "sum": sum(losses)}
    fits = {way: abs(value - whole.loss) for way, value in predicted.items() if abs(value - whole.loss) <= tolerance}
    tells = max(losses) - min(losses) > 10 * tolerance
    best = min(fits, key=lambda way: (fits[way] > 0.1 * tolerance, fits[way]), default=None)
    weights: dict[Any, Sequence[float]] = {"weights": ways.get(best, sizes), "sizes": sizes, **counts}
    logs: dict[str, dict[Any, float]] = {key: {} for part in parts for key in part.logs if key not in whole.logs}
    for key, logged in whole.logs.items():
        held = [place for place, part in enumerate(parts) if key in part.logs]  # others do not come to the line
        values = [parts[place].logs[key].value for place in held]
        of_held = {way: [each[place] for place in held] for way, each in weights.items()}
        if not held or _tell(values, logged.value):
            off = max(within, _LOGGED, _SPACINGS * logged.spacing)
            given = [size for place in held if (size := parts[place].logs[key].size)]
            given = given if sum(given) == logged.size else []  # it counts, and is no constant
            logs[key] = fitting(values, logged.value, of_held, off, given) if held else {}
    wide = {key for key, logged in whole.logs.items() if logged.wide}
    lines = {key: logged.line for run in (*parts, whole) for key, logged in run.logs.items()}
    rounding = _ROUNDING[torch.float32] if whole.dtype in _TOLERANCE else _NARROW
    return Finding(fits, "", logs, wide, lines, rounding, tells, (whole.loss, means[None]))


def _fits_of_some(
    losses: Sequence[float], whole: float, counts: Mapping[Counted, Sequence[float]], within: float
) -> dict[Any, float]:
    """Ways of counting after which the parts whose loss is no finite number have no targets, and the mean of the others
    is that of the whole, each with its distance.
    """
    fits: dict[Any, float] = {}
    for way, count in counts.items():
        held = [(loss, number) for loss, number in zip(losses, count, strict=True) if number]
        if held and all(math.isfinite(loss) for loss, _ in held):
            off = abs(_mean(*zip(*held, strict=True)) - whole)
            if off <= within * max(abs(loss) for loss in (*(loss for loss, _ in held), whole)):
                fits[way] = off
    return fits


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def _tell(values: Sequence[float], whole: float) -> bool:
    """Whether these values can tell how they combine."""
    if not all(math.isfinite(value) for value in values):
        return math.isfinite(whole)
    return math.isfinite(whole) and (max(values) > min(values) or whole != values[0])


def _both(one: Mapping[str, dict[Any, float]], other: Mapping[str, dict[Any, float]]) -> dict[str, dict[Any, float]]:
    """Findings of both, each way with the larger distance; those of one for a key that the other lacks."""
    joined = dict(one)
    for key, ways in other.items():
        known = one.get(key, ways)
        joined[key] = {how: max(known[how], off) for how, off in ways.items() if how in known}
    return joined


@dataclass(frozen=True)
class Reading:
    """How the batches of a run are cut, from what trials found.

    Attributes:
        fits: ways of weighing that no trial has ruled out, with the largest distance seen.
        writes: see :class:`Finding`.
        logs: see :class:`Finding`.
        settled: whether the latest trial could tell.
        stays: whether the user has said that the loss is one of the whole batch.
        opaque: whether no trial has told anything, and the latest found losses that are no finite numbers.
        tried: whether there was a trial: what it has ruled out stays so, however well it fits a later batch.
        draws: see :class:`Finding`.
        undecided: see :class:`Finding`.
    """

    fits: Mapping[Any, float] = field(default_factory=dict)
    writes: str = ""
    logs: Mapping[str, dict[Any, float]] = field(default_factory=dict)
    settled: bool = False
    stays: bool = False
    opaque: bool = False
    tried: bool = False
    draws: str = ""
    undecided: str = ""

    def after(self, found: Finding) -> Reading:
        """The findings after a further trial."""
        if not self.tried:
            fits = found.fits
        else:
            fits = {way: max(self.fits[way], off) for way, off in found.fits.items() if way in self.fits}
        logs = _both(self.logs, found.logs)
        opaque = found.opaque and not (self.fits and self.settled)
        writes, draws = self.writes or found.writes, self.draws or found.draws
        return Reading(fits, writes, logs, found.tells, self.stays, opaque, True, draws, found.undecided)

    @property
    def within(self) -> dict[str, Any]:
        """Logged key -> how values of micro-batches combine; ``None`` where no way was found."""
        return {key: likeliest(ways) for key, ways in self.logs.items()}

    @property
    def whole(self) -> bool:
        """Whether the batch has to stay whole."""
        return self.stays or self.opaque or not self.fits or bool(self.writes or self.draws or self.undecided)

    @property
    def tells_replicas(self) -> bool:
        """Whether what the loss is a mean of is known, whatever else of a batch has to be whole."""
        return bool(self.fits) and not self.opaque

    @cached_property
    def way(self) -> Any:
        """``None``: weigh by samples; ``"sum"``: add up; or what to count."""
        least = min(self.fits.values())
        near = [way for way, off in self.fits.items() if off <= 2 * least + 1e-12]
        return None if None in near else near[0]

    def open(self) -> Iterator[Counted]:
        """Ways of counting that were not told apart from the one in use."""
        return (way for way in self.fits if isinstance(way, Counted) and way != self.way)


def weighs_otherwise(ways: Sequence[Counted], used: Any, batch: Any, parts: Sequence[Any]) -> bool:
    """Whether counting would give the micro-batches of this batch other weights than those in use."""
    if not _some_tell({*ways, used}, tensors_of(batch)):
        return False
    weigh: Callable[[Any], float] = used if isinstance(used, Counted) else batch_size_of
    weights, tensors = _shares([weigh(part) for part in parts]), len(tensors_of(batch))
    return any(_shares([way(part) for part in parts]) != weights for way in ways if way.place < tensors)


def _some_tell(ways: Collection[Any], tensors: Sequence[Tensor]) -> bool:
    """Whether some of what could be counted tells anything, see :meth:`Counted.tells`; a device is waited for once."""
    found: dict[torch.device, list[Tensor]] = {}
    for place, ignored in {(way.place, way.ignored) for way in ways if isinstance(way, Counted)}:
        tensor = tensors[place] if place < len(tensors) else torch.empty(0)
        found.setdefault(tensor.device, []).append((tensor != 1 if ignored is None else tensor == ignored).any())
    return any(bool(torch.stack(each).any()) for each in found.values())


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [round(weight / total, 9) for weight in weights] if total else []


def narrowest(loss: Tensor, device: torch.device) -> torch.dtype:
    """Type of the loss, or that in which layers compute under autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else loss.dtype
