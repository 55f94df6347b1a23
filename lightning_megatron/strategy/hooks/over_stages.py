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
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from, module_of
from lightning_megatron.mesh.replaced import Replacements, around_calls
from lightning_megatron.mesh.torch_functions import line_of_user
from lightning_megatron.pipeline.elsewhere.absent import KNOWN, TENSOR_ATTRIBUTES, Absent
from lightning_megatron.pipeline.elsewhere.away import LARGEST, TAKES_NUMBERS, tensors_in, writes_in_place
from lightning_megatron.pipeline.elsewhere.presence import owner_of
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.going_over import BESIDE_RUNS, are_those, hooks_over_all, schedule_goes_over_all
from lightning_megatron.strategy.hooks.whole_hooks import DOORS
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of

_NOTHING = nullcontext()
_SCHEDULES = "lr_scheduler_step"
_READS = frozenset(
    (
        *("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__"),
        *("equal", "allclose", "is_nonzero"),
    )
)


class OverStages:
    """Lets hooks go over the parameters of all stages.

    Args:
        module: the user's module, cut.
        trainer: of the run, whose strategy's methods lead back into this package.
        stage: this rank's.
        group: the stages of this replica.
        precision: the strategy's plugin, which clips.
        optimizers: gives those of the run, and of each the names of its groups' parameters on all stages.

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
    ) -> None:
        self._module, self._stage, self._group, self._optimizers = module, stage, group, optimizers
        self.running: StageNumbers | None = None
        self._noted: Any = WeakIdKeyDictionary()
        self._replaced = Replacements()
        self._doors = (trainer.strategy, DOORS), (precision, ("clip_gradients",))
        self._found, self._lists = list[tuple[Any, str]](), True
        if stage.presence.copies or not module.automatic_optimization:
            self._lists = False
            return  # a copy is listed beside its source, and a step by hand lists what is here
        others = ((callback, Callback) for callback in foreign_callbacks(callbacks_of(trainer)))
        owners = ((module, None), *others)
        self._found = [(owner, hook) for owner, parent in owners for hook in hooks_over_all(owner, parent, module)]
        if self._found:
            self._open_doors(self._replaced)

    def _open_doors(self, replaced: Replacements) -> None:
        for owner, names in self._doors:
            for name in names:
                if hasattr(owner, name):
                    replaced.call(owner, name, self.local(getattr(owner, name)))

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

    def entered(self, owner: Any, hook: str) -> Callable[..., Any]:
        """A hook, which is given the parameters of all stages if it goes over them."""
        own: Callable[..., Any] = getattr(owner, hook)
        if any(o is owner and h == hook for o, h in self._found):
            return self._listing_all(own, hook)
        return self._scheduling(own) if hook == _SCHEDULES and owner is self._module and self._lists else own

    def _scheduling(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """``lr_scheduler_step``: Lightning's steps a scheduler, which may be the user's."""
        listing = around_calls(self._listing_all(own, _SCHEDULES), self._open_doors)

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
            listed = [[here[name] if name in here else self._elsewhere(name) for name in group] for group in names]
            groups = list(zip(optimizer.param_groups, listed, strict=False))
            if len(groups) == len(optimizer.param_groups) and all(are_those(group, own) for group, own in groups):
                found += groups
        return found

    def _elsewhere(self, name: str) -> Tensor:
        owner, leaf = owner_of(self._module, name)
        return getattr(owner, leaf)  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Give hooks and methods back."""
        self._replaced.take_back()


class StageNumbers(TorchFunctionMode):
    """Around one call of a hook: knows which stages have which tensors, and sends numbers.

    Args:
        module: the user's module, cut.
        stage: this rank's.
        group: the stages of this replica.
        hook: name of the hook.
        noted: the stages that have tensors, kept from one call to the next, as hooks keep these.

    Attributes:
        active: whether code of the user runs.
    """

    def __init__(self, module: nn.Module, stage: Stage, group: dist.ProcessGroup, hook: str, noted: Any) -> None:
        super().__init__()
        self._module, self._presence, self._group, self._hook = module, stage.presence, group, hook
        self._stage, self._everyone, self._noted = stage.stage, stage.presence.stages, noted
        self._without, self._absent = set[int](), set[int]()
        self.active, self._gradients = True, 0

    def begin(self) -> None:
        """Note who has which parameter, and which have no gradient or are frozen; collective over the stages."""
        bare, frozen = list[str](), list[str]()
        for name, parameter in type(self._module).named_parameters(self._module):
            stages = self._stages_of_name(name)
            if stages is not None:
                self._noted[parameter] = stages
                with torch._C.DisableTorchFunctionSubclass():
                    if parameter.grad is None:
                        bare.append(self._presence.entries[name].first)
                    if not parameter.requires_grad:
                        frozen.append(self._presence.entries[name].first)
        told = objects.gather((self._hook, bare, frozen), self._group)
        if any(hook != self._hook for hook, *_ in told):
            self._refuse("is called")
        named, untrained = ({name for each in told for name in each[at]} for at in (1, 2))
        entries = self._presence.entries.values()
        self._gradients = len({e.first for e in entries if isinstance(e.twin, nn.Parameter)} - named)
        for name, entry in self._presence.elsewhere():
            owner, leaf = owner_of(self._module, name)
            if owner is not None and isinstance(entry.twin, nn.Parameter):
                absent = getattr(owner, leaf)
                entry.twin.requires_grad_(entry.first not in untrained)
                self._absent.add(id(absent))
                if (stages := self._stages_of_name(name)) is not None:
                    self._noted[absent] = stages
                if entry.first in named:
                    self._without.add(id(absent))

    def end(self) -> None:
        """Say that the hook has ended here; collective over the stages."""
        self._exchange(None, {})

    def are_all_gradients(self, tensors: Sequence[Tensor], here: bool) -> bool:
        """Whether ``tensors`` of all stages are the gradients of the model, as those of this stage are if they are
        ``here``; collective over the stages, unless their number tells.
        """
        if len(tensors) != self._gradients:
            return False
        told = self._exchange("gradients", {self._stage: torch.tensor(here)})
        return all(bool(said) for said in told.values())

    def known(self, number: Tensor, tensors: Iterable[Tensor]) -> Tensor:
        """``number`` with its value on all stages that have any of ``tensors``; collective over the stages."""
        have, everyone = self._stages_of(number), frozenset(range(self._everyone))
        if have is None or all((self._stages_of(tensor) or everyone) <= have for tensor in tensors):
            return number
        return self._fetch("known", None, (number,), {})[0][0]  # type: ignore[no-any-return]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active or _is_own(sys._getframe(1)):
            return func(*args, **kwargs)
        found = [tensor for tensor in tensors_in((args, kwargs)) if self._stages_of(tensor) is not None]
        if not found:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
        if name in KNOWN or (name == "__get__" and attribute not in TENSOR_ATTRIBUTES):
            return func(*args, **kwargs)
        if attribute == "grad" and type(args[0]) is Absent and id(args[0]) in self._absent:
            return self._absent_gradient(func, name, args)
        if name.startswith("_foreach"):
            return self._one_by_one(func, name, args, kwargs)
        return self._call(func, name, args, kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        writes = name == "__set__" or writes_in_place(name)
        target = next(tensors_in(args[:1]), None) if writes else kwargs.get("out")
        takes = name in _READS or func in TAKES_NUMBERS
        if takes or len(self._met(args, kwargs)) > 1 or (target is not None and self._stages_of(target) is None):
            args, kwargs = self._fetch(name, target, args, kwargs)
            left = self._met(args, kwargs)
            if left and (takes or len(left) > 1 or (target is not None and self._stages_of(target) is None)):
                self._refuse_large(name, args, kwargs)
        met = self._met(args, kwargs)
        output = func(*args, **kwargs)
        for tensor in tensors_in(output) if met else ():
            self._noted[tensor] = next(iter(met))
        return output

    def _absent_gradient(self, func: Any, name: str, args: Any) -> Any:
        """``.grad`` of a parameter of another stage, which may have none."""
        if name == "__get__":
            return None if id(args[0]) in self._without else func(*args)
        (self._without.add if args[1] is None else self._without.discard)(id(args[0]))
        return func(*args)

    def _one_by_one(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function of lists of tensors, some of which are absent."""
        many, outputs = len(args[0]), []
        for index in range(many):
            each = [[a[index]] if isinstance(a, (list, tuple)) and len(a) == many else a for a in args]
            outputs.append(self._call(func, name, each, kwargs))
        return (
            None if any(output is None for output in outputs) else [tensor for output in outputs for tensor in output]
        )

    def _stages_of(self, tensor: Tensor) -> frozenset[int] | None:
        """The stages that have the numbers of a tensor; ``None`` for all."""
        if type(tensor) is Absent and tensor not in self._noted:
            part = self._presence.part_of(tensor.part)
            return None if part is None else part.stages
        return self._noted.get(tensor)  # type: ignore[no-any-return]

    def _stages_of_name(self, name: str) -> frozenset[int] | None:
        entry = self._presence.entries.get(name)  # of a tied one the stages of all its names
        return None if entry is None or len(entry.stages) == self._everyone else entry.stages

    def _met(self, args: Any, kwargs: Any) -> set[frozenset[int]]:
        return {stages for t in tensors_in((args, kwargs)) if (stages := self._stages_of(t)) is not None}

    def _fetch(self, name: str, target: Tensor | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with the numbers of all small tensors that some stages only have."""
        wanted: dict[int, tuple[Tensor, frozenset[int]]] = {}
        for tensor in tensors_in((args, kwargs)):
            stages = self._stages_of(tensor)
            if stages is not None and tensor is not target and tensor.numel() <= LARGEST:
                wanted[id(tensor)] = tensor, stages
        if not wanted:
            return args, kwargs
        about = name, tuple((tuple(sorted(stages)), tuple(tensor.shape)) for tensor, stages in wanted.values())
        own = {
            place: tensor.detach().cpu()
            for place, (tensor, stages) in enumerate(wanted.values())
            if self._stage == min(stages)
        }
        known = self._exchange(about, own)
        numbers = {key: known[place].to(tensor.device) for place, (key, (tensor, _)) in enumerate(wanted.items())}
        return _with_numbers(args, numbers), _with_numbers(kwargs, numbers)

    def _exchange(self, about: Any, own: dict[int, Tensor]) -> dict[int, Tensor]:
        told = objects.gather((about, own), self._group)
        if any(other != about for other, _ in told):
            self._refuse("does other things")
        return {place: tensor for _, mine in told for place, tensor in mine.items()}

    def _refuse(self, what: str) -> None:
        raise RuntimeError(
            f"`{self._hook}` goes over all parameters, and {what} on other pipeline stages in another order"
            f" ({line_of_user()}). Let it run the same lines on every rank, over `self.parameters()` and not over what "
            "a rank has kept from an earlier call, build a copy that follows a network in `__init__` or `setup` and "
            "freeze it (`requires_grad_(False)`), or use `pipeline_parallel_size=1`."
        )

    def _refuse_large(self, name: str, args: Any, kwargs: Any) -> None:
        parts = [tensor.part for tensor in tensors_in((args, kwargs)) if type(tensor) is Absent]
        raise RuntimeError(
            f"`{self._hook}` brings together, by `{name}`, tensors of more than {LARGEST} elements that different "
            f"pipeline stages have{f', among them of `{min(parts)}`' if parts else ''} ({line_of_user()}). Numbers "
            "made of each parameter by itself, such as norms and sums, may meet. A copy that follows a network is kept "
            "on every stage where it is frozen (`requires_grad_(False)`). Or use `pipeline_parallel_size=1`."
        )


def _with_numbers(value: Any, numbers: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return numbers.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)([_with_numbers(item, numbers) for item in value])
    if isinstance(value, dict):
        return {key: _with_numbers(item, numbers) for key, item in value.items()}
    return value


def _is_own(frame: FrameType) -> bool:
    """Whether code of this package computes, as where a weight that was seen whole is cut again."""
    return comes_from(frame, PACKAGE) and module_of(frame) != __name__
