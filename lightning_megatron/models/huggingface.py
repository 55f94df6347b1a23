"""Converts Hugging Face's Llama and GPT-2 models to this package's decoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.models.config import DecoderConfig
from lightning_megatron.models.decoder import Decoder

_LLAMA = {
    r"model\.embed_tokens\.": "embed.",
    r"model\.norm\.": "norm.",
    r"lm_head\.": "head.",
    r"model\.layers\.(\d+)\.self_attn\.": r"layers.\1.attention.",
    r"model\.layers\.(\d+)\.mlp\.": r"layers.\1.mlp.",
    r"model\.layers\.(\d+)\.input_layernorm\.": r"layers.\1.attention_norm.",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"layers.\1.mlp_norm.",
}
_GPT2 = {
    r"transformer\.wte\.": "embed.",
    r"transformer\.wpe\.": "positions.",
    r"transformer\.ln_f\.": "norm.",
    r"lm_head\.": "head.",
    r"transformer\.h\.(\d+)\.attn\.c_proj\.": r"layers.\1.attention.o_proj.",
    r"transformer\.h\.(\d+)\.mlp\.c_fc\.": r"layers.\1.mlp.up_proj.",
    r"transformer\.h\.(\d+)\.mlp\.c_proj\.": r"layers.\1.mlp.down_proj.",
    r"transformer\.h\.(\d+)\.ln_1\.": r"layers.\1.attention_norm.",
    r"transformer\.h\.(\d+)\.ln_2\.": r"layers.\1.mlp_norm.",
}
_PACKED = re.compile(r"transformer\.h\.(\d+)\.attn\.c_attn\.(weight|bias)")


def from_huggingface(model: Any) -> Decoder:
    """Make a decoder with the configuration and weights of a ``LlamaForCausalLM`` or ``GPT2LMHeadModel``.

    Args:
        model: the Hugging Face model.

    Returns:
        A decoder in the model's dtype that computes the same logits.

    Raises:
        ValueError: the model has another architecture, or an option that this decoder does not support.
    """
    kind = model.config.model_type
    if kind == "llama":
        config, weights = _llama_config(model.config), _renamed(model.state_dict(), _LLAMA)
    elif kind == "gpt2":
        config, weights = _gpt2_config(model.config), _gpt2_weights(model.state_dict())
    else:
        raise ValueError(f"`model_type={kind!r}` cannot be read into this decoder; use 'llama' or 'gpt2'.")
    decoder = Decoder(config).to(model.dtype)
    decoder.load_state_dict(weights)
    return decoder


def _llama_config(theirs: Any) -> DecoderConfig:
    rope = getattr(theirs, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rotary positions of type {rope['rope_type']!r} are not supported; use 'default'.")
    if theirs.attention_bias != theirs.mlp_bias:
        raise ValueError(
            f"`attention_bias={theirs.attention_bias}` and `mlp_bias={theirs.mlp_bias}` differ; this decoder has one "
            "option for both."
        )
    _check_activation(theirs.hidden_act, ("silu",))
    return DecoderConfig(
        vocabulary=theirs.vocab_size,
        hidden=theirs.hidden_size,
        layers=theirs.num_hidden_layers,
        heads=theirs.num_attention_heads,
        key_value_heads=theirs.num_key_value_heads,
        head_size=theirs.head_dim,
        intermediate=theirs.intermediate_size,
        sequence=theirs.max_position_embeddings,
        rotary_base=rope.get("rope_theta", getattr(theirs, "rope_theta", 10_000.0)),
        norm_epsilon=theirs.rms_norm_eps,
        bias=theirs.attention_bias,
        tied=theirs.tie_word_embeddings,
    )


def _gpt2_config(theirs: Any) -> DecoderConfig:
    _check_activation(theirs.activation_function, ("gelu_new", "gelu"))
    return DecoderConfig.gpt2(
        vocabulary=theirs.vocab_size,
        hidden=theirs.n_embd,
        layers=theirs.n_layer,
        heads=theirs.n_head,
        intermediate=theirs.n_inner,
        sequence=theirs.n_positions,
        activation="gelu_tanh" if theirs.activation_function == "gelu_new" else "gelu",
        norm_epsilon=theirs.layer_norm_epsilon,
        tied=theirs.tie_word_embeddings,
    )


def _check_activation(name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"the activation {name!r} is not one of {', '.join(map(repr, known))}.")


def _renamed(weights: Mapping[str, Tensor], rules: Mapping[str, str]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in weights.items():
        rule = next((pattern for pattern in rules if re.match(pattern, name)), None)
        if rule is not None:
            found[re.sub(f"^{rule}", rules[rule], name)] = tensor
    return found


def _gpt2_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert GPT-2's weights, which stores linears as [in, out], and query, key and value in one matrix."""
    found = _renamed(weights, _GPT2)
    for name, tensor in found.items():
        if name.endswith("proj.weight"):
            found[name] = tensor.t().contiguous()
    for name, tensor in weights.items():
        packed = _PACKED.fullmatch(name)
        if packed is not None:
            whole = tensor.t() if tensor.dim() == 2 else tensor
            for part, rows in zip("qkv", torch.chunk(whole, 3), strict=True):
                found[f"layers.{packed[1]}.attention.{part}_proj.{packed[2]}"] = rows.contiguous()
    return found
