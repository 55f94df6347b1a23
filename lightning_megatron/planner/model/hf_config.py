"""Reads a model's dimensions from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HIDDEN_KEYS = ("hidden_size", "n_embd", "n_embed", "d_model", "dim")
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEAD_KEYS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
_KV_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_FFN_KEYS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_SEQ_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_UNGATED_FAMILIES = "gpt2 gpt_neo gpt_neox gptj opt bloom falcon mpt phi gpt_bigcode codegen starcoder2"
_TIED_FAMILIES = (
    "gpt2 gpt_neo gpt_bigcode bloom opt falcon mpt starcoder2 xglm biogpt gemma gemma2 gemma3_text cohere cohere2 "
    "smollm3 ernie4_5"
)
"""Families that tie embedding and head, and whose ``config.json`` may leave ``tie_word_embeddings`` out."""

_MIXTURE_FAMILIES = (
    "mixtral qwen2_moe qwen3_moe olmoe flex_olmo granitemoe gpt_oss phimoe deepseek_v2 deepseek_v3 ernie4_5_moe "
    "glm4_moe"
)
"""Families whose ``config.json`` tells their experts in the words of :func:`_mixtures`."""


def shape_fields(config: Mapping[str, Any] | str | Path, seq: int | None) -> dict[str, Any]:
    """Fields of a :class:`~lightning_megatron.planner.model.shape.ModelShape`.

    Args:
        config: path of the JSON file, path of its folder, or its content.
        seq: sequence length in training; None means the configuration's maximum.

    Raises:
        ValueError: the file is not JSON, a dimension is missing, or the model is no decoder of a known kind.
    """
    values = _read_config(config)
    _refuse_others(values)
    hidden = _required(values, "hidden size", _HIDDEN_KEYS)
    heads = _required(values, "attention heads", _HEAD_KEYS)
    family = str(values.get("model_type", ""))
    length = seq or _optional(values, _SEQ_KEYS)
    if length is None:
        raise ValueError(f"the configuration has no sequence length ({', '.join(_SEQ_KEYS)}); give `seq` (`--seq`)")
    return {
        "layers": _required(values, "layers", _LAYER_KEYS),
        "hidden": hidden,
        "heads": heads,
        "vocab": _required(values, "vocabulary", ("vocab_size",)),
        "seq": length,
        "kv_heads": _kv_heads(values),
        "ffn": _optional(values, _FFN_KEYS),
        "gated": _is_gated(values, family),
        "tied": bool(values.get("tie_word_embeddings", family in _TIED_FAMILIES.split())),
        "head_dim": _head_dim(values),
        "positions": _positions(values, family),
        **_mixtures(values),
        "attention_parameters": _latent_attention(values, hidden, heads),
    }


def _read_config(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The configuration as a mapping; of a multimodal model, its ``text_config``."""
    if isinstance(config, Mapping):
        values: Mapping[str, Any] = config
    else:
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"`{path}` is not JSON: {error}") from error
        if not isinstance(values, Mapping):
            raise ValueError(f"`{path}` holds {type(values).__name__}, not the mapping of a model's configuration")
    inner = values.get("text_config")
    return inner if isinstance(inner, Mapping) else values


def _optional(values: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """The first of ``keys`` with an integer value; None without one."""
    for key in keys:
        if isinstance(values.get(key), int):
            return int(values[key])
    return None


def _required(values: Mapping[str, Any], what: str, keys: tuple[str, ...]) -> int:
    """The first of ``keys`` with an integer value.

    Raises:
        ValueError: there is none; the message names ``what`` and the keys.
    """
    found = _optional(values, keys)
    if found is None:
        raise ValueError(f"the configuration has no {what} (looked for {', '.join(keys)}); add `{keys[0]}` to it")
    return found


def _kv_heads(values: Mapping[str, Any]) -> int | None:
    """Number of key/value heads; 1 for families with the flag ``multi_query``, None if not given."""
    if values.get("multi_query") and not values.get("new_decoder_architecture"):
        return 1
    return _optional(values, _KV_KEYS)


def _positions(values: Mapping[str, Any], family: str) -> int:
    """Rows of the trained position table, for families that have one; OPT's table has two more than it uses."""
    if family not in ("gpt2", "opt", "gpt_neo", "gpt_bigcode"):
        return 0
    return (_optional(values, _SEQ_KEYS) or 0) + (2 if family == "opt" else 0)


def _is_gated(values: Mapping[str, Any], family: str) -> bool:
    """Whether the MLP is gated, which Hugging Face configurations do not state.

    MLPs with SiLU are gated, and so are those of models with RMS norms unless the activation is a kind of ReLU.
    """
    if family in _UNGATED_FAMILIES.split():
        return False
    activation = str(values.get("hidden_act", values.get("hidden_activation", "")))
    if activation in ("silu", "swish"):
        return True
    return "rms_norm_eps" in values and not activation.startswith(("relu", "xielu"))


def _mixtures(values: Mapping[str, Any]) -> dict[str, int | None]:
    """Fields about experts; none without them."""
    experts = _optional(values, _EXPERT_KEYS) or 0
    if experts < 2:
        return {}
    layers = _required(values, "layers", _LAYER_KEYS)
    inner = _optional(values, ("moe_intermediate_size",))
    shared = _optional(values, ("shared_expert_intermediate_size",))
    if shared is None:
        shared = (_optional(values, ("n_shared_experts", "moe_num_shared_experts")) or 0) * (inner or 0)
    every = _optional(values, ("decoder_sparse_step", "moe_layer_freq")) or 1
    listed = values.get("mlp_only_layers")
    dense = _optional(values, ("first_k_dense_replace",)) or (len(listed) if isinstance(listed, list) else 0)
    return {
        "experts": experts,
        "top_k": _optional(values, ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")) or 1,
        "expert_inner": inner,
        "shared_inner": shared,
        "moe_layers": (layers - dense) // every,
    }


def _latent_attention(values: Mapping[str, Any], hidden: int, heads: int) -> int | None:
    """Matrix elements of attention with latent keys and values (DeepSeek); None for others."""
    latent = _optional(values, ("kv_lora_rank",))
    if latent is None:
        return None
    plain, rotary = _optional(values, ("qk_nope_head_dim",)) or 0, _optional(values, ("qk_rope_head_dim",)) or 0
    out, queries = _optional(values, ("v_head_dim",)) or 0, _optional(values, ("q_lora_rank",))
    width = heads * (plain + rotary)
    query = hidden * width if queries is None else queries * (hidden + width)
    return query + hidden * (latent + rotary) + latent * heads * (plain + out) + heads * out * hidden


def _head_dim(values: Mapping[str, Any]) -> int | None:
    """Channels of a head; with latent attention the mean of those of queries and of values, whose products it takes."""
    keys = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if _optional(values, ("kv_lora_rank",)) is None:
        return _optional(values, ("head_dim",))
    return sum(_optional(values, (key,)) or 0 for key in keys) // 2


def _refuse_others(values: Mapping[str, Any]) -> None:
    """Refuse other mixtures of experts, and encoder-decoders, whose layers would be counted wrongly.

    Raises:
        ValueError: the model is no decoder of a known kind.
    """
    inner = values.get("ffn_config")
    nested = _optional(inner if isinstance(inner, Mapping) else {}, _EXPERT_KEYS)
    family = str(values.get("model_type", ""))
    if nested or ((_optional(values, _EXPERT_KEYS) or 0) > 1 and family not in _MIXTURE_FAMILIES.split()):
        raise ValueError(
            f"`model_type={family}` has {nested or _optional(values, _EXPERT_KEYS)} experts per layer in a way that is "
            f"not known here (known are {', '.join(_MIXTURE_FAMILIES.split())}); give its sizes as a ModelShape"
        )
    if values.get("is_encoder_decoder"):
        raise ValueError(
            f"`model_type={values.get('model_type')}` has an encoder and a decoder, which are not modelled; give the "
            "configuration of a decoder-only model"
        )
