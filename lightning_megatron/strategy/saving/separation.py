"""Separates the tensors of a Lightning checkpoint, stored by name, from the rest, which goes into ``meta.pt``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_megatron.checkpoints.files.dcp_plans import STATE_BESIDE, beside
from lightning_megatron.checkpoints.state.stored import plain_values
from lightning_megatron.mesh.parts.pieces import PiecedTensor
from lightning_megatron.strategy.saving.model_state import PartOfState

Tensors = dict[str, Tensor | PiecedTensor]


def separate(checkpoint: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Split a checkpoint into tensors by name, tied ones once, and the rest."""
    aliases = checkpoint.get("lightning_megatron", {}).get("local_aliases", {})
    state = checkpoint.get("state_dict", {})
    tensors: Tensors = {name: value for name, value in state.items() if _is_stored(value) and name not in aliases}
    left_out = ("state_dict", "optimizer_states", "lightning_megatron")
    meta = {key: value for key, value in checkpoint.items() if key not in left_out}
    own = {key: value for key, value in checkpoint.get("lightning_megatron", {}).items() if key != "local_aliases"}
    meta["lightning_megatron"] = own
    meta["state_dict_extra"] = own.pop("extra", None) or {n: v for n, v in state.items() if not _is_stored(v)}
    meta["optimizer_values"] = own.pop("optimizer_values", None) or plain_values(checkpoint.get("optimizer_states", []))
    groups = []
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        groups.append(optimizer["param_groups"])
        for parameter, entries in optimizer["state"].items():
            for key, value in entries.items():
                if _is_stored(value):
                    tensors[f"optimizer.{index}.{parameter}.{key}"] = value
    if "optimizer_states" in checkpoint:
        meta["optimizer_groups"] = groups
    meta = {key: _without_parts(value, key, tensors, aliases) for key, value in meta.items()}
    return tensors, meta


def _without_parts(value: Any, path: str, tensors: Tensors, tied: Mapping[str, str]) -> Any:
    """``value`` with a note in the place of every :class:`PartOfState`, whose tensors go to ``tensors``."""
    if isinstance(value, PartOfState):
        tensors |= {beside(path, n): v for n, v in value.items() if _is_stored(v) and n not in tied}
        return {STATE_BESIDE: path, "extra": {n: v for n, v in value.items() if not _is_stored(v)}}
    if type(value) is dict:
        return {key: _without_parts(each, f"{path}/{key}", tensors, tied) for key, each in value.items()}
    return value


def _is_stored(value: Any) -> bool:
    return isinstance(value, (Tensor, PiecedTensor))
