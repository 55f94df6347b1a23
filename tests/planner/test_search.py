"""The search finds the fastest layout that fits, and says why."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from lightning_megatron.planner import Cluster, Limits, ModelShape, Plan, Recipe, plan, predict
from lightning_megatron.planner.search.plot import plan_svg
from lightning_megatron.planner.search.search import candidates

A100 = Cluster.named("A100-80")
SMALL = ModelShape(layers=24, hidden=2048, heads=16, vocab=50304, seq=1024)
GPT3 = ModelShape(layers=96, hidden=12288, heads=96, vocab=51200, seq=2048, positions=2048)


@pytest.fixture(scope="module")
def found() -> Plan:
    """GPT-3 on 1024 GPUs, the paper's 34 days."""
    return plan(GPT3, A100, 1024, 1536)


def test_ranked_layouts_fit_use_all_gpus_and_are_sorted(found: Plan) -> None:
    times = [item.iteration_seconds for item in found.ranked]
    assert times == sorted(times)
    assert len(found.ranked) == 10
    for item in found.ranked:
        assert item.fits and item.memory.total <= 0.95 * A100.gpu.memory
        assert item.recipe.world == 1024 and item.recipe.tensor <= 8
        assert 1536 % (item.recipe.data * item.recipe.micro_batch) == 0


def test_the_best_layout_is_the_best_of_all_that_can_be_written_down() -> None:
    limits = Limits(schedules=("1f1b",), shardings=("zero1",), headroom=0.0)
    best = plan(SMALL, A100, 8, 32, limits=limits).best
    times = []
    for tensor, pipeline, micro_batch in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32)):
        data, rest = divmod(8, tensor * pipeline)
        if rest or not data or 32 % (data * micro_batch):
            continue
        for recompute in ("none", "full"):
            recipe = Recipe(tensor, pipeline, data, 1, micro_batch, 32, recompute=recompute)
            found = predict(SMALL, recipe, A100)
            if found.fits:
                times.append(found.iteration_seconds)
    assert best.iteration_seconds == pytest.approx(min(times))


def test_a_trillion_parameters_fit_on_the_papers_3072_gpus() -> None:
    shape = ModelShape(layers=128, hidden=25600, heads=160, vocab=51200, seq=2048, positions=2048)
    best = plan(shape, A100, 3072, 3072, limits=Limits(schedules=("1f1b", "interleaved"))).best
    assert best.recipe.tensor == 8
    assert best.recipe.pipeline * best.recipe.tensor >= 128
    assert 0.3 < best.mfu < 0.7


def test_fixed_sizes_are_kept() -> None:
    found = plan(GPT3, A100, 512, 512, limits=Limits(tensor=8, pipeline=8, micro_batch=1))
    assert {(item.recipe.tensor, item.recipe.pipeline, item.recipe.micro_batch) for item in found.ranked} == {(8, 8, 1)}


def test_the_explanation_names_the_runner_ups_loss(found: Plan) -> None:
    assert "The runner-up" in found.explanation
    assert re.search(r"it loses [\d.]+% on", found.explanation)
    assert f"{found.best.recipe.pipeline} pipeline stages" in found.explanation
    least = min(item.recipe.tensor * item.recipe.pipeline for item in found.ranked)
    assert re.search(r"A replica has \d+ GPUs", found.explanation) and least >= 16


def test_the_explanation_gives_the_papers_bubble_and_what_other_micro_batches_lose() -> None:
    shape = ModelShape(layers=48, hidden=8192, heads=64, vocab=51200, seq=2048)
    text = plan(shape, A100, 64, 512, limits=Limits(schedules=("1f1b",), pipeline=8)).explanation
    recipe = plan(shape, A100, 64, 512, limits=Limits(schedules=("1f1b",), pipeline=8)).best.recipe
    assert f"(p - 1)/m of even stages would be {100 * 7 / recipe.micro_batches:.1f}%" in text
    assert re.search(r"As micro-batch, .*(would be [\d.]+% slower for|would not fit)", text)


@pytest.mark.parametrize(("sizes", "message"), [((0, 8), "`gpus=0` must be"), ((8, 0), "`global_batch=0` must be")])
def test_sizes_below_one_are_refused(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(SMALL, A100, *sizes)


def test_impossible_limits_are_named() -> None:
    with pytest.raises(ValueError, match="`tensor=3` does not divide heads="):
        plan(SMALL, A100, 8, 64, limits=Limits(tensor=3))
    with pytest.raises(ValueError, match=r"`headroom=2` is a share"):
        Limits(headroom=2)
    with pytest.raises(ValueError, match="`top=0`"):
        plan(SMALL, A100, 8, 64, top=0)


def test_a_model_that_cannot_fit_says_how_many_gpus_it_needs() -> None:
    with pytest.raises(
        ValueError, match=r"none of \d+ layouts of 174.6B parameters fits on `gpus=8` A100-80.*raise `gpus`"
    ):
        plan(GPT3, A100, 8, 64)


def test_a_batch_that_no_layout_divides_is_refused() -> None:
    shape = ModelShape(layers=1, hidden=64, heads=1, vocab=64, seq=8, ffn=63)
    with pytest.raises(ValueError, match="no layout of `gpus=7`"):
        plan(shape, A100, 7, 3)


def test_heads_and_layers_limit_the_candidates() -> None:
    shape = ModelShape(layers=6, hidden=96, heads=6, kv_heads=3, ffn=384, vocab=128, seq=16)
    sizes = {(recipe.tensor, recipe.pipeline) for recipe in candidates(shape, A100, 24, 24, Limits(largest_tensor=24))}
    assert {tensor for tensor, _ in sizes} == {1, 3, 6}
    assert max(pipeline for _, pipeline in sizes) <= 6


def test_a_plan_is_json_and_its_picture_is_xml() -> None:
    found = plan(SMALL, A100, 16, 64, top=3)
    document = json.loads(json.dumps(found.as_dict()))
    assert len(document["layouts"]) == 3
    assert document["layouts"][0]["fits"] is True
    picture = ElementTree.fromstring(plan_svg(found))
    assert picture.tag.endswith("svg")
    texts = [node.text or "" for node in picture.iter() if node.tag.endswith("text")]
    assert any("16 GPUs" in text for text in texts) and "activations" in texts and "tokens/s" in texts
