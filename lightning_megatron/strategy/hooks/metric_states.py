"""States of torchmetrics objects, which the updates of micro-batches bring where one process's update does, or do not.

An accuracy counts samples, so it does not matter how many it is told at once. A metric that is told a number of the
batch, such as its loss, minds::

    self.accuracy.update(logits, y)     tp += ...        the parts' counts add up to those of the whole
    self.total.update(loss)             total += loss    two parts add two losses, the whole adds one

A trial shows which (:mod:`~lightning_megatron.strategy.loss.trials.tries`). Means and sums then take a share of each
(:mod:`~lightning_megatron.strategy.logs.metrics`); of others the batch has to stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import Running

from lightning_megatron.mesh.parts.names import parent

States = dict[tuple[str, str], Any]
"""Name of the metric and of the state -> its value."""
Joins = Mapping[int, Sequence[int]]
Weights = Mapping[Any, Sequence[float]]

_WITHIN = 1e-4  # states are float32 by default


class MetricStates:
    """The states of a module's metrics in the runs of a trial, all of which start from the same ones.

    Args:
        module: the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = {name: child for name, child in module.named_modules() if isinstance(child, Metric)}
        self._before = self._now()
        self._left: dict[int, States] = {}

    def note(self, piece: int) -> None:
        """Remember what the run of a piece has left."""
        if self._metrics:
            self._left[piece] = self._now()

    def mixed(self, joins: Joins, weights: Callable[[int], Weights], *, cut: bool) -> tuple[str, str] | None:
        """A state to which the parts of a batch do not bring what the whole brings; ``None`` if there is none.

        Args:
            joins: piece -> the pieces whose samples it has.
            weights: of such a piece: way to weigh its parts in a mean -> what each of them counts.
            cut: whether micro-batches update one metric, and not replicas each its own.
        """
        told = self.told(joins, weights)
        for runs in self._runs(joins).values():
            for name in self._before:
                if name[0] not in told and not self._fits(name, runs, cut=cut):
                    return name
        return None

    def told(self, joins: Joins, weights: Callable[[int], Weights]) -> dict[str, tuple[Metric, tuple[Any, ...]]]:
        """Means and sums that are told a number of the batch, by name: in which ways its parts may weigh in it.

        Args:
            joins: see :meth:`mixed`.
            weights: likewise.
        """
        found: dict[str, tuple[Metric, tuple[Any, ...]]] = {}
        for name, metric in self._metrics.items():
            wrapped = parent(name) in self._metrics
            if wrapped or type(metric).update not in (MeanMetric.update, SumMetric.update):
                continue
            each = [self._ways(name, runs, weights(both)) for both, runs in self._runs(joins).items()]
            ways = tuple(way for way in each[0] if all(way in others for others in each)) if each else ()
            if ways:
                found[name] = metric, ways
        return found

    def _ways(self, name: str, runs: Sequence[States], weights: Weights) -> tuple[Any, ...]:
        """In which ways the number of the whole is a mean of those of the parts; nothing, where it adds up."""
        metric = self._metrics[name]
        states = ("mean_value", "weight") if isinstance(metric, MeanMetric) else (cast("str", metric.state_name),)
        added = [[run[name, state] - self._before[name, state] for run in runs] for state in states]
        if not all(added[-1]) or any(counts[-1] != count for counts in added[1:] for count in counts):
            return ()  # none, of each sample, or weighed by what it is of
        *parts, whole = added[0]
        largest = max(run[name, states[0]].abs() for run in runs)
        near = _WITHIN * max(map(abs, (*parts, whole))) + 8 * torch.finfo(largest.dtype).eps * largest
        if abs(sum(parts) - whole) <= near and len(added) == 1:
            return ()
        means = {way: sum(p * c for p, c in zip(parts, each, strict=True)) / sum(each) for way, each in weights.items()}
        return tuple(way for way, mean in means.items() if abs(mean - whole) <= near)

    def _runs(self, joins: Joins) -> dict[int, list[States]]:
        """Piece -> the states that its parts have left, and those that it has."""
        every = {
            both: [self._left[piece] for piece in (*pair, both) if piece in self._left] for both, pair in joins.items()
        }
        return {both: runs for both, runs in every.items() if len(runs) == len(joins[both]) + 1}

    def _now(self) -> States:
        return {
            (name, state): _copy(getattr(metric, state, None))
            for name, metric in self._metrics.items()
            for state in metric._reductions
        }

    def _fits(self, name: tuple[str, str], runs: Sequence[States], *, cut: bool) -> bool:
        before, found = self._before[name], [run[name] for run in runs]
        metric, (*parts, whole) = self._metrics[name[0]], found
        if all(_is_same(before, each) for each in found):
            return True
        if isinstance(metric, Running):
            return not cut and isinstance(metric.base_metric, MeanMetric)  # keeps the latest updates, of whatever
        reduction = metric._reductions[name[1]]
        if isinstance(whole, list):
            lists = all(isinstance(each, list) for each in (before, *parts))
            return not lists or _is_same([*before, *(new for part in parts for new in part[len(before) :])], whole)
        if not all(isinstance(each, Tensor) and each.shape == whole.shape for each in (before, *parts)):
            return True  # nobody knows how it comes together
        if reduction is dim_zero_sum:
            return _is_close(sum((part - before for part in parts), before), whole)
        if reduction is dim_zero_max or reduction is dim_zero_min:
            extreme = torch.amax if reduction is dim_zero_max else torch.amin
            return _is_close(extreme(torch.stack(list(parts)), 0), whole)
        return True


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [each.detach() if isinstance(each, Tensor) else each for each in value] if isinstance(value, list) else value


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states are equal; of lists, whether all that is in them is."""
    if isinstance(one, list) and isinstance(other, list):
        return _is_close(_rows(one), _rows(other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    return bool(one is other or (type(one) is type(other) and one == other))


def _rows(entries: Iterable[Any]) -> Tensor:
    tensors = [entry.reshape(-1) for entry in entries if isinstance(entry, Tensor)]
    return dim_zero_cat(tensors) if tensors else torch.zeros(0)


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(torch.allclose(one.double(), other.double(), rtol=_WITHIN, atol=1e-12, equal_nan=True))
