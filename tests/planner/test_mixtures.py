"""Mixtures of experts: parameters of published models, bytes and messages of the formulas, and runs that took place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_megatron.planner import Cluster, Limits, ModelShape, Recipe, plan, predict
from lightning_megatron.planner.cost.memory import expert_parameters, stage_parameters, state_bytes
from lightning_megatron.planner.cost.mixture import rows_here, sent_bytes
from lightning_megatron.planner.cost.stage_layers import mixtures_of_ranks
from lightning_megatron.planner.model.software import MEGATRON_CORE
from lightning_megatron.planner.runs.runs import read_rows, run_from_row
from lightning_megatron.planner.runs.scoring import score_row
from lightning_megatron.strategy.options.recipes import arguments_of

H100 = Cluster.named("H100")
MIXTRAL = {
    **{"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
    **{"vocab_size": 32000, "hidden_act": "silu", "tie_word_embeddings": False},
}
QWEN3_30B = {
    **{"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32},
    **{"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768},
    **{"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"vocab_size": 151936, "hidden_act": "silu", "tie_word_embeddings": False},
}
DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128},
    **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280},
    **{"hidden_act": "silu", "tie_word_embeddings": False},
}
SMALL = ModelShape(8, 512, 8, 1000, 256, ffn=2048, gated=True, tied=False, experts=16, top_k=2, expert_inner=1024)


@pytest.mark.parametrize(
    ("config", "billions", "active"), [(MIXTRAL, 46.7, 12.9), (QWEN3_30B, 30.5, 3.3), (DEEPSEEK_V3, 671, 37.5)]
)
def test_published_mixtures_have_their_parameters(config: dict[str, object], billions: float, active: float) -> None:
    shape = ModelShape.from_config(config, seq=4096)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.003)
    met = shape.active_matrix_parameters + 2 * shape.vocab * shape.hidden
    assert met / 1e9 == pytest.approx(active, rel=0.02)


def test_the_first_layers_of_deepseek_are_dense_and_every_second_of_others() -> None:
    shape = ModelShape.from_config(DEEPSEEK_V3, seq=4096)
    assert mixtures_of_ranks(shape, Recipe(pipeline=4, global_batch=4)) == [13, 15, 15, 15]
    every = replace(SMALL, moe_layers=4)
    assert [every.mixtures_among(i, i + 1) for i in range(8)] == [0, 1] * 4


@pytest.mark.parametrize("expert", [1, 2, 4, 8])
def test_messages_and_bytes_are_the_formulas(expert: int) -> None:
    """4 T k h (e-1)/e elements a mixture and micro-batch; 1/e of the experts' parameters; state over their copies."""
    recipe = Recipe(data=8, global_batch=32, micro_batch=2, expert=expert)
    tokens = 2 * 256
    assert sent_bytes(SMALL, recipe) == 4 * tokens * 2 * 512 * 2 * (expert - 1) / expert
    assert rows_here(SMALL, replace(recipe, imbalance=1.5)) == 1.5 * tokens * 2
    experts = expert_parameters(SMALL, recipe, 0)
    assert experts == 8 * 16 * 3 * 512 * 1024 / expert
    dense = stage_parameters(SMALL, recipe, 0) - experts
    assert sum(state_bytes(SMALL, recipe, 0, 8)) == 6 * (dense + experts) + 12 * (dense / 8 + experts * expert / 8)


def test_tensor_ranks_share_out_the_tokens_of_experts() -> None:
    folded = Recipe(tensor=2, data=4, global_batch=32, expert=8)
    assert sent_bytes(SMALL, folded) == 4 * (256 / 2) * 2 * 512 * 2 * 7 / 8
    assert folded.expert_copies == 1


def test_the_busiest_rank_sets_the_time_and_other_nodes_are_far() -> None:
    shape = ModelShape.from_config(MIXTRAL, seq=4096)
    recipe = Recipe(data=8, pipeline=4, expert=8, global_batch=256, software=MEGATRON_CORE)
    even, uneven = (predict(shape, replace(recipe, imbalance=times), H100) for times in (1.0, 2.0))
    assert uneven.breakdown.expert_communication == pytest.approx(2 * even.breakdown.expert_communication)
    assert uneven.iteration_seconds > 1.3 * even.iteration_seconds
    across = predict(shape, recipe, replace(H100, gpus_per_node=4))
    assert across.breakdown.expert_communication > 2 * even.breakdown.expert_communication


def test_recomputation_sends_half_as_much_again() -> None:
    recipe = Recipe(data=8, expert=8, global_batch=32)
    plain, again = (predict(SMALL, replace(recipe, recompute=r), H100).breakdown for r in ("none", "full"))
    assert again.expert_communication == pytest.approx(1.5 * plain.expert_communication)


def test_a_search_chooses_how_many_ranks_share_out_the_experts_and_says_why() -> None:
    shape = ModelShape.from_config(MIXTRAL, seq=4096)
    found = plan(shape, H100, 64, 256, limits=Limits(schedules=("1f1b",), micro_batch=1))
    assert found.best.recipe.expert > 1
    assert "ranks share out the 8 experts of which a token takes 2" in found.explanation
    assert arguments_of(found.best.recipe)["expert_parallel_size"] == found.best.recipe.expert
    alone = plan(shape, H100, 64, 256, limits=Limits(schedules=("1f1b",), micro_batch=1, expert=1))
    assert alone.best.tokens_per_second <= found.best.tokens_per_second
    assert {item.recipe.expert for item in alone.ranked} == {1}


def test_deepseek_v3_on_1024_gpus_takes_the_published_time() -> None:
    """52.04 s on H100, t2 p16 e64; experts and their messages had no part in any fit."""
    rows = read_rows(Path(__file__).parents[1] / "data" / "other_runs.csv")
    row = next(row for row in rows if row["id"] == "deepseek-v3-h100-1024")
    run = run_from_row(row)
    assert run.shape == replace(ModelShape.from_config(DEEPSEEK_V3, seq=4096), kv_heads=None)
    found = score_row(row, run, predict(run.shape, run.recipe, run.cluster))
    assert found.error is not None and abs(found.error) < 0.08


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert": 3}, "`expert=3` does not divide tensor x context x data = 8"),
        ({"expert": 0}, "`expert=0` does not divide"),
        ({"imbalance": 0.5}, "`imbalance=0.5` is the busiest rank's rows over the mean"),
    ],
)
def test_impossible_expert_ranks_say_what_to_change(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**{"data": 8, "global_batch": 8, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("experts", [0, 6])
def test_experts_that_cannot_be_shared_out_say_what_can(experts: int) -> None:
    shape = replace(SMALL, experts=experts, top_k=1, expert_inner=1024 if experts else None)
    with pytest.raises(ValueError, match=f"does not share out the model's `experts={experts}` evenly"):
        predict(shape, Recipe(data=4, global_batch=4, expert=4), H100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 17}, "`top_k=17` must be 1 to the `experts=16`"),
        ({"moe_layers": 9}, "`moe_layers=9` must be 1 to `layers=8`"),
        ({"experts": 0}, "are about `experts`; give it too"),
        ({"experts": -1}, "must not be negative"),
    ],
)
def test_impossible_mixtures_say_what_to_change(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)
