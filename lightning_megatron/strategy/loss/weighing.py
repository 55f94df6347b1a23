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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.strategy.logs.combining import Logged, Unsure, fitting, likeliest
from lightning_megatron.strategy.loss.counted import Counted
from lightning_megatron.strategy.loss.trials.bends import Bend
from lightning_megatron.strategy.loss.trials.masks import Masks

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-5}  # relative, of the losses
_EXACT = 1e-10
_ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6}
_LOGGED = 3e-5  # likewise of logged numbers, which often are float32
_NARROW = 2e-3
_SPACINGS = 1.5  # half of one for the loss of the whole, half for those of its parts, and what led to them


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
        bends: where the loss may bend at a number of the batch; ``None`` for nowhere.
        slight: logged keys of which at most one part has a number other than 0, so that sums, extremes and norms agree.
        masks: of integers, that were met, and what of the loss they may bend.
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
    bends: Bend | None = None
    slight: frozenset[str] = frozenset()
    masks: Masks = field(default_factory=Masks)

    def settle(
        self,
        writes: str | None,
        draws: str | None = None,
        undecided: str | None = None,
        bends: Bend | None = None,
        *,
        masks: Sequence[Masks] = (),
        exact: bool,
        weigh: Any = None,
    ) -> None:
        """Take over what all ranks have found.

        Args:
            writes: see above; ``None`` for nothing.
            draws: likewise.
            undecided: likewise.
            bends: likewise.
            masks: of each rank.
            exact: whether everything was computed in float64, so that ways which fit as in float32 do not.
            weigh: what loss and logs are weighed by, where the user says so.
        """
        self.writes, self.draws, self.undecided, self.bends = writes or "", draws or "", undecided or "", bends
        self.masks = Masks().joined(masks)
        for key, ways in self.logs.items():
            strict = exact and key in self.wide
            floor = _ROUNDING[torch.float64] if strict else self.rounding  # below which the usual way is the likeliest
            self.logs[key] = {how: max(off, floor) for how, off in ways.items() if off <= _EXACT or not strict}
        scale = max(abs(number) for number in self.numbers)
        if exact and math.isfinite(scale):
            self.fits = {way: off for way, off in self.fits.items() if off <= _EXACT * scale}
        if weigh is not None:
            self.fits, self.logs, self.tells, self.opaque, self.failed = {weigh: 0.0}, {}, True, False, ""
            self.bends = None if bends is None or bends.counts else bends  # these the user knows
            self.masks = Masks()

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
            slight=_slight(one for one in every if one.logs),
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
    slight: set[str] = set()
    for key, logged in whole.logs.items():
        held = [place for place, part in enumerate(parts) if key in part.logs]  # others do not come to the line
        values = [parts[place].logs[key].value for place in held]
        of_held = {way: [each[place] for place in held] for way, each in weights.items()}
        if not held or _tell(values, logged.value):
            off = max(within, _LOGGED, _SPACINGS * logged.spacing)
            given = [size for place in held if (size := parts[place].logs[key].size)]
            given = given if sum(given) == logged.size else []  # it counts, and is no constant
            logs[key] = fitting(values, logged.value, of_held, off, given) if held else {}
            slight.update([key] if sum(value != 0 for value in values) < 2 else ())
    wide = {key for key, logged in whole.logs.items() if logged.wide}
    lines = {key: logged.line for run in (*parts, whole) for key, logged in run.logs.items()}
    rounding = _ROUNDING[torch.float32] if whole.dtype in _TOLERANCE else _NARROW
    return Finding(fits, "", logs, wide, lines, rounding, tells, (whole.loss, means[None]), slight=frozenset(slight))


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


def _slight(found: Iterable[Finding | Reading]) -> frozenset[str]:
    """Logged keys that none of these has told by more than one part with a number other than 0."""
    every = list(found)
    keys = {key for one in every for key in one.slight}
    return frozenset(key for key in keys if all(key in one.slight for one in every if key in one.logs))


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
        bends: see :class:`Finding`.
        slight: see :class:`Finding`.
        told: masks of integers that trials have met both ways.
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
    bends: Bend | None = None
    slight: frozenset[str] = frozenset()
    told: frozenset[str] = frozenset()

    def after(self, found: Finding) -> Reading:
        """The findings after a further trial."""
        if not self.tried:
            fits = found.fits
        else:
            fits = {way: max(self.fits[way], off) for way, off in found.fits.items() if way in self.fits}
        logs = _both(self.logs, found.logs)
        opaque = found.opaque and not (self.fits and self.settled)
        writes, draws = self.writes or found.writes, self.draws or found.draws
        undecided, bends = found.undecided, self.bends or found.bends
        slight = _slight([self, found])
        now = Reading(fits, writes, logs, found.tells, self.stays, opaque, True, draws, undecided, bends, slight)
        masks = found.masks.joined([Masks(self.told)])
        if now.bends is None and fits:
            bends = masks.untold(settled=not any(now.open()))
        return replace(now, bends=bends, told=masks.told)

    @property
    def within(self) -> dict[str, Any]:
        """Logged key -> how values of micro-batches combine; ``None`` where no way was found."""
        ways = {key: likeliest(ways) for key, ways in self.logs.items()}
        return ways | {key: Unsure(ways[key]) for key in self.slight if isinstance(ways[key], str)}

    @property
    def whole(self) -> bool:
        """Whether the batch has to stay whole."""
        mixes = self.writes or self.draws or self.undecided or self.bends
        return self.stays or self.opaque or not self.fits or bool(mixes)

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


def narrowest(loss: Tensor, device: torch.device) -> torch.dtype:
    """Type of the loss, or that in which layers compute under autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else loss.dtype
