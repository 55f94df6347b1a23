"""Split parameters, seen whole by the code of a step that is outside of the layers which compute with them.

A step adds a penalty on weights to its loss, logs a norm, perturbs an embedding. What it reads there has to be the
parameter of one process, with a gradient; what the layer itself reads in its forward has to be the part::

    training_step:   x = self.net(batch)                             layers run, and read parts
                     loss = cross_entropy(x, y)
                     loss + 0.01 * self.net.fc.weight.abs().sum()    a WholeTensor of the part: sums add up over ranks

So parameters have a class of their own while a step runs, which shows them whole to every function of torch, and are
ordinary ones while the layer that owns them runs, or the module around it.

A parameter that every rank holds whole, but whose gradient is a sum of one term per rank, needs care as well: what the
step computes from it is computed on all ranks and must count once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from lightning_megatron.layers.whole import RULES, SplitDim, WholeTensor
from lightning_megatron.layers.whole.around_calls import Entering, Leaving, Read, around_calls, readers_of
from lightning_megatron.layers.whole.base import one_at_a_time
from lightning_megatron.layers.whole.gathered_views import view_of
from lightning_megatron.layers.whole.parameter_parts import CutToPart, Gathered, GatheredForEach, ParameterParts
from lightning_megatron.layers.whole.rounds import NOTHING, Rounds, refuse_other_threads
from lightning_megatron.layers.whole.seen_kinds import EVERY_ELEMENT, SHAPE
from lightning_megatron.layers.whole.step_kinds import (
    CountedOnce,
    GivenData,
    InStep,
    StepParameter,
    StepTensor,
    as_they_are,
    plain,
)
from lightning_megatron.mesh.messages.collectives import copy_to_group, reduce_from_group
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.mesh.torch_functions import by_place, getters, is_in_place, setters


class WholeWeight(WholeTensor):
    """A parameter of global shape of which this rank holds a block of rows or columns."""

    rules = RULES


@dataclass
class _SeenInStep:
    """A parameter that a step sees whole.

    Attributes:
        number: tells it from all others, alike on all ranks.
        parts: how it is split; ``None`` if every rank holds all of it and computes one term of its gradient.
        dim: the dim that is cut into equal blocks in the order of ranks; ``None`` if it is cut in another way.
        inside: number of forwards under way that read it as it is.
        version: of the parameter when the step began, where ranks may run different code in it.
        given: what the step has put in its place; see :class:`.around_calls.SeenParameter`.
    """

    number: int
    parts: ParameterParts | None
    dim: int | None
    inside: int = 0
    version: int = 0
    given: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)


class StepView:
    """Shows the parameters of one rank whole to the code of steps.

    Args:
        group: the tensor group.
        rounds: ranks that may run different code in steps, as a separate group; ``None`` where they do not.
        beside: for those steps, a separate group of the same ranks for each parameter's group.

    Attributes:
        runs: whether code of a step runs now.
        kind: class of parameters while it does.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rounds: dist.ProcessGroup | None = None,
        beside: Callable[[dist.ProcessGroup], dist.ProcessGroup] | None = None,
    ) -> None:
        apart = rounds or group
        self._group, self._beside = group, beside or (lambda _: apart)
        self._rounds, self._may_serve = Rounds(apart, self._part, _PATIENCE_S), rounds is not None
        self._serves, self._thread = False, 0
        self._entries: dict[int, _SeenInStep] = {}
        self._parameters: list[tuple[nn.Parameter, _SeenInStep]] = []
        self.runs = False
        self._handles: list[Callable[[], None]] = []
        self.kind = type("StepParameter", (StepParameter,), {"_owner": self})
        self._tensor_kind = type("StepTensor", (StepTensor,), {"_owner": self})
        self._optimizing: list[list[int]] = []

    def add(self, parameter: nn.Parameter, parts: ParameterParts | None) -> None:
        """Show one more parameter whole; see `_SeenInStep` for ``parts``."""
        if id(parameter) not in self._entries and type(parameter) is nn.Parameter:
            dim = parts.block_dim() if parts is not None and parts.same_loss is None else None
            entry = _SeenInStep(len(self._parameters), parts, dim)
            self._entries[id(parameter)] = entry
            self._parameters.append((parameter, entry))

    def watch(
        self,
        module: nn.Module,
        is_compiled: Callable[[nn.Module], bool] = lambda _: False,
        first: Callable[[nn.Module], None] = lambda _: None,
        is_alone: Callable[[nn.Module], bool] = lambda _: False,
        shows_whole: Callable[[nn.Module], bool] = lambda _: False,
    ) -> None:
        """Let the forwards of modules that compute with these parameters read the local parts.

        Args:
            module: the whole module.
            is_compiled: tells of a part of it whether its forward is compiled, beside what torch itself notes there.
            first: given each of those modules before it runs.
            is_alone: tells of a part of it whether the modules around it see its parameters whole.
            shows_whole: tells of such a part whether those in it see them whole too, while it runs.
        """
        modules = dict(module.named_modules(remove_duplicate=False))
        readers: dict[int, tuple[nn.Module, dict[tuple[int, str], Read]]] = {}
        for name, owner in modules.items():
            table: dict[str, Any] = owner._parameters
            own = {
                (id(table), key): Read(parameter, self._entries[id(parameter)], table, key)
                for key, parameter in table.items()
                if id(parameter) in self._entries
            }
            for reader in readers_of(modules, name, is_compiled, is_alone, shows_whole) if own else ():
                readers.setdefault(id(reader), (reader, {}))[1].update(own)
        for reader, read in readers.values():
            reads = list(read.values())
            self._handles += around_calls(reader, Entering(self, reads, partial(first, reader)), Leaving(self, reads))
        if readers:
            replaced = Replacements()
            replaced.put(nn.Parameter, "data", GivenData())
            self._handles.append(replaced.take_back)
        # Once for all steps: a hook more in each of them would have everyone who looks for new hooks look again.
        self._handles.append(register_optimizer_step_pre_hook(self._before_update).remove)
        self._handles.append(register_optimizer_step_post_hook(self._after_update).remove)

    def close(self) -> None:
        """Remove what :meth:`watch` installed."""
        for undo in self._handles:
            undo()
        self._handles = []

    @contextmanager
    def running(self, *, serves: bool = False) -> Iterator[None]:
        """Around the user's step; optimizers that it calls compute with parameters as they are.

        Args:
            serves: whether ranks may run different code in it.
        """
        self._thread = threading.get_ident()
        self._serves = serves and self._may_serve and bool(self._parameters)
        for parameter, entry in self._parameters if self._serves else ():
            entry.version = parameter._version
        try:
            with self._phase(runs=True):
                yield
            while self._serves and self._asked(NOTHING)[1]:
                pass
        finally:
            self._optimizing, self._serves = [], False

    def _asked(self, number: float, version: float = 0.0, name: str = "") -> tuple[Any, bool]:
        """Take part in a round: the tensor of this number, and whether any rank has asked for one."""
        found, notes = self._rounds.ask(number, version, self._parameters[0][0].device, name)
        return found, any(asked != NOTHING for asked, _ in notes)

    def _part(self, number: int, version: float) -> tuple[ParameterParts, Tensor]:
        """The parameter, or gradient, that another rank asks for."""
        parameter, entry = self._parameters[number // 2]
        parts = cast(ParameterParts, entry.parts)
        with torch._C.DisableTorchFunctionSubclass():
            part = parameter.grad if number % 2 else parameter.detach()
            changed = not number % 2 and parameter._version - entry.version != version
        if part is None or changed:
            raise RuntimeError(
                f"another rank reads `{parts.name}{'.grad' if number % 2 else ''}` in a step that has changed it "
                "on this rank meanwhile. Read it on every rank, not under `if self.trainer.is_global_zero`."
            )
        return replace(parts, group=self._beside(parts.group)), part

    def _gather(self, entry: _SeenInStep, parts: ParameterParts, gradient: bool, part: Tensor) -> Tensor:
        if not self._serves:
            return parts.gather(part)
        with torch._C.DisableTorchFunctionSubclass():
            parameter = self._parameters[entry.number][0]
            version = 0 if gradient else parameter._version - entry.version
        return cast(Tensor, self._asked(2 * entry.number + gradient, version, parts.name)[0])

    def _before_update(self, *call: Any) -> None:
        if self.runs:
            self._optimizing.append([entry.inside for _, entry in self._parameters])
            self._switch(False, self._optimizing[-1])

    def _after_update(self, *call: Any) -> None:
        if self._optimizing and not self.runs:
            self._switch(True, self._optimizing.pop())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context for code in the middle of a step that reads the local parts of parameters."""
        with self._phase(runs=False):
            yield

    @contextmanager
    def _phase(self, *, runs: bool) -> Iterator[None]:
        if runs == self.runs:
            yield
            return
        before = [entry.inside for _, entry in self._parameters]
        self._switch(runs, [0] * len(before) if runs else before)
        try:
            yield
        finally:
            self._switch(not runs, before)

    def _switch(self, runs: bool, inside: list[int]) -> None:
        self.runs = runs
        for (parameter, entry), count in zip(self._parameters, inside, strict=True):
            entry.inside = count
            parameter.__class__ = self.kind if runs and not count else nn.Parameter

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of torch that was given parameters on what one process has in their place."""
        func, args, kwargs = by_place(func, args, kwargs)
        first = args[0] if args else None
        if isinstance(first, InStep):
            if func in SHAPE:
                shape = self._shape_of(first)
                return func(torch.empty(shape, device="meta"), *args[1:], **kwargs)
            if func in _GRAD:
                return self._gradient(first)
            if func in _DETACHED:
                gradient = isinstance(first, StepTensor) and first.is_gradient
                return self._alias(self._entry(first), as_they_are(Tensor.detach, (first,), {}), gradient)
            if func in _SET_GRAD:
                return self._set_gradient(first, args[1])
            if func in _SET_DATA or is_in_place(func, kwargs):
                return self._change(func, first, args[1:], kwargs)
        elif isinstance(first, list | tuple) and is_in_place(func, kwargs):
            return one_at_a_time(func, *args, **kwargs)
        if func is torch.autograd.grad:
            return self._differentiate(*args, **kwargs)
        if func is torch.autograd.backward or func is Tensor.backward:
            return as_they_are(func, args, kwargs)
        given, options = tree_map(self._shown, (args, kwargs))
        return func(*given, **options)

    def part_of_copy(self, parameter: Tensor) -> nn.Parameter:
        """A deep copy, of what this rank has: that is what a copied layer computes with."""
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)

    def part_of_given(self, given: Tensor, parameter: nn.Parameter) -> Tensor:
        """The part that a layer computes with where the step has put a whole tensor in the place of a parameter."""
        entry, value = self._entries[id(parameter)], self._shown(given)
        if entry.parts is None:
            return copy_to_group(value, self._group)
        if isinstance(value, WholeTensor):
            kept = self._whole(entry, parameter.detach())
            if isinstance(kept, WholeTensor) and value.alike(kept):
                return value.local()
            value = value.full()
        if tuple(value.shape) != entry.parts.shape:
            return given
        with torch._C.DisableTorchFunctionSubclass():
            return cast(Tensor, CutToPart.apply(value.as_subclass(Tensor), entry.parts))

    def _entry(self, shown: Tensor) -> _SeenInStep:
        return shown.entry if isinstance(shown, StepTensor) else self._entries[id(shown)]

    def _shape_of(self, parameter: Tensor) -> tuple[int, ...]:
        parts = self._entry(parameter).parts
        if parts is not None:
            return parts.shape
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(parameter.shape)

    def _shown(self, value: Any) -> Any:
        """A parameter as one process has it; anything else as it is."""
        if not isinstance(value, InStep):
            return value
        with torch._C.DisableTorchFunctionSubclass():
            follows = value.requires_grad and torch.is_grad_enabled()
            local = value.view_as(value) if follows else value.detach()
        return self._whole(self._entry(value), local, isinstance(value, StepTensor) and value.is_gradient)

    def _whole(self, entry: _SeenInStep, local: Tensor, gradient: bool = False) -> Tensor:
        """The whole tensor of which this is the part, or the only term of a gradient's that counts."""
        if entry.parts is None:
            return cast(Tensor, CountedOnce.apply(local, self._group.rank())) if local.requires_grad else local
        refuse_other_threads(self._thread, entry.parts)
        if entry.dim is not None and not self._serves:
            return WholeWeight.show(local, SplitDim(self._group, entry.parts.shape[entry.dim]), entry.dim)
        gathered: Any = Gathered if entry.parts.same_loss is None else GatheredForEach
        whole = cast(Tensor, gathered.apply(local, entry.parts, partial(self._gather, entry, entry.parts, gradient)))
        return cast(Tensor, view_of(whole, {whole.untyped_storage()._cdata: None}))

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.grad
        return None if gradient is None else self._alias(self._entry(parameter), gradient, True)

    def _alias(self, entry: _SeenInStep, local: Tensor, gradient: bool) -> Tensor:
        """A whole tensor that shares the memory of a part, outside of autograd."""
        if entry.parts is None or (entry.dim is not None and not self._serves):
            return self._whole(entry, local)
        alias: Any = local.as_subclass(self._tensor_kind)
        alias.entry, alias.part, alias.is_gradient = entry, local, gradient
        return cast(Tensor, alias)

    def _set_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        parts = self._entry(parameter).parts
        if value is not None and parts is not None:
            value = parts.cut(plain(value))
        with torch._C.DisableTorchFunctionSubclass():
            parameter.grad = value

    def _change(self, func: Any, parameter: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Change a parameter in place, or its ``data``, as the same line changes the whole one."""
        parts = self._entry(parameter).parts
        with torch._C.DisableTorchFunctionSubclass():
            refused = parameter.requires_grad and torch.is_grad_enabled() and func not in _SET_DATA
            own = parameter.detach()
        if refused or parts is None:  # torch says that a leaf cannot be changed so
            given, options = tree_map(self._plainly, (args, kwargs))
            as_they_are(func, (parameter, *given), options)
            return parameter
        if func in EVERY_ELEMENT:
            given, options = tree_map(partial(self._operand, parts), (args, kwargs))
            func(own, *given, **options)
            return parameter
        given, options = tree_map(self._plainly, (args, kwargs))
        refuse_other_threads(self._thread, parts)
        whole = self._gather(
            self._entry(parameter), parts, isinstance(parameter, StepTensor) and parameter.is_gradient, own
        )
        func(whole, *given, **options)
        if tuple(whole.shape) != parts.shape:
            raise RuntimeError(
                f"the step gave `{parts.name}` the shape {tuple(whole.shape)}; it must stay {parts.shape}, of which "
                "every rank holds a part."
            )
        own.copy_(parts.cut(whole))
        return parameter

    def _operand(self, parts: ParameterParts, value: Any) -> Any:
        """The part of an operand that meets this rank's part, for functions that change each element by itself."""
        other = self._entry(value).parts if isinstance(value, InStep) else None
        if other is not None and other.specs == parts.specs:
            return as_they_are(Tensor.detach, (value,), {})
        return parts.cut_operand(self._plainly(value))

    def _plainly(self, value: Any) -> Any:
        return plain(self._shown(value)) if isinstance(value, Tensor) else value

    def _differentiate(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.autograd.grad``: gradients of split parameters are split, those of terms are summed."""
        several = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        found = as_they_are(torch.autograd.grad, (outputs, several, *args), kwargs)
        return tuple(
            self._found(self._entry(value), gradient) if isinstance(value, StepParameter) else gradient
            for value, gradient in zip(several, found, strict=True)
        )

    def _found(self, entry: _SeenInStep, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        if entry.parts is not None:
            return entry.parts.gather(gradient) if self._serves else self._whole(entry, gradient)
        return reduce_from_group(gradient, self._group)


_PATIENCE_S = 60.0
_GRAD, _SET_GRAD, _SET_DATA = getters("grad"), setters("grad"), setters("data")
_DETACHED = {*getters("data"), Tensor.detach, torch.detach}
