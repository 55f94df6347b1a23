"""The reference decoder: Hugging Face's numbers with Hugging Face's weights, and arithmetic that counts right."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lightning_megatron.models import Decoder, DecoderConfig, from_huggingface

SMALL: dict[str, Any] = {"vocabulary": 61, "hidden": 32, "layers": 3, "heads": 4, "sequence": 16}


def _tokens() -> torch.Tensor:
    return torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(0))


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "intermediate_size": 48, "rope_theta": 5000.0, "max_position_embeddings": 16}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **more, **changes})).eval()


def _gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=16, **changes)).eval()


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 16}]
)
def test_with_the_weights_of_a_llama_it_computes_the_same_logits_and_gradients(changes: dict[str, Any]) -> None:
    _compare(_llama(**changes))


def test_with_the_weights_of_a_gpt2_it_computes_the_same_logits_and_gradients() -> None:
    _compare(_gpt2())


def _compare(theirs: Any) -> None:
    for parameter in theirs.parameters():  # nothing may stay at a value that hides a mistake, such as zero biases
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    ours = from_huggingface(theirs).eval()
    tokens = _tokens()
    expected, got = theirs(tokens).logits, ours(tokens)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    expected.square().mean().backward()
    got.square().mean().backward()
    theirs_norm = sum(p.grad.square().sum() for p in theirs.parameters()).sqrt()
    ours_norm = sum(p.grad.square().sum() for p in ours.parameters() if p.grad is not None)
    torch.testing.assert_close(torch.as_tensor(ours_norm).sqrt(), theirs_norm, atol=1e-5, rtol=1e-4)


def test_models_it_cannot_read_are_refused_by_name() -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="gpt_neox"):
        from_huggingface(GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=48)))
    with pytest.raises(ValueError, match="'relu'"):
        from_huggingface(_llama(hidden_act="relu"))
    with pytest.raises(ValueError, match="'linear'"):
        from_huggingface(_llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True, "norm": "layer", "positions": "learned", "gated": False, "activation": "gelu", "bias": True},
        {"key_value_heads": 2, "intermediate": 40, "head_size": 16},
        {"parallel_block": True, "key_value_heads": 1},
    ],
)
def test_matrix_parameters_are_those_that_tokens_are_multiplied_with(changes: dict[str, Any]) -> None:
    config = DecoderConfig(**{**SMALL, **changes})
    model = Decoder(config)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert sum(linear.weight.numel() for linear in linears) == config.matrix_parameters
    logits = model(_tokens())
    assert logits.shape == (2, 16, 61)
    changed = _tokens()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    moved = (model(changed) - logits).abs().amax(dim=(0, 2)) > 0
    assert not moved[:9].any() and moved[9:].all()  # causal: only what comes after a token depends on it


def test_published_sizes_have_their_published_parameter_counts() -> None:
    with torch.device("meta"):
        models = {size: Decoder(DecoderConfig.llama(size)) for size in ("1b", "8b")}
        gpt2 = sum(p.numel() for p in Decoder(DecoderConfig.gpt2()).parameters())
    counts = {size: sum(p.numel() for p in model.parameters()) for size, model in models.items()}
    assert counts == {"1b": 1_235_814_400, "8b": 8_030_261_248}
    assert gpt2 == 124_439_808


def test_flops_of_a_token_are_six_per_weight_and_the_whole_score_matrix() -> None:
    config = DecoderConfig(**SMALL, gated=False)
    layer = 24 * 32 * 32 + 4 * 32 * 16  # forward: qkv, output and feed-forward; scores and mix
    assert config.flops_per_token(16) == 3 * (3 * layer + 2 * 32 * 61)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"heads": 5}, "hidden=32.*heads=5"),
        ({"key_value_heads": 3}, "heads=4.*key_value_heads=3"),
        ({"positions": "alibi"}, "positions='alibi'.*rotary"),
        ({"head_size": 7}, "even"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_values(changes: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        DecoderConfig(**{**SMALL, **changes})


def test_sequences_beyond_learned_positions_are_refused() -> None:
    model = Decoder(DecoderConfig(**SMALL, positions="learned"))
    with pytest.raises(ValueError, match=r"17 tokens.*16 learned"):
        model(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize(("size", "published"), [("13b", 13), ("52b", 52), ("pr-4b", 4), ("pr-31b", 31)])
def test_mixtures_have_the_published_numbers_of_parameters(size: str, published: int) -> None:
    config = DecoderConfig.deepspeed_moe(size)
    with torch.device("meta"):
        whole = sum(parameter.numel() for parameter in Decoder(config).parameters())
    assert whole == config.parameters
    assert round(whole / 1e9) == published
    residual = 12 * 8 * config.hidden**2 if config.residual_expert else 0
    counted = whole - residual if residual else config.parameters_of_layers
    assert counted / 1e9 == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig.gpt2(),
        DecoderConfig.llama("1b"),
        DecoderConfig(**SMALL, experts=(4,), top_k=2, residual_expert=True),
        DecoderConfig(**SMALL, experts=4, expert_every=1, expert_intermediate=8, bias=True, parallel_block=True),
    ],
)
def test_all_parameters_are_counted(config: DecoderConfig) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Decoder(config).parameters()) == config.parameters


def test_a_mixture_costs_what_a_dense_model_of_its_width_costs() -> None:
    sizes = {**SMALL, "layers": 4, "gated": False, "activation": "gelu"}
    mixture = DecoderConfig(**sizes, experts=(4, 8), residual_expert=True)
    dense = DecoderConfig(**sizes, intermediate=6 * 32)
    assert mixture.matrix_parameters - dense.matrix_parameters == 32 * (4 + 8), "routers"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"experts": 4, "expert_every": 4}, "`expert_every=4` leaves none of `layers=3`"),
        ({"experts": 4, "expert_every": 0}, "`expert_every=0` leaves none"),
        ({"experts": (4, 8)}, "has 2 entries, but `layers=3` with `expert_every=2` have 1 mixtures"),
        ({"experts": 1}, "`experts` must be at least 2"),
        ({"experts": 2, "top_k": 3}, "`top_k=3` in each layer, not 2"),
        ({"experts": 4, "activation": "relu"}, "`gated=True` with 'relu'"),
    ],
)
def test_mixtures_that_do_not_fit_are_refused(changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wanted)):
        DecoderConfig(**{**SMALL, **changes})
