"""Messages for modules whose experts cannot be shared out: the reason, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_megatron.experts.suggested import suggested_plan


def not_experts(name: str, why: str) -> str:
    """For what the plan calls a group of experts, and is none.

    Args:
        name: of the module.
        why: the reason, if one is known.
    """
    return (
        f"`expert_parallel_plan` says that `{name}` is a group of experts, but "
        + (why or "it is neither a module with parameters `[experts, ...]` nor a list of modules beside a router")
        + "; name the dims of its parameters that count experts, or let its weights be gathered for each call of it "
        "('gathered'), or leave it on every rank ('whole')."
    )


def indivisible(name: str, count: int, size: int) -> str:
    """For experts that ranks cannot share out evenly.

    Args:
        name: of the module.
        count: of its experts.
        size: number of ranks.
    """
    fitting = [str(other) for other in range(1, count + 1) if count % other == 0]
    return (
        f"`{name}` has {count} experts, not divisible by `expert_parallel_size={size}`; use "
        f"`expert_parallel_size={', '.join(fitting[:-1])} or {fitting[-1]}`."
    )


def not_gathered(name: str) -> str:
    """For experts that are called with rows of their own, where all ranks were to get all tokens.

    Args:
        name: of the module.
    """
    return (
        f"`expert_dispatch='all_gather'` gives all ranks all tokens, but the experts of `{name}` are called with the "
        "rows that are meant for each, and not with tokens, numbers of experts, and weights; use "
        "`expert_dispatch='all_to_all'`."
    )


def none_found(module: nn.Module, whole: Mapping[str, str], size: int, parts: int) -> str:
    """For a module without experts that can be shared out.

    Args:
        module: the whole.
        whole: name of what looks like experts -> why they stay whole.
        size: over how many ranks.
        parts: over how many further ones each is cut.
    """
    seen = "".join(f" `{name}` looks like experts, but {why}." for name, why in whole.items())
    if not seen:
        named = ((name, type(child).__name__) for name, child in module.named_modules())
        called = next((each for each in named if "expert" in each[1].lower()), None)
        seen = f" `{called[0]}` is called {called[1]}, but is none of those that can be." if called else ""
    plan = suggested_plan(module, size) if parts == 1 else {}
    if plan:
        seen += f" Some hold weights that may be those of experts, which `expert_parallel_plan={plan}` distributes."
    name, value = ("expert_parallel_size", size) if size > 1 else ("expert_tensor_parallel_size", parts)
    return (
        f"`{name}={value}` shares out experts, but none were found that can be.{seen} Experts are modules "
        "with parameters `[experts, ...]` and a `forward(hidden, index, weights)`, or a list of modules that are "
        f"alike, called by one that has a router beside them. Others are named by `expert_parallel_plan`, which also "
        f"distributes weights without sending rows ('gathered'); or use `{name}=1`."
    )
