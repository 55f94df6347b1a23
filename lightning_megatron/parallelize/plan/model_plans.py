"""The tensor-parallel plans that Hugging Face models define.

Plans are read from attributes of the model, without importing ``transformers``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_megatron.parallelize.plan.patterns import matches
from lightning_megatron.parallelize.plan.styles import is_style
from lightning_megatron.parallelize.reading.kinds import hugging_face_models, is_hugging_face
from lightning_megatron.parallelize.reading.low_rank import is_splittable


def own_plan(module: nn.Module) -> dict[str, str]:
    """Plans of the Hugging Face models in a module, as full patterns; empty if there are none.

    A plan is ignored if it names only a head, an embedding (as models without a plan of their own inherit) or experts,
    which are not split here.
    """
    plan: dict[str, str] = {}
    for name, model in hugging_face_models(module).items():
        entries = dict(getattr(model, "_tp_plan", None) or {})
        linears = [inner for inner, part in model.named_modules() if is_splittable(part)]
        if not _names_layers(entries, linears):
            entries = _plan_from_configs(model)
        if _names_layers(entries, linears):
            plan |= {f"{name}.{pattern}" if name else pattern: style for pattern, style in entries.items()}
    return plan


def _names_layers(entries: dict[str, str], linears: list[str]) -> bool:
    patterns = [pattern for pattern, style in entries.items() if "*" in pattern and is_style(style)]
    return any(matches(pattern, name) for pattern in patterns for name in linears)


def _plan_from_configs(model: Any) -> dict[str, str]:
    """Plans of the inner models, for releases of ``transformers`` that do not merge them."""
    plan: dict[str, str] = {}
    parts: dict[str, Any] = dict(model.named_modules())
    for name, part in parts.items():
        if not is_hugging_face(part):
            continue
        entries = dict(type(part).__dict__.get("_tp_plan") or {})
        if getattr(part, "base_model", None) is part:
            entries |= getattr(getattr(part, "config", None), "base_model_tp_plan", None) or {}
        plan |= {f"{name}.{pattern}" if name else pattern: style for pattern, style in entries.items()}
    return plan
