"""Code of the user that runs in backwards: hooks on activations, hooks of modules, own ``autograd.Function``s.

A forward on two micro-batches tells nothing about it, and it may mix their samples all the same::

    h.register_hook(lambda g: g / g.norm())        the norm over the batch's samples, or over a micro-batch's

So what of it there is gets noted, by its line: what the module's code mentions, before anything runs; what a forward
registers, as it does.

The same is true of values that a step takes out of the graph of its loss::

    a + b * (a / b).detach()                       2 a, and the gradient of b is scaled by the batch's losses
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import handle_torch_function, has_torch_function_unary

from lightning_megatron.layers.whole.seen_kinds import user_hook
from lightning_megatron.mesh.parts.packages import is_users
from lightning_megatron.mesh.parts.syntax import definition_of, place_in
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.mesh.torch_functions import around_functions, is_users_function, subclasses_of
from lightning_megatron.pipeline.cut.trunk import find_trunk
from lightning_megatron.pipeline.elsewhere.reachable import Reach, names_in

_NAMES = frozenset({"register_hook", "register_prehook", "register_full_backward_hook", "retain_grad"})
_OUT = frozenset(
    ("detach", "detach_", "no_grad", "set_grad_enabled", "inference_mode", "item", "tolist", "numpy", "data")
)
_LOGS = ("log", "log_dict")
_MOST = 5_000


class BackwardCode:
    """Notes which code of the user's runs inside of backwards.

    Args:
        module: the user's module.

    Attributes:
        mentioned: whether code of the module mentions such things, run or not.
        unseen: whether it mentions hooks on nodes of the graph, which nobody sees registered.
        fresh: a line that was seen for the first time since :meth:`take`; or "".
        keeps: a line that keeps the gradient of an activation, to be read after the backward; or "".
        refuses: why a line that was not seen before must not run now; "" if it may.
    """

    def __init__(self, module: nn.Module) -> None:
        names = _names(module)
        self.mentioned, self.unseen = _mention(names), "register_prehook" in names
        self.fresh, self.keeps, self.refuses = "", "", ""
        self._seen: set[str] = set()
        self._replaced = Replacements()
        for name in ("register_hook", "retain_grad"):
            self._replaced.put(Tensor, name, self._noting(name, getattr(Tensor, name)))
        around_functions(self._replaced, self._applying)

    def close(self) -> None:
        """Give torch's methods back."""
        self._replaced.take_back()

    @property
    def runs(self) -> bool:
        """Whether any such code was seen to run, or may have run unseen."""
        return bool(self._seen) or self.unseen

    def take(self) -> str:
        """The findings since the last call."""
        fresh, self.fresh = self.fresh, ""
        return fresh

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(tensor, nn.Parameter) and torch.is_grad_enabled():
                frame = sys._getframe(1)
                if is_users(frame):
                    self._note(f"`{name}` in {frame.f_code.co_filename}:{frame.f_lineno}", keeps=name == "retain_grad")
            if has_torch_function_unary(tensor):  # which knows torch's own method, and not this one in its place
                return handle_torch_function(original, (tensor,), tensor, *args, **kwargs)
            return original(tensor, *args, **kwargs)

        return method

    def _applying(self, cls: type[Function], call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if cls is BackwardHookFunction:
            self._note("a backward hook of a module")
        elif is_users_function(cls) and torch.is_grad_enabled():
            self._note(f"`{cls.__qualname__}`, an `autograd.Function` of {cls.__module__}")
        return call(*args)

    def _note(self, line: str, *, keeps: bool = False) -> None:
        if line in self._seen:
            return
        if self.refuses:
            raise RuntimeError(
                f"{line}, ran for the first time in a later step, and code of a library brought it along: what it does "
                f"in a backward was not tried, and {self.refuses}. Let the first step run it, or say with "
                "`MegatronStrategy(whole_batch_loss=True)` that batches stay whole, or with `whole_batch_loss=False` "
                "that it treats each sample by itself."
            )
        self._seen.add(line)
        self.fresh = self.fresh or line
        self.keeps = self.keeps or (line if keeps else "")


def why_tried(module: nn.Module, called: Sequence[types.FunctionType]) -> str:
    """Why the gradients of a module's steps, which call some functions, may be other than those of its samples; "" if
    nothing tells so.
    """
    if _mention(_names(module)):
        return "code of the module runs in backwards"
    return "".join(f"the step takes values out of the graph ({line})" for line in lines_out_of_graph(called)[:1])


def lines_out_of_graph(called: Iterable[types.FunctionType]) -> list[str]:
    """The lines of a training step that take values out of the graph, but for those that it logs.

    Args:
        called: the user's functions that it calls.
    """
    found = []
    for function in called:
        code, definition = function.__code__, definition_of(function)
        names = sorted(_OUT.intersection(names_in(code)[0])) if definition is None else []
        nodes = [] if definition is None else _taking_out(definition)
        places = [*((name, 1) for name in names), *nodes]
        found += [f"`{name}` in {place_in(code, line)}" for name, line in places]
    return list(dict.fromkeys(found))


def reads_gradients(called: Iterable[types.FunctionType]) -> bool:
    """Whether functions of a training step mention gradients: those of the step before, until they are set to zero."""
    return any("grad" in names_in(function.__code__)[0] for function in called)


def _taking_out(node: ast.AST) -> Iterator[tuple[str, int]]:
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and called.attr in _LOGS:
        return
    if isinstance(called, ast.Name) and called.id == "float":
        yield "float", node.lineno  # type: ignore[attr-defined]
    if isinstance(node, ast.Attribute) and node.attr in _OUT:
        yield node.attr, node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _taking_out(child)


def refuse_on_tokens(module: nn.Module, ranks: int) -> None:
    """Refuse such things in the layers, where tensor ranks share the tokens (sequence parallelism).

    Args:
        module: the user's.
        ranks: that share them.

    Raises:
        RuntimeError: a layer would take the gradient of one rank's tokens for that of all.
    """
    try:
        trunk = find_trunk(module)
    except ValueError:  # a single layer
        return
    for name, layer in zip(trunk.layer_names, trunk.layers(module), strict=True):
        for found in sorted(_names(layer, module) & _NAMES):
            raise RuntimeError(
                f"`{found}` in `{name}` would be given the gradient of one rank's tokens: with "
                f"`sequence_parallel=True` the {ranks} tensor-parallel ranks share the tokens between split layers. "
                "Take the gradient outside of the layers, or use `sequence_parallel=False`."
            )


def takes_gradients(module: nn.Module) -> bool:
    """Whether code of a module mentions such things, or gradients that it takes itself."""
    names = _names(module)
    return _mention(names) or bool(names & {"autograd", "backward"})


def _mention(names: set[str]) -> bool:
    return bool(names & _NAMES) or ("apply" in names and any(map(is_users_function, subclasses_of(Function))))


def _names(module: nn.Module, root: nn.Module | None = None) -> set[str]:
    """Names that the code of a module and of its hooks mentions; of a part of ``root``, if that is given."""
    reach = Reach(root or module, module, frozenset(), _MOST)
    reach.containers()
    names = {name for function in reach.functions for name in names_in(function.__code__)[0]}
    if reach.applies:
        names.add("apply")
    for layer in module.modules():
        for table in (layer._backward_hooks, layer._backward_pre_hooks):
            if any(user_hook(hook) is not None for hook in table.values()):
                names.add("register_full_backward_hook")
    return names


def refuse_kept(line: str) -> None:
    """Refuse the gradient of an activation that is kept.

    Args:
        line: keeps it.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"{line}: only the stage that computes the activation has its gradient, and code between steps reads it on "
        "every stage. Take what is needed of it in a hook, `h.register_hook(lambda g: ...)`, or use "
        "`pipeline_parallel_size=1`."
    )


def refuse_stray(why: str) -> None:
    """Refuse what a backward writes before the last stage.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"{why}, and on a stage whose numbers the others do not get. Write it where the last stage is (after the "
        "layers), or use `pipeline_parallel_size=1`."
    )


def refuse_late(why: str, line: str, step: int) -> None:
    """Refuse what mixes samples, and was not tried before it ran in micro-batches.

    Args:
        why: it is known.
        line: of the code.
        step: in which it ran.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"{why}; {line} may be what does it. Step {step} ran it for the first time, in micro-batches, and was not the "
        "step of one process. Go on from a checkpoint before it with `MegatronStrategy(whole_batch_loss=True)`, with "
        "which batches stay whole."
    )
