"""States of torchmetrics objects, which the updates of micro-batches bring where one process's update does, or do not.

An accuracy counts samples, so it does not matter how many it is told at once. A metric that is told a number of the
batch, such as its loss, minds::

    self.accuracy.update(logits, y)     tp += ...        the parts' counts add up to those of the whole
    self.total.update(loss)             total += loss    two parts add two losses, the whole adds one

A trial shows which (:mod:`~lightning_megatron.strategy.loss.tries`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import Running

States = dict[tuple[str, str], Any]
"""Name of the metric and of the state -> its value."""

_MEAN = "mean_value", "weight"
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

    def mixed(self, joins: Mapping[int, Sequence[int]], *, cut: bool) -> tuple[str, str] | None:
        """A state to which the parts of a batch do not bring what the whole brings; ``None`` if there is none.

        Args:
            joins: piece -> the pieces whose samples it has.
            cut: whether micro-batches update one metric, and not replicas each its own.
        """
        for both, pair in joins.items():
            runs = [self._left[piece] for piece in (*pair, both) if piece in self._left]
            for name in self._before if len(runs) == len(pair) + 1 else ():
                if not self._fits(name, runs, cut=cut):
                    return name
        return None

    def _fits_mean(self, name: str, runs: Sequence[States]) -> bool:
        """Whether the parts bring the mean of the whole; it counts once more where they are more."""
        sums, counts = ([run[name, state] - self._before[name, state] for run in runs] for state in _MEAN)
        return _is_close(sum(sums[:-1]) / sum(counts[:-1]), sums[-1] / counts[-1])

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
        if isinstance(metric, MeanMetric):
            return self._fits_mean(name[0], runs)
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
