"""Long sequences: messages and bytes of context ranks, logits in pieces, and the runs of MEMO and ALST."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_megatron.planner import Cluster, Limits, ModelShape, Recipe, plan, predict
from lightning_megatron.planner.cost.context_ranks import context_seconds, received_bytes
from lightning_megatron.planner.cost.memory import passing_bytes, peak_memory, waiting_bytes
from lightning_megatron.planner.model.constants import DEFAULT_CONSTANTS
from lightning_megatron.planner.model.software import LIGHTNING, MEGATRON_CORE, PYTORCH_FSDP
from lightning_megatron.planner.search.longest import longest_sequence
from lightning_megatron.planner.search.savings import chunks_of_loss
from lightning_megatron.strategy.options.recipes import arguments_of

A800 = replace(Cluster.named("A800"), nvlink=200e9)
H100 = Cluster.named("H100")
GPT_7B = ModelShape(layers=32, hidden=4096, heads=32, vocab=50257, seq=1 << 20)
LLAMA_8B = ModelShape(32, 4096, 32, 128256, 131072, 8, 14336, gated=True, tied=False)
ALST = replace(PYTORCH_FSDP, name="alst", fused_kernels=True, keeps_16_bit_shard=True)


def test_memos_million_tokens_on_8_gpus_are_predicted() -> None:
    """52.3% MFU with the causal half of attention; 8%. Nothing of it is fitted."""
    limits = Limits(software=MEGATRON_CORE, offload=True, schedules=("1f1b",), shardings=("zero1",), headroom=0.0)
    found = plan(GPT_7B, A800, 8, 1, limits=limits, top=1).best
    assert found.causal_mfu == pytest.approx(0.523, rel=0.08)
    assert found.fits and isinstance(found.recipe.activation_offload, float)
    assert found.recipe.activation_offload == pytest.approx(0.41, abs=0.01)  # as the authors' formula gives


@pytest.mark.parametrize(("ranks", "published"), [(1, 500e3), (8, 3.7e6), (32, 15e6)])
def test_alsts_longest_sequences_are_predicted(ranks: int, published: float) -> None:
    recipe = Recipe(
        context=ranks,
        context_method="ulysses",
        sharding="fsdp",
        recompute="full",
        activation_offload="inputs",
        optimizer_offload=1.0,
        weight_offload=ranks == 1,
        loss_chunks=2,
        mlp_chunks=2,
        software=ALST,
    )
    assert longest_sequence(LLAMA_8B, recipe, replace(H100, host_memory=1.9e12)) == pytest.approx(published, rel=0.20)


def test_without_it_the_same_model_trains_32_thousand_tokens() -> None:
    plain = Recipe(data=8, global_batch=8, sharding="fsdp", recompute="full", software=ALST)
    assert longest_sequence(LLAMA_8B, plain, H100) == pytest.approx(32e3, rel=0.20)


@pytest.mark.parametrize("context", [2, 4, 8])
@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [("gather", (1, -1), (2, -2)), ("ring", (1, -1), (2, -1)), ("ulysses", None, None)],
)
def test_messages_are_the_notes(
    method: str, forward: tuple[int, int] | None, backward: tuple[int, int] | None, context: int
) -> None:
    """Gathering sends c - 1 blocks, and twice that back; a ring c - 1 and 2 c - 1; heads (2 + 2 g) h (c-1)/c."""
    shape, recipe = replace(LLAMA_8B, seq=32768), Recipe(context=context, context_method=method)
    block = 2 * 2 * (32768 / context) * 1024
    if forward is None or backward is None:
        once = (2 + 2 * 8 / 32) * (32768 / context) * 4096 * 2 * (context - 1) / context
        assert received_bytes(shape, recipe) == pytest.approx((once, once))
        return
    expected = [block * (each * context + more) for each, more in (forward, backward)]
    assert received_bytes(shape, recipe) == pytest.approx(expected)


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_sets_of_ranks_that_share_heads_pass_keys_and_values_on(heads: int) -> None:
    """Within n ranks (2 + 2 g) h (n-1)/n of 8 ranks' tokens; between them c/n - 1 blocks, and 2 c/n - 1 back."""
    shape, recipe = replace(LLAMA_8B, seq=32768), Recipe(context=8, context_method="ulysses", context_heads=heads)
    block, sets = 2 * 2 * (32768 / 8) * 1024, 8 // heads
    once = (2 + 2 * 8 / 32) * (32768 / 8) * 4096 * 2 * (heads - 1) / heads
    around = (block * (sets - 1), block * (2 * sets - 1)) if sets > 1 else (0.0, 0.0)
    assert received_bytes(shape, recipe) == pytest.approx((once + around[0], once + around[1]))
    method = "ulysses" if sets == 1 else ("ulysses", heads)
    assert arguments_of(recipe)["context_parallel_options"] == {"method": method}


def test_a_search_keeps_the_exchange_of_heads_inside_nodes_where_that_is_faster() -> None:
    """Over two nodes of 8, all 16 ranks would exchange everything across the network."""
    limits = Limits(schedules=("1f1b",), tensor=1, pipeline=1, context=16, context_methods=("ulysses",))
    found = plan(replace(LLAMA_8B, seq=1 << 19), H100, 16, 1, limits=limits, top=10)
    assert {item.recipe.context_heads for item in found.ranked} == {None, 8}
    assert found.best.recipe.context_heads == 8


def test_a_ring_is_hidden_once_sequences_are_long() -> None:
    """From s/c >= e g X/B tokens on: about 4500 on this machine with an eighth of 32 heads for keys."""
    hidden = Recipe(context=8, context_method="ring", software=MEGATRON_CORE)
    times = {}
    for seq in (8192, 262144):
        shape = replace(LLAMA_8B, seq=seq)
        ring, _ = context_seconds(shape, hidden, replace(H100, gpus_per_node=1), DEFAULT_CONSTANTS)
        exposed = predict(shape, hidden, replace(H100, gpus_per_node=1)).breakdown.context_communication
        times[seq] = exposed / (3 * 32 * ring)
    assert times[262144] < DEFAULT_CONSTANTS.contention * 1.2 < 0.6 < times[8192]
    ours = predict(LLAMA_8B, replace(hidden, software=LIGHTNING), H100)
    assert ours.breakdown.context_communication > predict(LLAMA_8B, hidden, H100).breakdown.context_communication


@pytest.mark.parametrize("context", [2, 4])
def test_activations_and_logits_are_shared_out(context: int) -> None:
    one = waiting_bytes(LLAMA_8B, Recipe(), 0, 0.0)
    assert waiting_bytes(LLAMA_8B, Recipe(context=context), 0, 0.0) == pytest.approx(one / context)


def test_logits_in_pieces_are_never_whole() -> None:
    whole, pieces = Recipe(), Recipe(loss_chunks=chunks_of_loss(LLAMA_8B, Recipe()))
    assert pieces.loss_chunks == 1002  # 131072 x 128256 in 32 bits are 67 GB
    kept = [waiting_bytes(LLAMA_8B, r, 0, 1.0) + passing_bytes(LLAMA_8B, r, 0, 0.0) for r in (whole, pieces)]
    assert kept[0] - kept[1] > 12 * 131072 * 128256 * 0.95
    slower = predict(LLAMA_8B, pieces, H100).iteration_seconds - predict(LLAMA_8B, whole, H100).iteration_seconds
    assert 0 < slower < 2.5 * 2 * 131072 * 128256 * 4096 / 989e12


def test_an_mlp_in_pieces_keeps_its_input_only() -> None:
    recipe = Recipe(recompute="full", loss_chunks=1002)
    plain, pieces = (peak_memory(LLAMA_8B, replace(recipe, mlp_chunks=n), H100, 1.0) for n in (1, 16))
    assert plain.buffers - pieces.buffers > 131072 * 14336 * 2 * 3
    assert predict(LLAMA_8B, Recipe(mlp_chunks=16), H100).breakdown.compute > (
        predict(LLAMA_8B, Recipe(), H100).breakdown.compute
    )


def test_a_search_shares_out_tokens_and_the_strategy_runs_what_it_finds() -> None:
    found = plan(LLAMA_8B, H100, 8, 1, limits=Limits(schedules=("1f1b",), tensor=1, pipeline=1))
    best = found.best.recipe
    assert best.context == 8 and "8 context ranks share the 131,072 tokens" in found.explanation
    arguments = arguments_of(best)
    assert arguments["context_parallel_size"] == 8
    assert arguments["context_parallel_options"] == {"method": best.context_method}
    assert arguments.get("loss_chunks", 1) == best.loss_chunks
    alone = Limits(schedules=("1f1b",), context=1)
    assert all(item.recipe.context == 1 for item in plan(replace(LLAMA_8B, seq=8192), H100, 8, 64, limits=alone).ranked)


def test_short_sequences_are_not_shared_out() -> None:
    found = plan(replace(LLAMA_8B, seq=4096), H100, 16, 64, limits=Limits(schedules=("1f1b",)))
    assert {item.recipe.context for item in found.ranked} == {1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_method": "star"}, "`context_method=star` is not one of gather, ring, ulysses"),
        ({"context": 4, "context_heads": 2}, "is about `context_method=ulysses`, not gather"),
        ({"context": 4, "context_heads": 3, "context_method": "ulysses"}, "of `context=4`; use a divisor"),
        ({"loss_chunks": 0}, "`loss_chunks=0` must be at least 1"),
        ({"mlp_chunks": 0}, "`mlp_chunks=0` must be at least 1"),
        ({"weight_offload": True}, "`weight_offload=True` is about shards of weights"),
    ],
)
def test_impossible_choices_say_what_to_change(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**change)  # type: ignore[arg-type]


def test_sequences_and_heads_that_cannot_be_shared_out_are_refused() -> None:
    short = replace(LLAMA_8B, seq=4)
    with pytest.raises(ValueError, match="`context=8` is more than the `seq=4` tokens"):
        predict(short, Recipe(context=8), H100)
    with pytest.raises(ValueError, match="deals out heads, and `heads=32`"):
        predict(LLAMA_8B, Recipe(context=3, context_method="ulysses"), H100)
    with pytest.raises(ValueError, match="does not fit on H100 with any sequence"):
        longest_sequence(replace(LLAMA_8B, layers=200), Recipe(), H100)
    with pytest.raises(ValueError, match="cannot be run by MegatronStrategy"):
        arguments_of(Recipe(sharding="zero2"))
