"""Notes in a checkpoint about the adapters of a module, so that they can be exported without building the module.

Which tensors belong to an adapter, and under which names its own library stores them, is asked of that library (peft)
where the module lives. Only names and numbers are noted; the tensors are in the checkpoint as any others.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_EMBEDDED = ("PROMPT_TUNING", "PREFIX_TUNING")


def adapter_notes(module: nn.Module, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Start of the names of every peft model in a module -> name of an adapter -> what is known of it.

    An adapter's note has its ``config``; ``tensors``, the name in a file of peft -> the name in the checkpoint, or
    ``None`` where peft has to compute what it stores; and ``updates``, for merging: name of a linear layer or embedding
    -> ``scale``, ``transposed`` and whether its columns are normalised (``magnitude``), or ``None`` for an adapter that
    adds no product of two matrices.

    Args:
        module: the user's module, or what a stage has of it.
        names: of all parameters and buffers of the whole module.
    """
    if "peft" not in sys.modules:
        return {}
    kind = sys.modules["peft"].PeftModel
    found: dict[str, dict[str, Any]] = {}
    for name, child in module.named_modules():
        if isinstance(child, kind):
            start = f"{name}." if name else ""
            found[start] = {adapter: _note(child, start, adapter, names) for adapter in child.peft_config}
    return found


def _note(model: Any, start: str, adapter: str, names: Iterable[str]) -> dict[str, Any]:
    config = model.peft_config[adapter]
    plain = {**config.to_dict(), "inference_mode": True}
    return {
        "config": json.loads(json.dumps(plain, default=_plain)),
        "tensors": _tensors(
            model, start, adapter, [name.removeprefix(start) for name in names if name.startswith(start)]
        ),
        "updates": _updates(model, start, adapter, config),
    }


def _plain(value: Any) -> Any:
    """Sets and enumerations, as a file in JSON has them."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(getattr(value, "value", value))


def _tensors(model: Any, start: str, adapter: str, names: Sequence[str]) -> dict[str, str] | None:
    config = model.peft_config[adapter]
    if config.is_prompt_learning:
        name = f"prompt_encoder.{adapter}.embedding.weight"
        kind = str(getattr(config.peft_type, "value", ""))  # others compute what they store by layers of their own
        plain = kind in _EMBEDDED and not getattr(config, "prefix_projection", False) and name in names
        return {"prompt_embeddings": start + name} if plain else None
    from peft import get_peft_model_state_dict

    marks = {name: torch.empty(0, device="meta") for name in names}
    marked = {id(mark): name for name, mark in marks.items()}
    with warnings.catch_warnings(), _all_ranks(config):
        warnings.simplefilter("ignore")
        chosen = get_peft_model_state_dict(model, marks, adapter, save_embedding_layers=False)
    found = {key: start + marked[id(mark)] for key, mark in chosen.items() if id(mark) in marked}
    inside = f".modules_to_save.{adapter}."  # peft asks each module what it holds, and those of other stages are hollow
    return {name.replace(inside, ".", 1): start + name for name in names if inside in name} | found


@contextmanager
def _all_ranks(config: Any) -> Iterator[None]:
    """Around code that would leave out the ranks that AdaLoRA has given up, which needs their numbers."""
    ranks = getattr(config, "rank_pattern", None)
    adaptive = str(getattr(config.peft_type, "value", "")) == "ADALORA"
    if adaptive:
        config.rank_pattern = None
    try:
        yield
    finally:
        if adaptive:
            config.rank_pattern = ranks


def _updates(model: Any, start: str, adapter: str, config: Any) -> dict[str, Any] | None:
    from peft.tuners.lora import LoraLayer

    if str(getattr(config.peft_type, "value", "")) != "LORA" or getattr(config, "bias", "none") != "none":
        return None
    found: dict[str, Any] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or adapter not in layer.scaling:
            continue
        if isinstance(layer.get_base_layer(), (nn.Linear, nn.Embedding)) or getattr(layer, "fan_in_fan_out", False):
            column_norms = bool(getattr(layer, "use_dora", {}).get(adapter, False))
            if getattr(layer, "lora_variant", {}).get(adapter) is None or column_norms:
                transposed = bool(getattr(layer, "fan_in_fan_out", False))
                scale = float(layer.scaling[adapter])
                found[f"{start}{name}."] = {"scale": scale, "transposed": transposed, "magnitude": column_norms}
                continue
        return None
    return found
