"""Recording what the user logs inside a step, and replaying it once on every rank.

Inside a step only the last stage reaches ``self.log``, once per micro-batch and only for its replica. Lightning's
loggers, progress bars and callbacks want one call per key and step on every rank, with one value. So calls made
inside a step are recorded, aggregated over micro-batches and replicas, broadcast along the pipeline and replayed
through the public ``self.log``::

    last stage   log(loss) × m ──aggregate──▶ all-gather over replicas ──▶ broadcast ──▶ self.log(loss)
    other stages                                                          receive  ──▶ self.log(loss)

Everything else a step leaves behind travels in the same message: what it returned, and what it stored on the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import Started, start_broadcast
from lightning_megatron.mesh.messages.exchange import exchanges
from lightning_megatron.mesh.watch.waits import Waiting, members, ranks_of
from lightning_megatron.strategy.logs.batch_metrics import BatchValue, MetricCalls

_EMPTY = inspect.Parameter.empty
LOG_SIGNATURE = inspect.signature(pl.LightningModule.log)
_LOG_DEFAULTS = {
    name: parameter.default for name, parameter in LOG_SIGNATURE.parameters.items() if parameter.default is not _EMPTY
}
_NOT_REPLAYED = ("sync_dist", "sync_dist_group", "rank_zero_only", "enable_graph")
_HEADER = 3
_RESULTS = (1 << 20) + 1  # tag of messages that bring a step's result
_INLINE_VALUES = 61
_LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LogKey:
    """One logged key of a step: everything but its value.

    Attributes:
        name: the key.
        operation: how values of micro-batches and replicas combine: mean, sum, min or max.
        metric: dotted name of the logged torchmetrics object, or ``None`` for a number.
        dtype: floating-point type in which the value is replayed.
        options: the other arguments of ``self.log``.
    """

    name: str
    operation: str
    metric: str | None
    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...]


@dataclass
class _Recorded:
    key: LogKey
    values: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    sources: list[BatchValue | None] = field(default_factory=list)
    batch_size: int | None = None

    def whole(self) -> Any:
        """The value that a metric has for the whole batch, if one metric stands behind every micro-batch's value."""
        first = self.sources[0] if self.sources else None
        if first is None or any(source != first for source in self.sources):
            return None
        value = first.compute()
        return value if isinstance(value, Tensor) and value.numel() == 1 else None


def operation_of(reduce_fx: Any) -> str:
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    name = name.lower()
    return {"avg": "mean"}.get(name, name) if name in ("mean", "avg", "sum", "min", "max") else "mean"


def _log_dtype(value: Any) -> torch.dtype:
    dtype = value.dtype if isinstance(value, Tensor) else torch.get_default_dtype()
    return dtype if dtype in (torch.float32, torch.float64) else torch.get_default_dtype()


class LogRecorder:
    """Collects the ``self.log`` calls of one step.

    Args:
        module: the user's module.
        check: called with each value and what it is; raises if it cannot be right.
    """

    def __init__(self, module: pl.LightningModule, check: Callable[[Any, str], None] | None = None) -> None:
        self._module = module
        self._check = check
        self._records: dict[tuple[str, int], _Recorded] = {}
        self._counts: dict[str, int] = {}
        self._weight = 1.0
        self.rank_zero_calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.metric_calls: MetricCalls | None = None

    def begin_micro_batch(self, weight: float) -> None:
        """Say that the calls which follow belong to a new micro-batch of this weight."""
        self._weight = weight
        self._counts = {}
        if self.metric_calls is not None:
            self.metric_calls.begin_micro_batch()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``LightningModule.log``."""
        name, value, options = _log_call(self._module, args, kwargs)
        if options.get("rank_zero_only"):
            self.rank_zero_calls.append((args, kwargs))
            return
        if self._check is not None:
            self._check(value, f"the logged value `{name}`")
        occurrence = self._counts.get(name, 0)
        self._counts[name] = occurrence + 1
        record = self._records.get((name, occurrence))
        if record is None:
            record = self._records[(name, occurrence)] = _Recorded(self._key(name, value, options))
        record.values.append(self._as_tensor(value))
        if self.metric_calls is not None:
            record.sources.append(self.metric_calls.behind(value))
        batch_size = options.get("batch_size")
        record.weights.append(float(batch_size) if batch_size is not None else self._weight)
        if batch_size is not None:
            record.batch_size = (record.batch_size or 0) + int(batch_size)

    def _key(self, name: str, value: Any, options: dict[str, Any]) -> LogKey:
        every = {**_LOG_DEFAULTS, **options}
        kept = tuple(sorted(item for item in every.items() if item[0] not in (*_NOT_REPLAYED, "batch_size")))
        return LogKey(name, operation_of(every["reduce_fx"]), self._metric_name(value), _log_dtype(value), kept)

    def _metric_name(self, value: Any) -> str | None:
        if not isinstance(value, Metric):
            return None
        for name, module in self._module.named_modules():
            if module is value:
                return name
        raise ValueError(
            f"`self.log` was given a {type(value).__name__} that is not an attribute of the LightningModule; assign it "
            "to `self` so that every rank can find it."
        )

    @staticmethod
    def _as_tensor(value: Any) -> Tensor:
        if isinstance(value, Metric):
            value = value._forward_cache
            if not isinstance(value, Tensor) or value.numel() != 1:
                return torch.tensor(float("nan"), dtype=torch.float64)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"`self.log` takes scalars; got a tensor of shape {tuple(value.shape)}.")
            return value.detach().reshape(()).clone()
        if isinstance(value, dict):
            raise ValueError("`self.log` takes scalars; use `self.log_dict` for a dictionary.")
        return torch.tensor(float(value), dtype=torch.float64)

    def collect(self, device: torch.device) -> tuple[list[LogKey], Tensor]:
        """Keys, and one row ``[value, weight, batch size]`` each, aggregated over the micro-batches of this replica."""
        keys = [record.key for record in self._records.values()]
        rows = torch.zeros(len(keys), 3, dtype=torch.float64, device=device)
        for row, record in zip(rows, self._records.values(), strict=True):
            whole = record.whole()
            found = record.values if whole is None else [self._as_tensor(whole)] * len(record.values)
            values = torch.stack([value.to(device) for value in found]).to(torch.float64)
            weights = torch.tensor(record.weights, dtype=torch.float64, device=device)
            row[0] = _combine(record.key.operation if whole is None else "max", values, weights)
            row[1] = weights.sum()
            row[2] = -1.0 if record.batch_size is None else float(record.batch_size)
        return keys, rows


def _log_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """Name, value and the other arguments of a call of ``self.log``; the usual form without asking ``inspect``."""
    if len(args) == 2 and kwargs.keys() <= _LOG_DEFAULTS.keys():
        return args[0], args[1], kwargs
    options = dict(LOG_SIGNATURE.bind(module, *args, **kwargs).arguments)
    options.pop("self")
    return options.pop("name"), options.pop("value"), options


def _combine(operation: str, values: Tensor, weights: Tensor) -> Tensor:
    if operation == "mean":
        if values.numel() == 1:
            return values[0]
        return (values * weights).sum() / weights.sum()
    if operation == "sum":
        return values.sum()
    return values.min() if operation == "min" else values.max()


@dataclass
class StepResult:
    """What a step left behind, equal on every rank of a pipeline.

    Attributes:
        loss: mean loss over micro-batches and replicas; ``None`` in evaluation.
        output: what the step returned, put together for the whole batch.
        keys: logged keys.
        rows: per key ``[value, weight, batch size]``.
        state: changes to the module's plain attributes.
    """

    loss: Tensor | None = None
    output: Any = None
    keys: list[LogKey] = field(default_factory=list)
    rows: Tensor | None = None
    state: list[Any] = field(default_factory=list)


class StepExchange:
    """Makes one step's result equal on all ranks: over replicas first, then along the pipeline.

    Args:
        mesh: the grid.
        device: where tensors live.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._device = device
        self._replicas = mesh.layout.data
        self._data_group = mesh.group("data_parallel") if mesh.layout.data > 1 else None
        self._pipeline_group = mesh.group("pipeline_parallel") if mesh.layout.pipeline > 1 else None
        self._sent: list[Started] = []
        self._expected: tuple[Tensor, Started] | None = None
        self._loss_rank = mesh.loss_rank
        self._has_loss = mesh.rank == mesh.loss_rank
        self._keys: list[LogKey] = []
        self._pending: Any = None

    def share(self, result: StepResult | None) -> StepResult:
        """Exchange the result; ranks that do not compute the loss pass ``None``."""
        if self._has_loss:
            assert result is not None
            self._reduce_over_replicas(result)
            if self._pipeline_group is not None:
                self._broadcast(result)
            return result
        return self._receive()

    def expect(self) -> None:
        """Be ready for the result of the step that is about to run, so that it arrives while this rank is busy."""
        self._expected = None
        if self._has_loss or self._pipeline_group is None:
            return
        header = self._new_header()
        if exchanges(header, self._pipeline_group):
            self._expected = header, self._start(header)

    def settle(self) -> None:
        """Wait until the other stages have fetched what was sent to them: at the latest when the next step is sent."""
        sent, self._sent = self._sent, []
        for work in sent:
            work.wait()

    def _reduce_over_replicas(self, result: StepResult) -> None:
        self.start(result)
        self.finish(result)

    def start(self, result: StepResult) -> None:
        """Begin to reduce over replicas without waiting; :meth:`finish` must follow."""
        self._pending = None
        if self._data_group is None or (result.loss is None and not result.keys):
            return
        assert result.rows is not None
        loss = result.loss if result.loss is not None else torch.zeros((), dtype=torch.float64)
        mine = torch.cat([loss.reshape(1).to(self._device, torch.float64), result.rows.reshape(-1)])
        rows = torch.empty(self._replicas, mine.numel(), dtype=mine.dtype, device=self._device)
        work = dist.all_gather(list(rows.unbind()), mine, group=self._data_group, async_op=True)
        self._pending = (work, rows)

    def waits_for(self, seen: Mapping[str, Any]) -> Waiting | None:
        """What :meth:`finish` is about."""
        if self._pending is None:
            return None
        return Waiting(f"loss and logged values over {members(self._data_group)}", ranks_of(self._data_group))

    def finish(self, result: StepResult) -> None:
        """Wait for what :meth:`start` began, and put the values over all replicas into ``result``."""
        if self._pending is None:
            return
        work, everyone = self._pending
        work.wait()
        assert result.rows is not None
        if result.loss is not None:
            result.loss = everyone[:, 0].mean().to(result.loss.dtype)
        gathered = everyone[:, 1:].view(self._replicas, -1, 3)
        for index, key in enumerate(result.keys):
            values, weights = gathered[:, index, 0], gathered[:, index, 1]
            result.rows[index, 0] = _combine(key.operation, values, weights)

    def _broadcast(self, result: StepResult) -> None:
        self.settle()
        assert result.rows is not None
        rows = result.rows.reshape(-1)
        loss = result.loss
        extra: dict[str, Any] = {}
        if result.keys != self._keys:
            self._keys = result.keys
            extra["keys"] = result.keys
        if result.output is not None:
            extra["output"] = map_tensors(result.output, lambda tensor: tensor.detach().cpu())
        if result.state:
            extra["state"] = map_tensors(result.state, lambda tensor: tensor.detach().cpu())
        blob = objects.encode(extra or None)
        header = self._new_header()
        dtype = _LOSS_DTYPES.index(loss.dtype) if loss is not None else -1
        header[:_HEADER] = torch.tensor([blob.numel(), rows.numel(), dtype], dtype=torch.float64)
        values = torch.cat([(loss if loss is not None else rows.new_tensor(float("nan"))).reshape(1).double(), rows])
        inline = values[:_INLINE_VALUES]
        header[_HEADER : _HEADER + inline.numel()] = inline
        self._send(header)
        if values.numel() > _INLINE_VALUES:
            self._send(values[_INLINE_VALUES:].contiguous())
        if blob.numel():
            self._send(blob.to(self._device))

    def _receive(self) -> StepResult:
        expected, self._expected = self._expected, None
        if expected is not None:
            header, under_way = expected
            under_way.wait()
        else:
            header = self._new_header()
            self._send(header)
        size, count, dtype = (int(entry) for entry in header[:_HEADER].tolist())
        count += 1
        values = header[_HEADER : _HEADER + min(count, _INLINE_VALUES)]
        if count > _INLINE_VALUES:
            rest = torch.zeros(count - _INLINE_VALUES, dtype=torch.float64, device=self._device)
            self._send(rest)
            values = torch.cat([values, rest])
        extra: dict[str, Any] = {}
        if size:
            blob = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._send(blob)
            extra = objects.decode(blob)
        self._keys = extra.get("keys", self._keys)
        to_device = lambda tensor: tensor.to(self._device)  # noqa: E731
        output = map_tensors(extra.get("output"), to_device)
        state = map_tensors(extra.get("state", []), to_device)
        loss = values[0].to(_LOSS_DTYPES[dtype]) if dtype >= 0 else None
        return StepResult(loss, output, self._keys, values[1:].view(-1, 3), state)

    def _new_header(self) -> Tensor:
        return torch.zeros(_HEADER + _INLINE_VALUES, dtype=torch.float64, device=self._device)

    def _start(self, tensor: Tensor) -> Started:
        assert self._pipeline_group is not None
        source = dist.get_group_rank(self._pipeline_group, self._loss_rank)
        return start_broadcast(tensor, source, self._pipeline_group, _RESULTS)

    def _send(self, tensor: Tensor) -> None:
        work = self._start(tensor)
        if self._has_loss:
            self._sent.append(work)
        else:
            work.wait()
