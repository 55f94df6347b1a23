"""Compiles the trunk layer by layer.

All layers of a trunk run the same code on different weights. ``torch.compile`` of the whole module would unroll them
into one graph and compile every layer again. Here one function that takes the layer as an argument is compiled per
class, so all layers of a class share its compiled code. Stage boundaries, random streams and recomputation stay outside
of the compiled code; collectives of tensor-parallel layers run between the compiled graphs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_megatron.pipeline.cut.trunk import LayersHere
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack, Wrapper

CompileOptions = bool | Mapping[str, Any]
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Compiles a function with the options that the user gave."""
_SPLIT_BACKWARD = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")


def check_compile(options: Any, schedule: Any, recompute: Any) -> None:
    """Refuse options that do not go with compiled layers.

    Args:
        options: ``True``, ``False``, or keyword arguments of ``torch.compile``.
        schedule: the pipeline schedule.
        recompute: the choice of activation recomputation.

    Raises:
        ValueError: naming the argument to change.
    """
    if options is False:
        return
    if options is not True and not isinstance(options, Mapping):
        raise ValueError(
            f"`compile_layers={options!r}` must be True, False, or a dict of arguments of `torch.compile` such as "
            '{"mode": "max-autotune"}.'
        )
    if schedule in _SPLIT_BACKWARD:
        raise ValueError(
            f"`pipeline_schedule={schedule!r}` splits the backward of each linear, which compiled layers do as one "
            "piece; use '1f1b', 'gpipe' or 'interleaved' with `compile_layers`."
        )
    if recompute is not None and recompute != "full" and not isinstance(recompute, Mapping):
        raise ValueError(
            f"`activation_recompute={recompute!r}` recomputes parts of layers, which `compile_layers` compiles as a "
            "whole; use 'full' or {'every': n}."
        )


class CompiledCall(Wrapper):
    """Runs one layer through the compiled function that all layers of its class share.

    Args:
        module: the layer.
        run: compiled ``run(layer, *args, **kwargs)``.
        by_user: whether the user's code has compiled the layer, rather than the option ``compile_layers``.
    """

    slot = ForwardSlot.COMPILE

    def __init__(self, module: nn.Module, run: Callable[..., Any], *, by_user: bool = False) -> None:
        super().__init__(module)
        self._run = run
        self.by_user = by_user

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # only shapes are wanted
            return self.forward(*args, **kwargs)
        return self._run(self.module, *args, **kwargs)


def is_given_compiled(module: nn.Module) -> bool:
    """Whether anything in a module is compiled by its user, before layers are: an earlier run may have left its own."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())


def has_compiled(module: nn.Module) -> bool:
    """Whether anything in a module is compiled in this run, by its user or by the option ``compile_layers``."""
    compiled = (ForwardStack.of(part).get(ForwardSlot.COMPILE) is not None for part in module.modules())
    return is_given_compiled(module) or any(compiled)


def compile_layers(here: LayersHere, options: CompileOptions) -> None:
    """Compile this rank's layers, or remove the compiled calls of an earlier run if ``options`` is ``False``.

    Args:
        here: this rank's layers.
        options: ``True``, ``False``, or keyword arguments of ``torch.compile``.

    Raises:
        ValueError: no trunk is found, or a layer does not run the ``forward`` that its class defines.
    """
    compiled = (ForwardStack.of(child).get(ForwardSlot.COMPILE) is not None for child in here.module.modules())
    if options is False and not any(compiled):
        return
    arguments = {} if isinstance(options, bool) else dict(options)
    trunk, owned = here.trunk, here.names
    run: dict[type, Callable[..., Any]] = {}
    for name, layer in zip(trunk.layer_names, trunk.layers(here.module), strict=True):
        stack = ForwardStack.of(layer)
        if options is False and getattr(stack.get(ForwardSlot.COMPILE), "by_user", False):
            continue
        stack.remove(ForwardSlot.COMPILE)
        if options is False or name not in owned:
            continue
        own = type(layer).forward
        if not stack.runs_class_forward or own is nn.Module.forward:
            raise ValueError(
                f"`compile_layers` compiles the `forward` that a layer's class defines, which "
                f"`{name}` ({type(layer).__name__}) does not run; use `compile_layers=False`."
            )
        if type(layer) not in run:
            run[type(layer)] = torch.compile(_code_of(own), **arguments)
        CompiledCall(layer, run[type(layer)]).install()


def compile_by_class(modules: Mapping[nn.Module, Compiler]) -> None:
    """Compile modules with the user's compilers; modules of one class and compiler share their compiled code.

    A module that does not run the forward of its class is not compiled.

    Args:
        modules: module -> its compiler.
    """
    run: dict[tuple[type, int], Callable[..., Any]] = {}
    for module, compiler in modules.items():
        if ForwardStack.of(module).runs_class_forward:
            key = type(module), id(compiler)
            if key not in run:
                run[key] = compiler(_code_of(type(module).forward))
            CompiledCall(module, run[key], by_user=True).install()


def _code_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that runs ``forward``: one per class, as ``torch.compile`` caches code by function."""

    def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(layer, *args, **kwargs)

    return run
