"""Dimensions of a decoder-only transformer, with its parameter and FLOP counts.

A shape does not depend on a layout or a machine: the planner predicts the same shape on many of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
        experts: routed experts E in a layer that is a mixture; 0 without mixtures.
        top_k: experts that a token takes.
        expert_inner: inner size of one expert; None means ``ffn``.
        shared_inner: inner size of the MLP that all tokens take beside the experts; 0 without one.
        moe_layers: layers that are mixtures; None means all. If their number divides ``layers`` they are spread evenly
            (every second layer, say), otherwise the first layers are dense.
        attention_parameters: matrix elements of one layer's attention, where it is not Q, K, V and O of ``head_dim``
            (latent attention); None otherwise.

    Raises:
        ValueError: a size is not positive, ``heads`` is not a multiple of ``kv_heads``, or mixtures make no sense.
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
    experts: int = 0
    top_k: int = 1
    expert_inner: int | None = None
    shared_inner: int = 0
    moe_layers: int | None = None
    attention_parameters: int | None = None

    def __post_init__(self) -> None:
        self._check_mixtures()
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

    def _check_mixtures(self) -> None:
        """Refuse mixtures that make no sense.

        Raises:
            ValueError: more experts per token than there are, more mixtures than layers, or either without experts.
        """
        if self.experts < 0 or self.shared_inner < 0 or (self.expert_inner is not None and self.expert_inner < 1):
            raise ValueError(f"`experts={self.experts}` and inner sizes must not be negative; correct the model shape")
        about = (self.top_k, self.expert_inner, self.moe_layers, self.shared_inner)
        if not self.experts and about != (1, None, None, 0):
            raise ValueError(
                "`top_k`, `expert_inner`, `shared_inner` and `moe_layers` are about `experts`; give it too"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"`top_k={self.top_k}` must be 1 to the `experts={self.experts}`; correct one of them")
        if self.moe_layers is not None and not 1 <= self.moe_layers <= self.layers:
            raise ValueError(f"`moe_layers={self.moe_layers}` must be 1 to `layers={self.layers}`; correct one of them")

    @property
    def mixtures(self) -> int:
        """Number of layers that are mixtures of experts."""
        return 0 if not self.experts else self.layers if self.moe_layers is None else self.moe_layers

    def mixtures_among(self, first: int, last: int) -> int:
        """How many of the layers ``first`` to ``last - 1`` are mixtures."""
        if self.mixtures and self.layers % self.mixtures == 0:
            every = self.layers // self.mixtures
            return last // every - first // every
        dense = self.layers - self.mixtures
        return max(0, last - dense) - max(0, first - dense)

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
        return self.attention_matrix_parameters + self._mlp_parameters(self.inner)

    @property
    def attention_matrix_parameters(self) -> int:
        """Parameters of one layer's attention matrices."""
        if self.attention_parameters is not None:
            return self.attention_parameters
        return self.hidden * (self.qkv_width + self.head_size * self.heads)

    def _mlp_parameters(self, inner: int) -> int:
        return self.hidden * inner * (3 if self.gated else 2)

    @property
    def expert_width(self) -> int:
        """Inner size of one expert."""
        return self.expert_inner if self.expert_inner is not None else self.inner

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return self._mlp_parameters(self.expert_width)

    @property
    def mixture_beside_parameters(self) -> int:
        """Matrix parameters of a mixture's layer beside its experts: attention, router, and what all tokens take."""
        router = self.experts * self.hidden
        shared = self._mlp_parameters(self.shared_inner) if self.shared_inner else 0
        return self.attention_matrix_parameters + router + shared

    @property
    def active_matrix_parameters(self) -> int:
        """Matrix parameters of all layers that one token meets: ``top_k`` experts of each mixture."""
        mixture = self.mixture_beside_parameters + self.top_k * self.expert_parameters
        return (self.layers - self.mixtures) * self.layer_matrix_parameters + self.mixtures * mixture

    @property
    def mixture_parameters(self) -> int:
        """All parameters of a layer that is a mixture."""
        return self.mixture_beside_parameters + self.experts * self.expert_parameters + self._norms_and_biases

    @property
    def _norms_and_biases(self) -> int:
        return self.layer_parameters - self.layer_matrix_parameters

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
        dense = (self.layers - self.mixtures) * self.layer_parameters
        layers = dense + self.mixtures * self.mixture_parameters
        return layers + self.embedding_parameters + head + self.final_norm_parameters

    @property
    def size(self) -> str:
        """The number of parameters as people say it: ``"12.6T"``, ``"1.3B"``, ``"124.4M"``, ``"3.5K"``."""
        for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
            if self.parameters >= 0.9995 * unit:
                return f"{self.parameters / unit:.1f}{letter}"
        return str(self.parameters)

    @property
    def model_flops_per_token(self) -> float:
        """Forward and backward FLOPs per token; attention counts the full score matrix, not the causal half.

        For an ungated model with f = 4h this is 72 l h^2 (1 + s/(6h) + V/(12 h l)), the model FLOPs of Korthikanti et
        al. (arXiv 2205.05198, appendix A).
        """
        matrices = self.active_matrix_parameters + self.vocab * self.hidden
        attention = 2 * self.layers * self.head_size * self.heads * self.seq
        return 6.0 * (matrices + attention)

    @property
    def causal_flops_per_token(self) -> float:
        """:attr:`model_flops_per_token` with the causal half of the score matrix only."""
        return self.model_flops_per_token - 1.5 * self.attention_core_flops_per_token

    @property
    def layer_flops_per_token(self) -> float:
        """Forward FLOPs of all layers per token, without the output head; full recomputation repeats these."""
        attention = 2 * self.layers * self.head_size * self.heads * self.seq
        return 2.0 * (self.active_matrix_parameters + attention)

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
            ValueError: the file is not JSON, a dimension is missing, or the model is no decoder of a known kind.
        """
        from lightning_megatron.planner.model.hf_config import shape_fields

        return cls(**shape_fields(config, seq))
