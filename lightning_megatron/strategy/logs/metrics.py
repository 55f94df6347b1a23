"""torchmetrics objects: updated where the step ends, read everywhere, logged as the value of the whole batch.

Only the last stage updates a metric. Its states are summed over the replicas of that stage, and ``compute()`` called
outside a step hands the value to the other stages.

``self.log("f1", self.f1(predictions, classes))`` logs the value of a batch. The accuracy of a batch is the mean of its
micro-batches' accuracies; an F1 score, a precision or an area under a curve is not. So a call inside a step of several
micro-batches also updates a copy of the metric that sees this batch alone, and what is logged is the copy's value::

    micro-batch   0             1             2
    metric        f1(...) ──▶ value 0  ...           whatever the step computes with it
    copy          update ─────▶ update ────▶ update ──▶ compute ──▶ logged once

Where there are replicas, such a copy counts also in a step of one micro-batch, and computes from the states of all.

A mean or a sum that is told a number of the batch (``self.mean.update(loss)``) is told one by each micro-batch of
each replica: it takes of each the share that the micro-batch has in the number of the whole batch. Trials find out
which metrics are told such a number (:mod:`~lightning_megatron.strategy.hooks.metric_states`)::

    one process   value += loss               weight += 1
    micro-batch   value += share · its loss   weight += share           the shares of a batch add up to 1
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.batches import batch_size_of, map_tensors, tensors_of
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.pickling import HeldGroup
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.strategy.evaluation.taken_for_logits import LogitsNoted, takes_logits

Gather = Callable[..., list[Tensor]]
"""``dist_sync_fn`` of a metric: a state of this rank -> those of all ranks."""
Shares = Mapping[int, float]
"""Identities of metrics -> share of a micro-batch in the number of its batch that they are told."""


@dataclass(frozen=True)
class BatchValue:
    """Source of the value of a batch.

    Attributes:
        metric: the copy that has seen the batch.
        part: key of the value, where ``compute`` returns a dictionary.
    """

    metric: Metric
    part: str | None = None

    def compute(self, gather: Gather | None = None) -> Any:
        """The value of the batch.

        Args:
            gather: over the replicas, for the value of all of their samples, which is collective; ``None``: of those
                of this replica.
        """
        if self.metric.sync_on_compute is not (gather is not None):
            for part in self.metric.modules():
                if isinstance(part, Metric):
                    part.sync_on_compute = part._to_sync = gather is not None
                    part._computed, part.dist_sync_fn = None, gather
        value = self.metric.compute()
        return value if self.part is None else value[self.part]


class MetricCalls:
    """The calls of torchmetrics objects during one step.

    Args:
        copies: of metrics, by the metric's identity and how often it was called before in the same micro-batch; kept
            from step to step.
        told: identities of metrics that are told numbers of the batch -> how micro-batches weigh in those: "sizes"
            (samples), or what counts their targets.
        gather: over the replicas, which have batches of their own; ``None`` for one.
        total: sums numbers of this rank over the replicas; ``None`` where they do not share the step.

    Attributes:
        gather: as given.
    """

    def __init__(
        self,
        copies: dict[tuple[int, int], Metric],
        told: Mapping[int, Any] = MappingProxyType({}),
        gather: Gather | None = None,
        total: Callable[[list[float]], list[float]] | None = None,
    ) -> None:
        self._copies, self._told, self._shares = copies, told, cast("Shares", {})
        self.gather, self._total = gather, total
        self._counts: Counter[int] = Counter()
        self._started: set[tuple[int, int]] = set()
        self._latest: dict[int, BatchValue] = {}
        self._values: dict[int, tuple[Any, BatchValue]] = {}

    def begin_micro_batch(self, shares: Shares = MappingProxyType({})) -> None:
        """Say that the calls which follow belong to a new micro-batch; ``shares``: see :meth:`shares`."""
        self._counts.clear()
        self._shares = shares

    def shares(self, parts: Sequence[Any]) -> list[Shares]:
        """Those of each micro-batch; collective over the replicas.

        Args:
            parts: the micro-batches.
        """
        if not self._told or (len(parts) == 1 and self._total is None):
            return [{} for _ in parts]
        ways = list(dict.fromkeys(self._told.values()))
        counts = [[float(batch_size_of(part) if way == "sizes" else way(part)) for part in parts] for way in ways]
        sums = [sum(each) for each in counts]
        totals = dict(zip(ways, sums if self._total is None else self._total(sums), strict=True))
        each_way = dict(zip(ways, counts, strict=True))
        return [
            {metric: each_way[way][place] / totals[way] for metric, way in self._told.items() if totals[way]}
            for place in range(len(parts))
        ]

    def update(self, metric: Metric, update: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``update(*args, **kwargs)`` of a metric or its copy, with no more than the share of the micro-batch."""
        share = self._shares.get(id(metric))
        if share is None:
            return update(*args, **kwargs)
        value, weight = (lambda value, weight=1.0: (value, weight))(*args, **kwargs)
        if isinstance(metric, MeanMetric):
            return update(value, torch.as_tensor(1.0 if weight is None else weight, dtype=metric.dtype) * share)
        return update(torch.as_tensor(value, dtype=metric.dtype) * share)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """In the middle of a micro-batch, around code of others."""
        counts, shares = self._counts, self._shares
        self._counts = Counter()
        yield
        self._counts, self._shares = counts, shares

    def note(self, metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        """Follow one call of ``metric`` that returned ``value``."""
        place = (id(metric), self._counts[id(metric)])
        self._counts[id(metric)] += 1
        copied = self._copy(metric, place)
        self.update(metric, copied.update, args, kwargs)
        self._latest[id(metric)] = BatchValue(copied)
        parts = value if isinstance(value, Mapping) else {None: value}
        for name, part in parts.items():
            self._values[id(part)] = (part, BatchValue(copied, name))

    def behind(self, value: Any) -> BatchValue | None:
        """Source of the value of the batch, if ``value`` is a metric, or what a metric's call returned."""
        if isinstance(value, Metric):  # without a value of its own in one process, Lightning logs nothing of a step
            return None if value._forward_cache is None else self._latest.get(id(value))
        found = self._values.get(id(value))
        return found[1] if found is not None and found[0] is value else None

    def _copy(self, metric: Metric, place: tuple[int, int]) -> Metric:
        if place not in self._copies:
            self._copies[place] = _without_exchange(metric)
        if place not in self._started:
            self._started.add(place)
            self._copies[place].reset()
        return self._copies[place]


def _without_exchange(metric: Metric) -> Metric:
    """A copy of ``metric`` that computes from its own states only, without exchange and without hooks; it shares the
    networks that are in it.
    """
    kept = [value for part in metric.modules() for value in tensors_of(list(vars(part).values()))]
    known: dict[int, Any] = {id(value): value.detach().clone() for value in kept if value.grad_fn is not None}
    for part in metric.modules():
        if not any(isinstance(inside, Metric) for inside in part.modules()) and not isinstance(part, nn.ModuleList):
            known[id(part)] = part
    copied = copy.deepcopy(metric, known)
    for part in copied.modules():
        if isinstance(part, Metric):
            part.sync_on_compute = part._to_sync = False
            part._forward_hooks.clear()
            part._forward_hooks_with_kwargs.clear()
    return copied


class MetricListener:
    """Hears of every call of the metrics of a module while it is attached.

    Args:
        calls: the running step's calls, if one of several micro-batches is running.
    """

    def __init__(self, calls: Callable[[], MetricCalls | None]) -> None:
        self._hook = _CallHook(calls)
        self._handles: list[RemovableHandle] = []

    def attach(self, module: nn.Module) -> None:
        """Watch every metric inside ``module``; those of an earlier call are watched once."""
        self.detach()
        self.add(module)

    def add(self, module: nn.Module) -> None:
        """Watch the metrics inside ``module`` as well."""
        for metric in module.modules():
            if isinstance(metric, Metric):
                self._handles.append(metric.register_forward_hook(self._hook, with_kwargs=True))

    def detach(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _CallHook:
    """A forward hook; a copied metric shares it, and one that is pickled leaves it behind."""

    def __init__(self, calls: Callable[[], MetricCalls | None]) -> None:
        self._calls = calls

    def __call__(self, metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        calls = self._calls()
        if calls is not None:
            calls.note(metric, args, kwargs, value)

    def __deepcopy__(self, memo: Any) -> _CallHook:
        return self

    def __reduce__(self) -> Any:
        return _CallHook, (_no_calls,)


def _no_calls() -> None:
    return None


class RunningStep(Protocol):
    """The step that is running on this rank, if one is; ``Recording`` of :mod:`..step.step_context` is one."""

    @property
    def recorder(self) -> Any:
        """Not ``None`` while a step runs."""

    def metric_calls(self) -> MetricCalls | None:
        """Follows the calls of metrics in a step of several micro-batches."""


class GatherOverReplicas:
    """``dist_sync_fn`` of a metric, which is copied and pickled with it; states of shown parts become whole.

    Args:
        group: the replicas.
    """

    def __init__(self, group: Any) -> None:
        self._replicas = HeldGroup(group)

    @property
    def group(self) -> Any:
        """The replicas; ``None`` for one."""
        held = self._replicas.group
        return None if held is None or held.size() == 1 else held

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        whole = tensor.full() if isinstance(tensor, WholeTensor) else tensor
        alone = self._replicas.group is not None and self.group is None
        return [whole] if alone else gather_all_tensors(whole, self._replicas.group)


class MetricRouter:
    """Routes the metrics of a module while it is attached.

    Args:
        mesh: the grid.
        device: where tensors live.
        running: whether a step is running, when only the last stage computes.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device, running: RunningStep) -> None:
        self._device = device
        self._pipeline_group = mesh.group("pipeline_parallel")
        self._gather = GatherOverReplicas(mesh.group("data_parallel"))
        self._alone = mesh.layout.pipeline == 1
        self._loss_rank = mesh.loss_rank
        self._has_loss = mesh.rank == mesh.loss_rank
        self._running, self._computes = running, False
        self._listener = MetricListener(running.metric_calls)
        self._attached: list[Metric] = []
        self._owners, self._late = set[int](), cast("RemovableHandle | None", None)
        self._replaced = Replacements()

    def attach(self, module: nn.Module) -> None:
        """Take over every metric inside ``module``, and those that are registered in it later, as a ``MetricTracker``
        does for each epoch.
        """
        self._listener.attach(module)
        self._take(module)
        if self._late is None:
            self._late = register_module_module_registration_hook(self._look)  # type: ignore[no-untyped-call]

    def _look(self, owner: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None or id(owner) not in self._owners:
            return
        if any(isinstance(part, Metric) for part in child.modules()):
            self._listener.add(child)
            self._take(child)

    def _take(self, module: nn.Module) -> None:
        self._owners.update(id(part) for part in module.modules())
        known = {id(metric) for metric in self._attached}
        names = {child: name for name, child in module.named_modules() if name}
        for metric in module.modules():
            if not isinstance(metric, Metric) or id(metric) in known:
                continue
            self._attached.append(metric)
            if metric.dist_sync_fn is None:
                self._replaced.put(metric, "dist_sync_fn", self._gather)
            self._replaced.put(metric, "compute", _BroadcastCompute(self, metric, metric.compute))
            if type(metric).update in (MeanMetric.update, SumMetric.update):
                self._replaced.put(metric, "update", _SharedUpdate(self._running, metric, metric.update))
            elif takes_logits(metric):
                noted = LogitsNoted(self._running.metric_calls, metric.update, names.get(metric, type(metric).__name__))
                self._replaced.put(metric, "update", noted)

    def detach(self) -> None:
        """Give the metrics their own behaviour back."""
        if self._late is not None:
            self._late.remove()
        self._listener.detach()
        self._replaced.take_back()
        self._attached, self._late, self._owners = [], None, set()

    def compute(self, metric: Metric, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``metric.compute()`` on the last stage; its value elsewhere."""
        if self._running.recorder is not None or self._computes:
            return compute(*args, **kwargs)
        noted = vars(metric).get("update")
        if self._has_loss and isinstance(noted, LogitsNoted):
            exchanges = metric._computed is None and metric._to_sync and metric.sync_on_compute
            noted.tell(self._gather.group if exchanges else None)
        if self._alone:
            return compute(*args, **kwargs)
        if self._has_loss:
            self._computes = True  # a wrapper computes the metric in it, which the others do not
            try:
                value = compute(*args, **kwargs)
            finally:
                self._computes = False
            sent = map_tensors(value, lambda tensor: tensor.detach().cpu())
            objects.broadcast(sent, self._loss_rank, self._pipeline_group)
            return value
        received = objects.broadcast(None, self._loss_rank, self._pipeline_group)
        return map_tensors(received, lambda tensor: tensor.to(self._device))


class _BroadcastCompute:
    """Installed as ``compute`` on a metric."""

    def __init__(self, router: MetricRouter, metric: Metric, compute: Callable[..., Any]) -> None:
        self._router, self._metric, self._compute = router, metric, compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._router.compute(self._metric, self._compute, args, kwargs)


class _SharedUpdate:
    """Installed as ``update`` on a mean or a sum."""

    def __init__(self, running: RunningStep, metric: Metric, update: Callable[..., Any]) -> None:
        self._running, self._metric, self._update = running, metric, update

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = self._running.metric_calls()
        if calls is None:
            return self._update(*args, **kwargs)
        return calls.update(self._metric, self._update, args, kwargs)
