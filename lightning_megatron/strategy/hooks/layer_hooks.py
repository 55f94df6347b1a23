"""Hooks of the user on layers of which a rank has a part.

A hook that the constructor registers is there when the plan is made: it runs in the trial, and where it needs a whole
input or output the layer stays whole. A hook that comes later meets parts that no plan has foreseen, and is refused::

    constructor, `setup`, `configure_model` ──▶ plan ──▶ module divided ──▶ `on_fit_start`, steps
              hooks are tried with it                              hooks inside of regions are refused

What neither may do is compute with a split weight of its own layer: its part is not the weight. So while a hook runs,
such parameters have a class that tells their whole shape and refuses the rest. Hooks of the module around see them
whole where steps do (`lightning_megatron.layers.whole.in_steps`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.whole.around_calls import Entering, Leaving
from lightning_megatron.layers.whole.parameter_parts import ParameterParts
from lightning_megatron.layers.whole.seen_kinds import NATIVE, SHAPE
from lightning_megatron.layers.whole.step_kinds import as_they_are
from lightning_megatron.mesh.parts.names import leaf_of, lies_in, outwards, parent
from lightning_megatron.mesh.parts.packages import LIGHTNING, PACKAGE, comes_from
from lightning_megatron.mesh.pickling import AroundHook

_TABLES = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class LayerHooks:
    """Looks after the hooks of the user on the layers of a divided module.

    Args:
        module: the user's module, divided.
        parts: id of a split parameter -> how it is split.
        ranks: size of the tensor group.
        shares_tokens: whether ranks share the tokens between the split layers (sequence parallelism).
    """

    def __init__(self, module: nn.Module, parts: Mapping[int, ParameterParts], ranks: int, shares_tokens: bool) -> None:
        self._parts, self._ranks = parts, ranks
        self._first_late = RemovableHandle.next_id
        modules = dict(module.named_modules())
        split = {name: part for name, part in modules.items() if self._has_part(part)}
        self._names = {id(part): name or type(part).__name__ for name, part in modules.items()}
        self._held = {
            id(part): [p for p in part.parameters() if id(p) in parts]
            for name, part in modules.items()
            if any(lies_in(each, name) for each in split)
        }
        inside = set(_between(modules, split))
        if shares_tokens:
            inside |= {each for name in split for each in outwards(name) if each}
            layers = {each for each in inside if leaf_of(each).isdigit()}
            inside |= {name for name in modules if any(lies_in(name, layer) for layer in layers)}
        self._inside = [modules[name] for name in modules if name in inside]
        self._hooked = [part for name, part in modules.items() if name in inside or id(part) in self._held]
        self._within = {
            id(part): [each for each in self._inside if each is part or each in set(part.modules())]
            for part in self._hooked
        }
        self._kind = type("HiddenParameter", (_HiddenParameter,), {"_owner": self})
        self._running: list[str] = []
        self._looked: dict[int, list[int]] = {}  # by id of a module: keys of its hooks when they were looked at
        self._known = -1  # hooks registered in this process when the last step began

    def _has_part(self, part: nn.Module) -> bool:
        return any(id(parameter) in self._parts for parameter in part._parameters.values())

    def look(self) -> None:
        """Before a step: refuse hooks that came late, and have the others find their weights hidden or whole."""
        if RemovableHandle.next_id == self._known:
            return
        for part in self._hooked:
            keys = [*part._forward_pre_hooks, *part._forward_hooks, *part._backward_pre_hooks, *part._backward_hooks]
            if keys and keys != self._looked.get(id(part)):
                self._look_at(part)
                self._looked[id(part)] = keys
        self._known = RemovableHandle.next_id

    def called(self, reader: nn.Module) -> None:
        """A module that reads split parameters is called: refuse hooks that the step has put into it."""
        if RemovableHandle.next_id == self._known:
            return
        for part in self._within.get(id(reader), ()):
            keys = [*part._forward_pre_hooks, *part._forward_hooks, *part._backward_pre_hooks, *part._backward_hooks]
            if keys and keys != self._looked.get(id(part)):
                self._refuse_late(part)

    def _look_at(self, part: nn.Module) -> None:
        if id(part) in self._within and any(each is part for each in self._within[id(part)]):
            self._refuse_late(part)
        if id(part) not in self._held:
            return
        for table, kind in _TABLES.items():
            hooks = getattr(part, table)
            for key, hook in hooks.items():
                if not isinstance(hook, _Blindfolded) and _is_of_others(hook):
                    said = f"the {kind} of `{self._names[id(part)]}`{_place(hook)}"
                    hooks[key] = functools.wraps(hook, updated=())(_Blindfolded(hook, said, self))
        _outermost(part._forward_pre_hooks, Entering, last=True)
        _outermost(part._forward_hooks, Leaving, last=False)

    def _refuse_late(self, part: nn.Module) -> None:
        for table, kind in _TABLES.items():
            for key, hook in getattr(part, table).items():
                if key >= self._first_late and _is_of_others(hook):
                    name = self._names[id(part)]
                    raise RuntimeError(
                        f"a {kind}{_place(hook)} was registered on `{name}` after the module had been divided: "
                        f"{self._ranks} tensor-parallel ranks share this layer's work, and the hook would be given one "
                        "rank's part in silence. Register it earlier, in the module's constructor or in `setup`, where "
                        "the plan takes it into account; or on a module around it that is not split; or keep the layer "
                        f"whole with `tensor_parallel_plan={{'{name}': 'replicate', ...}}`."
                    )

    def hidden(self, part: nn.Module) -> list[nn.Parameter]:
        """Split parameters in a module of which this rank's part would be seen now."""
        held = self._held.get(id(part), ())
        return [parameter for parameter in held if type(parameter) is nn.Parameter]

    def run(self, said: str, hook: Callable[..., Any], part: nn.Module, *call: Any, **options: Any) -> Any:
        """Run a hook on a module while the parts in it are hidden."""
        hidden = self.hidden(part)
        self._running.append(said)
        for parameter in hidden:
            parameter.__class__ = self._kind
        try:
            return hook(part, *call, **options)
        finally:
            self._running.pop()
            for parameter in hidden:
                if type(parameter) is self._kind:
                    parameter.__class__ = nn.Parameter

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of torch on a hidden parameter, if it asks for nothing but its shape or kind."""
        if func in NATIVE:
            return as_they_are(func, args, kwargs)
        first = args[0] if args else None
        found = self._parts.get(id(first))
        if func in SHAPE and found is not None:
            return func(torch.empty(found.shape, device="meta"), *args[1:], **kwargs)
        several = [each for value in (*args, *kwargs.values()) for each in _flat(value)]
        names = [self._parts[id(each)].name for each in several if id(each) in self._parts]
        name, hook = names[0] if names else "a weight", self._running[-1] if self._running else "a hook"
        raise RuntimeError(
            f"{hook} computes with `{name}`, of which each of {self._ranks} tensor-parallel ranks has a part: the "
            "result would differ from one process. Compute with it in the step, outside of the layers, or in a forward "
            "hook of the module around them, which see it whole; or keep the layer whole with "
            f"`tensor_parallel_plan={{'{parent(name)}': 'replicate', ...}}`."
        )

    def remove(self) -> None:
        """Give the user's hooks back."""
        self._looked, self._known = {}, -1
        for part in self._hooked:
            for table in _TABLES:
                hooks = getattr(part, table)
                for key, hook in hooks.items():
                    if isinstance(hook, _Blindfolded):
                        hooks[key] = hook.given


class _HiddenParameter(nn.Parameter):
    """A part of a weight while a hook runs that must not take it for the weight."""

    _owner: ClassVar[LayerHooks]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls._owner.answer(func, args, kwargs or {})


class _Blindfolded(AroundHook):
    """A hook of the user that is run with the parts of weights hidden.

    Args:
        hook: the user's.
        said: what it is, for messages.
        hooks: hides them.

    Attributes:
        given: the user's hook.
    """

    def __init__(self, hook: Callable[..., Any], said: str, hooks: LayerHooks) -> None:
        self.given, self._said, self._hooks = hook, said, hooks

    def __call__(self, part: nn.Module, *call: Any, **options: Any) -> Any:
        return self._hooks.run(self._said, self.given, part, *call, **options)


def _between(modules: Mapping[str, nn.Module], split: Mapping[str, nn.Module]) -> Iterator[str]:
    """Names of the layers of regions, and of modules without parameters beside them, whose inputs may be parts."""
    ends = [name for name, part in split.items() if _meets_parts(part)]
    yield from ends
    around = {next((each for each in list(outwards(name))[1:] if not _is_list(modules[each])), "") for name in ends}
    for name, part in modules.items():
        if not part._modules and not part._parameters and any(lies_in(name, each) for each in around if each):
            yield name


def _is_list(part: nn.Module) -> bool:
    return type(part) in _CONTAINERS


def _meets_parts(part: nn.Module) -> bool:
    """Whether a layer is given a part of its input, or returns a part of its output."""
    if isinstance(part, ColumnParallelLinear):
        return part._sharding is not None and part._sharding.output == "split"
    return isinstance(part, RowParallelLinear) and part._sharding is not None and not part._sharding.split_input


def _outermost(hooks: Any, kind: type, *, last: bool) -> None:
    """Let the hook that shows parameters whole again, or no longer, run next to the forward."""
    keys = list(hooks)
    found = [key for key in keys if isinstance(hooks[key], kind)]
    beyond = keys[keys.index(found[0]) + 1 :] if found and last else keys[: keys.index(found[0])] if found else []
    if any(isinstance(hooks[key], _Blindfolded) for key in beyond):
        hooks.move_to_end(found[0], last=last)


def _is_of_others(hook: Any) -> bool:
    """Whether it is neither Lightning's nor this package's."""
    return not comes_from(_bare(hook), *LIGHTNING, PACKAGE)


def _bare(hook: Any) -> Any:
    while isinstance(hook, functools.partial | _Blindfolded):
        hook = hook.func if isinstance(hook, functools.partial) else hook.given
    return hook


def _place(hook: Any) -> str:
    """The file and line of a hook, if it has one."""
    hook = _bare(hook)
    code = getattr(hook, "__code__", None) or getattr(vars(type(hook)).get("__call__"), "__code__", None)
    return f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""


def _flat(value: Any) -> list[Any]:
    return [each for one in value for each in _flat(one)] if isinstance(value, list | tuple) else [value]
