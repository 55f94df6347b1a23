"""Finds hooks that go over the parameters of all pipeline stages, by the names in their code."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_megatron.mesh.parts.packages import is_users
from lightning_megatron.mesh.replaced import has_other_method
from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.strategy.hooks.whole_hooks import hooks_of
from lightning_megatron.strategy.lightning.hooks import names_used

BESIDE_RUNS = ("setup", "on_fit_end", "teardown")
"""Hooks that Lightning calls before or behind a run of the divided module."""
_OF_THE_UPDATE = ("configure_gradient_clipping", "optimizer_zero_grad", "lr_scheduler_step")
_LISTS = ("parameters", "named_parameters", "param_groups", "grad_norm")  # the last one is Lightning's
_DRAWS = (
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "dropout", "init"),
    *("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"),
)
_COUNTS = (
    *("sum", "norm", "vector_norm", "stack", "cat", "mean", "std", "var", "dot", "max", "min", "any", "all", "sqrt"),
    *("item", "float", "tolist", "parameters_to_vector", "numel", "isnan", "isinf", "isfinite", "kthvalue", "topk"),
    *("len", "shape", "size"),
    *("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "get_total_norm", "grad_norm"),
)
_PAIRS = (
    "zip",
    "enumerate",
    "vector_to_parameters",
)  # each parameter with what is kept of it, or of its copy, by place
_OF_OWN = ("state", "state_dict", "add_param_group", "unfreeze_and_add_param_group", "deepcopy")  # of a stage's own


def hooks_over_all(owner: Any, parent: type | None, module: pl.LightningModule) -> list[str]:
    """Hooks that may take numbers from all parameters, draw for each of them, or find what is kept of it by its place;
    where one does so, all hooks of an owner, which may keep it.

    Args:
        owner: the module, or a callback.
        parent: of a callback, ``Callback``.
        module: the user's, whose methods a callback may call.
    """
    beside = [h for h in BESIDE_RUNS if not has_other_method(owner, h) and is_overridden(h, owner, parent=parent)]
    hooks = {hook: names_used(owner, hook) for hook in dict.fromkeys((*hooks_of(owner, parent), *beside))}
    if owner is not module:
        hooks = {hook: names.union(*(_names_behind(module, name) for name in names)) for hook, names in hooks.items()}
    listing = {hook: names for hook, names in hooks.items() if _lists_all(hook, names)}
    pairs = any(not names.isdisjoint(_PAIRS) for names in listing.values())
    return [hook for hook, names in listing.items() if pairs or not names.isdisjoint((*_DRAWS, *_COUNTS))]


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
    return not used.isdisjoint(_LISTS) and not used.isdisjoint(_COUNTS)


def _lists_all(hook: str, names: set[str]) -> bool:
    """Whether a hook lists parameters, and may be given those of all stages. ``optimizer_step``, in which steps run, is
    given them where it pairs those of a network and of its copy, and not for a line that sets a learning rate.
    """
    pairs = hook == "optimizer_step" and "zip" in names and not names.isdisjoint(_LISTS[:2])
    whole = hook.startswith("on_") or hook in (*BESIDE_RUNS, *_OF_THE_UPDATE) or pairs
    return whole and not names.isdisjoint(_LISTS) and names.isdisjoint(_OF_OWN)


def are_those(group: Mapping[str, Any], everywhere: list[Tensor]) -> bool:
    """Whether a group of an optimizer has those of some parameters that are here, and no other."""
    kept = [id(p) for p in group["params"] if type(p) is not Absent]
    return kept == [id(p) for p in everywhere if type(p) is not Absent]
