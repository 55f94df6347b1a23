"""The user's description of a module's experts, for modules whose structure does not show them, or shows them wrong.

A plan names parts of the module by patterns, as ``tensor_parallel_plan`` does::

    {"layers.*.moe.bank": "experts",     a group of experts: refused with the reason where it cannot be distributed
     "layers.*.moe.bank.up": 1,          its parameter `up` counts experts along dim 1
     "layers.0.moe": "gathered",         whatever it computes: its weights are distributed, and gathered for each call
     "layers.0.moe.out": 2,              along this dim
     "draft.bank": "whole"}              every rank keeps all of it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from lightning_megatron.mesh.parts.names import lies_in
from lightning_megatron.parallelize.plan.patterns import expand

EXPERTS, GATHERED, WHOLE = KINDS = ("experts", "gathered", "whole")
"""What a plan may say of a module."""
Plan = str | Mapping[str, str | int]
"""``"auto"``, or a kind for each pattern of modules, and a dim for each pattern of parameters."""

_Value = TypeVar("_Value", str, int)


def check_plan(plan: object) -> None:
    """Refuse a plan that cannot be meant.

    Args:
        plan: as the user gave it.

    Raises:
        ValueError: with the plan, or the entry that is wrong.
    """
    if plan == "auto":
        return
    if not isinstance(plan, Mapping) or not plan:
        raise ValueError(
            f"`expert_parallel_plan={plan!r}` must be 'auto' or a non-empty dict: pattern of modules -> 'experts', "
            "'gathered' or 'whole', or pattern of parameters -> the dim that counts experts."
        )
    for pattern, value in plan.items():
        is_dim = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not isinstance(pattern, str) or not (is_dim or value in KINDS):
            raise ValueError(
                f"`expert_parallel_plan={{{pattern!r}: {value!r}}}`: a pattern of modules is given 'experts', "
                "'gathered' or 'whole', and one of parameters the dim that counts experts, 0 or more."
            )


@dataclass(frozen=True)
class ExpertPlan:
    """A plan, by the names of one module's parts.

    Attributes:
        kinds: module name -> one of :data:`KINDS`.
        dims: parameter name -> the dim along which it is distributed.

    Example:
        ``{"*.bank": "experts", "*.bank.up": 1}`` for a module with ``layers.0.bank.up``: kinds ``{"layers.0.bank":
        "experts"}`` and dims ``{"layers.0.bank.up": 1}``.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, module: nn.Module) -> ExpertPlan:
        """The plan of a module.

        Args:
            plan: as the user gave it; see :func:`check_plan`.
            module: whole.

        Raises:
            ValueError: a pattern matches nothing, or what it must not; or two of them contradict each other.
        """
        check_plan(plan)
        if isinstance(plan, str):
            return cls()
        modules, parameters = dict(module.named_modules()), dict(module.named_parameters())
        of_modules = {pattern: kind for pattern, kind in plan.items() if isinstance(kind, str)}
        of_parameters = {pattern: dim for pattern, dim in plan.items() if not isinstance(dim, str)}
        kinds, dims = _by_name(of_modules, list(modules)), _by_name(of_parameters, list(parameters))
        for name, dim in dims.items():
            if dim >= parameters[name].dim():
                raise ValueError(
                    f"`expert_parallel_plan` says that dim {dim} of `{name}` counts experts, but it has "
                    f"{parameters[name].dim()} dims, {tuple(parameters[name].shape)}; count from 0."
                )
            if not any(kind != WHOLE and lies_in(name, each) for each, kind in kinds.items()):
                raise ValueError(
                    f"`expert_parallel_plan` gives `{name}` a dim, but says of no module around it that it is "
                    "'experts' or 'gathered'; name that, too."
                )
        return cls(kinds, dims)

    def dims_in(self, name: str) -> dict[str, int]:
        """Dims of the parameters of module ``name`` that are given, by their names in it."""
        inside = {each: dim for each, dim in self.dims.items() if lies_in(each, name)}
        return {each.removeprefix(f"{name}.") if name else each: dim for each, dim in inside.items()}


def _by_name(plan: Mapping[str, _Value], names: list[str]) -> dict[str, _Value]:
    """The entries of a plan, by name.

    Raises:
        ValueError: a pattern matches no name, or two give a name different values.
    """
    found: dict[str, _Value] = {}
    for pattern, hits in expand(dict.fromkeys(plan, ""), names).items():
        for name in hits:
            if found.setdefault(name, plan[pattern]) != plan[pattern]:
                raise ValueError(
                    f"`expert_parallel_plan` gives `{name}` {found[name]!r} and {plan[pattern]!r}; name it by one "
                    "pattern."
                )
    return found
