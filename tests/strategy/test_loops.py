"""Steps and optimizers of one's own, and batch norm over replicas, give the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_trainers
from tests.harness.remember import remembered
from tests.parity.scenario import differences
from tests.strategy import loop_scenarios as loops

WIDE = pytest.mark.wide
Layout = tuple[int, int]


@remembered
def _one_process(name: str, options: dict[str, Any]) -> Any:
    return run_trainers(loops.fit, None, {}, name, options, devices=1)[0].value


def _compare(name: str, layout: Layout, options: Any = None, both: Any = None, **arguments: Any) -> None:
    expected = _one_process(name, both or {})
    options = {**(options or {}), **(both or {})}
    devices = layout[0] * layout[1] * arguments.get("tensor_parallel_size", 1)
    for outcome in run_trainers(loops.fit, layout, arguments, name, options, devices=devices):
        metrics, steps, norms = outcome.value
        found = list(differences("metrics", metrics, expected[0], 1e-9))
        found += [f"{steps} steps"] if steps != expected[1] else []
        found += list(differences("norms", norms, {key: expected[2][key] for key in norms}, 1e-9))
        assert not found, f"rank {outcome.rank}: " + "\n".join(found[:10])


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("name", "data", "tensor"),
    [
        ("own_backward", 2, 1),
        ("closures", 2, 1),
        ("uphill_by_slices", 1, 2),
        pytest.param("manual", 2, 1, marks=WIDE),
        pytest.param("manual", 1, 2, marks=WIDE),
        pytest.param("manual", 2, 2, marks=WIDE),
        pytest.param("own_backward", 1, 2, marks=WIDE),
        pytest.param("own_backward", 2, 2, marks=WIDE),
        pytest.param("adversaries", 2, 1, marks=WIDE),
        pytest.param("adversaries", 1, 2, marks=WIDE),
        pytest.param("adversaries", 2, 2, marks=WIDE),
        ("closures", 1, 2),
        pytest.param("closures", 2, 2, marks=WIDE),
        pytest.param("closures_by_hand", 2, 1, marks=WIDE),
        pytest.param("closures_by_hand", 1, 2, marks=WIDE),
        pytest.param("uphill", 1, 2, marks=WIDE),
        pytest.param("uphill", 2, 2, marks=WIDE),
        pytest.param("uphill", 2, 1, marks=WIDE),
        pytest.param("uphill_by_hand", 2, 2, marks=WIDE),
        pytest.param("scaled_by_gradients", 1, 2, marks=WIDE),
        pytest.param("input_penalty", 1, 2, marks=WIDE),
        pytest.param("input_penalty", 2, 1, marks=WIDE),
        pytest.param("input_penalty", 2, 2, marks=WIDE),
    ],
)
def test_a_loop_of_ones_own_is_that_of_one_process(name: str, data: int, tensor: int) -> None:
    _compare(name, (1, data), tensor_parallel_size=tensor)


@pytest.mark.parametrize(
    ("name", "layout", "arguments"),
    [
        ("adversaries", (2, 1), {}),
        ("scheduled", (2, 1), {"pipeline_schedule": "zb-v"}),
        pytest.param("manual", (2, 1), {}, marks=WIDE),
        pytest.param("manual", (4, 1), {}, marks=WIDE),
        pytest.param("manual", (2, 2), {"activation_recompute": "full"}, marks=WIDE),
        pytest.param("manual", (2, 1), {"tensor_parallel_size": 2}, marks=WIDE),
        pytest.param("adversaries", (2, 1), {"tensor_parallel_size": 2}, marks=WIDE),
        pytest.param("adversaries", (2, 2), {}, marks=WIDE),
        pytest.param("adversaries", (4, 1), {}, marks=WIDE),
        pytest.param("adversaries", (2, 1), {"pipeline_schedule": "zb-v"}, marks=WIDE),
        pytest.param("adversaries", (2, 1), {"virtual_pipeline_parallel_size": 2}, marks=WIDE),
        pytest.param("critic_first", (2, 1), {}, marks=WIDE),
        pytest.param("critic_first", (2, 1), {"pipeline_schedule": "zb-v"}, marks=WIDE),
        pytest.param("scheduled", (2, 2), {"virtual_pipeline_parallel_size": 2}, marks=WIDE),
        pytest.param("two_parts", (2, 2), {}, marks=WIDE),
        ("scaled_by_gradients", (2, 1), {}),
        pytest.param("scaled_by_gradients", (2, 1), {"pipeline_schedule": "zb-v"}, marks=WIDE),
        pytest.param("scaled_by_gathered", (1, 2), {"whole_batch_loss": False}, marks=WIDE),
        pytest.param("scaled_by_gathered", (2, 2), {"whole_batch_loss": False}, marks=WIDE),
        ("single_gradients", (2, 1), {}),
        pytest.param("single_gradients", (2, 1), {"tensor_parallel_size": 2}, marks=WIDE),
        pytest.param("single_gradients", (2, 2), {}, marks=WIDE),
        pytest.param("two_parts", (2, 1), {"activation_recompute": "full"}, marks=WIDE),
    ],
)
def test_manual_optimization_goes_through_the_stages(name: str, layout: Layout, arguments: dict[str, Any]) -> None:
    if arguments.get("virtual_pipeline_parallel_size"):
        arguments = {**arguments, "pipeline_schedule": "interleaved"}
    _compare(name, layout, **arguments)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("own_backward", "the step runs a backward of its own (`.backward()`)"),
        pytest.param("two_forwards", "was called again before the `self.manual_backward(loss)`", marks=WIDE),
        ("penalty_before", "from before the layers, but the layers between are on other pipeline stages"),
        pytest.param("pictures_first", "was called again before the `self.manual_backward(loss)`", marks=WIDE),
        pytest.param("two_backwards", "depends on what the step computed before the", marks=WIDE),
        pytest.param("copies_gradient", "was written into another tensor by `copy_`", marks=WIDE),
        pytest.param("reads_parts", "the step reads, in Python, a number that depends on", marks=WIDE),
        pytest.param("uphill_by_hand", "goes over all parameters between two of its backwards", marks=WIDE),
        pytest.param("closures_by_hand", "LBFGS takes inner products over all parameters", marks=WIDE),
    ],
)
def test_what_a_pipeline_cannot_do_by_hand_is_refused_on_every_rank(name: str, wanted: str) -> None:
    for outcome in run_trainers(loops.fit, (2, 1), {}, name, {}, devices=2, check=False, grace=20.0):
        assert outcome.error is not None and "killed" not in outcome.error, f"rank {outcome.rank}: {outcome.error}"
        assert wanted in f"{outcome.error}\n{outcome.output}", outcome.error


@pytest.mark.parametrize(
    ("layout", "both", "arguments"),
    [
        ((2, 1), {}, {}),
        pytest.param((2, 1), {"accumulate_grad_batches": 2}, {}, marks=WIDE),
        pytest.param((2, 1), {}, {"pipeline_schedule": "zb-v", "micro_batch_size": 1}, marks=WIDE),
        pytest.param((1, 1), {}, {"tensor_parallel_size": 2}, marks=WIDE),
        pytest.param((2, 1), {}, {"tensor_parallel_size": 2}, marks=WIDE),
        pytest.param((1, 1), {"accumulate_grad_batches": 2}, {"micro_batch_size": 1}, marks=WIDE),
    ],
)
def test_a_batch_is_left_out_by_returning_none(layout: Layout, both: dict[str, Any], arguments: dict[str, Any]) -> None:
    _compare("left_out", layout, both=both, **arguments)


@pytest.mark.parametrize(
    ("layout", "both", "arguments"),
    [
        ((2, 1), {}, {"micro_batch_size": 1}),
        pytest.param((2, 1), {"accumulate_grad_batches": 2}, {}, marks=WIDE),
        pytest.param((2, 1), {}, {"pipeline_schedule": "zb-v", "micro_batch_size": 1}, marks=WIDE),
        pytest.param((2, 1), {}, {"tensor_parallel_size": 2}, marks=WIDE),
    ],
)
def test_a_batch_is_left_out_before_the_layers(layout: Layout, both: dict[str, Any], arguments: dict[str, Any]) -> None:
    _compare("left_out_early", layout, both=both, **arguments)


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=WIDE)])
def test_backwards_of_one_step_add_up_where_tensor_ranks_have_terms_of_a_gradient(data: int) -> None:
    _compare("own_descent", (1, data), tensor_parallel_size=2, sequence_parallel=True)


@pytest.mark.parametrize("options", [{"optimizer_sharding": {"shard": 2}}, pytest.param({}, marks=WIDE)], ids=str)
def test_gradients_of_earlier_steps_stay_in_the_sum_of_all_nodes(options: dict[str, Any]) -> None:
    _compare("never_zero", (1, 4), **options)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("noise_of_ranks", "differs between them after this step"),
        pytest.param("hidden_penalty", "a gradient of a gradient (`create_graph=True`) goes through", marks=WIDE),
    ],
)
def test_what_slices_would_make_another_number_of_is_refused_on_every_rank(name: str, wanted: str) -> None:
    arguments = {"tensor_parallel_size": 2}
    for outcome in run_trainers(loops.fit, (1, 1), arguments, name, {}, devices=2, check=False, grace=20.0):
        assert outcome.error is not None and "killed" not in outcome.error, f"rank {outcome.rank}: {outcome.error}"
        assert wanted in f"{outcome.error}\n{outcome.output}", outcome.error


@pytest.mark.parametrize("layout", [(2, 2), pytest.param((1, 2), marks=WIDE)])
def test_synchronised_batch_norm_is_that_of_the_whole_batch(layout: Layout) -> None:
    _compare("batch_norms", layout, {"sync_batchnorm": True})
