"""Hooks of the user on layers whose inputs or outputs a plan would divide.

A hook is given what its layer takes and gives, and may put anything made of that anywhere: into a dictionary of another
object, into a log, detached from any graph. A trial does not see all of this, and a mean of one rank's features is a
number like any other. So inputs and outputs of such layers are kept whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_megatron.mesh.parts.names import lies_in
from lightning_megatron.mesh.parts.packages import is_users
from lightning_megatron.mesh.pickling import users_hook

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooked_inside(module: nn.Module, members: Iterable[str], scope: str) -> str:
    """Name of a module with a hook of the user that would be given parts, or "".

    Args:
        module: holds them.
        members: names of the column- and row-parallel layers of a region.
        scope: name of the module around them; modules in it without parameters may run between them.
    """
    holder = module.get_submodule(scope)
    between = (
        f"{scope}.{name}" if scope else name
        for name, part in holder.named_modules()
        if name and not part._modules and not part._parameters
    )
    names = [*members, *(name for name in between if lies_in(name, scope) or not scope)]
    return next((name for name in names if _has_hook(module.get_submodule(name))), "")


def _has_hook(part: nn.Module) -> bool:
    hooks: Iterable[Any] = (hook for table in _TABLES for hook in getattr(part, table).values())
    return any(_is_users_own(hook) for hook in hooks)


def _is_users_own(hook: Any) -> bool:
    given = users_hook(hook)
    return given is not None and is_users(given.func if isinstance(given, functools.partial) else given, "transformers")
