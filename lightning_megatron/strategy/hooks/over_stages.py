"""Hooks that go over all parameters under a pipeline, where each stage has only its own.

A norm over ``self.parameters()`` would be that of one stage, and noise drawn for each of them other noise. So in hooks
whose code may do such things a module lists the parameters of all stages, in the order of one process. Those of others
are :class:`~lightning_megatron.pipeline.elsewhere.absent.Absent`: they draw as the real ones do, and writing into them
does nothing. A number is sent by the stage that has it where Python reads it, or where it meets one of another stage::

    stage 0   t = g0² + g1²    (here)    ┐ meet: sent to       ┐ meet: g2² + g3² is
    stage 1   t = ...          (absent)  ┘ all, t is known     ┘ sent, t is known     ──▶  p.grad.mul_(1 / t.sqrt())
              ────────────────────────────  + g2² + g3²

All stages run the same lines in the same order. What each of them is about to send is compared, so that a hook which
does other things on other stages is refused, and nobody waits for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatron.mesh.replaced import Replacements, around_calls
from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.pipeline.elsewhere.presence import tensor_of
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.going_over import (
    BESIDE_RUNS,
    are_those,
    hooks_over_all,
    lists_parameters,
    schedule_goes_over_all,
)
from lightning_megatron.strategy.hooks.stage_numbers import NumbersByHand, StageNumbers
from lightning_megatron.strategy.hooks.whole_hooks import Doors
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks, names_used
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of

_NOTHING = nullcontext()
_SCHEDULES = "lr_scheduler_step"


class OverStages:
    """Lets hooks go over the parameters of all stages.

    Args:
        module: the user's module, cut.
        trainer: of the run, whose strategy's methods lead back into this package.
        stage: this rank's.
        group: the stages of this replica.
        precision: the strategy's plugin, which clips.
        optimizers: gives those of the run, and of each the names of its groups' parameters on all stages.
        hook_of: gives a hook of the user's, by its owner and name.

    Attributes:
        running: around the hook that runs and is given the parameters of all stages.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        trainer: pl.Trainer,
        stage: Stage,
        group: dist.ProcessGroup,
        precision: Any,
        optimizers: Callable[[], Iterable[tuple[Optimizer, Sequence[Sequence[str]]]]],
        hook_of: Callable[[Any, str], Callable[..., Any]] = getattr,
    ) -> None:
        self._hook_of = hook_of
        self._module, self._stage, self._group, self._optimizers = module, stage, group, optimizers
        self.running: StageNumbers | None = None
        self._noted: Any = WeakIdKeyDictionary()
        self._replaced = Replacements()
        self._doors = Doors(trainer.strategy, precision)
        self._found, self._lists = list[tuple[Any, str]](), not stage.presence.copies
        if not self._lists:
            return  # a copy is listed beside its source
        others = ((callback, Callback) for callback in foreign_callbacks(callbacks_of(trainer)))
        owners = ((module, None), *others)
        self._found = [(owner, hook) for owner, parent in owners for hook in hooks_over_all(owner, parent, module)]
        if self._found:
            self._open_doors(self._replaced)

    def _open_doors(self, replaced: Replacements) -> None:
        self._doors.open(replaced, self.local)

    def lists(self, owner: Any, hook: str) -> bool:
        """Whether a hook is given the parameters of all stages."""
        return any(o is owner and h == hook for o, h in self._found)

    def install(self) -> None:
        """Take the place of the hooks, where nothing else does."""
        for owner, hook in self._found:
            if hook not in BESIDE_RUNS:
                self._replaced.call(owner, hook, self.entered(owner, hook))
        if (self._module, _SCHEDULES) not in self._found:
            self._replaced.call(self._module, _SCHEDULES, self.entered(self._module, _SCHEDULES))

    def alone(self, owner: Any, name: str) -> Callable[..., Any]:
        """A hook that Lightning calls while no run is under way, and this rank's doors are closed."""
        return around_calls(self.entered(owner, name), self._open_doors)

    def among_doors(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A function that is given the parameters of all stages, where no hook need have opened this rank's doors."""
        return around_calls(self._listing_all(function, name), self._open_doors) if self._lists else function

    def entered(self, owner: Any, hook: str) -> Callable[..., Any]:
        """A hook, which is given the parameters of all stages if it goes over them."""
        own = self._hook_of(owner, hook)
        if self.lists(owner, hook):
            return self._listing_all(own, hook)
        return self._scheduling(own) if hook == _SCHEDULES and owner is self._module and self._lists else own

    def _scheduling(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """``lr_scheduler_step``: Lightning's steps a scheduler, which may be the user's."""
        listing = self.among_doors(own, _SCHEDULES)

        @functools.wraps(own)
        def stepping(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            each = listing if schedule_goes_over_all(scheduler) else own
            return each(scheduler, *args, **kwargs)

        return stepping

    def local(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of this package that hooks may call and that works on this stage's parameters."""

        @functools.wraps(function)
        def on_own(*args: Any, **kwargs: Any) -> Any:
            with self._running_with(None) if self.running is not None else _NOTHING:
                return function(*args, **kwargs)

        return on_own

    def _listing_all(self, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(hook)
        def listing(*args: Any, **kwargs: Any) -> Any:
            numbers = StageNumbers(self._module, self._stage, self._group, name, self._noted)
            numbers.begin()
            with self._running_with(numbers), numbers:
                try:
                    result = hook(*args, **kwargs)
                except KeyError as error:
                    self._stage.presence.note_missing(error)
                    raise
            numbers.end()
            return result

        return listing

    def by_hand(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A step of manual optimization, which is given the parameters of all stages from its first backward on, if it
        goes over them: until then, and in the next pass, it may not read them.
        """
        if not self._lists or not lists_parameters(names_used(self._module, "training_step")):
            return step

        def running(batch: Any) -> Any:
            numbers = NumbersByHand(self._module, self._stage, self._group, "training_step", self._noted)
            strategy = self._doors.strategy
            with Replacements() as doors:
                self._open_doors(doors)
                backward = strategy.backward

                def ended(*args: Any, **kwargs: Any) -> Any:
                    loss = backward(*args, **kwargs)
                    numbers.begin()
                    return loss

                doors.call(strategy, "backward", ended)
                with self._running_with(numbers), numbers:
                    result = step(batch)
            numbers.end()
            return result

        return running

    @contextmanager
    def _running_with(self, numbers: StageNumbers | None) -> Iterator[None]:
        """List what all stages have, or what is here."""
        before, groups = self.running, self._groups()
        self.running, self._stage.lists_all = numbers, numbers is not None
        if before is not None:
            before.active = False
        kept = [(group, group["params"]) for group, _ in groups]
        for group, everywhere in groups:
            group["params"] = [p for p in everywhere if numbers is not None or type(p) is not Absent]
        try:
            yield
        finally:
            for group, parameters in kept:
                group["params"] = parameters
            self.running, self._stage.lists_all = before, before is not None
            if before is not None:
                before.active = True

    def _groups(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """Groups of optimizers, each with the parameters of all stages; none of an optimizer with new ones."""
        here = dict(type(self._module).named_parameters(self._module, remove_duplicate=False))
        found: list[tuple[dict[str, Any], list[Tensor]]] = []
        for optimizer, names in self._optimizers():
            if not {name for group in names for name in group} <= {*here, *self._stage.presence.entries}:
                continue
            listed = [[here[n] if n in here else tensor_of(self._module, n) for n in group] for group in names]
            groups = list(zip(optimizer.param_groups, listed, strict=False))
            if len(groups) == len(optimizer.param_groups) and all(are_those(group, own) for group, own in groups):
                found += groups
        return found

    def remove(self) -> None:
        """Give hooks and methods back."""
        self._replaced.take_back()
