"""The memory of a run is counted by kind, predicted beside it, and where it does not suffice, options are named."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron.callbacks import MemoryTimeline
from lightning_megatron.models import CausalLanguageModel
from lightning_megatron.planner import Cluster, ModelShape, Recipe
from lightning_megatron.planner.cost.memory import peak_memory
from lightning_megatron.strategy.callbacks.memory_timeline import draw
from lightning_megatron.strategy.memory.expected import ExpectedRun, held_savings, savings
from lightning_megatron.strategy.memory.ledger import Bytes
from lightning_megatron.strategy.memory.live_bytes import LiveBytes
from lightning_megatron.strategy.options.options import Options
from tests.harness import JobFailed, run_trainers
from tests.models.scenarios import CONFIGS
from tests.strategy.memory_report_scenarios import measured, penalised, too_large

WIDE = pytest.mark.wide


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("sizes", "devices"),
    [
        ({}, 1),
        ({"data_parallel_size": 2}, 2),
        ({"data_parallel_size": 2, "weight_sharding": True}, 2),
        ({"pipeline_parallel_size": 2, "micro_batch_size": 2}, 2),
        pytest.param({"tensor_parallel_size": 2}, 2, marks=WIDE),
        pytest.param({"optimizer_offload": True}, 1, marks=WIDE),
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "micro_batch_size": 2}, 4, marks=WIDE),
    ],
)
def test_bytes_of_a_step_are_counted_by_kind_and_near_the_planners(sizes: dict[str, Any], devices: int) -> None:
    values = [outcome.value for outcome in run_trainers(measured, sizes, devices=devices)]
    alone = [outcome.value["losses"] for outcome in run_trainers(measured, sizes, False, devices=devices)]
    assert [value["losses"] for value in values] == alone, "measuring changes no number"
    shards = sizes.get("data_parallel_size", 1)
    for value, one in zip(values, values[0]["report"].ranks, strict=True):
        weights, peak, held = 8 * value["parameters"], one.peak, one.held
        spread, hosted = "weight_sharding" in sizes, "optimizer_offload" in sizes
        assert 0.99 * weights < held.weights * (1 if not spread else 2 / 3) < 1.02 * weights, (
            "whole after a run, and a shard"
        )
        assert peak.weights >= weights / (shards if spread else 1)
        assert (
            2 * weights / shards
            <= (held.host if hosted else peak.optimizer)
            < (3.1 if hosted else 2.1) * weights / shards
        )
        assert peak.gradients < 1.1 * weights and max(one.step.kinds["gradients"]) >= weights / shards
        assert peak.total == max(one.step.totals) and peak.activations > 0.15 * peak.total
        assert one.predicted is not None
        for kind in ("gradients", "optimizer", *(() if "tensor_parallel_size" in sizes else ("activations",))):
            wanted = getattr(one.predicted, kind)  # split layers as small as these keep more than the planner counts
            assert getattr(peak, kind) == pytest.approx(wanted, rel=0.3), (kind, peak, one.predicted)
    assert "rank" in values[0]["text"] and "in brackets what the planner expects" in values[0]["text"]
    assert values[0]["files"] == ["memory-step6.json", "memory-step6.svg"]
    report = values[0]["report"]
    shown = draw(report).axes[1]
    assert shown.get_visible() and shown.get_xlabel() == "planner"
    unpredicted = replace(report, ranks=[replace(one, predicted=None) for one in report.ranks])
    assert not any(axes.get_visible() for axes in draw(unpredicted).axes[1::2]), "no frame without a bar"


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "sizes",
    [
        {"data_parallel_size": 2, "micro_batch_size": 1},
        pytest.param({"data_parallel_size": 2, "weight_sharding": True}, marks=WIDE),
        pytest.param({"pipeline_parallel_size": 2, "micro_batch_size": 1}, marks=WIDE),
    ],
)
def test_steps_that_are_tried_on_parts_hold_no_more_activations_than_others(sizes: dict[str, Any]) -> None:
    most = {
        batch: [
            each.peak.activations
            for each in run_trainers(measured, sizes, True, 4, batch, devices=2)[0].value["report"].ranks
        ]
        for batch in (1, 2, 6)
    }
    for first, second, later in zip(*most.values(), strict=True):
        assert max(first, second) < 1.1 * later


@pytest.mark.wide
def test_a_step_that_differentiates_within_itself_is_tried_all_the_same() -> None:
    alone = run_trainers(penalised, {}, devices=1)[0].value
    found = run_trainers(penalised, {"data_parallel_size": 2, "micro_batch_size": 1}, devices=2)[0].value
    torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-9)


def test_a_memory_counts_once_from_the_operation_that_makes_it_to_its_last_tensor() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    counter = LiveBytes(
        torch.device("cpu"), lambda: [(weight, "weights")], lambda: [g for g in [weight.grad] if g is not None]
    )
    counter.begin(torch.ones(2))
    inner = torch.ones(4, 8) @ weight  # keeps the ones
    outer = inner.view(32).exp()  # keeps its result, a view none
    del inner
    outer.sum().backward()
    del outer
    found = counter.end()
    assert max(found.kinds["weights"]) == min(found.kinds["weights"]) == 256
    assert max(found.kinds["activations"]) == 128 + 128 + 4 + 4, (
        "ones, exponentials, loss and its gradient; not the product"
    )
    assert found.kinds["gradients"][-1] == 256
    assert found.thinned(3).peak.total == found.peak.total


@pytest.mark.parametrize(
    ("sizes", "devices", "where"),
    [({}, 1, "forward"), ({"data_parallel_size": 2}, 2, "update"), ({"pipeline_parallel_size": 2}, 2, "forward")],
)
def test_an_error_of_memory_names_options_in_bytes_on_every_rank(
    sizes: dict[str, Any], devices: int, where: str
) -> None:
    with pytest.raises(JobFailed) as caught:
        run_trainers(too_large, sizes, where, devices=devices)
    outcomes = caught.value.outcomes
    for outcome in outcomes:
        assert outcome.error is not None
        said = outcome.error + outcome.trace
        assert "can't allocate memory" in said and "lightning_megatron: out of memory on rank 0" in said
        named = re.findall(r"^ *(\w+=\S+) +([\d.]+ [GM]iB)", said.partition("What would save most there:")[2], re.M)
        assert len(named) >= 2, said
        assert "activation_recompute='full'" in dict(named)


def test_the_options_that_save_most_are_named_with_the_planners_bytes() -> None:
    shape, cluster = ModelShape(layers=32, hidden=4096, heads=32, vocab=32000, seq=4096), Cluster.named("h100")
    recipe = Recipe(data=8, micro_batch=4, global_batch=32, sharding="zero1")
    named = savings(Options(optimizer_sharding=True, micro_batch_size=4), ExpectedRun(shape, recipe, cluster), 0)
    assert len(named) == 3 and named[0].bytes >= named[1].bytes >= named[2].bytes > 2**30
    found = {each.arguments: each.bytes for each in named}
    full = peak_memory(shape, replace(recipe, recompute="full"), cluster, 1.0).total
    now = peak_memory(shape, recipe, cluster, 0.0).total
    assert found["activation_recompute='full'"] == pytest.approx(now - full)
    whole = held_savings(Options(optimizer_sharding=False), Bytes(weights=8, optimizer=24), 4)
    assert [(each.arguments, each.bytes) for each in whole] == [
        ("optimizer_offload=True", 24), ("optimizer_sharding=True", 18), ("pipeline_parallel_size=2", 16)
    ]  # fmt: skip


def test_options_that_do_not_go_with_those_of_the_run_are_not_named() -> None:
    shape, cluster = ModelShape(layers=32, hidden=4096, heads=32, vocab=32000, seq=4096), Cluster.named("h100")
    recipe = Recipe(data=8, micro_batch=4, global_batch=32, sharding="zero1", activation_offload=1.0)
    options = Options(optimizer_sharding=True, micro_batch_size=4, activation_offload="all")
    named = savings(options, ExpectedRun(shape, recipe, cluster), 0, most=9)
    assert named and not any("activation_recompute='selective'" in each.arguments for each in named)


def test_a_model_that_the_planner_does_not_know_is_told_what_its_state_takes() -> None:
    with pytest.raises(JobFailed) as caught:
        run_trainers(too_large, {"data_parallel_size": 2}, "update", "unknown", devices=2)
    said = str(caught.value)
    assert "It keeps" in said and "from step to step (the planner counts no activations here" in said
    assert re.search(r"optimizer_offload=True +[\d.]+ MiB", said) and re.search(
        r"weight_sharding=True +[\d.]+ MiB", said
    )


def test_other_strategies_and_no_batch_are_refused() -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[MemoryTimeline()], max_steps=1
    )
    rows = torch.utils.data.DataLoader([torch.zeros(13, dtype=torch.long)] * 4)  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="MemoryTimeline needs `Trainer\\(strategy=MegatronStrategy"):
        trainer.fit(CausalLanguageModel(CONFIGS["gpt"]), rows, rows)
    with pytest.raises(ValueError, match="`batch=0` must be at least 1"):
        MemoryTimeline(batch=0)
