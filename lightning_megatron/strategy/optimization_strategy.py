"""From gradients to updated weights: Lightning's hooks for precision, clipping and the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.checkpoints.state.stored import StatePlace
from lightning_megatron.data_parallel.buckets.holders import declared_elementwise
from lightning_megatron.data_parallel.model_gradients import has_narrow_weights
from lightning_megatron.data_parallel.step_guard import StepGuard
from lightning_megatron.data_parallel.update.loss_scale import LossScale
from lightning_megatron.data_parallel.update.trial import Independence, smallest_independence
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy import checks
from lightning_megatron.strategy.lightning import trainer_access as lightning_state
from lightning_megatron.strategy.lightning.hand_clipping import HandClipping
from lightning_megatron.strategy.lightning.hooks import watches_gradients, watches_weights
from lightning_megatron.strategy.lightning.precision import MegatronPrecision, megatron_precision
from lightning_megatron.strategy.logs.hook_logs import HeldHooks, HookLogs
from lightning_megatron.strategy.logs.replay import ALREADY_REDUCED, log_everywhere
from lightning_megatron.strategy.options import Options
from lightning_megatron.strategy.state_strategy import StateStrategy
from lightning_megatron.strategy.step.assembly import Assembled
from lightning_megatron.strategy.step.engine import StepEngine
from lightning_megatron.strategy.step.step import Window


class OptimizationStrategy(StateStrategy):
    """A strategy whose ranks share the gradients, and maybe the optimizer, of one module."""

    _assembled: Assembled | None
    options: Options
    _guard: StepGuard | None
    _reduce_gradients: bool
    _hook_logs: HookLogs | None = None
    _other_logs: HookLogs | None = None
    _held_hooks: HeldHooks | None = None
    _clipping: HandClipping | None = None

    @property
    def precision_plugin(self) -> Precision:
        """The plugin in use; its clipping sees the gradients of all stages."""
        if self._precision_plugin is None:
            self.precision_plugin = MegatronPrecision()
        assert self._precision_plugin is not None
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else megatron_precision(plugin)
        if self._precision_plugin is not None:
            self._precision_plugin.norm_of = self.gradient_norm  # type: ignore[attr-defined]
            self._precision_plugin.held_of = self._held_gradients  # type: ignore[attr-defined]

    @property
    def _engine(self) -> StepEngine:
        """The engine; there is one from ``setup`` on."""
        assert self._assembled is not None
        return self._assembled.engine

    @property
    def _tensor_state(self) -> TensorState:
        return self._assembled.tensor_state if self._assembled is not None else TensorState()

    @property
    def _presence(self) -> Presence:
        return self._assembled.engine.model_gradients.presence if self._assembled is not None else Presence()

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale of ``precision="16-mixed"``; ``None`` for other precisions."""
        return getattr(self.precision_plugin, "loss_scale", None)

    @property
    def skipped_steps(self) -> int:
        """Updates left out in this run because a loss or gradient was not finite."""
        return self._guard.skipped_steps if self._guard is not None else 0

    def _prepare_gradients(self, trainer: pl.Trainer) -> None:
        """Lay out gradient buckets, and let the optimizers update this rank's share."""
        assert self._assembled is not None and self.lightning_module is not None
        gradients, module = self._engine.model_gradients, self.lightning_module
        watched = watches_gradients(module, lightning_state.callbacks_of(trainer))
        layout = self.mesh.layout
        shared = layout.pipeline * layout.tensor > 1 and not self._engine.splits_itself
        self._hook_logs = HookLogs(self.mesh, self.root_device) if shared and watched else None
        if self._engine.splits_itself:
            checks.check_own_gradients(self.loss_scale, self.options.nonfinite, gradients.options.reduce_dtype)
            return
        several = self._assembled.needs_gradients or lightning_state.accumulates(trainer)
        adds_up = several and has_narrow_weights(module)
        least = self._check_optimizers(adds_up)
        widens = adds_up and least is not Independence.NONE
        puts_together = least is Independence.PARAMETER and not self._tensor_state.is_trivial
        if not (self._assembled.needs_gradients or puts_together or widens):
            return
        if self.loss_scale is not None:
            checks.check_scaled(module)
        place = self.mesh.layout.describe(self.global_rank)
        self._guard = StepGuard(
            gradients, self.root_device, self.global_rank, place, self.options.nonfinite, self.loss_scale
        )
        gradients.prepare(
            self._assembled.groups,
            self.optimizers,
            whole=least is not Independence.ELEMENT,
            watched=watched,
            skips=self._guard.watches,
            watches_weights=watches_weights(module, lightning_state.callbacks_of(trainer)),
            rounds=least is not Independence.NONE,
            widens=widens,
        )

    def _check_optimizers(self, adds_up: bool) -> Independence:
        """Try out what the optimizers update by themselves, and refuse what needs more than a rank holds."""
        gradients, layout, least = self._engine.model_gradients, self.mesh.layout, Independence.ELEMENT
        shards, lowered = gradients.replicas.shards, gradients.options.layer_dtype is not None
        if shards * layout.pipeline * layout.tensor > 1 or lowered or adds_up:
            declared = declared_elementwise(gradients.options.sharding)
            least = smallest_independence(self.optimizers, self.root_device, declared)
        checks.check_independence(self.optimizers, least, layout, shards, lowered)
        return least

    @property
    def _scale(self) -> float:
        """Factor of the loss while gradients are computed."""
        return self.loss_scale.scale if self.loss_scale is not None else 1.0

    @property
    def _starts_accumulation(self) -> bool:
        """Whether this batch is the first of those whose gradients are averaged."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0

    def _window(self) -> Window:
        """Where the present batch stands among those whose gradients are averaged."""
        assert self.lightning_module is not None
        batches = self.lightning_module.trainer.accumulate_grad_batches
        return Window(batches, self._starts_accumulation, self._reduce_gradients, self._scale)

    def _check_step(self, reduced: bool) -> None:
        """Refuse or skip an update that is not finite, once gradients have been summed."""
        if self._guard is not None and self._guard.watches and reduced:
            assert self.lightning_module is not None
            self._guard.check(self.lightning_module.trainer.global_step, self._engine.losses.take_bad())

    def _places(self, optimizer: Optimizer) -> list[StatePlace]:
        return self._engine.model_gradients.state_places(optimizer)

    def _stored_module(self) -> dict[str, Any]:
        self._engine.model_gradients.finish_gather()
        stored = super()._stored_module()
        masters = self._engine.model_gradients.masters()
        stored |= masters
        return {name: value for name, value in stored.items() if value is not None or name not in masters}

    def _load_module(self, state: Mapping[str, Any]) -> None:
        gradients = self._engine.model_gradients
        gradients.finish_gather()
        masters = gradients.masters()
        super()._load_module({name: value for name, value in state.items() if name not in masters})
        if masters:
            gradients.load_masters(state)

    def on_train_end(self) -> None:
        """Hand round what the last hooks wrote."""
        super().on_train_end()
        self._engine.settle()
        self._engine.share_copies()

    def _run_section(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        if self._assembled is not None:
            self._engine.share_copies()
        return super()._run_section(checkpoint)

    def _local_state(self) -> dict[str, Any]:
        self._engine.model_gradients.finish_gather()
        self._engine.share_copies()
        state = super()._local_state()
        return state | {n: v for n, v in self._engine.model_gradients.whole_masters().items() if n in state}

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        """Step; an optimizer whose step fails gets its parameters back. What hooks log meanwhile is put together."""
        logs = self._hook_logs
        try:
            if logs is not None:
                logs.hold()
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
            self._engine.settle()
        except BaseException:
            self._engine.model_gradients.restore()
            if logs is not None:
                logs.release()
            raise
        if logs is not None:
            assert self.lightning_module is not None
            logs.flush(self.lightning_module, self._log)
        return result

    def _hold_hooks(self, module: pl.LightningModule, callbacks: Iterable[Callback]) -> None:
        """Put together what hooks log outside of updates too, where no rank holds the whole model."""
        self._release_hooks()
        if self.mesh.layout.pipeline * self.mesh.layout.tensor > 1 and not self._engine.splits_itself:
            self._other_logs = HookLogs(self.mesh, self.root_device)
            self._held_hooks = HeldHooks(module, callbacks, self._other_logs, self._log)
            self._clipping = HandClipping(module, self._presence, Stage.of(module), self.gradient_norm)
            self._clipping.start()

    def _release_hooks(self) -> None:
        if self._held_hooks is not None:
            self._held_hooks.remove()
        if self._clipping is not None:
            self._clipping.stop()
        self._held_hooks = self._other_logs = self._clipping = None

    def _log(self, *args: Any, **kwargs: Any) -> None:
        """``self.log`` while the strategy is attached: recorded inside a step, made equal over replicas outside."""
        module = self.lightning_module
        assert module is not None
        recorder = self._engine.recording.recorder if self._assembled is not None else None
        if recorder is not None:
            recorder.log(*args, **kwargs)
        elif not any(logs.take(module, args, kwargs) for logs in (self._hook_logs, self._other_logs) if logs):
            replicas = self.mesh.group("data_parallel") if self.mesh.layout.data > 1 else ALREADY_REDUCED
            log_everywhere(module, replicas, args, kwargs)

    def gradient_norm(self, parameters: Any | None = None) -> Tensor:
        """2-norm of the gradients over the whole model, every parameter counted once; collective over all ranks.

        Args:
            parameters: this rank's parameters to count; by default all of the optimizer's.

        Returns:
            Scalar, equal on every rank.
        """
        if parameters is None:
            parameters = [
                p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
            ]
        return self._engine.model_gradients.norm(parameters)

    def _held_gradients(self, parameters: Iterable[Any]) -> list[Tensor]:
        return self._engine.model_gradients.held(parameters)


class LogGradientNorm(Callback):
    """Logs the global norm, before clipping, as ``grad_norm``; for ``MegatronStrategy(log_gradient_norm=True)``."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Compute and log it; collective over all ranks."""
        strategy = trainer.strategy
        assert isinstance(strategy, OptimizationStrategy)
        pl_module.log("grad_norm", strategy.gradient_norm().float())


def insert_gradient_norm(trainer: pl.Trainer) -> None:
    """Add the callback, once."""
    callbacks = lightning_state.callbacks_of(trainer)
    if not any(isinstance(callback, LogGradientNorm) for callback in callbacks):
        callbacks.append(LogGradientNorm())
