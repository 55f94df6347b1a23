"""Routes calls of ``self.log`` while a module runs under the strategy.

::

    in a step                      the step's recorder, which averages over micro-batches and replicas
    in predict_step                Lightning, which refuses it
    in a hook, model divided       held back until the hook is done, then put together over the ranks of one model
    anywhere else                  Lightning, made equal over replicas

The module's ``log``, its metrics and the hooks that may log are taken over when a run begins and given back at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.replaced import Replacement, Replacements
from lightning_megatron.strategy.carried.kept_by_name import KeptByName
from lightning_megatron.strategy.lightning import trainer_access as lightning_state
from lightning_megatron.strategy.lightning.hooks import reads_gradients
from lightning_megatron.strategy.lightning.log_replay import ALREADY_REDUCED, log_everywhere
from lightning_megatron.strategy.logs.hook_logs import HeldHooks, HookLogs, HooksThatMeasure, KeysOfReplicas
from lightning_megatron.strategy.logs.metrics import MetricRouter
from lightning_megatron.strategy.step.engine import StepEngine


class LogRouting(Replacement):
    """Routes the logs of one run, from when it is made until :meth:`release`.

    Args:
        module: the user's module, divided.
        trainer: of the run.
        engine: records the logs of steps.
        mesh: the grid.
        device: this rank's.
        cuts_batches: whether a batch may be cut into micro-batches, so that a metric sees it in parts.
        fits: whether optimizers will step.

    Attributes:
        is_whole: see :func:`.log_everywhere`; ``None`` where nothing is put together for hooks.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        trainer: pl.Trainer,
        engine: StepEngine,
        mesh: ParallelMesh,
        device: torch.device,
        *,
        cuts_batches: bool,
        fits: bool,
    ) -> None:
        super().__init__(module, "log")
        self.is_whole: Callable[[Any], bool] | None = None
        self._module, self._engine = module, engine
        self._predicts = trainer.state.fn == TrainerFn.PREDICTING
        self._replicas = None if mesh.layout.data > 1 else ALREADY_REDUCED
        callbacks = lightning_state.callbacks_of(trainer)
        self._by_hand = mesh.layout.pipeline > 1 and not module.automatic_optimization  # hooks run within a step
        is_divided = mesh.layout.pipeline * mesh.layout.tensor > 1
        self._metrics: MetricRouter | None = None
        if is_divided or cuts_batches or mesh.layout.context * mesh.layout.data > 1:
            self._metrics = MetricRouter(mesh, device, engine.recording)
            self._metrics.attach(module)
        self._of_updates: HookLogs | None = None
        self._of_hooks: HookLogs | None = None
        self._held_hooks: HeldHooks | None = None
        if is_divided and not engine.splits_itself:
            measure = HooksThatMeasure(module, callbacks)
            if fits and reads_gradients(module, callbacks):
                self._of_updates = HookLogs(mesh, device, measure)
            self._of_hooks = HookLogs(mesh, device, measure)
            self._held_hooks = HeldHooks(module, callbacks, self._of_hooks, self)
        self._kept: KeptByName | None = None
        if mesh.layout.pipeline > 1 and not engine.splits_itself:
            presence = engine.model_gradients.presence
            self._kept = KeptByName(module, trainer, presence, mesh.group("pipeline_parallel"))
        self._keys: KeysOfReplicas | None = None
        if mesh.layout.data > 1:
            self._keys = KeysOfReplicas(module, callbacks, mesh.group("data_parallel"))
        self._replaced = Replacements()
        self._replaced.put(module, "log", self)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """``self.log`` of the module; arguments as Lightning's."""
        recorder = None if self._predicts else self._engine.recording.recorder  # nothing is logged in predictions
        in_hook = self._by_hand and (lightning_state.hook_of(self._module) or "").startswith("on_")
        if recorder is not None and not in_hook:
            recorder.log(*args, **kwargs)
        elif not any(logs.take(self._module, args, kwargs) for logs in (self._of_updates, self._of_hooks) if logs):
            if self._keys is not None:
                self._keys.note(args, kwargs)
            log_everywhere(self._module, self._replicas, args, kwargs, self.is_whole)

    @contextmanager
    def updating(self) -> Generator[None, None, None]:
        """Hold back what hooks log while an optimizer steps, then log it alike on every rank; collective."""
        if self._of_updates is None:
            yield
            return
        self._of_updates.hold()
        try:
            yield
        except BaseException:
            self._of_updates.release()
            raise
        self._of_updates.flush(self._module, self)

    def end_training(self) -> None:
        """Hand round what hooks keep by name; collective."""
        if self._kept is not None:
            self._kept.settle()

    def release(self) -> None:
        """Give the module its ``log``, metrics and hooks back."""
        for hooks in (self._keys, self._kept, self._held_hooks):
            if hooks is not None:
                hooks.remove()
        if self._metrics is not None:
            self._metrics.detach()
        self._replaced.take_back()
