"""Generated tokens equal those of one process, whatever the layout; what cannot be is refused on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatron.strategy.generation.repeats import generates
from tests.generation.refusals import REFUSALS, refused
from tests.generation.scenarios import MODES, Sizes, Talks, generated, replica_of, scheduled
from tests.generation.strangers import STRANGERS, Greedy, strange
from tests.harness import one_process, run_trainers

FAMILIES = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3", "opt", "gpt_neox"),
    *("bloom", "gptj", "stablelm", "olmo2", "starcoder2", "falcon", "gemma3n", "mixtral"),
)
LAYOUTS: tuple[Sizes, ...] = ((1, 1, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1))
wide = pytest.mark.wide


def check_tokens(family: str, sizes: Sizes, modes: tuple[str, ...], where: str, **options: Any) -> None:
    pipeline, data, tensor = sizes
    context = options.get("context_parallel_size", 1)
    around = pipeline, data, context * tensor
    ranks = run_trainers(generated, family, sizes, modes, where, 0, options, devices=math.prod(around))
    for rank, outcome in enumerate(ranks):
        expected = one_process(generated, family, None, modes, where, replica_of(rank, around))
        if where in ("validate", "test"):
            tokens, (values,) = outcome.value
            batches = expected[0]
            if where == "validate":  # nothing but a hook reads the list, which holds what all samples gave
                each = [one_process(generated, family, None, modes, where, replica)[0] for replica in range(data)]
                batches = [[row for part in parts for row in part] for parts in zip(*each, strict=True)]
            assert tokens == batches, (rank, tokens, batches)
            if data == 1:
                assert values == pytest.approx(expected[1][0], rel=1e-6)  # a loss in float32
            continue
        assert outcome.value == expected, (rank, outcome.value, expected)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 1, 1)], ids=str)
def test_predictions_in_every_mode_are_those_of_one_process(sizes: Sizes) -> None:
    check_tokens("llama", sizes, tuple(MODES), "predict")


@pytest.mark.wide
def test_layers_that_read_the_keys_of_others_decode_under_a_pipeline() -> None:
    check_tokens("gemma3n", (2, 1, 1), ("greedy", "beams"), "predict")


def test_tokens_in_steps_a_callback_and_after_fit_are_those_of_one_process() -> None:
    check_tokens("gpt2", (2, 1, 1), ("greedy",), "fit")


TOKENS = {"sequence_parallel": True}
CONTEXT = {"context_parallel_size": 2}


@pytest.mark.everyday(1)
@pytest.mark.parametrize("where", ["predict", "validate", "fit"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        *[((1, 1, 2), TOKENS), ((2, 1, 1), CONTEXT)],
        *[((2, 1, 2), TOKENS), ((1, 1, 1), CONTEXT), ((1, 1, 2), {**TOKENS, **CONTEXT}), ((1, 2, 1), CONTEXT)],
    ],
    ids=str,
)
def test_ranks_that_share_tokens_generate_those_of_one_process(
    sizes: Sizes, options: dict[str, Any], where: str
) -> None:
    if where == "fit" and (sizes[1] > 1 or "sequence_parallel" in options):
        pytest.skip("replicas train on batches of their own; prompts of 5 tokens are for no two ranks to train on")
    check_tokens("llama", sizes, tuple(MODES) if where == "predict" else ("greedy",), where, **options)


@wide
@pytest.mark.parametrize(
    ("family", "sizes"),
    [(family, LAYOUTS[(turn + step) % 5]) for turn, family in enumerate(FAMILIES) for step in (0, 2)],
    ids=str,
)
def test_tokens_of_a_family_are_those_of_one_process(family: str, sizes: Sizes) -> None:
    modes = ("greedy", "recomputed", "sampled", "beams")
    check_tokens(family, sizes, (*modes, "static") if family in ("llama", "gemma3") else modes, "predict")


@wide
@pytest.mark.parametrize("where", ["validate", "test", "fit"])
@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1)], ids=str)
def test_tokens_anywhere_are_those_of_one_process(sizes: Sizes, where: str) -> None:
    if where == "fit" and sizes[1] > 1:
        pytest.skip("replicas train on batches of their own")
    check_tokens("qwen2", sizes, ("greedy",), where)


@wide
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_schedule": "interleaved", "virtual_pipeline_parallel_size": 2},
        {"pipeline_schedule": "zb-v"},
        {"evaluation_micro_batch_size": 1},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_schedule(options: dict[str, Any]) -> None:
    for outcome in run_trainers(scheduled, {"pipeline_parallel_size": 2, **options}, devices=2):
        assert outcome.value == one_process(scheduled, None)


def check_stranger(name: str, sizes: Sizes, **options: Any) -> None:
    ranks = math.prod(sizes) * options.get("context_parallel_size", 1)
    for rank, outcome in enumerate(run_trainers(strange, name, sizes, 0, options, devices=ranks)):
        expected = one_process(strange, name, None, replica_of(rank, sizes))
        assert_equal(outcome.value, expected)


def assert_equal(given: Any, expected: Any) -> None:
    ours, theirs = pytree.tree_leaves(given), pytree.tree_leaves(expected)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        else:
            assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("name", ["functional", "measures"])
def test_a_strangers_loop_gives_what_it_gives_in_one_process(name: str) -> None:
    check_stranger(name, (2, 1, 1))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", ["ends apart", "own options"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 2), (2, 2, 1), *(pytest.param(sizes, marks=wide) for sizes in ((1, 2, 2), (2, 2, 2)))],
    ids=str,
)
def test_ranks_end_a_generation_together_whatever_each_of_them_says(sizes: Sizes, name: str) -> None:
    check_stranger(name, sizes)


def test_buffers_of_a_part_that_only_some_stages_have_are_no_matter_to_the_others() -> None:
    check_stranger("two models", (4, 1, 1))


@wide
@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("name", sorted(STRANGERS))
def test_strangers_loops_give_what_they_give_in_one_process(name: str, sizes: Sizes) -> None:
    if STRANGERS[name][1] != "predict" and sizes[1] > 1:
        pytest.skip("metrics over replicas are those of all their batches")
    check_stranger(name, sizes)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", sorted(STRANGERS))
def test_strangers_loops_over_context_ranks_give_what_they_give_in_one_process(name: str, sizes: Sizes) -> None:
    check_stranger(name, sizes, **CONTEXT)


@pytest.mark.parametrize(
    "name",
    ["guarded", *(pytest.param(name, marks=wide) for name in sorted(REFUSALS) if name != "guarded")],
)
def test_what_cannot_be_is_refused_on_every_rank(name: str) -> None:
    _, words = REFUSALS[name]
    for outcome in run_trainers(refused, name, devices=2, check=False, grace=20):
        assert "killed" not in (outcome.error or ""), f"rank {outcome.rank} hung"
        assert words in f"{outcome.value}\n{outcome.error}\n{outcome.output}", outcome


def test_a_step_generates_if_it_or_a_method_that_it_calls_says_so() -> None:
    assert generates(Talks, "predict_step") and generates(Talks, "validation_step")
    assert not generates(Talks, "training_step") and not generates(Greedy, "predict_step")
    assert not generates(Greedy, "validation_step")  # Lightning's own
