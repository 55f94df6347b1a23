"""Hooks and steps of the user see split parameters whole; what they call in this package sees parts.

Lightning calls a hook, the hook reads ``self.head.weight.norm()``: it gets what one process gets (see
`lightning_megatron.layers.whole.between_steps`). So every overridden hook of the module and of the user's callbacks is
entered through the view, and the doors that lead from a hook back into the strategy through its opposite::

    Lightning ──▶ hook, parameters whole ──▶ strategy.optimizer_step, parts ──▶ closure ──▶ hook, whole

Steps see them whole as well, with gradients (`lightning_megatron.layers.whole.in_steps`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.experts.kinds.twin import is_led, shows_whole
from lightning_megatron.layers.whole.between_steps import WholeView
from lightning_megatron.layers.whole.in_steps import StepView
from lightning_megatron.layers.whole.parameter_parts import ParameterParts
from lightning_megatron.layers.whole.seen_kinds import SummedGradientHook, WholeGradientHook
from lightning_megatron.mesh.mesh import ExpertGroups, ParallelMesh
from lightning_megatron.mesh.messages.further_groups import further_group
from lightning_megatron.mesh.parts.bytecode import names_in
from lightning_megatron.mesh.parts.packages import LIGHTNING, PACKAGE, comes_from, is_users
from lightning_megatron.mesh.replaced import Replacements, around_calls, has_other_method
from lightning_megatron.mesh.torch_functions import subclasses_of
from lightning_megatron.parallelize import ParallelReport
from lightning_megatron.parallelize.swap.hooks_on_tokens import refuse_gradients
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack
from lightning_megatron.strategy.hooks.backward_code import refuse_on_tokens
from lightning_megatron.strategy.hooks.layer_hooks import LayerHooks
from lightning_megatron.strategy.hooks.served_calls import ServedCalls
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of

_SCHEDULES = "lr_scheduler_step"
_OTHER_HOOKS = (
    _SCHEDULES,
    *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad"),
    "transfer_batch_to_device",
)
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = tuple(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict"))
_LEFT_ALONE = ("on_exception", "on_gpu")
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_DOORS = (
    *(*_STEPS, "backward", "optimizer_step", "gradient_norm"),
    *("save_checkpoint", "load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict", "optimizer_state"),
    *("lightning_module_state_dict", "full_state_dict", "load_initial_weights", "teardown"),
)
OF_ONE_RANK = {
    *("is_global_zero", "global_rank", "local_rank", "node_rank", "get_rank", "rank", "rank_zero_only", "RANK"),
    *("LOCAL_RANK", "experiment", "logger", "loggers", "is_last_batch_of_rank"),
}
"""Names in code that may run on some ranks only."""


class Doors:
    """Methods by which hooks come back into this package, which works on what this rank has.

    Args:
        strategy: of the run.
        precision: its plugin, which clips.

    Attributes:
        strategy: see above.
    """

    def __init__(self, strategy: Any, precision: Any) -> None:
        self.strategy = strategy
        owned = ((strategy, _DOORS), (precision, ("clip_gradients",)))
        self._doors = [(owner, name) for owner, names in owned for name in names if hasattr(owner, name)]

    def open(self, replaced: Replacements, local: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let each of them run as ``local`` makes of it, until what is replaced is taken back."""
        for owner, name in self._doors:
            replaced.call(owner, name, local(getattr(owner, name)))


class WholeHooks:
    """Shows split parameters whole to hooks and steps.

    Args:
        module: the user's module, divided.
        trainer: of the run, whose strategy's methods lead back into this package.
        tensor: how parameters are split.
        report: the plan of that, where there is one.
        mesh: the grid.
        precision: the strategy's plugin, which clips.
        experts: the ranks that share out experts, where they do.
        hook_of: gives a hook of the user's, by its owner and name.

    Attributes:
        view: what hooks see.
        steps: what steps see.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        trainer: pl.Trainer,
        tensor: TensorState,
        report: ParallelReport | None,
        mesh: ParallelMesh,
        precision: Any,
        experts: ExpertGroups | None = None,
        hook_of: Callable[[Any, str], Callable[..., Any]] = getattr,
    ) -> None:
        self._module = module
        group, replicas = tensor.group or tensor.expert_group, mesh.layout.data
        meets = experts.together if experts is not None else group
        reason = "`sequence_parallel=True`" if tensor.sums_gradients else f"`data_parallel_size={replicas}`"
        self.view = WholeView(meets, reason if tensor.sums_gradients or replicas > 1 else None)
        self._served = {step for step in _STEPS if may_run_on_one_rank(module, step)}
        apart = _beside((meets, tensor.group, tensor.expert_group)) if self._served else {}
        self.steps = StepView(group, apart.get(meets), apart.__getitem__)
        self._replaced = Replacements()
        split: dict[int, ParameterParts] = {}
        for name, parameter in type(module).named_parameters(module):
            parts = tensor.parts_of(name)
            if parameter.is_meta:
                continue
            if parts is not None:
                split[id(parameter)] = parts
                self.view.add(parts, parameter)
                self.steps.add(parameter, parts)
                _tell_whole(parameter, functools.partial(WholeGradientHook, parts))
            elif name in tensor.table and tensor.table[name].sums_gradient:
                self.steps.add(parameter, None)
                _tell_whole(parameter, functools.partial(SummedGradientHook, group))
        self._served_calls = ServedCalls(module, self.view, mesh.layout)
        shares_tokens = report is not None and report.sequence_parallel
        if shares_tokens:
            refuse_on_tokens(module, group.size())
            if mesh.layout.pipeline > 1:
                refuse_gradients(module)
        self._layers = LayerHooks(module, split, group.size(), shares_tokens)
        self.steps.watch(module, _is_compiled, self._layers.called, is_led, shows_whole)
        others = ((callback, Callback) for callback in foreign_callbacks(callbacks_of(trainer)))
        given = getattr(trainer, "datamodule", None)
        loads = [(owner, name) for owner in (module, given) if owner is not None for name in loaders_of(owner)]
        loads += [(given, name) for name in _TRANSFERS if given is not None and is_overridden(name, given)]
        hooks = [(owner, hook) for owner, parent in ((module, None), *others) for hook in hooks_of(owner, parent)]
        schedules = [] if has_other_method(module, _SCHEDULES) else [(module, _SCHEDULES)]  # may step one of the user's
        for owner, hook in dict.fromkeys((*hooks, *loads, *schedules)):
            seeing = self.seeing(hook_of(owner, hook), may_run_on_one_rank(owner, hook))
            self._replaced.call(owner, hook, seeing)
        self._doors = Doors(trainer.strategy, precision)
        self._open_doors(self._replaced)

    def _open_doors(self, replaced: Replacements) -> None:
        self._doors.open(replaced, self.local)
        update = self._doors.strategy.optimizer_step
        replaced.call(self._doors.strategy, "optimizer_step", self._with_closure(update))

    def alone(self, hook: Callable[..., Any], serves: bool) -> Callable[..., Any]:
        """A hook that Lightning calls while no run is under way, and this rank's doors are closed."""
        return around_calls(self.seeing(hook, serves), self._open_doors)

    def seeing(self, hook: Callable[..., Any], serves: bool) -> Callable[..., Any]:
        """A hook that sees whole tensors; ``serves`` if some ranks may run other code in it."""
        name = getattr(hook, "__name__", "closure")

        @functools.wraps(hook)
        def seeing(*args: Any, **kwargs: Any) -> Any:
            with self._seen(name, serves):
                return hook(*args, **kwargs)

        return seeing

    def local(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of this package that hooks may call."""

        @functools.wraps(function)
        def on_parts(*args: Any, **kwargs: Any) -> Any:
            with self.steps.paused(), self.view.local():
                return function(*args, **kwargs)

        return on_parts

    def _with_closure(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """``strategy.optimizer_step``, whose closure is code of the user too where it is not Lightning's."""

        def updating(optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
            if not comes_from(closure, *LIGHTNING):
                closure = self.seeing(closure, serves=False)
            return update(optimizer, closure, *args, **kwargs)

        return updating

    @contextmanager
    def configuring(self) -> Iterator[None]:
        """Around ``configure_optimizers``, whose learning rates may go by the shapes and values of weights. What
        optimizers make in their constructors is for the parts that they update.
        """
        serves = may_run_on_one_rank(self._module, "configure_optimizers")
        with Replacements() as replaced, self._seen("configure_optimizers", serves):
            for kind in subclasses_of(Optimizer):
                if "__init__" in vars(kind):
                    replaced.put(kind, "__init__", self.local(vars(kind)["__init__"]))
            yield

    @contextmanager
    def _seen(self, name: str, serves: bool) -> Iterator[None]:
        with self.steps.paused(), self.view.seen(name, serves=serves), self._served_calls.announced(serves=serves):
            yield

    @contextmanager
    def gradient_hooks(self) -> Iterator[None]:
        """Around gradient hooks that are called on sums."""
        with self.steps.paused(), self.view.seen("register_hook", serves=False):
            yield

    def in_step(self, name: str, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The user's step called ``name``, which sees parameters whole outside of the layers that compute with them."""

        def seeing(batch: Any) -> Any:
            with self.steps.running(serves=name in self._served):
                self._layers.look()  # inside: `running` registers hooks, and none may be new when layers are called
                return step(batch)

        return seeing

    def remove(self) -> None:
        """Give hooks and methods back."""
        self._layers.remove()
        self.steps.close()
        self._replaced.take_back()


def _is_compiled(part: nn.Module) -> bool:
    return ForwardStack.of(part).get(ForwardSlot.COMPILE) is not None


def _beside(groups: Iterable[dist.ProcessGroup | None]) -> dict[dist.ProcessGroup, dist.ProcessGroup]:
    """For each of some groups a further one, in which messages do not meet those of the layers; collective over all."""
    return {group: further_group(group) for group in dict.fromkeys(groups) if group is not None}


def hooks_of(owner: Any, parent: type | None) -> list[str]:
    """Hooks that a module or callback of the user defines."""
    known = [name for name in dir(parent or pl.LightningModule) if name.startswith("on_") and name not in _LEFT_ALONE]
    more = _OTHER_HOOKS if parent is None else ()
    return [h for h in (*known, *more) if not has_other_method(owner, h) and is_overridden(h, owner, parent=parent)]


def loaders_of(owner: Any) -> list[str]:
    """Methods of a module or data module that make loaders, and may look at the module for it (its vocabulary)."""
    return [name for name in _LOADERS if not has_other_method(owner, name) and is_overridden(name, owner)]


def _tell_whole(parameter: nn.Parameter, wrap: Callable[[Any], Any]) -> None:
    """Let gradient hooks that were registered before the parameter was split have the whole gradient."""
    hooks = parameter._backward_hooks or {}
    for key, hook in hooks.items():
        own = comes_from(hook, PACKAGE)
        if not own and not isinstance(hook, WholeGradientHook | SummedGradientHook):
            hooks[key] = wrap(hook)


def may_run_on_one_rank(owner: Any, hook: str) -> bool:
    """Whether the code of a hook, or a function that it names, may do something on some ranks only."""
    seen: set[types.CodeType] = set()
    waiting: list[Any] = [getattr(owner, hook)]
    while waiting:
        function = waiting.pop()
        while function is not None:
            code = getattr(function, "__code__", None)
            if code is None and not hasattr(function, "__wrapped__"):
                return True  # a partial, or compiled: it cannot be read
            if code is not None and code not in seen:
                seen.add(code)
                for name in names_in(code):
                    if name in OF_ONE_RANK:
                        return True
                    waiting += _functions_called(owner, function, name)
            function = getattr(function, "__wrapped__", None)
    return False


def _functions_called(owner: Any, function: Any, name: str) -> list[Any]:
    """Functions of the user's that a name in the code may mean: a method of the owner, or a function beside it."""
    candidates = (inspect.getattr_static(owner, name, None), getattr(function, "__globals__", {}).get(name))
    return [
        found for found in candidates if isinstance(found, types.FunctionType) and is_users(found, "builtins", "numpy")
    ]
