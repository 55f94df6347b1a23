"""What hooks put in the place of gradients is what is trained with, and sparse gradients are summed over replicas."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_megatron.strategy.assembly.shared_memory import parameters_on_one_memory
from lightning_megatron.strategy.logs.metrics import MetricCalls
from tests.harness import run_trainers
from tests.parity.scenario import differences
from tests.strategy import gradient_scenarios as gradients

WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("kind", "layout", "arguments"),
    [
        ("Rebound", (1, 2), {}),
        pytest.param("Rebound", (2, 1), {}, marks=WIDE),
        pytest.param("Rebound", (1, 2), {"weight_sharding": True}, marks=WIDE),
        pytest.param("Rebound", (2, 2), {}, marks=WIDE),
        ("Sparse", (1, 2), {}),
        pytest.param("Sparse", (2, 2), {}, marks=WIDE),
    ],
)
def test_gradients_are_those_of_one_process(kind: str, layout: tuple[int, int], arguments: dict[str, object]) -> None:
    reference = run_trainers(gradients.train, None, {}, kind, devices=1)[0].value
    outcomes = run_trainers(gradients.train, layout, arguments, kind, devices=layout[0] * layout[1])
    assert reference and not list(differences("", outcomes[0].value, reference, 1e-9))


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ((1, 2), {}),
        ((2, 1), {}),
        pytest.param((2, 2), {}, marks=WIDE),
        pytest.param((2, 1), {"tensor_parallel_size": 2}, marks=WIDE),
        pytest.param((1, 2), {"weight_sharding": True}, marks=WIDE),
        pytest.param((1, 2), {"optimizer_sharding": False, "micro_batch_size": "auto"}, marks=WIDE),
    ],
)
def test_hooks_see_sums_behind_each_batch_that_is_accumulated(
    layout: tuple[int, int], arguments: dict[str, object]
) -> None:
    reference = run_trainers(gradients.accumulate, None, {}, devices=1)[0].value
    devices = layout[0] * layout[1] * arguments.get("tensor_parallel_size", 1)  # type: ignore[operator]
    outcomes = run_trainers(gradients.accumulate, layout, arguments, devices=devices)
    for outcome in outcomes:
        expected = reference if outcome.rank == 0 else [reference[0], {}]
        assert not list(differences("", outcome.value, expected, 1e-9)), outcome.rank


@pytest.mark.parametrize("kind", list(gradients.CLEARED))
@pytest.mark.parametrize(
    ("layout", "arguments", "batches"),
    [
        ((2, 1), {}, 1),
        pytest.param((2, 2), {"micro_batch_size": 1}, 2, marks=WIDE),
        pytest.param((1, 1), {"tensor_parallel_size": 2, "sequence_parallel": True}, 1, marks=WIDE),
        pytest.param((2, 1), {"pipeline_schedule": "zb-v"}, 1, marks=WIDE),
        pytest.param((1, 2), {"micro_batch_size": 2}, 2, marks=WIDE),
        pytest.param((1, 2), {"micro_batch_size": "auto"}, 2, marks=WIDE),
    ],
)
def test_gradients_stay_until_user_code_clears_them(
    layout: tuple[int, int], arguments: dict[str, object], batches: int, kind: str
) -> None:
    reference = run_trainers(gradients.cleared, None, {}, kind, batches, devices=1)[0].value
    devices = layout[0] * layout[1] * arguments.get("tensor_parallel_size", 1)  # type: ignore[operator]
    for outcome in run_trainers(gradients.cleared, layout, arguments, kind, batches, devices=devices):
        expected = reference if outcome.rank == 0 else {**reference, "weights": {}}
        assert not list(differences("", outcome.value, expected, 1e-9)), outcome.rank


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("SparseAdam", "SparseAdam takes sparse gradients only"),
        pytest.param("Lazy", "`net.head.weight` gets its shape in the first forward", marks=WIDE),
    ],
)
def test_what_replicas_cannot_sum_is_refused(kind: str, complaint: str) -> None:
    for outcome in run_trainers(gradients.train, (1, 2), {}, kind, devices=2, check=False, grace=20.0):
        assert complaint in f"{outcome.error}{outcome.trace}{outcome.output}", outcome.rank


@pytest.mark.parametrize(
    ("kind", "complaint", "way_out"),
    [
        ("Another", "SGD is none of the optimizers that `configure_optimizers` has returned", "optimizer_sharding"),
        ("Fetches", "`training_step(self, dataloader_iter)` fetches its own batches", "whole_batch_loss"),
        (
            "Aliased",
            "`net.embed.weight` and `net.head.weight` are two parameters on the same memory",
            "optimizer_sharding",
        ),
    ],
)
def test_what_replicas_cannot_share_out_is_refused_and_trains_as_it_is_told(
    kind: str, complaint: str, way_out: str
) -> None:
    arguments = {"micro_batch_size": "auto"}
    for outcome in run_trainers(gradients.train, (1, 2), arguments, kind, devices=2, check=False, grace=20.0):
        said = f"{outcome.error}{outcome.trace}{outcome.output}"
        assert complaint in said and f"{way_out}=False" in said, outcome.rank
    reference = run_trainers(gradients.train, None, {}, kind, devices=1)[0].value
    outcomes = run_trainers(gradients.train, (1, 2), {**arguments, way_out: False}, kind, devices=2)
    assert reference and not list(differences("", outcomes[0].value, reference, 1e-9))


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [((2, 1), {}), pytest.param((1, 1), {"tensor_parallel_size": 2}, marks=WIDE)],
)
def test_parameters_on_one_memory_are_validated_where_they_are_not_trained(
    layout: tuple[int, int], arguments: dict[str, object]
) -> None:
    for outcome in run_trainers(gradients.validate_and_train, layout, arguments, devices=2):
        assert "two parameters on the same memory" in outcome.value, outcome.rank


def test_parameters_that_lie_between_each_other_share_no_memory() -> None:
    table = torch.zeros(6, 8)
    parts = nn.ParameterDict({"left": table[:, :4], "right": table[:, 4:], "across": table[5].unflatten(0, (2, 4)).T})
    assert all(part.untyped_storage().data_ptr() == table.data_ptr() for part in parts.values())
    met = list(parameters_on_one_memory(parts))
    assert {frozenset(pair) for pair in met} == {frozenset(("left", "across")), frozenset(("right", "across"))}
    assert not list(parameters_on_one_memory(parts.requires_grad_(False)))


def test_a_metric_that_was_called_with_a_loss_is_followed() -> None:
    metric, calls = MeanMetric(), MetricCalls({})
    loss = 2 * torch.ones((), requires_grad=True)
    metric._forward_cache = loss  # as where a metric keeps what it returned, with its graph
    value = metric(loss.detach())
    metric._forward_cache = loss
    calls.note(metric, (loss.detach(),), {}, value)
    batch = calls.behind(value)
    assert batch is not None and float(batch.compute()) == 2.0
