"""What Hugging Face models say about themselves: their plans, their heads, their attention sizes.

Everything is read by attribute, so that ``transformers`` is never imported here: a model that is one brings it
along.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.parallelize.plan.patterns import matches
from lightning_megatron.parallelize.plan.styles import is_style
from lightning_megatron.parallelize.reading.kinds import is_linear


def is_hugging_face(module: nn.Module) -> bool:
    """Whether the module is a Hugging Face ``PreTrainedModel``."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def hugging_face_models(module: nn.Module) -> dict[str, Any]:
    """The outermost Hugging Face models in a module, by dotted name (empty for the module itself)."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        if is_hugging_face(part) and name not in Parts(found):
            found[name] = part
    return found


def own_plan(module: nn.Module) -> dict[str, str]:
    """Plans that the Hugging Face models in a module carry, as full patterns; empty when they carry none.

    A plan that names only a head, an embedding (as models without a plan of their own inherit) or experts, which are
    not split here, does not count.
    """
    plan: dict[str, str] = {}
    for name, model in hugging_face_models(module).items():
        entries = dict(getattr(model, "_tp_plan", None) or {})
        linears = [inner for inner, part in model.named_modules() if is_linear(part)]
        if not _names_layers(entries, linears):
            entries = _plan_from_configs(model)
        if _names_layers(entries, linears):
            plan |= {f"{name}.{pattern}" if name else pattern: style for pattern, style in entries.items()}
    return plan


def _names_layers(entries: dict[str, str], linears: list[str]) -> bool:
    patterns = [pattern for pattern, style in entries.items() if "*" in pattern and is_style(style)]
    return any(matches(pattern, name) for pattern in patterns for name in linears)


def _plan_from_configs(model: Any) -> dict[str, str]:
    """Plans of the inner models, for releases that do not merge them."""
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


def output_embeddings(module: nn.Module) -> list[nn.Module]:
    """Heads of the Hugging Face models in a module, as they name them."""
    heads = []
    for model in hugging_face_models(module).values():
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if isinstance(head, nn.Module):
            heads.append(head)
    return heads
