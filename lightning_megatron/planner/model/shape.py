"""Dimensions of a decoder-only transformer, with its parameter and FLOP counts.

A shape does not depend on a layout or a machine: the planner predicts the same shape on many of both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of one decoder-only transformer.

    Args:
        layers: transformer layers l.
        hidden: hidden size h.
        heads: attention heads a.
        vocab: vocabulary size V (before padding).
        seq: sequence length s in tokens.
        kv_heads: key/value heads; None means as many as ``heads``.
        ffn: inner size of the MLP; None means 4h.
        gated: the MLP has a gate besides its up projection (SwiGLU, GeGLU).
        tied: embedding and output head share one matrix.
        head_dim: size of one head; None means h/a.
        positions: rows of a trained position table; 0 without one.

    Raises:
        ValueError: a size is not positive, or ``heads`` is not a multiple of ``kv_heads``.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    tied: bool = True
    head_dim: int | None = None
    positions: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "seq", "kv_heads", "ffn", "head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1; correct `{name}` of the model shape")
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"`hidden={self.hidden}` is not a multiple of `heads={self.heads}` (heads of "
                f"{self.hidden / self.heads:g} channels); change one of them, or give `head_dim`"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"`heads={self.heads}` is not a multiple of `kv_heads={self.key_value_heads}`; change `kv_heads`"
            )

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads; by default ``heads``."""
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def inner(self) -> int:
        """Inner size of the MLP; by default 4h."""
        return self.ffn if self.ffn is not None else 4 * self.hidden

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.head_dim if self.head_dim is not None else max(1, self.hidden // self.heads)

    @property
    def qkv_width(self) -> int:
        """Output channels of the joint query, key and value projection."""
        return self.head_size * (self.heads + 2 * self.key_value_heads)

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer's matrices."""
        attention = self.hidden * (self.qkv_width + self.head_size * self.heads)
        return attention + self.hidden * self.inner * (3 if self.gated else 2)

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer: matrices, norms, and the biases of ungated models."""
        biases = 0 if self.gated else self.qkv_width + 2 * self.hidden + self.inner
        norms = 2 * self.hidden if self.gated else 4 * self.hidden
        return self.layer_matrix_parameters + biases + norms

    @property
    def replicated_layer_parameters(self) -> int:
        """Parameters of one layer that are replicated on tensor ranks: norms, and biases of row-parallel linears."""
        return 2 * self.hidden if self.gated else 6 * self.hidden

    @property
    def final_norm_parameters(self) -> int:
        """Parameters of the norm after the last layer."""
        return self.hidden * (1 if self.gated else 2)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and of the trained position table, if any."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all trained parameters; tied matrices count once."""
        head = 0 if self.tied else self.vocab * self.hidden
        return self.layers * self.layer_parameters + self.embedding_parameters + head + self.final_norm_parameters

    @property
    def size(self) -> str:
        """The number of parameters as people say it: ``"1.3B"``, ``"124.4M"``, ``"3.5K"``."""
        for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
            if self.parameters >= 0.9995 * unit:
                return f"{self.parameters / unit:.1f}{letter}"
        return str(self.parameters)

    @property
    def model_flops_per_token(self) -> float:
        """Forward and backward FLOPs per token; attention counts the full score matrix, not the causal half.

        For an ungated model with f = 4h this is 72 l h^2 (1 + s/(6h) + V/(12 h l)), the model FLOPs of Korthikanti et
        al. (arXiv 2205.05198, appendix A).
        """
        matrices = self.layers * self.layer_matrix_parameters + self.vocab * self.hidden
        attention = 2 * self.layers * self.head_size * self.heads * self.seq
        return 6.0 * (matrices + attention)

    @property
    def layer_flops_per_token(self) -> float:
        """Forward FLOPs of all layers per token, without the output head; full recomputation repeats these."""
        attention = 2 * self.layers * self.head_size * self.heads * self.seq
        return 2.0 * (self.layers * self.layer_matrix_parameters + attention)

    @property
    def attention_core_flops_per_token(self) -> float:
        """Forward FLOPs per token of the attention cores of all layers; selective recomputation repeats these."""
        return 4.0 * self.layers * self.head_size * self.heads * self.seq

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path, *, seq: int | None = None) -> ModelShape:
        """Read a Hugging Face ``config.json``.

        Args:
            config: path of the JSON file, path of its folder, or its content.
            seq: sequence length in training; None means the configuration's maximum.

        Raises:
            ValueError: the file is not JSON, a dimension is missing, or the model is not a dense decoder.
        """
        values = _read_config(config)
        _refuse_others(values)
        hidden = _required(values, "hidden size", _HIDDEN_KEYS)
        heads = _required(values, "attention heads", _HEAD_KEYS)
        family = str(values.get("model_type", ""))
        length = seq or _optional(values, _SEQ_KEYS)
        if length is None:
            raise ValueError(f"the configuration has no sequence length ({', '.join(_SEQ_KEYS)}); give `seq` (`--seq`)")
        return cls(
            layers=_required(values, "layers", _LAYER_KEYS),
            hidden=hidden,
            heads=heads,
            vocab=_required(values, "vocabulary", ("vocab_size",)),
            seq=length,
            kv_heads=_kv_heads(values, family),
            ffn=_optional(values, _FFN_KEYS),
            gated=_is_gated(values, family),
            tied=bool(values.get("tie_word_embeddings", family in _TIED_FAMILIES.split())),
            head_dim=_optional(values, ("head_dim",)),
            positions=_positions(values, family),
        )


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


def _kv_heads(values: Mapping[str, Any], family: str) -> int | None:
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


def _refuse_others(values: Mapping[str, Any]) -> None:
    """Refuse mixtures of experts and encoder-decoders, whose layers would be counted wrongly.

    Raises:
        ValueError: the model is not a dense decoder.
    """
    inner = values.get("ffn_config")
    experts = _optional(values, _EXPERT_KEYS) or _optional(inner if isinstance(inner, Mapping) else {}, _EXPERT_KEYS)
    if experts and experts > 1:
        raise ValueError(
            f"the configuration has {experts} experts per layer; mixtures of experts are not modelled, so give the "
            "configuration of a dense model, or a dense model's sizes"
        )
    if values.get("is_encoder_decoder"):
        raise ValueError(
            f"`model_type={values.get('model_type')}` has an encoder and a decoder, which are not modelled; give the "
            "configuration of a decoder-only model"
        )
