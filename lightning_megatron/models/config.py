"""Configuration of the reference decoder, with its parameter and FLOP counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer.

    Attributes:
        vocabulary: number of tokens.
        hidden: features per token.
        layers: transformer layers.
        heads: query heads.
        key_value_heads: key and value heads (grouped queries; arXiv 2305.13245); ``None`` for ``heads``.
        head_size: features per head; ``None`` for ``hidden / heads``.
        intermediate: inner features of the feed-forward block; ``None`` for four times ``hidden``.
        sequence: longest sequence, in tokens.
        positions: ``"rotary"`` (arXiv 2104.09864) or ``"learned"``.
        rotary_base: base of the rotary frequencies.
        norm: ``"rms"`` or ``"layer"``.
        norm_epsilon: added to the variance.
        gated: whether the feed-forward block is gated (arXiv 2002.05202).
        activation: one of ``ACTIVATIONS``; ``"gelu_tanh"`` is GPT-2's approximation.
        bias: whether linears have biases.
        tied: whether the output head is the embedding.
        parallel_block: attention and feed-forward in parallel on the output of one norm, as in PaLM (arXiv 2204.02311).
        dropout: probability of dropout on the embedding, on each branch's output, and on attention probabilities.
        initial_deviation: standard deviation of the normal distribution of initial weights; for projections that write
            to the residual stream it is divided by ``sqrt(2 * layers)``.

    Raises:
        ValueError: a choice is unknown, or sizes do not divide.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int | None = None
    head_size: int | None = None
    intermediate: int | None = None
    sequence: int = 2048
    positions: str = "rotary"
    rotary_base: float = 10_000.0
    norm: str = "rms"
    norm_epsilon: float = 1e-5
    gated: bool = True
    activation: str = "silu"
    bias: bool = False
    tied: bool = False
    parallel_block: bool = False
    dropout: float = 0.0
    initial_deviation: float = 0.02

    def __post_init__(self) -> None:
        _check_choice("positions", self.positions, ("rotary", "learned"))
        _check_choice("norm", self.norm, ("rms", "layer"))
        _check_choice("activation", self.activation, ACTIVATIONS)
        if self.head_size is None and self.hidden % self.heads:
            raise ValueError(f"`hidden={self.hidden}` is not a multiple of `heads={self.heads}`; give `head_size`.")
        if self.heads % self.kv_heads:
            raise ValueError(f"`heads={self.heads}` is not a multiple of `key_value_heads={self.kv_heads}`.")
        if self.positions == "rotary" and self.per_head % 2:
            raise ValueError(f"rotary positions turn pairs of features: the head size {self.per_head} must be even.")

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.key_value_heads or self.heads

    @property
    def per_head(self) -> int:
        """Features per head."""
        return self.head_size or self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Inner features of the feed-forward block."""
        return self.intermediate or 4 * self.hidden

    @property
    def matrix_parameters(self) -> int:
        """Number of weights used in matrix products per token: linears and the output head, without embeddings."""
        attention = self.hidden * self.per_head * (2 * self.heads + 2 * self.kv_heads)
        feed_forward = (3 if self.gated else 2) * self.hidden * self.inner
        return self.layers * (attention + feed_forward) + self.vocabulary * self.hidden

    def flops_per_token(self, sequence: int) -> float:
        """Model FLOPs of forward and backward per token, for sequences of ``sequence`` tokens.

        Six per matrix weight, and ``12 · layers · heads · head size · sequence`` for attention. This counts the full
        score matrix, as SC21 and PaLM's appendix B do, although a causal kernel computes only half of it. Recomputation
        is not counted.
        """
        return 6.0 * self.matrix_parameters + 12.0 * self.layers * self.heads * self.per_head * sequence

    @classmethod
    def llama(cls, size: str = "8b", **changes: Any) -> DecoderConfig:
        """Configuration of Llama-3.1-8B (``"8b"``) or Llama-3.2 (``"3b"``, ``"1b"``), from their model cards.

        Args:
            size: ``"8b"``, ``"3b"`` or ``"1b"``.
            changes: attributes to change.

        Raises:
            ValueError: an unknown size.
        """
        sizes: dict[str, dict[str, Any]] = {
            "1b": {"hidden": 2048, "layers": 16, "heads": 32, "intermediate": 8192, "tied": True},
            "3b": {"hidden": 3072, "layers": 28, "heads": 24, "intermediate": 8192, "tied": True},
            "8b": {"hidden": 4096, "layers": 32, "heads": 32, "intermediate": 14336},
        }
        _check_choice("size", size, tuple(sizes))
        common: dict[str, Any] = {"vocabulary": 128_256, "key_value_heads": 8, "rotary_base": 500_000.0}
        return cls(**{**common, **sizes[size], **changes})

    @classmethod
    def gpt2(cls, **changes: Any) -> DecoderConfig:
        """Configuration of GPT-2's small model, 124 million parameters.

        Args:
            changes: attributes to change.
        """
        own: dict[str, Any] = {
            "vocabulary": 50_257,
            "hidden": 768,
            "layers": 12,
            "heads": 12,
            "sequence": 1024,
            "positions": "learned",
            "norm": "layer",
            "gated": False,
            "activation": "gelu_tanh",
            "bias": True,
            "tied": True,
        }
        return cls(**{**own, **changes})


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}={value!r}` is not one of {', '.join(map(repr, choices))}.")
