"""Translations between what Lightning handles (whole modules, optimizers by index) and a rank's parts, by name."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelPruning, ThroughputMonitor
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_summary import ModelSummary as Summary
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_megatron.checkpoints.state.stored import GroupNames
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.packages import LIGHTNING, comes_from
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.pipeline.elsewhere.reachable import attributes_set_in

T = TypeVar("T")


class _FailureCallback(Callback):
    """Comes first among the callbacks, so that all ranks know of a failure, or of a stop, before others run."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report

    def __getstate__(self) -> dict[str, Any]:
        """Without the processes, which no other process and no copy has."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._report = _to_nobody

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Tell the other ranks."""
        self._report(exception)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop together, where a step of validation has asked for it on some rank."""
        strategy: Any = trainer.strategy
        strategy.run.agree_on_stopping()


def _to_nobody(exception: BaseException) -> None:
    """Stands for the report of a failure where there are no other ranks yet."""


def settle_callbacks(trainer: pl.Trainer, layout: Layout, sharded: bool) -> None:
    """Refuse loggers and callbacks of Lightning that cannot do here what they do, and let others count as here.

    Args:
        trainer: about to run.
        layout: of its ranks.
        sharded: whether replicas share out the optimizer's update.

    Raises:
        MisconfigurationException: with what to change.
    """
    refuse_graphs(trainer, layout)
    refuse_lottery(trainer, layout, sharded)
    count_samples_once(trainer, layout)


def refuse_graphs(trainer: pl.Trainer, layout: Layout) -> None:
    """Refuse ``TensorBoardLogger(log_graph=True)`` where no rank can run the whole forward that it traces.

    Raises:
        MisconfigurationException: with what to change.
    """
    if layout.pipeline * layout.tensor > 1 and any(getattr(logger, "_log_graph", False) for logger in trainer.loggers):
        raise MisconfigurationException(
            "`TensorBoardLogger(log_graph=True)` traces a forward of the whole module, of which each rank holds a part "
            f"(`pipeline_parallel_size={layout.pipeline}`, `tensor_parallel_size={layout.tensor}`); leave `log_graph` "
            "out, and log the graph in a run on one device: `max_steps=1` is enough."
        )


def refuse_lottery(trainer: pl.Trainer, layout: Layout, sharded: bool) -> None:
    """Refuse ModelPruning's lottery tickets where weights lie in buckets.

    It sets ``weight.data = copy.data``, so in one process the "original" weights that it keeps go on to be trained, and
    later prunings put back what the weights are. Weights in buckets take the values only.

    Args:
        trainer: about to run.
        layout: of its ranks.
        sharded: whether replicas share out the optimizer's update.

    Raises:
        MisconfigurationException: with what to change.
    """
    mixed = str(trainer.precision).endswith("mixed")
    for callback in callbacks_of(trainer):
        if not isinstance(callback, ModelPruning) or callback._resample_parameters:
            continue
        if callback._use_lottery_ticket_hypothesis and (mixed or (sharded and layout.data > 1)):
            raise MisconfigurationException(
                f"{type(callback).__name__} with `use_lottery_ticket_hypothesis=True` (its default) keeps weights in "
                f"one memory with those that it prunes, and with `data_parallel_size={layout.data}` and "
                f"`precision={trainer.precision!r}` they lie elsewhere: later prunings would put other weights back "
                "than in one process. Pass `use_lottery_ticket_hypothesis=False`, or train with "
                "`MegatronStrategy(optimizer_sharding=False)` in a precision that is not mixed."
            )


def count_samples_once(trainer: pl.Trainer, layout: Layout) -> None:
    """Let ThroughputMonitors multiply their rates by the replicas, not by the devices that share a replica's samples.

    What they call a device is a replica then; ``mfu`` is that of its devices together.
    """
    for monitor in callbacks_of(trainer):
        if isinstance(monitor, ThroughputMonitor):  # its setup, before each run's, has counted anew
            for throughput in monitor._throughputs.values():
                throughput.world_size = layout.data
                if monitor.available_flops is not None:
                    throughput.available_flops = monitor.available_flops * layout.world_size // layout.data


def skips_backward(module: pl.LightningModule) -> bool:
    """Whether no backward follows a training step: SWA's last epoch only measures BatchNorm's statistics."""
    trainer = module._trainer
    return trainer is not None and bool(trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward)


def callbacks_of(trainer: pl.Trainer) -> list[Callback]:
    """The Trainer's list of callbacks itself, not a copy."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def not_of_trainers(names: Iterable[str]) -> set[str]:
    """Those names of attributes that a Trainer does not have of its own: no code of Lightning's sets them."""
    return set(names) - _set_by_lightning()


@functools.cache
def _set_by_lightning() -> frozenset[str]:
    modules = [vars(each) for each in list(sys.modules.values()) if comes_from(each, "lightning.pytorch.trainer")]
    kinds = {kind for module in modules for kind in module.values() if isinstance(kind, type)}
    own = [each for kind in kinds if comes_from(kind, *LIGHTNING) for each in vars(kind).values()]
    return frozenset().union(*(attributes_set_in(each.__code__) for each in own if isinstance(each, FunctionType)))


def accumulates(trainer: pl.Trainer) -> bool:
    """Whether several batches make a step, now or, by Lightning's scheduler for that, later."""
    scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer))
    return scheduled or trainer.accumulate_grad_batches > 1


def insert_failure_callback(trainer: pl.Trainer, report: Callable[[BaseException], None]) -> None:
    """Put the failure callback in front, in the place of an earlier run's."""
    callbacks = callbacks_of(trainer)
    others = (callback for callback in callbacks if not isinstance(callback, _FailureCallback))
    callbacks[:] = [_FailureCallback(report), *others]


_MAKE = ("__init__", "_get_summary_data")
_COUNTS = ("param_nums", "total_parameters", "trainable_parameters")
WholeView = Callable[[pl.LightningModule], AbstractContextManager[None] | None]


class WholeSummaries:
    """Lets every ``ModelSummary`` of a divided module count the whole of it, and run none of it, until :meth:`remove`.

    Users make summaries in hooks, by Lightning's class, which has no seam for that: its methods are replaced while a
    run with a divided module lasts. Of a module that is not divided it tells what it told before.

    Args:
        whole_view: shows a module as it is in one process, as a context manager; ``None`` for one that is not divided.
    """

    def __init__(self, whole_view: WholeView) -> None:
        self._replaced = Replacements()
        for name in _MAKE:
            self._replaced.put(Summary, name, _in_view(vars(Summary)[name], whole_view))
        for name in _COUNTS:
            self._replaced.put(Summary, name, property(_in_view(vars(Summary)[name].fget, whole_view)))

    def remove(self) -> None:
        """Give Lightning's class its own methods back."""
        self._replaced.take_back()


def _in_view(method: Callable[..., T], whole_view: WholeView) -> Callable[..., T]:
    """A method of a summary, run in sight of the whole module, and without an example input.

    Sizes of outputs, which Lightning finds by running the module on that, would need a forward of all of it.
    """

    @functools.wraps(method)
    def in_view(summary: Any, *args: Any, **kwargs: Any) -> T:
        given = args[0] if args else kwargs.get("model")
        module = summary.__dict__.get("_model", given)  # which its constructor has yet to keep
        view = whole_view(module)
        if view is None:
            return method(summary, *args, **kwargs)
        example, module.example_input_array = module.example_input_array, None
        try:
            with view:
                return method(summary, *args, **kwargs)
        finally:
            module.example_input_array = example

    return in_view


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The Trainer that a module is attached to; ``module.trainer`` raises where there is none."""
    return module._trainer


def hook_of(module: pl.LightningModule) -> str | None:
    """The hook that is running now, as ``self.log`` sees it; ``None`` outside of hooks."""
    return module._current_fx_name


def is_under_way(module: pl.LightningModule | None) -> bool:
    """Whether a function of the Trainer runs and has come further than the hooks called ``setup``."""
    if module is None or module._trainer is None or hook_of(module) == "setup":
        return False
    return module._trainer.state.status == TrainerStatus.RUNNING


def training_data(module: pl.LightningModule) -> Any:
    """Training data given to ``fit``: loaders, a datamodule or the module itself; ``None`` without a Trainer."""
    trainer = module._trainer
    source = getattr(trainer.fit_loop, "_data_source", None) if trainer is not None else None
    return getattr(source, "instance", None)


def optimizers_and_schedulers(module: pl.LightningModule) -> tuple[list[Optimizer], list[Any]]:
    """Those of a run; none without a trainer."""
    trainer = getattr(module, "_trainer", None)
    return (
        ([], []) if trainer is None else (trainer.optimizers, [each.scheduler for each in trainer.lr_scheduler_configs])
    )


def batch_number(module: pl.LightningModule) -> int | None:
    """``batch_idx`` of the batch that is trained; ``None`` without a trainer."""
    return None if module._trainer is None else int(module._trainer.fit_loop.epoch_loop.batch_idx)


def fetched_loaders(trainer: pl.Trainer) -> tuple[Any, Any]:
    """The combined training loader of a fit and the fetcher that reads it; ``None`` for each that is not set up."""
    return trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher


def loading_mode(combined: Any) -> str:
    """How a combined loader ends: ``"max_size_cycle"``, ``"min_size"``, ``"max_size"`` or ``"sequential"``."""
    mode: str = combined._mode
    return mode


def loader_states(combined: Any) -> list[dict[str, Any]]:
    """The states of the stateful loaders in a combined loader."""
    states: list[dict[str, Any]] = combined._state_dicts()
    return states


def show_device_mesh(module: pl.LightningModule, mesh: DeviceMesh) -> None:
    """Let ``module.device_mesh`` be the mesh."""
    module._device_mesh = mesh


def syncs_batch_norm(trainer: pl.Trainer) -> bool:
    """Whether ``Trainer(sync_batchnorm=True)`` was passed, and training is about to start.

    Raises:
        MisconfigurationException: a plugin that synchronises layers in a way of its own.
    """
    plugin = getattr(trainer.strategy, "_layer_sync", None)
    if plugin is None or trainer.state.fn != TrainerFn.FITTING:
        return False
    if type(plugin) is not TorchSyncBatchNorm:
        raise MisconfigurationException(
            f"`plugins=[{type(plugin).__name__}(...)]` synchronises layers in a way of its own, which stages and "
            "tensor-parallel ranks do not follow; leave it out, and pass `Trainer(sync_batchnorm=True)` for batch norm "
            "over replicas."
        )
    return True


def stops(module: pl.LightningModule) -> bool:
    """Whether somebody has asked the Trainer to stop after this step (``trainer.should_stop = True``)."""
    trainer = module._trainer
    return trainer is not None and trainer.should_stop


@contextmanager
def in_hook(module: pl.LightningModule, name: str) -> Generator[None, None, None]:
    """Let ``self.log`` take the calls in here for those of the hook called ``name``."""
    attributes = module.__dict__  # a module takes an attribute as it is only after a dozen calls
    hook, attributes["_current_fx_name"] = module._current_fx_name, name
    yield
    attributes["_current_fx_name"] = hook


def present(value: T | None, name: str) -> T:
    """The value, which a Trainer gives the strategy.

    Raises:
        RuntimeError: it has not given any: the strategy is used without a Trainer.
    """
    if value is None:
        raise RuntimeError(
            f"MegatronStrategy has no {name}; a Trainer gives it one: `Trainer(strategy=MegatronStrategy(...))`."
        )
    return value


def seed_workers(dataloader: Any, replica: int) -> None:
    """Seed loader workers by replica where Lightning would seed them by global rank."""
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(dataloader, "worker_init_fn", 0) is None:
        dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=replica)


def set_sampler_epoch(dataloader: object, epoch: int) -> None:
    """Tell a loader's samplers which epoch it is, as Lightning does before each."""
    _set_sampler_epoch(dataloader, epoch)


def localize_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> GroupNames:
    """Drop the parameters of other stages, which are on the meta device; returns the names of all."""
    group_names: GroupNames = []
    for group in optimizer.param_groups:
        group_names.append([names.get(id(p), f"parameter {i}") for i, p in enumerate(group["params"])])
        for parameter in group["params"]:
            if parameter.is_meta:
                optimizer.state.pop(parameter, None)
        group["params"][:] = [parameter for parameter in group["params"] if not parameter.is_meta]
    return group_names


def gather_state_dict(local: Mapping[str, Any], mesh: ParallelMesh) -> dict[str, Tensor]:
    """Whole state on the CPU of global rank 0; an empty dict elsewhere."""
    mine = _without_neighbours({n: v.detach().cpu() for n, v in local.items() if isinstance(v, Tensor)})
    if mesh.layout.pipeline == 1:
        return mine if mesh.rank == 0 else {}
    if 0 not in mesh.pipeline_ranks:
        return {}
    parts = objects.gather_to(mine, 0, mesh.group("pipeline_parallel")) or []
    return {name: value for part in parts for name, value in part.items()}


def _without_neighbours(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors; those that are views into larger memory (buckets) copied out, tied ones once.

    A pickled view takes all of the memory that it looks into along.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    found = {}
    for name, value in state.items():
        if value.untyped_storage().nbytes() > value.nbytes:
            key = (value.data_ptr(), value.dtype, value.shape, value.stride())
            value = copies.setdefault(key, value.clone()) if value.numel() else value.clone()
        found[name] = value
    return found


METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
"""What a Trainer shows of what has been logged."""


@contextmanager
def metrics_shown_as(
    trainer: pl.Trainer, make: Callable[[dict[str, Any]], dict[str, Any]]
) -> Generator[None, None, None]:
    """Show other dictionaries of metrics for a while; what Lightning adds to them stays.

    Args:
        trainer: the run's.
        make: such a dictionary out of the Trainer's own.
    """
    connector = trainer._logger_connector
    kept = {name: getattr(connector, f"_{name}") for name in METRICS}
    for name, table in kept.items():
        setattr(connector, f"_{name}", make(table))
    try:
        yield
    finally:
        for name, table in kept.items():
            table.update(dict.items(getattr(connector, f"_{name}")))
            setattr(connector, f"_{name}", table)
