"""Handing aggregated values to Lightning, once per key and step.

``self.log`` of Lightning does much that does not change from step to step: it walks the metric it stores the value in,
inspects hook signatures, builds and compares metadata. With a small model that is a tenth of a step. So a key goes the
whole way when it is new to a result collection, and afterwards its value alone is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.strategy.logs.step_logs import LOG_SIGNATURE, LogKey, StepLogs, operation_of


class AlreadyReduced:
    """Stands for a process group where a logged value is equal on all ranks already, so nothing needs reducing."""

    def __reduce__(self) -> str:
        return "ALREADY_REDUCED"  # a copy is the same: Lightning compares what a value was logged with


ALREADY_REDUCED = AlreadyReduced()


class LogReplay:
    """Replays the logs of steps on one module."""

    def __init__(self) -> None:
        self._results: Any = None
        self._known: dict[tuple[str, str], LogKey] = {}

    def __call__(self, module: pl.LightningModule, logs: StepLogs) -> None:
        """Log every key with its aggregated value, as the public ``self.log`` would."""
        if logs.own is not None and module.trainer.is_global_zero:
            self(module, logs.own)
        for key, row in zip(logs.keys, logs.rows.unbind() if logs.keys else (), strict=True):
            size = int(row[2])
            self.one(module, key, row[0].to(key.dtype, copy=True), size if size >= 0 else None)

    def one(self, module: pl.LightningModule, key: LogKey, value: Tensor, batch_size: int | None) -> None:
        """Log one key.

        Args:
            module: the user's module.
            key: everything but the value.
            value: scalar, which is kept.
            batch_size: where one was given.
        """
        value = value.to(module.device, key.dtype)
        if key.metric is not None:
            self._log(module, key, _metric_with_cache(module, key.metric, value), batch_size)
        elif not self._hand_on(module, key, value, batch_size):
            self._log(module, key, value, batch_size)

    def _log(self, module: pl.LightningModule, key: LogKey, value: Any, batch_size: int | None) -> None:
        options = dict(key.options)
        if key.metric is not None:
            options["metric_attribute"] = key.metric
        options |= {"batch_size": batch_size, "sync_dist": True, "sync_dist_group": ALREADY_REDUCED}
        pl.LightningModule.log(module, key.name, value, **options)
        results = module.trainer._results
        if results is not self._results:
            self._results, self._known = results, {}
        if results is not None and module._current_fx_name is not None:
            self._known[module._current_fx_name, key.name] = key

    def _hand_on(self, module: pl.LightningModule, key: LogKey, value: Tensor, batch_size: int | None) -> bool:
        """Update the stored metric of a key that was logged before in the same way, by the same hook."""
        trainer, hook = module.trainer, module._current_fx_name
        results, connector = trainer._results, trainer._logger_connector
        if results is None or results is not self._results or hook is None:
            return False
        known, stored = self._known.get((hook, key.name)), results.get(f"{hook}.{key.name}")
        if known != key or stored is None or results.dataloader_idx is not None or connector.should_reset_tensors(hook):
            return False
        results.update_metrics(
            f"{hook}.{key.name}", value, results._extract_batch_size(stored, batch_size, stored.meta)
        )
        connector._current_fx = hook
        return True


def _metric_with_cache(module: pl.LightningModule, name: str, value: Tensor) -> Metric:
    metric = module.get_submodule(name)
    assert isinstance(metric, Metric)
    if not bool(torch.isnan(value)):
        metric._forward_cache = value  # type: ignore[assignment]
    if not metric._update_count:
        metric._update_count = 1
    return metric


def log_everywhere(
    module: pl.LightningModule,
    data_group: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    is_whole: Callable[[Any], bool] | None = None,
) -> None:
    """``self.log`` outside of a step, made equal over replicas unless the user restricts it to rank zero.

    Args:
        module: the user's module.
        data_group: ``None``, for which the strategy takes the replicas' group, or ``ALREADY_REDUCED`` with one replica.
        args: positional arguments of ``self.log``.
        kwargs: its keyword arguments.
        is_whole: tells whether a value that is to be summed over replicas is that of all samples already; collective
            over them.
    """
    bound = LOG_SIGNATURE.bind(module, *args, **kwargs)
    bound.apply_defaults()
    options = dict(bound.arguments)
    shared = not options["rank_zero_only"] and not isinstance(options["value"], Metric)
    summed = operation_of(options["reduce_fx"]) == "sum"
    if shared and not options["sync_dist"]:
        options |= {"sync_dist": True, "sync_dist_group": ALREADY_REDUCED if summed else data_group}
    elif shared and summed and is_whole is not None and is_whole(options["value"]):
        options["sync_dist_group"] = ALREADY_REDUCED
    pl.LightningModule.log(**options)
