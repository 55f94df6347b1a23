"""Configuration of the reference decoder, with its parameter and FLOP counts."""

from __future__ import annotations

from collections.abc import Callable
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
        experts: experts of each mixture that takes the place of a feed-forward block; or how many each of them has,
            first to last, as in PR-MoE (DeepSpeed-MoE, arXiv 2201.05596); 0 for no mixtures.
        expert_every: of so many layers the last has a mixture.
        top_k: experts that a token goes to.
        residual_expert: whether all tokens go through a feed-forward block too, to which experts add (PR-MoE).
        expert_intermediate: inner features of an expert; ``None`` for those of a feed-forward block.
        router: ``"softmax"`` or ``"sigmoid"``; see :class:`~lightning_megatron.layers.MoE`, as for the following.
        capacity_factor: tokens that an expert takes at most, over the mean; ``None`` for all.
        router_bias: whether experts are chosen with biases that ``expert_balance="bias"`` moves.
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
    experts: int | tuple[int, ...] = 0
    expert_every: int = 2
    top_k: int = 1
    residual_expert: bool = False
    expert_intermediate: int | None = None
    router: str = "softmax"
    capacity_factor: float | None = None
    router_bias: bool = False
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
        if self.experts:
            self._check_experts()

    def _check_experts(self) -> None:
        places = self.layers // self.expert_every if self.expert_every > 0 else 0
        if not places:
            raise ValueError(
                f"`expert_every={self.expert_every}` leaves none of `layers={self.layers}` for a mixture; use 1 to "
                f"{self.layers}, or `experts=0`."
            )
        if isinstance(self.experts, tuple) and len(self.experts) != places:
            raise ValueError(
                f"`experts={self.experts}` has {len(self.experts)} entries, but `layers={self.layers}` with "
                f"`expert_every={self.expert_every}` have {places} mixtures; give one number for each of them."
            )
        if (least := min(self._mixtures)) < max(2, self.top_k):
            raise ValueError(f"`experts` must be at least 2 and `top_k={self.top_k}` in each layer, not {least}.")
        if (self.gated, self.activation) not in ((True, "silu"), (False, "gelu")):
            raise ValueError(
                f"experts have `gated=True` with `activation='silu'`, or `gated=False` with 'gelu', not "
                f"`gated={self.gated}` with {self.activation!r}."
            )

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
    def _mixtures(self) -> tuple[int, ...]:
        places = self.layers // self.expert_every
        return self.experts if isinstance(self.experts, tuple) else (self.experts,) * places

    @property
    def experts_of_layers(self) -> tuple[int, ...]:
        """How many experts each layer has, 0 for those with a feed-forward block.

        Example:
            4 layers with ``experts=(4, 8)`` and ``expert_every=2``: (0, 4, 0, 8).
        """
        if not self.experts:
            return (0,) * self.layers
        found = [0] * self.layers
        found[self.expert_every - 1 :: self.expert_every] = self._mixtures
        return tuple(found)

    @property
    def inner_of_expert(self) -> int:
        """Inner features of an expert."""
        return self.expert_intermediate or self.inner

    @property
    def matrix_parameters(self) -> int:
        """Number of weights used in matrix products per token: linears, routers, the experts that a token goes to, and
        the output head, without embeddings.
        """
        return self._matrices(lambda _: self.top_k) + self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all weights: those of all experts, embeddings, norms and biases too."""
        norms = self.layers * (1 if self.parallel_block else 2) + 1
        vectors = norms * self.hidden * (1 if self.norm == "rms" else 2)
        if self.bias:
            dense = self.experts_of_layers.count(0)
            attention = self.per_head * (self.heads + 2 * self.kv_heads) + self.hidden
            vectors += self.layers * attention + dense * ((2 if self.gated else 1) * self.inner + self.hidden)
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        positions = self.sequence * self.hidden if self.positions == "learned" else 0
        return self.parameters_of_layers + tables + positions + vectors

    @property
    def parameters_of_layers(self) -> int:
        """Number of the weights in the layers' matrices: attention, feed-forward blocks, routers and all experts."""
        return self._matrices(lambda experts: experts)

    def _matrices(self, counted: Callable[[int], int]) -> int:
        """Weights of the layers' matrices, of which ``counted(experts)`` experts count."""
        matrices = 3 if self.gated else 2
        total = self.layers * self.hidden * self.per_head * (2 * self.heads + 2 * self.kv_heads)
        for experts in self.experts_of_layers:
            if not experts or self.residual_expert:
                total += matrices * self.hidden * self.inner
            if experts:
                total += self.hidden * (experts + matrices * counted(experts) * self.inner_of_expert)
        return total

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

    @classmethod
    def deepspeed_moe(cls, size: str = "pr-4b", **changes: Any) -> DecoderConfig:
        """Configuration of DeepSpeed-MoE's language models (arXiv 2201.05596, table 1).

        Args:
            size: ``"13b"`` and ``"52b"``, which have 128 experts in every second layer; ``"pr-4b"`` and ``"pr-31b"``,
                which have fewer in the first ten mixtures than in the last two, and a residual block.
            changes: attributes to change.

        Raises:
            ValueError: an unknown size.
        """
        sizes: dict[str, dict[str, Any]] = {
            "13b": {"hidden": 1024, "experts": 128},
            "52b": {"hidden": 2048, "experts": 128},
            "pr-4b": {"hidden": 1024, "experts": (32,) * 10 + (64,) * 2, "residual_expert": True},
            "pr-31b": {"hidden": 2048, "experts": (64,) * 10 + (128,) * 2, "residual_expert": True},
        }
        _check_choice("size", size, tuple(sizes))
        own = {"layers": 24, "heads": 16, "vocabulary": 51_200, "activation": "gelu"}
        return cls.gpt2(**{"sequence": 2048, **own, **sizes[size], **changes})


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}={value!r}` is not one of {', '.join(map(repr, choices))}.")
