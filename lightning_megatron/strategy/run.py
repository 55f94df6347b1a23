"""One run of a module, from Lightning's ``setup`` to its ``teardown``: everything that only exists in between.

A :class:`Run` is made whole, once the module is divided, so that nothing in it needs a check that it is there yet::

    saving    states, checkpoints, where to go on          logs      where ``self.log`` goes
    engine    steps of this rank's part of the module      guard     looks at gradients before an update

After ``teardown`` it has given back what it took over from the module, the Trainer and torch, and still answers for the
weights: saving after ``fit`` is common, and the next run of the same module goes on with what is divided already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoints.state.stored import GroupNames
from lightning_megatron.data_parallel.buckets.rebound import check_alike
from lightning_megatron.data_parallel.renormalised_rows import RenormalisedRows
from lightning_megatron.data_parallel.step_guard import StepGuard
from lightning_megatron.mesh.autograd import differentiating_twice
from lightning_megatron.mesh.default_group import default_group
from lightning_megatron.pipeline.elsewhere.listing import NewContainers
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.assembly.alike import synchronize
from lightning_megatron.strategy.assembly.assembled import Assembled
from lightning_megatron.strategy.assembly.refusals import check_backward
from lightning_megatron.strategy.callbacks.cut_short import CutShort
from lightning_megatron.strategy.callbacks.loop_ends import remove_loop_ends
from lightning_megatron.strategy.carried.batch_hooks import BatchHooks
from lightning_megatron.strategy.evaluation.kept import KeptForHooks
from lightning_megatron.strategy.hooks.added_later import LateModules
from lightning_megatron.strategy.hooks.hand_clipping import HandClipping
from lightning_megatron.strategy.lightning import trainer_access as lightning_state
from lightning_megatron.strategy.lightning.averaging import begin_averages
from lightning_megatron.strategy.lightning.hooks import takes_second_gradients
from lightning_megatron.strategy.lightning.log_replay import LogReplay
from lightning_megatron.strategy.lightning.precision import clips_gradients_of
from lightning_megatron.strategy.lightning.step_results import StepResults
from lightning_megatron.strategy.logs.routing import LogRouting
from lightning_megatron.strategy.loss.muted_loggers import warn_of_own_words
from lightning_megatron.strategy.options import run_checks
from lightning_megatron.strategy.options.expert_checks import check_batches
from lightning_megatron.strategy.options.options import Options
from lightning_megatron.strategy.options.weight_checks import reads_before_steps
from lightning_megatron.strategy.processes import Processes
from lightning_megatron.strategy.saving.checkpoint_io import MegatronCheckpointIO
from lightning_megatron.strategy.saving.saving import Saving
from lightning_megatron.strategy.seen_whole import SeenWhole
from lightning_megatron.strategy.step.equal_replicas import comparisons
from lightning_megatron.strategy.step.step import Accumulation, Outcome, call_with
from lightning_megatron.strategy.step.updates import end_step, prepare_updates, show_at_end, show_weights, weights_of

_NOTHING: AbstractContextManager[None] = nullcontext()


class Run:
    """A divided module on connected processes, ready for steps; exists from Lightning's ``setup`` to ``teardown``.

    Invariants: the constructor makes all collaborators, or ``None`` for a feature that the run does not use; only the
    guard of updates is made later, by :meth:`prepare_updates`. :meth:`close` gives back each hook and attribute that
    the run took over from the module, the Trainer or torch, and may be called twice.

    Args:
        trainer: of the run.
        assembled: the divided module.
        processes: of the strategy.
        precision: the plugin in use; clips by the gradients of this run until :meth:`close`.
        options: of the strategy.
        io: writes and reads checkpoints.
        earlier: the same module's run before this one, if any.

    Attributes:
        module: this rank's part of the user's module.
        engine: runs its steps.
        saving: its state.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        assembled: Assembled,
        processes: Processes,
        precision: Precision,
        options: Options,
        io: MegatronCheckpointIO,
        earlier: Run | None = None,
    ) -> None:
        self.assembled, self.module, self.engine = assembled, assembled.module, assembled.engine
        self._trainer, self._processes, self._precision, self._options = trainer, processes, precision, options
        self._fits = trainer.state.fn == TrainerFn.FITTING
        self._guard: StepGuard | None = earlier._guard if earlier is not None and not self._fits else None
        self._known: frozenset[Tensor] = earlier._known if earlier is not None and not self._fits else frozenset()
        self._replay, self._results = LogReplay(), StepResults(trainer, processes.mesh.layout.data)
        self.engine.recording.hand_on = functools.partial(self._replay.one, self.module)
        self._reduces = True
        assembled.open()
        self._step = self.engine.whole
        self.saving = Saving(assembled, trainer, processes, io, options.details)
        if earlier is not None:
            self.saving.optimizer_names = earlier.saving.optimizer_names
        mesh, gradients = processes.mesh, self.engine.model_gradients
        self._experts = mesh.expert_groups(options.expert_ranks)
        self._replicas, self._everyone = _NOTHING, _NOTHING  # whom torch's calls without a group mean
        if mesh.layout.data < mesh.layout.world_size and not self.engine.splits_itself:
            self._replicas = default_group(mesh.group("data_parallel"))
            self._everyone = default_group(mesh.group("world"))
        divided = mesh.layout.pipeline > 1 or not assembled.tensor_state.is_trivial
        self._late = LateModules(self.module, gradients.presence, wanted=divided)
        clips_gradients_of(precision, gradients)
        stage = Stage.of(self.module)
        self._seen = SeenWhole(assembled, trainer, mesh, precision, self._experts, self._named_groups, fits=self._fits)
        wanted = self._fits and not self.engine.splits_itself
        self._equal, self._equal_stages = comparisons(self.module, stage, gradients, processes, wanted=wanted)
        here = self.module, trainer, self.engine, mesh, processes.device
        self._logs = LogRouting(*here, cuts_batches=options.micro_batch_size != "auto", fits=self._fits)
        self._kept = KeptForHooks(self.module, trainer, mesh, self.engine.logged, self.engine.trials)
        self._logs.is_whole = self._kept.is_whole if mesh.layout.data > 1 else None
        self._short = CutShort(self.module, processes) if self._fits and mesh.layout.world_size > 1 else None
        mixes = mesh.layout.data > 1 and options.whole_batch_loss is not False
        self._of_batches = BatchHooks(self.module, trainer, processes) if mixes else None
        if self._fits:
            cuts = options.micro_batch_size != "auto" or mesh.layout.pipeline > 1
            warn_of_own_words(self.module, ("training_step", "validation_step"), mesh.layout.data, cuts=cuts)
        self._rows = RenormalisedRows(self.module, mesh.of_gradients.group("data_parallel"))
        twice = mesh.layout.tensor > 1 and takes_second_gradients(self.module)
        self._differentiating: AbstractContextManager[None] = differentiating_twice if twice else _NOTHING
        if not self._fits:
            begin_averages(trainer, self.saving.weights, processes.device, self._seen.on_parts, fits=False)
        self._containers = NewContainers() if stage is not None else None
        if self._containers is not None:
            self._containers.start()
        self._clipping: HandClipping | None = None
        several = mesh.layout.pipeline * mesh.layout.tensor * options.expert_ranks > 1
        if several and not self.engine.splits_itself:
            views = self._seen.whole_hooks, self._seen.over_stages
            self._clipping = HandClipping(self.module, gradients.presence, stage, gradients.norm, *views)
            self._clipping.start()

    def _named_groups(self) -> Iterable[tuple[Optimizer, GroupNames]]:
        """The optimizers, each with the names of its groups' parameters on all stages."""
        return zip(self._trainer.optimizers, self.saving.optimizer_names, strict=False)

    def __reduce__(self) -> Any:
        """A run belongs to its processes: copies and pickles of a strategy have none."""
        return type(None), ()

    @property
    def skipped_steps(self) -> int:
        """Updates left out because a loss or gradient was not finite, in the latest fit."""
        return self._guard.skipped_steps if self._guard is not None else 0

    @contextmanager
    def configuring(self) -> Iterator[None]:
        """Around ``configure_optimizers``, which sees whole tensors, with values where it looks at them."""
        late = self.assembled.late
        with _NOTHING if late is None else late.watched(), self._seen.configuring():
            yield

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Keep this rank's part of optimizers that were made in sight of the whole module."""
        layout = self._processes.mesh.layout
        run_checks.check_optimizers(optimizers, layout.pipeline, layout.data)
        self.engine.note_trained(p for o in optimizers for group in o.param_groups for p in group["params"])
        self.saving.localize(optimizers)

    def check_prepared(self, optimizer: Optimizer) -> None:
        """Refuse optimizers and parameters that :meth:`prepare_updates` has not seen, where it would have had to."""
        with self._processes.naming_failures():
            run_checks.check_prepared(optimizer, self.engine.model_gradients)
            if self._known:
                run_checks.check_registered(optimizer, self.module, self._known)

    def prepare_updates(self, optimizers: Sequence[Optimizer]) -> None:
        """Lay out the gradients for these optimizers, before the first step of a fit."""
        scale = getattr(self._precision, "loss_scale", None)
        self._guard = prepare_updates(
            self.assembled, optimizers, self._trainer, self._processes, self._options.nonfinite, scale
        )
        if (late := self.assembled.late) is not None:
            late.settle(self.engine.model_gradients)
            if reads_before_steps(self.module, lightning_state.callbacks_of(self._trainer)):
                self.engine.model_gradients.finish_gather()
        gradients = self.engine.model_gradients
        if gradients.buckets is not None or gradients.local is not None:
            self._known = frozenset(self.module.parameters())
            for optimizer in optimizers:
                self.check_prepared(optimizer)
        begin_averages(self._trainer, self.saving.weights, self._processes.device, self._seen.on_parts)

    def continue_loader(self, loader: object) -> object:
        """A training loader that goes on where the checkpoint's run stopped; others as they are.

        Raises:
            ValueError: micro-batches are larger than its batches.
        """
        if self._trainer.training:
            run_checks.check_micro_batch(loader, self._options.micro_batch_size)
        return self.saving.continue_loader(loader)

    def training_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The user's ``training_step`` on every micro-batch, forward and backward; returns the mean loss."""
        batch = args[0] if args else next(iter(kwargs.values()))
        self._check_batch(batch, self._options.micro_batch_size)
        if self._equal is not None:
            with self._processes.naming_failures():
                self._equal.check(self._trainer.current_epoch)
        call: Callable[[Any], Any] = functools.partial(call_with, self.module.training_step, args, kwargs)
        call = self.engine.balanced(call)
        call = self._seen.in_step("training_step", call)
        call = self.assembled.in_step(call)
        gradients = self.engine.model_gradients
        around, kept = self._precision.train_step_context(), self._kept.training.around("training_step", batch, ())
        with self._processes.naming_failures(), self.engine.around_step(), around, gradients.training_step():
            self._step = self.engine.step(batch)
            self._results.begin()
            with self._replicas, self._differentiating, self._late.explaining(), kept:
                output = self._step.forward(call, batch, self._window)
            self._take(self._step.finish())
            return self._results.skippable(output, self.module)

    def _take(self, outcome: Outcome | None) -> None:
        """Log what a step has logged, and stop where it has asked for that."""
        if outcome is not None:
            if outcome.loss is not None:
                self._results.of_all_replicas(outcome.loss)
            self._replay(self.module, outcome.logs)
            self._trainer.should_stop |= outcome.stop

    def _check_batch(self, batch: Any, size: int | str) -> None:
        if self._experts is not None:
            cut = size != "auto" or (self._processes.mesh.layout.pipeline > 1 and self._trainer.training)
            with self._processes.naming_failures():
                check_batches(size if cut else None, self._experts, batch)

    def evaluate(self, name: str, context: Callable[[], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The user's step of evaluation or prediction called ``name``, through all stages."""
        batch = args[0] if args else next(iter(kwargs.values()))
        self._check_batch(batch, self._options.evaluation_micro_batch_size)
        call: Callable[[Any], Any] = functools.partial(call_with, getattr(self.module, name), args, kwargs)
        call = self._seen.in_step(name, call)
        call = self.assembled.in_step(call)
        if name != "predict_step" or self._experts is not None:  # else replicas may have different numbers of batches
            self._processes.wants_batch(name.removesuffix("_step"))
        with self._processes.naming_failures(), context(), self._weights(name, batch):
            with self._replicas, self._late.explaining(), self._kept.evaluation.around(name, batch, args[2:]):
                outcome = self.engine.evaluate(call, batch, name)
            if name != "predict_step":
                self._rows.share()
            self._take(outcome)
            return outcome.output

    def _weights(self, name: str, batch: Any) -> AbstractContextManager[None]:
        return weights_of(self.engine.model_gradients, self.module, name, batch)

    def agree_on_stopping(self) -> None:
        """Let no rank train on where another is to stop; collective over the world."""
        if self._fits and self._processes.mesh.layout.world_size > 1:
            self._trainer.should_stop = self._processes.agree(self._trainer.should_stop, everyone=False)

    def backward(self, loss: Tensor, optimizer: Optimizer | None, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
        """Publish the gradients of a scheduled step, or run autograd for a plain one."""
        precision = self._precision
        if self.engine.has_stages:
            check_backward(args, kwargs)
        with self.engine.between_passes():
            loss = precision.pre_backward(loss, self.module)
        autograd = functools.partial(self._autograd, optimizer, args, kwargs)
        with self._processes.naming_failures(), self._everyone:
            if self._equal is not None:
                self._equal.check_again()
            self._step.backward(loss, autograd, self._window)
            if self._equal_stages is not None:
                self._equal_stages.check()
            self._rows.share()
            end_step(self.engine.model_gradients, self._processes)
            if self.engine.has_stages and self._reduces:
                self.engine.note_gradients()
            self._check_gradients()
            outcome = self._step.finish()
            if outcome is not None:  # of a plain step, whose logs travelled between the replicas meanwhile
                with lightning_state.in_hook(self.module, "training_step"), precision.train_step_context():
                    self._take(outcome)
        with self.engine.between_passes():
            return precision.post_backward(loss, self.module)

    def _autograd(self, optimizer: Optimizer | None, args: Any, kwargs: Mapping[str, Any], loss: Tensor) -> None:
        with self._replicas:
            self._precision.backward(loss, self.module, optimizer, *args, **kwargs)

    def _check_gradients(self) -> None:
        """Refuse or skip an update that is not finite, once gradients have been summed."""
        if self._guard is not None and self._guard.checks and self._reduces:
            self._guard.check(self._trainer.global_step, self.engine.losses.take_bad())

    @property
    def _window(self) -> Accumulation:
        """Position of the present batch among those whose gradients are averaged."""
        batches, scale = self._trainer.accumulate_grad_batches, getattr(self._precision, "loss_scale", None)
        first = self._trainer.fit_loop.epoch_loop.batch_idx % batches == 0
        return Accumulation(batches, first, self._reduces, 1.0 if scale is None else scale.scale)

    @contextmanager
    def accumulating(self) -> Generator[None, None, None]:
        """Add gradients up without summing over replicas; in a batch after which no optimizer steps, hooks log too."""
        self._reduces = False
        logs = self._logs.updating() if self.module.automatic_optimization else _NOTHING
        try:
            with logs:
                yield
        finally:
            self._reduces = True

    @contextmanager
    def updating(self, closure: Callable[[], Any]) -> Generator[None, None, None]:
        """Around a step of an optimizer, which gets its parameters back if it fails; ``closure`` is what it calls."""
        by_hand = closure is do_nothing_closure
        outside = self.engine.between_passes() if by_hand else _NOTHING
        self._seen.look_at_step_hooks()
        if by_hand:
            self._rows.share()
            if (buckets := self.engine.model_gradients.buckets) is not None:
                check_alike(buckets.buckets)
        with self._everyone, self._logs.updating(), outside:
            try:
                yield
                self.engine.settle()
            except BaseException:
                self.engine.model_gradients.restore()
                raise

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        """Write a checkpoint; every rank takes part, in the user's step too."""
        with self._everyone:
            self.saving.save(checkpoint, path, storage_options)

    def whole_state(self, keeps: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
        """The whole module's state, or tensors of some names, on the CPU of global rank 0, an empty dict elsewhere;
        collective over all ranks."""
        with self._everyone:
            return self.saving.weights.whole(keeps)

    def end_training(self) -> None:
        """Hand round what the last hooks wrote."""
        show_at_end(self.engine.model_gradients, self._processes)
        self.engine.settle()
        self.engine.losses.read()
        self.engine.share_copies()
        self._logs.end_training()

    def close(self) -> None:
        """Give back what was taken over from the module, the Trainer and torch."""
        show_weights(self.engine.model_gradients, self._processes)
        self.engine.close()
        self.assembled.close()
        self._late.close()
        synchronize(self.module, self._processes.mesh, wanted=False)
        self.saving.close()
        self._results.remove()
        for replaced in (self._clipping, self._containers, self._of_batches, self._short):
            if replaced is not None:
                replaced.stop()
        self._rows.close()
        self._kept.remove(self._trainer)
        self._logs.release()
        self._seen.close()
        clips_gradients_of(self._precision, None)
        remove_loop_ends(self._trainer)
        if self._trainer.state.status == TrainerStatus.RUNNING:
            self._seen.behind_run(self.saving.weights, fits=self._fits)

    def begin_another(self) -> None:
        """Before Lightning calls ``setup`` for another run of the same module."""
        self._seen.before_run()


def report_of(part: str) -> property:
    """Report of a part of the assembled module on its steps; ``None`` where there is no such part."""
    return property(lambda self: None if (found := getattr(self.run.assembled, part)) is None else found.report())
