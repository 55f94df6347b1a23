"""Masks of Hugging Face's models are rules while tokens are split: the same numbers, never of tokens by tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, masking_utils

from lightning_megatron.context_parallel.rule_masks import RuleMask, masks_by_rule
from tests.context_parallel.library_modules import train
from tests.harness import one_process, run_trainers

CP, PP, TP = (f"{axis}_parallel_size" for axis in ("context", "pipeline", "tensor"))
TOKENS = 52
MAKERS = [
    masking_utils.create_causal_mask,
    masking_utils.create_sliding_window_causal_mask,
    masking_utils.create_chunked_causal_mask,
    masking_utils.create_bidirectional_mask,
]


def made(maker: Any, attention: str, **given: Any) -> Any:
    """What a model would be given, for two samples of 9 tokens."""
    config: Any = LlamaConfig()
    config.sliding_window = config.attention_chunk_size = 4
    config._attn_implementation = attention
    inputs = torch.zeros(2, 9, 4)
    if maker is masking_utils.create_bidirectional_mask:
        given.pop("position_ids", None)
    else:
        given["past_key_values"] = None
    return maker(config=config, inputs_embeds=inputs, **{"attention_mask": None, **given})


PADDED = torch.arange(9) < torch.tensor([[6], [9]])
GIVEN = [{}, {"attention_mask": PADDED}, {"attention_mask": PADDED.new_ones(2, 9)}]
GIVEN += [{"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0]])}]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_parts_of_a_rule_are_those_of_the_mask(maker, attention, given):
    wanted, noted = made(maker, attention, **given), Counter[str]()
    with masks_by_rule(noted):
        found = made(maker, attention, **given)
    if wanted is None:
        assert found is None
        return
    assert type(found) is RuleMask and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    for start, stop, low, high in ((0, 9, 0, 9), (2, 5, 1, 8), (8, 9, 0, 3)):
        assert found.part(start, stop, low, high).equal(wanted[..., start:stop, low:high])
        seen = wanted[..., start:stop, low:high].double()
        sees = None if attention == "eager" or 0 < seen.mean() < 1 else bool(seen.all())
        assert found.sees(start, stop, low, high) is sees
    assert found.rows([(0, 2), (5, 9)]).equal(torch.cat([wanted[..., :2, :], wanted[..., 5:, :]], -2))
    assert found[:, :, :, :9] is found and found[..., :9] is found and noted == {"": 1}
    assert (found == 0).equal(wanted == 0) and found[:, :, :, :4].equal(wanted[..., :4])
    assert noted == {"": 1, "__eq__": 1} and type(made(maker, attention, **given)) is torch.Tensor


def test_plain_attention_is_given_all_of_it():
    x = torch.randn(2, 2, 9, 4)
    with masks_by_rule(Counter()):
        mask = made(MAKERS[0], "sdpa", attention_mask=PADDED)
    found = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    assert found.equal(
        F.scaled_dot_product_attention(x, x, x, attn_mask=made(MAKERS[0], "sdpa", attention_mask=PADDED))
    )


def test_padding_that_is_changed_after_the_mask_was_made_is_refused():
    padded = PADDED.clone()
    with masks_by_rule(Counter()):
        mask = made(MAKERS[0], "sdpa", attention_mask=padded)
    padded.zero_()
    with pytest.raises(RuntimeError, match="changed in place after the mask had been made"):
        mask.part(0, 1, 0, 1)


RING, HEADS, LEVELS = ({"context_parallel_options": {"method": m}} for m in ("ring", "ulysses", ("ulysses", 2)))
ROWS: list[Any] = [
    ("llama", "packed", "sdpa", {CP: 2}),
    ("mistral", "padding", "sdpa", {CP: 2, **RING}),
    ("llama", "padding", "eager", {CP: 2}),
    *(
        pytest.param(*row, marks=pytest.mark.wide)
        for row in (
            ("llama", "padding", "sdpa", {CP: 2, **HEADS}),
            ("llama", "left", "sdpa", {CP: 4, **LEVELS}),
            ("llama", "whole", "sdpa", {CP: 2, **RING}),
            ("llama", "packed", "sdpa", {CP: 3, **RING}),
            ("llama", "packed", "sdpa", {CP: 2, PP: 2}),
            ("llama", "padding", "sdpa", {CP: 2, TP: 2}),
            ("llama", "packed", "sdpa", {CP: 2, TP: 2, "sequence_parallel": True}),
            ("llama", "padding", "sdpa", {CP: 2, "activation_recompute": "full"}),
            ("mistral", "plain", "sdpa", {CP: 3}),
            ("mistral", "packed", "sdpa", {CP: 2, PP: 2, **RING}),
            ("mistral", "padding", "sdpa", {CP: 2, "activation_offload": {"tokens": 0.4}}),
            ("gemma2", "padding", "eager", {CP: 2, PP: 2}),
            ("gemma3", "padding", "sdpa", {CP: 2, **RING}),
            ("gpt2", "padding", "sdpa", {CP: 2, **RING}),
        )
    ),
]


@pytest.mark.parametrize(("name", "kind", "attention", "arguments"), ROWS, ids=str)
@pytest.mark.parametrize("tokens", [TOKENS, pytest.param(TOKENS - 1, marks=pytest.mark.wide)])
def test_a_model_of_a_library_trains_as_in_one_process_and_makes_no_mask_of_all_tokens(
    name, kind, attention, arguments, tokens
):
    wanted = one_process(train, name, kind, attention, tokens, None)
    if "sequence_parallel" in arguments and tokens % 2:
        pytest.skip("blocks of tokens are equal")
    size = arguments[CP] * arguments.get(PP, 1) * arguments.get(TP, 1)
    for outcome in run_trainers(train, name, kind, attention, tokens, arguments, devices=size):
        found = outcome.value
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        for each, value in found["weights"].items():
            torch.testing.assert_close(value, wanted["weights"][each], rtol=1e-5, atol=1e-5, msg=each)
        if kind == "whole":  # the user has made it
            continue
        some = {tokens} | (
            {-(-tokens // arguments[CP]), tokens // 2 // arguments[CP]} if attention == "sdpa" else set()
        )
        assert not some & set(found["rows"]), found["rows"]
        assert "made as a rule" in found["report"] and "whole" not in found["report"], found["report"]
    assert wanted["rows"][tokens], "one process makes it"
