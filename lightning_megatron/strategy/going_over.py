"""Finds hooks that go over the parameters of all pipeline stages, by the names in their code."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_megatron.mesh.parts.packages import is_users
from lightning_megatron.mesh.replaced import has_other_method
from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.strategy.hooks.whole_hooks import hooks_of
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks, names_used
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of

BESIDE_RUNS = ("setup", "on_fit_end", "teardown")
"""Hooks that Lightning calls before or behind a run of the divided module."""
_OF_THE_UPDATE = ("configure_gradient_clipping", "optimizer_zero_grad", "lr_scheduler_step")
_LISTS = (
    *("parameters", "named_parameters", "param_groups", "state_dict"),
    *("buffers", "named_buffers", "modules", "named_modules", "grad_norm", "state"),  # Lightning's, an optimizer's
)
_STATES = ("state", "state_dict", "load_state_dict")
_OF_OWN = ("add_param_group", "unfreeze_and_add_param_group", "deepcopy")  # of a stage's own


def hooks_over_all(owner: Any, parent: type | None, module: pl.LightningModule) -> list[str]:
    """Hooks that may go over the parameters of all stages: take numbers from them, draw for each of them, keep their
    names, or find by its place what is kept of one.

    Args:
        owner: the module, or a callback.
        parent: of a callback, ``Callback``.
        module: the user's, whose methods a callback may call.
    """
    beside = [h for h in BESIDE_RUNS if not has_other_method(owner, h) and is_overridden(h, owner, parent=parent)]
    hooks = {hook: _names_of(owner, hook, module) for hook in dict.fromkeys((*hooks_of(owner, parent), *beside))}
    return [hook for hook, names in hooks.items() if _lists_all(hook, names)]


def _names_of(owner: Any, hook: str, module: pl.LightningModule) -> set[str]:
    names = names_used(owner, hook)
    return names if owner is module else names.union(*(_names_behind(module, name) for name in names))


def hooks_on_states(module: pl.LightningModule, trainer: pl.Trainer) -> list[tuple[Any, str]]:
    """Hooks of the module and of the user's callbacks that may look at the state of an optimizer.

    Args:
        module: the user's.
        trainer: of the run.
    """
    others = ((callback, Callback) for callback in foreign_callbacks(callbacks_of(trainer)))
    hooks = ((owner, hook) for owner, parent in ((module, None), *others) for hook in hooks_of(owner, parent))
    return [(owner, hook) for owner, hook in hooks if speaks_of_states(_names_of(owner, hook, module))]


def speaks_of_states(names: set[str]) -> bool:
    """Whether code that uses these names may look at the state of an optimizer."""
    return not names.isdisjoint(_STATES)


def lists_parameters(names: set[str]) -> bool:
    """Whether code that uses these names may go over parameters, or over the state that is kept of them."""
    return not names.isdisjoint(_LISTS)


def _names_behind(module: pl.LightningModule, name: str) -> set[str]:
    """Names in a method of the user's module, if there is one of that name."""
    method = inspect.getattr_static(type(module), name, None)
    return names_used(module, name) if isinstance(method, types.FunctionType) and is_users(method) else set()


def schedule_goes_over_all(scheduler: Any) -> bool:
    """Whether the user's code in a scheduler may take numbers from all parameters: a class of theirs, or functions that
    a class of torch has been given.
    """
    owners = [
        (scheduler, name) for name in ("step", "get_lr") if is_users(type(scheduler)) and hasattr(scheduler, name)
    ]
    owners += [(each, "__call__") for each in getattr(scheduler, "lr_lambdas", ())]
    used = set[str]().union(*(names_used(owner, name) for owner, name in owners))
    return lists_parameters(used)


def _lists_all(hook: str, names: set[str]) -> bool:
    """Whether a hook lists parameters, and may be given those of all stages. ``optimizer_step``, in which steps run, is
    given them where it pairs those of a network and of its copy, and not for a line that sets a learning rate.
    """
    pairs = hook == "optimizer_step" and "zip" in names and not names.isdisjoint(("parameters", "named_parameters"))
    whole = hook.startswith("on_") or hook in (*BESIDE_RUNS, *_OF_THE_UPDATE) or pairs
    return whole and lists_parameters(names) and (speaks_of_states(names) or names.isdisjoint(_OF_OWN))


def are_those(group: Mapping[str, Any], everywhere: list[Tensor]) -> bool:
    """Whether a group of an optimizer has those of some parameters that are here, and no other."""
    kept = [id(p) for p in group["params"] if type(p) is not Absent]
    return kept == [id(p) for p in everywhere if type(p) is not Absent]
