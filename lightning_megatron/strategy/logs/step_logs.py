"""Recording what the user logs inside a step.

Inside a step only the last stage reaches ``self.log``, once per micro-batch and only for its replica. Lightning's
loggers, progress bars and callbacks want one call per key and step on every rank, with one value. So calls made
inside a step are recorded and aggregated over micro-batches here, over replicas and stages with everything else that
the step leaves behind (:mod:`~lightning_megatron.strategy.step.step`), and then replayed through the public
``self.log`` (:mod:`~lightning_megatron.strategy.lightning.log_replay`)::

    last stage   log(loss) × m ──aggregate──▶ all-gather over replicas ──▶ broadcast ──▶ self.log(loss)
    other stages                                                          receive  ──▶ self.log(loss)

One process alone, with one micro-batch, has nothing to aggregate: each call goes on at once, so that what Lightning
refuses is refused at the user's line. What is logged with ``rank_zero_only=True`` stays on global rank 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Number
from types import MappingProxyType
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.mesh.torch_functions import line_of_user
from lightning_megatron.strategy.logs.combining import Logged, Mean, Unsure, combine
from lightning_megatron.strategy.logs.metrics import BatchValue, Gather, MetricCalls, Shares

_EMPTY = inspect.Parameter.empty
LOG_SIGNATURE = inspect.signature(pl.LightningModule.log)
_LOG_DEFAULTS = {
    name: parameter.default for name, parameter in LOG_SIGNATURE.parameters.items() if parameter.default is not _EMPTY
}
_DIFFERS = 1e-4  # relative: more than the rounding in which tensor ranks may differ
_NOT_REPLAYED = ("sync_dist", "sync_dist_group", "enable_graph", "batch_size")


@dataclass(frozen=True)
class LogKey:
    """One logged key of a step: everything but its value.

    Attributes:
        name: the key.
        how: how values of micro-batches and replicas combine: mean, sum, min or max; or what trials have found, see
            :mod:`~lightning_megatron.strategy.logs.combining`.
        metric: dotted name of the logged torchmetrics object, or ``None`` for a number.
        dtype: floating-point type in which the value is replayed.
        options: the other arguments of ``self.log``.
        line: of the user's code.
        sized: whether ``batch_size=`` says what the number is a mean of.
    """

    name: str
    how: Any
    metric: str | None
    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...]
    line: str = field(default="", compare=False)
    sized: bool = field(default=False, compare=False)


@dataclass
class StepLogs:
    """The logs of a step.

    Attributes:
        keys: logged keys.
        rows: per key ``[value, weight, batch size]`` in float64; batch size -1 where none was given.
        own: what was logged with ``rank_zero_only=True`` on this rank; ``None`` if nothing.
        later: per row with a metric behind it, what gives the metric's value, if that is a number: with a way to gather
            that for the batches of all replicas, which is collective; until they have told each other what they log.
        gather: that way.
    """

    keys: list[LogKey]
    rows: Tensor
    own: StepLogs | None = None
    later: Mapping[int, Callable[[Gather | None], Tensor | None]] = field(default_factory=dict)
    gather: Gather | None = None


def no_logs(device: torch.device) -> StepLogs:
    """Those of a step that logged nothing."""
    return StepLogs([], torch.zeros(0, 3, dtype=torch.float64, device=device))


@dataclass
class _Recorded:
    key: LogKey
    values: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    counts: list[Mapping[Any, float]] = field(default_factory=list)
    sources: list[BatchValue | None] = field(default_factory=list)
    batch_size: int | None = None
    batch_sizes: list[int | None] = field(default_factory=list)

    @property
    def source(self) -> BatchValue | None:
        """The metric that stands behind every micro-batch's value, if it is one."""
        first = self.sources[0] if self.sources else None
        return None if any(source != first for source in self.sources) else first

    @property
    def is_number(self) -> bool:
        """Whether it is not the value of a metric."""
        return self.key.metric is None and not any(self.sources)


def operation_of(reduce_fx: Any) -> str:
    """How values of micro-batches and replicas combine: ``mean``, ``sum``, ``min`` or ``max``."""
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    name = name.lower()
    return {"avg": "mean"}.get(name, name) if name in ("mean", "avg", "sum", "min", "max") else "mean"


def _log_dtype(value: Any) -> torch.dtype:
    dtype = value.dtype if isinstance(value, Tensor) else torch.get_default_dtype()
    return dtype if dtype in (torch.float32, torch.float64) else torch.get_default_dtype()


TakesLog = Callable[[tuple[Any, ...], dict[str, Any]], bool]
TakesValue = Callable[[LogKey, Tensor, int | None], None]


class LogRecorder:
    """Collects the ``self.log`` calls of one step.

    Args:
        module: the user's module.
        metric_calls: follows the module's metrics, in a step of several micro-batches.
        check: called with each value and what it is; raises if it cannot be right.
        take: called with the arguments of each call; says whether another stage records it.
        within: by key, how the values of micro-batches combine, where trials have told: see
            :mod:`~lightning_megatron.strategy.logs.combining`; ``None`` where they have shown no way.
        at_once: called with key, value and batch size of each call as it is made, where nothing is to be aggregated.
        constant: keys whose ``batch_size=`` is that of a batch, however many samples it has.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        metric_calls: MetricCalls | None = None,
        check: Callable[[Any, str], None] | None = None,
        within: Mapping[str, Any] = MappingProxyType({}),
        take: TakesLog | None = None,
        at_once: TakesValue | None = None,
        constant: AbstractSet[str] = frozenset(),
    ) -> None:
        self._constant = constant
        self._within, self._take, self._at_once = within, take, at_once
        self._module, self._check = module, check
        self._records: dict[tuple[str, int], _Recorded] = {}
        self._own: dict[tuple[str, int], _Recorded] = {}
        self._counts: dict[str, int] = {}
        self._weight, self._weigh = 1.0, cast("Mapping[Any, float]", {})
        self.metric_calls = metric_calls

    def begin_micro_batch(
        self, weight: float, counts: Mapping[Any, float] = MappingProxyType({}), shares: Shares = MappingProxyType({})
    ) -> None:
        """Say that the calls which follow belong to a new micro-batch.

        Args:
            weight: of its loss.
            counts: its other weights, by what is counted.
            shares: see :meth:`.MetricCalls.shares`.
        """
        self._weight, self._weigh = weight, {"weights": weight, **counts}
        self._counts = {}
        if self.metric_calls is not None:
            self.metric_calls.begin_micro_batch(shares)

    def names(self) -> set[str]:
        """Of what this micro-batch has logged so far."""
        return {name for name, count in self._counts.items() if count}

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """In the middle of a micro-batch, around code of others."""
        kept = self._weight, self._weigh, self._counts
        with nullcontext() if self.metric_calls is None else self.metric_calls.elsewhere():
            yield
        self._weight, self._weigh, self._counts = kept

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``LightningModule.log``."""
        if self._take is not None and self._take(args, kwargs):
            return
        name, value, options = _log_call(self._module, args, kwargs)
        if not isinstance(value, (Tensor, float, int, Metric, Number)):  # in Lightning's words
            raise ValueError(
                f"`self.log({name}, {value!s})` was called, but `{type(value).__name__}` values cannot be logged"
            )
        if self._check is not None:
            self._check(value, f"the logged value `{name}`")
        number = self._as_tensor(value)
        occurrence = self._counts.get(name, 0)
        self._counts[name] = occurrence + 1
        batch_size = options.get("batch_size")
        if self._at_once is not None:
            self._at_once(self._key(name, value, options), number, None if batch_size is None else int(batch_size))
            return
        records = self._own if options.get("rank_zero_only") else self._records
        record = records.get((name, occurrence))
        if record is None:
            record = records[(name, occurrence)] = _Recorded(self._key(name, value, options))
        record.values.append(number)
        if self.metric_calls is not None:
            record.sources.append(self.metric_calls.behind(value))
        record.weights.append(float(batch_size) if batch_size is not None else self._weight)
        record.counts.append(self._weigh)
        record.batch_sizes.append(batch_size)
        if batch_size is not None:
            earlier = 0 if name in self._constant else record.batch_size or 0
            record.batch_size = earlier + int(batch_size)

    def _key(self, name: str, value: Any, options: dict[str, Any]) -> LogKey:
        every = {**_LOG_DEFAULTS, **options}
        kept = tuple(sorted(item for item in every.items() if item[0] not in _NOT_REPLAYED))
        how, sized = operation_of(every["reduce_fx"]), every["batch_size"] is not None
        return LogKey(name, how, self._metric_name(value), _log_dtype(value), kept, line_of_user(), sized)

    def _metric_name(self, value: Any) -> str | None:
        if not isinstance(value, Metric):
            return None
        for name, module in self._module.named_modules():
            if module is value:
                return name
        raise MisconfigurationException(  # in Lightning's words
            "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged: "
            f"a {type(value).__name__}. You can fix this by setting an attribute for the metric in your "
            "`LightningModule`, so that every rank can find it."
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
        return torch.tensor(float(value), dtype=torch.float64)

    def numbers(self, parts: int) -> list[dict[str, dict[int, tuple[float, int | None]]]]:
        """Of each micro-batch what was logged as a number and is not the value of a metric: key -> how often it was
        logged before -> value and batch size.
        """
        found: list[dict[str, dict[int, tuple[float, int | None]]]] = [{} for _ in range(parts)]
        for (name, count), record in self._records.items():
            if record.is_number:
                for part, value, size in zip(found, record.values, record.batch_sizes, strict=False):
                    part.setdefault(name, {})[count] = float(value), size
        return found

    def numbers_logged(self) -> set[str]:
        """Keys that were logged as numbers, and not by metrics."""
        return {name for (name, _), record in self._records.items() if record.is_number}

    def sizes(self) -> dict[str, int | None]:
        """The ``batch_size=`` that the one part of a batch that ran has logged with each key."""
        return {name: record.batch_size for (name, _), record in self._records.items()}

    def logged(self) -> dict[str, Logged]:
        """Numbers logged by the one part of a batch that ran."""
        records = {name: record for (name, _), record in self._records.items() if record.is_number}
        return {
            name: Logged(
                float(self._value(record, record.key.how, "cpu")),
                record.key.dtype is torch.float64,
                record.key.line,
                max((torch.finfo(each.dtype).eps for each in record.values if each.is_floating_point()), default=0.0),
                record.batch_size,
            )
            for name, record in records.items()
        }

    def differs_untold(self) -> bool:
        """Whether some number differs between micro-batches of which no trial has told how it comes together."""
        for record in (each for each in self._records.values() if each.is_number and len(each.values) > 1):
            told = record.key.name in self._within
            if told and self._within[record.key.name].__class__ is not Unsure:
                continue
            each = [float(value) for value in record.values]
            apart = max(each) - min(each) > _DIFFERS * max(map(abs, each))
            if sum(value != 0 for value in each) > 1 if told else apart:
                return True
        return False

    def partly(self, parts: int) -> list[LogKey]:
        """Numbers that some of the micro-batches have logged, and others have not.

        Args:
            parts: how many there are.
        """
        records = (record for record in self._records.values() if record.is_number and len(record.values) < parts)
        return [replace(record.key, how=self._how(record)) for record in records]

    def collect(
        self,
        device: torch.device,
        joined: Mapping[tuple[str, int], tuple[Any, Any]] = MappingProxyType({}),
    ) -> StepLogs:
        """The logs, aggregated over the micro-batches of this replica.

        Args:
            device: where tensors live.
            joined: key and how often it was logged before -> value and batch size, of those that are known.
        """
        gather = None if self.metric_calls is None else self.metric_calls.gather
        logs = self._collected(self._records, device, joined, gather)
        logs.own = self._collected(self._own, device, {}) if self._own else None
        return logs

    def _collected(
        self,
        records: Mapping[tuple[str, int], _Recorded],
        device: torch.device,
        joined: Mapping[tuple[str, int], tuple[Any, Any]],
        gather: Gather | None = None,
    ) -> StepLogs:
        if not records:
            return no_logs(device)
        keys, later = list[LogKey](), dict[int, Callable[[Gather | None], Tensor | None]]()
        values, beside = list[Tensor](), list[tuple[float, float]]()
        for place, record in records.items():
            how, source = self._how(record), record.source
            size: Any = record.batch_size
            weight = sum(_weights(record, how))
            if place in joined:
                value, size = joined[place]
                values.append(torch.tensor(float(value), dtype=torch.float64, device=device))
                if not isinstance(how, Mean):
                    weight = float(size if size is not None else 1.0)
            else:
                whole = None if source is None or gather is not None else _whole(source, None)
                values.append(self._value(record, how, device) if whole is None else whole.to(device, torch.float64))
                if source is not None and gather is not None:
                    later[len(keys)] = partial(_whole, source)
            beside.append((weight, -1.0 if size is None else float(size)))
            keys.append(record.key if how is record.key.how else replace(record.key, how=how))
        rows = torch.tensor([(0.0, *each) for each in beside], dtype=torch.float64, device=device)
        rows[:, 0] = torch.stack(values)  # which in rehearsals have no numbers, as the rows have
        return StepLogs(keys, rows, later=later, gather=gather)

    def _how(self, record: _Recorded) -> Any:
        """How the values of the batch combine."""
        how = self._within.get(record.key.name) if record.is_number else None
        return record.key.how if how is None else how

    def _value(self, record: _Recorded, how: Any, device: torch.device | str) -> Tensor:
        """The value of the whole batch, from those of its parts."""
        if len(record.values) == 1 and (how == "mean" or isinstance(how, Mean)):
            return record.values[0].to(device, torch.float64)
        values = torch.stack([value.to(device) for value in record.values]).to(torch.float64)
        return combine(how, values, torch.tensor(_weights(record, how), dtype=torch.float64, device=device))


def _whole(source: BatchValue, gather: Gather | None) -> Tensor | None:
    """The value of a metric for the whole batch; ``None`` if it is no number."""
    value = source.compute(gather)
    return value.detach().reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else None


def _weights(record: _Recorded, how: Any) -> list[float]:
    """Weight of each value of a number."""
    return [counts[how.weigh] for counts in record.counts] if isinstance(how, Mean) else record.weights


def _log_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """Name, value and the other arguments of a call of ``self.log``; the usual form without asking ``inspect``."""
    if len(args) == 2 and kwargs.keys() <= _LOG_DEFAULTS.keys():
        return args[0], args[1], kwargs
    options = dict(LOG_SIGNATURE.bind(module, *args, **kwargs).arguments)
    options.pop("self")
    return options.pop("name"), options.pop("value"), options
