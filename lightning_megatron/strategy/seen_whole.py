"""A divided module as hooks and summaries see it: the parameters of all stages, and tensors in their whole shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_megatron.checkpoints.state.stored import GroupNames
from lightning_megatron.mesh.mesh import ExpertGroups, ParallelMesh
from lightning_megatron.mesh.parts.packages import LIGHTNING, comes_from
from lightning_megatron.mesh.replaced import Replacements, has_other_method
from lightning_megatron.mesh.torch_functions import line_of_error
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.assembly.assembled import Assembled
from lightning_megatron.strategy.assembly.layer_split import whole_view
from lightning_megatron.strategy.hooks.over_stages import OverStages
from lightning_megatron.strategy.hooks.whole_hooks import WholeHooks, may_run_on_one_rank
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks
from lightning_megatron.strategy.lightning.trainer_access import WholeSummaries, callbacks_of
from lightning_megatron.strategy.optimizers.step_hooks_seen import SeenStepHooks
from lightning_megatron.strategy.optimizers.whole_states import WholeStates
from lightning_megatron.strategy.saving.model_state import ModelState

_SAVES, _GRAPH = "on_save_checkpoint", "log_graph"


class SeenWhole:
    """Lets hooks and summaries see a divided module as in one process, until :meth:`close`.

    Args:
        assembled: the module; nothing is taken over of one that is not divided.
        trainer: of the run.
        mesh: the grid.
        precision: the plugin in use.
        experts: groups of the ranks that share out experts, if any do.
        named_groups: gives the optimizers, each with the names of its groups' parameters on all stages.
        fits: whether the run trains.

    Attributes:
        states: hooks that see whole states of optimizers; ``None`` where no rank keeps less than another.
        over_stages: hooks that go over the parameters of all stages; ``None`` with one stage.
        whole_hooks: hooks that see whole tensors; ``None`` where none is split.
        on_parts: makes a function see this rank's parts of tensors all the same; ``None`` where none is split.
    """

    def __init__(
        self,
        assembled: Assembled,
        trainer: pl.Trainer,
        mesh: ParallelMesh,
        precision: Any,
        experts: ExpertGroups | None,
        named_groups: Callable[[], Iterable[tuple[Optimizer, GroupNames]]],
        *,
        fits: bool,
    ) -> None:
        module, gradients, tensor = assembled.module, assembled.engine.model_gradients, assembled.tensor_state
        self._module, self._trainer, self._beside = module, trainer, Replacements()
        divided = mesh.layout.pipeline > 1 or not tensor.is_trivial
        self._summaries = WholeSummaries(whole_view) if divided else None
        stage = Stage.of(module)
        self._has_others, self._fits = stage is not None, fits
        self._step_hooks = SeenStepHooks(self._in_own_code)
        self.over_stages: OverStages | None = None
        self.states: WholeStates | None = None
        self.whole_hooks: WholeHooks | None = None
        self.on_parts: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        hook_of: Callable[[Any, str], Callable[..., Any]] = getattr
        if mesh.layout.world_size > 1 and not assembled.engine.splits_itself and fits:
            group = mesh.group("world")
            asked = self._lists_all, self._of_parts
            self.states = WholeStates(module, trainer, gradients, group, precision, named_groups, *asked)
            hook_of = self.states.entered
        if stage is not None:
            group = mesh.group("pipeline_parallel")
            self.over_stages = OverStages(module, trainer, stage, group, precision, named_groups, hook_of)
            hook_of = self.over_stages.entered
        if not tensor.is_trivial:
            split = tensor, assembled.report
            self.whole_hooks = WholeHooks(module, trainer, *split, mesh, precision, experts, hook_of)
            gradients.shows_whole = self.whole_hooks.gradient_hooks
            gradients.shows_parts = self.whole_hooks.steps.paused
            self.on_parts = self.whole_hooks.local
        elif self.over_stages is not None:
            self.over_stages.install()
        if self.states is not None and self.whole_hooks is None:
            self.states.install(self._is_listed)
        self._loggers = Replacements()
        for logger in trainer.loggers if divided else ():  # those of Lightning trace a forward, and are refused
            if not comes_from(type(logger), *LIGHTNING) and is_overridden(_GRAPH, logger, parent=Logger):
                self._loggers.call(logger, _GRAPH, self._in_own_code(getattr(logger, _GRAPH), logger, _GRAPH))

    def look_at_step_hooks(self) -> None:
        """Let hooks around the steps of optimizers see what other hooks see, those too that have come since."""
        if self._fits:
            self._step_hooks.look(self._trainer.optimizers)

    def _in_own_code(self, function: Callable[..., Any], owner: Any, name: str) -> Callable[..., Any]:
        """A function of the user's that is none of Lightning's hooks, and runs where all ranks call it."""
        seen = function if self.states is None else self.states.seeing(function, name)
        if self.over_stages is not None:
            seen = self.over_stages.among_doors(seen, name)
        if self.whole_hooks is not None:
            seen = self.whole_hooks.seeing(seen, may_run_on_one_rank(owner, name))
        return seen

    def _of_parts(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return (lambda function: function) if self.on_parts is None else self.on_parts

    def _lists_all(self) -> bool:
        return self.over_stages is not None and self.over_stages.running is not None

    def _is_listed(self, owner: Any, hook: str) -> bool:
        return self.over_stages is not None and self.over_stages.lists(owner, hook)

    def in_step(self, name: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The user's step called ``name``, which sees whole tensors where some are split, and by hand those of all
        stages.
        """
        if self.over_stages is not None and name == "training_step" and not self._module.automatic_optimization:
            call = self.over_stages.by_hand(call)
        if self.states is not None and name == "training_step":
            call = self.states.in_step(call)
        return call if self.whole_hooks is None else self.whole_hooks.in_step(name, call)

    @contextmanager
    def configuring(self) -> Iterator[None]:
        """Around ``configure_optimizers``: whole tensors, and a refusal where it asks for values of other stages' ones.

        Raises:
            RuntimeError: see above.
        """
        try:
            with nullcontext() if self.whole_hooks is None else self.whole_hooks.configuring():
                yield
        except (RuntimeError, NotImplementedError) as error:
            if not self._has_others or "meta tensor" not in str(error).lower():
                raise
            raise RuntimeError(
                f"`configure_optimizers` computes with values of weights that another pipeline stage has "
                f"({line_of_error(error)}): go by their shapes or names, read them in `setup`, before the module is "
                "divided, or use `pipeline_parallel_size=1`."
            ) from error

    def before_run(self) -> None:
        """Show whole tensors to ``setup`` hooks of another run, of the module as this one has left it."""
        self._show_beside(("setup",))

    def behind_run(self, weights: ModelState, *, fits: bool) -> None:
        """Show whole tensors to hooks that Lightning calls behind this run, now that it is closed: also to those of a
        checkpoint that is saved then.

        Args:
            weights: asked for when a checkpoint is made, before its hooks.
            fits: whether it was a fit.
        """
        weights.begins = functools.partial(self._show_beside, (_SAVES,))
        weights.ends = self._beside.take_back
        self._show_beside(("on_fit_end", "teardown") if fits else ("teardown",))

    def _show_beside(self, names: Sequence[str]) -> None:
        """Show what one process has to hooks that Lightning calls before a run of the divided module, or behind it,
        until the last of the module's own has run.
        """
        self._beside.take_back()
        if self.whole_hooks is None and self.over_stages is None and self.states is None:
            return
        others = ((callback, Callback) for callback in foreign_callbacks(callbacks_of(self._trainer)))
        given = getattr(self._trainer, "datamodule", None)
        data = ((given, pl.LightningDataModule),) if given is not None else ()
        for owner, parent in (*others, *data, (self._module, pl.LightningModule)):
            for name in names:
                if (
                    hasattr(parent, name)
                    and not has_other_method(owner, name)
                    and is_overridden(name, owner, parent=parent)
                ):
                    self._beside.call(owner, name, self._alone(owner, name))
        if names == (_SAVES,):  # until it is saved
            return
        last = getattr(self._module, names[-1])

        @functools.wraps(last)
        def ending(*args: Any, **kwargs: Any) -> Any:
            try:
                return last(*args, **kwargs)
            finally:
                self._beside.take_back()

        self._beside.call(self._module, names[-1], ending)

    def _alone(self, owner: Any, name: str) -> Callable[..., Any]:
        serves = may_run_on_one_rank(owner, name)
        own: Callable[..., Any] = getattr if self.states is None else self.states.entered
        hook = own(owner, name) if self.over_stages is None else self.over_stages.alone(owner, name)
        return hook if self.whole_hooks is None else self.whole_hooks.alone(hook, serves)

    def close(self) -> None:
        """Give back what was taken over from the module, the Trainer and Lightning."""
        self._step_hooks.remove()
        self._loggers.take_back()
        self._beside.take_back()
        if self.whole_hooks is not None:
            self.whole_hooks.remove()
        for shown in (self.over_stages, self.states):
            if shown is not None:
                shown.remove()
        if self._summaries is not None:
            self._summaries.remove()
