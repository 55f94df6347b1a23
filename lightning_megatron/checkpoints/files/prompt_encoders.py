"""Adapters of which peft stores what it computes by layers of their own: virtual tokens and prefixes with an encoder.

The encoder is small, and built anew from the adapter's config, for its weights in the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_megatron.checkpoints.files.adapters import Adapter, Tensors, TensorToWrite

_KINDS = ("P_TUNING", "PREFIX_TUNING")


def has_encoder(adapter: Adapter) -> bool:
    """Whether the adapter is of a kind that is known here."""
    return str(adapter.config.get("peft_type")) in _KINDS


def made_by_encoder(source: Tensors, adapter: Adapter, dtype: torch.dtype | None) -> dict[str, TensorToWrite]:
    """The prompt that its encoder computes, which is all that peft stores of it.

    Raises:
        ValueError: the encoder is of another kind, or peft is not installed.
    """
    kind = str(adapter.config.get("peft_type"))
    encoder, start = _encoder(adapter, kind), f"{adapter.start}prompt_encoder.{adapter.name}."
    stored = {name: source.aliases.get(start + name, start + name) for name in encoder.state_dict()}
    if missing := [name for name in stored.values() if name not in source.kinds]:
        raise ValueError(f"adapter {adapter.name!r} ({kind}) has no `{missing[0]}` in the checkpoint.")
    with torch.no_grad():
        encoder.load_state_dict({name: source.read(at) for name, at in stored.items()}, assign=True)
        embedding: Any = encoder.get_submodule("embedding")
        made = encoder(torch.arange(embedding.num_embeddings)[None])[0]
    return {"prompt_embeddings": TensorToWrite(tuple(made.shape), dtype or made.dtype, lambda: made)}


def _encoder(adapter: Adapter, kind: str) -> nn.Module:
    try:
        import peft
    except ImportError:
        raise ValueError(f"adapter {adapter.name!r} ({kind}) is computed by peft, which is not installed.") from None
    config: Any = peft.PeftConfig.from_peft_type(**{**adapter.config, "inference_mode": False})
    if kind == "P_TUNING":
        return peft.PromptEncoder(config).eval()
    if kind == "PREFIX_TUNING":
        return peft.PrefixEncoder(config).eval()
    raise ValueError(
        f"adapter {adapter.name!r} is of the kind {kind}, of which peft stores what it computes from the weights; load "
        "the checkpoint into the module and call its `save_pretrained`."
    )
