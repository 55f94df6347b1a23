"""torchmetrics objects under a pipeline: updated where the step ends, read everywhere.

Only the last stage updates a metric. Its states are summed over the replicas of that stage, and ``compute()`` called
outside a step hands the value to the other stages. What a call returns in a step of several micro-batches is logged as
the batch's value (:mod:`~lightning_megatron.strategy.logs.batch_metrics`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.logs.batch_metrics import MetricCalls, MetricWatch
from lightning_megatron.strategy.logs.step_logs import LogRecorder


class _GatherOverReplicas:
    """``dist_sync_fn`` of a metric; survives a deep copy of the metric, which a process group would not."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        return gather_all_tensors(tensor, self._group)

    def __deepcopy__(self, memo: Any) -> _GatherOverReplicas:
        return self


class MetricRouter:
    """Routes the metrics of a module while it is attached.

    Args:
        mesh: the grid.
        device: where tensors live.
        recorder: of the logs of the step that is running; only the last stage computes then.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device, recorder: Callable[[], LogRecorder | None]) -> None:
        self._device = device
        self._pipeline_group = mesh.group("pipeline_parallel")
        self._gather = _GatherOverReplicas(mesh.group("data_parallel"))
        self._alone = mesh.layout.pipeline == 1
        self._loss_rank = mesh.loss_rank
        self._has_loss = mesh.rank == mesh.loss_rank
        self._recorder = recorder
        self._watch = MetricWatch(self._calls)
        self._attached: list[tuple[Metric, Any, Any]] = []

    def _calls(self) -> MetricCalls | None:
        recorder = self._recorder()
        return recorder.metric_calls if recorder is not None else None

    def attach(self, module: nn.Module) -> None:
        """Take over every metric inside ``module`` that is not attached yet."""
        self._watch.attach(module)
        known = {id(metric) for metric, _, _ in self._attached}
        for metric in module.modules():
            if not isinstance(metric, Metric) or id(metric) in known:
                continue
            self._attached.append((metric, metric.compute, metric.dist_sync_fn))
            if metric.dist_sync_fn is None:
                metric.dist_sync_fn = self._gather
            metric.compute = _BroadcastCompute(self, metric, metric.compute)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Give the metrics their own behaviour back."""
        self._watch.detach()
        for metric, compute, sync in self._attached:
            metric.compute = compute  # type: ignore[method-assign]
            metric.dist_sync_fn = sync
        self._attached = []

    def compute(self, metric: Metric, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``metric.compute()`` on the last stage; its value elsewhere."""
        if self._alone or self._recorder() is not None:
            return compute(*args, **kwargs)
        if self._has_loss:
            value = compute(*args, **kwargs)
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
