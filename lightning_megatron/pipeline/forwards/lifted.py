"""Prepares modules that the user has compiled for the cut into stages.

``torch.compile(body)`` and ``body.compile()`` trace through every call inside of a module. A stage runs code around
each layer that cannot be traced: stand-ins, messages, random streams. A compiled module that contains the layers
therefore runs eagerly, and each layer is compiled by itself, with the options that the user gave::

    compiled body [ layer 0, layer 1, layer 2 ]   ──▶   body [ compiled layer 0, compiled layer 1, compiled layer 2 ]

Modules compiled outside of the layers, or inside of one, stay compiled, inside the wrappers of the stage. Names of
parameters do not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.eval_frame import OptimizeContext

from lightning_megatron.mesh.parts.names import lies_in
from lightning_megatron.pipeline.cut.trunk import Trunk
from lightning_megatron.pipeline.forwards.compiled import Compiler, compile_by_class


def lift_compilation(module: nn.Module, trunk: Trunk, *, compiles: bool) -> list[str]:
    """Move compilation from the modules that contain the layers to the layers.

    Args:
        module: the whole module, not cut yet; changed in place.
        trunk: its layers.
        compiles: whether layers may be compiled; otherwise they run eagerly.

    Returns:
        Names of the compiled modules that contain layers, and now run eagerly.

    Raises:
        ValueError: a layer is a TorchScript module, whose parameters belong to compiled code.
    """
    lifted: list[str] = []
    own: dict[nn.Module, Compiler] = {}
    around: Compiler | None = None
    for name, child in list(module.named_modules()):
        if isinstance(child, torch.jit.ScriptModule) and _holds_layers(name, trunk):
            raise ValueError(
                f"`{name}` is a TorchScript module, whose parameters cannot be given to one pipeline stage and taken "
                "from the others. Put the Python module there; `MegatronStrategy(compile_layers=True)` compiles it."
            )
        compiler = _taken_off(child)
        if compiler is None:
            continue
        if lies_in(trunk.name, name):
            around = compiler
            lifted.append(name)
        else:
            own[getattr(child, "_orig_mod", child)] = compiler
    if around is not None:
        own = {layer: around for layer in map(_inner, trunk.layers(module)) if layer not in own} | own
    if compiles:
        compile_by_class(own)
    return lifted


def _holds_layers(name: str, trunk: Trunk) -> bool:
    return lies_in(trunk.name, name) or any(lies_in(name, layer) for layer in trunk.layer_names)


def _inner(module: nn.Module) -> nn.Module:
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def _taken_off(module: nn.Module) -> Compiler | None:
    """Make a compiled ``module`` run eagerly, and return its compiler; ``None`` if it is not compiled."""
    if isinstance(module, OptimizedModule):
        compiler: Any = module.dynamo_ctx
        module.forward = module._orig_mod.__call__
        return compiler
    if module._compiled_call_impl is None:
        return None
    compiler = _compiler_of(module._compiled_call_impl)
    module._compiled_call_impl = None
    return compiler


def _compiler_of(compiled: Any) -> Compiler:
    """A compiler with the options of an existing compiled function."""
    cells = (cell.cell_contents for cell in compiled.__closure__ or ())
    found: Compiler | None = next((value for value in cells if isinstance(value, OptimizeContext)), None)
    return found or torch.compile
