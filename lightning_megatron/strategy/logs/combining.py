"""How the values of a logged number in the parts of a batch give that of the whole.

Which of these it is, a trial finds out (:mod:`lightning_megatron.strategy.loss.trials.tries`)::

    Mean(w)             Σ w x / Σ w             losses, accuracies
    sum, max, min
    norm, log sum       √Σ x², log Σ exp x
    Mean(w, curve)      f(Σ w f⁻¹(x) / Σ w)     f = exp: a perplexity; root: of a mean square; decibels: a PSNR

The weights ``w`` are those of the loss, the samples, or what is counted, such as targets that are no padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of

Curve = Callable[[Tensor], Tensor]
OPERATIONS: dict[str, Curve] = {
    "sum": torch.sum,
    "max": torch.max,
    "min": torch.min,
    "norm": torch.linalg.vector_norm,
    "log sum": lambda values: torch.logsumexp(values, 0),
}


def _power(base: float) -> tuple[Curve, Curve]:
    """Exponentials of a base and their logarithm."""
    scale = math.log(base)
    return (lambda x: (x * scale).exp()), (lambda x: x.log() / scale)


CURVES: dict[str, tuple[Curve, Curve]] = {
    "exp": (torch.log, torch.exp),
    "root": (torch.square, torch.sqrt),
    "square": (torch.sqrt, torch.square),
    "inverse": (torch.reciprocal, torch.reciprocal),
    "log": _power(math.e),
    "-log": _power(1 / math.e),
    "log2": _power(2.0),
    "-log2": _power(0.5),
    "log10": _power(10.0),
    "-log10": _power(0.1),
    "decibels": _power(10.0**0.1),
    "-decibels": _power(10.0**-0.1),
}
"""Name of ``f`` -> ``f⁻¹`` and ``f``."""


_UNBENT: tuple[Curve, Curve] = (torch.clone, torch.clone)


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """Mean over the last dim; what counts nothing may have no value."""
    return torch.where(weights != 0, values * weights, 0.0).sum(-1) / weights.sum(-1)


@dataclass(frozen=True)
class Mean:
    """A mean of parts.

    Attributes:
        weigh: ``weights``, those of the loss; ``sizes``, samples; or what counts the targets of a part.
        curve: key of :data:`CURVES`; "" for a plain mean.
    """

    weigh: Any
    curve: str = ""

    def __call__(self, values: Tensor, weights: Tensor) -> Tensor:
        """The value of the whole.

        Args:
            values: of the parts, [n] in float64.
            weights: of the parts, [n].
        """
        there, back = CURVES.get(self.curve, _UNBENT)
        return back(_mean(there(values), weights))


@dataclass(frozen=True)
class Logged:
    """A number that one part of a batch has logged.

    Attributes:
        value: the number.
        wide: whether it is float64.
        line: of the user's code.
        spacing: relative distance to the next number of its own type; 2⁻⁷ for bfloat16.
        size: ``batch_size=``, where it was given.
    """

    value: float
    wide: bool = False
    line: str = ""
    spacing: float = 0.0
    size: int | None = None


def fitting(
    values: Sequence[float],
    whole: float,
    weights: Mapping[Any, Sequence[float]],
    tolerance: float,
    given: Sequence[float] = (),
) -> dict[Any, float]:
    """In which ways values of the parts give that of the whole, each with its relative distance; the usual ones first:
    a sum before a mean over what is counted, which it is as well where only one part has any.

    Args:
        values: of the parts.
        whole: of all of them at once.
        weights: key as of :class:`Mean` -> weight of each part.
        tolerance: relative.
        given: ``batch_size=`` of each part, by which ``mean`` weighs: the user's word, before anything else.
    """
    parts = torch.tensor(values, dtype=torch.float64)
    scale = max(abs(value) for value in (*values, whole) if math.isfinite(value))
    ways = {how: float(combine(parts)) for how, combine in OPERATIONS.items()}
    found: dict[Any, float] = {}
    plain = list(_means(parts, weights, [""]))
    usual = [(how, value) for how, value in plain if how.weigh in ("weights", "sizes")]
    told = [("mean", value) for _, value in _means(parts, {"given": given}, [""])] if len(given) else []
    for how, value in [*told, *usual, ("sum", ways["sum"]), *plain, *ways.items(), *_means(parts, weights, CURVES)]:
        off = abs(value - whole)
        if off <= tolerance * scale:  # no number never is
            found[how] = off / scale if scale else 0.0
    return found


def _means(
    parts: Tensor, weights: Mapping[Any, Sequence[float]], curves: Iterable[str]
) -> Iterator[tuple[Mean, float]]:
    """Means by each of the weights, curve by curve; all those of one curve at once."""
    counting = {way: each for way, each in weights.items() if sum(each)}
    rows = torch.tensor([*counting.values()], dtype=torch.float64)
    for curve in curves if counting else ():
        there, back = CURVES.get(curve, _UNBENT)
        for way, value in zip(counting, back(_mean(there(parts), rows)).tolist(), strict=True):
            yield Mean(way, curve), value


class Unsure(str):
    """A key of :data:`OPERATIONS` that others fit as well: in all trials at most one part had a number other than 0."""

    __slots__ = ()


def likeliest(ways: Mapping[Any, float]) -> Any:
    """The first of the ways that are about as near as any; ``None`` if there are none."""
    least = min(ways.values(), default=0.0)
    return next((how for how, off in ways.items() if off <= 2 * least + 1e-12), None)


class Narrowed:
    """Ways in which parts of a batch come together, from trial to trial: what one has ruled out stays so.

    Attributes:
        left: by key, the ways that no trial has ruled out.
        chosen: likewise, the way that is used.
    """

    def __init__(self) -> None:
        self.left: dict[Any, tuple[Any, ...]] = {}
        self.chosen: dict[Any, Any] = {}

    def learn(self, key: Any, ways: tuple[Any, ...], usual: Any = None) -> Any:
        """The way to use after a further trial; all anew, if none is left.

        Args:
            key: of a value.
            ways: that the trial allows, one or more; the usual one first.
            usual: one that goes before the others.
        """
        left = tuple(way for way in self.left.get(key, ways) if way in ways) or ways
        self.left[key] = left
        self.chosen[key] = usual if usual in left else left[0]
        return self.chosen[key]


def counts_for(logs: Mapping[str, Any], *parts: Any) -> list[dict[Any, float]]:
    """Weights of parts of a batch in the means of logged numbers.

    Args:
        logs: by key, how values combine.
        parts: of the batch.
    """
    ways = {how.weigh for how in logs.values() if isinstance(how, Mean) and callable(how.weigh)}
    return [{"sizes": float(batch_size_of(part)), **{way: way(part) for way in ways}} for part in parts]


def combine(how: Any, values: Tensor, weights: Tensor) -> Tensor:
    """One value for those of several micro-batches or replicas.

    Args:
        how: ``mean`` (weighted), ``same`` (of all samples already), a key of :data:`OPERATIONS`, or a :class:`Mean`.
        values: ``[n]``.
        weights: ``[n]``.
    """
    if how == "same":
        return values[0]
    if how == "mean" or isinstance(how, Mean):
        if values.numel() == 1:
            return values[0]
        return how(values, weights) if isinstance(how, Mean) else (values * weights).sum() / weights.sum()
    return OPERATIONS[how](values)
