"""What cannot work is refused on every rank, by name, with the values and the argument to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.pipeline.stage.order import refuse_part
from tests.harness import run_trainers
from tests.strategy import refusal_scenarios as refusals

WIDE = pytest.mark.wide


def _refused(outcomes: list[Any], *wanted: str) -> None:
    """Asserts that every rank ended by itself and gave, in its error or what it printed, all of ``wanted``."""
    for outcome in outcomes:
        assert outcome.error is not None, f"rank {outcome.rank} trained on"
        assert "killed" not in outcome.error, f"rank {outcome.rank} hung\n{outcome.stacks}"
        said = f"{outcome.error}\n{outcome.trace}\n{outcome.output}"
        for words in wanted:
            assert words in said, f"rank {outcome.rank}: no {words!r} in\n{said}"


ONE_STAGE = "`pipeline_parallel_size=1`"


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        ("twice", ["layer 0 of `net.layers` was called again after layer 3: the layers are called twice", ONE_STAGE]),
        ("never", ["the step did not call the layers of `net.layers`", "layer 0 was not called", ONE_STAGE]),
        ("half", ["`net.final_norm` was called when layer 2 of `net.layers` was expected", ONE_STAGE]),
        ("trunkless", ["no trunk found", "net.activations", '`pipeline_layers="..."`', ONE_STAGE]),
        ("shared", ["the trunk `net.layers` holds the same layer object more than once", ONE_STAGE]),
        (
            "slice_penalty",
            ["what `training_step` returned depends on `net.layers.0`", "first computes with it in ", ONE_STAGE],
        ),
        ("late_penalty", ["what `training_step` returned depends on `net.layers.0`", "`weight_decay`", ONE_STAGE]),
        pytest.param("own_backward", ["the step runs a backward of its own (`.backward()`)", ONE_STAGE], marks=WIDE),
        ("late_number", ["the step reads, in Python, a number that depends on `net.layers.0`", ONE_STAGE]),
        pytest.param("large_kept", ["depends on `net.layers.0`, which another pipeline stage owns"], marks=WIDE),
        pytest.param(
            "late_kept",
            ["wrote to `net.layers.0` in a later `training_step", "and not in the first", ONE_STAGE],
            marks=WIDE,
        ),
        pytest.param(
            "now_and_then",
            ["the logged value `first` depends on `net.layers.0`, which another pipeline stage owns"],
            marks=WIDE,
        ),
        pytest.param(
            "input_gradient",
            ["(`torch.autograd.grad`) with respect to a tensor of shape", "from before the layers", ONE_STAGE],
            marks=WIDE,
        ),
        pytest.param(
            "validation_gradient", ["(`torch.autograd.grad`) with respect to a tensor", ONE_STAGE], marks=WIDE
        ),
    ],
)
def test_a_module_that_cannot_be_cut_is_refused_on_every_rank(module: str, wanted: list[str]) -> None:
    _refused(run_trainers(refusals.fit, (2, 1), {}, module, devices=2, check=False, grace=20, deadline=60), *wanted)


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=WIDE)])
def test_what_a_layer_of_another_stage_gives_is_refused_over_tensor_ranks_too(sequence: bool) -> None:
    arguments = {"tensor_parallel_size": 2, "sequence_parallel": sequence}
    outcomes = run_trainers(refusals.fit, (2, 1), arguments, "logs_layers", devices=4, check=False, grace=20)
    _refused(outcomes, "the logged value `layer 0` depends on `net.layers.0`", ONE_STAGE)


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        (
            "unfrozen",
            ["Error(s) in loading state_dict", "whose parts are on several pipeline", "`requires_grad_(False)`"],
        ),
        ("step", ["the step loads a state that depends on `net.", "on_train_batch_start", ONE_STAGE]),
        pytest.param("late", ["`other` is a copy, made in a hook", "in `__init__`, `setup` or", ONE_STAGE], marks=WIDE),
    ],
)
def test_a_copy_that_cannot_be_loaded_from_all_stages_is_refused(where: str, wanted: list[str]) -> None:
    _refused(run_trainers(refusals.fit, (2, 1), {}, f"loads_{where}", devices=2, check=False, grace=20), *wanted)


def test_a_copy_of_slices_is_refused_in_the_hook_that_makes_it() -> None:
    options: dict[str, Any] = {"devices": 2, "check": False, "grace": 20}
    outcomes = run_trainers(refusals.fit, (1, 1), {"tensor_parallel_size": 2}, "loads_late", **options)
    _refused(outcomes, "`other` is a copy, made in a hook", "`tensor_parallel_size=1`")


@pytest.mark.parametrize(
    ("what", "tensor", "wanted"),
    [
        ("layers", 1, ["`net.layers` is given another module in a hook", "in `__init__`, `setup` or", ONE_STAGE]),
        pytest.param("layer", 1, ["`net.layers.1` is given another module in a hook", ONE_STAGE], marks=WIDE),
        pytest.param("compiled", 1, ["`net` is compiled in a hook", "Compile it in `__init__`"], marks=WIDE),
        pytest.param("compiled", 2, ["`net` is compiled in a hook", "Compile it in `__init__`"], marks=WIDE),
        pytest.param("compiles", 1, ["`net` is compiled in a hook", "Compile it in `__init__`"], marks=WIDE),
        ("linear", 2, ["`net.layers.0.mlp.0` was given another module in a hook", "`tensor_parallel_size=1`"]),
        pytest.param("side", 2, ["`net.layers.0.mlp.0.side` was added in a hook, after the division"], marks=WIDE),
    ],
)
def test_a_module_that_a_hook_puts_into_a_divided_one_is_refused(what: str, tensor: int, wanted: list[str]) -> None:
    layout, arguments = ((2, 1), {}) if tensor == 1 else ((1, 1), {"tensor_parallel_size": 2})
    options: dict[str, Any] = {"devices": 2, "check": False, "grace": 20, "deadline": 90}
    _refused(run_trainers(refusals.fit, layout, arguments, f"rebuilt_{what}", **options), *wanted)


_GRIDS: list[tuple[tuple[int, int], dict[str, int]]] = [
    ((2, 1), {}),
    ((1, 2), {}),
    ((1, 1), {"tensor_parallel_size": 2}),
]


@pytest.mark.parametrize(
    ("what", "grid", "wanted"),
    [
        *(
            pytest.param(what, grid, wanted, marks=WIDE if grid != at else ())
            for what, at, wanted in (
                ("added", 1, ["SGD was given `net.final_norm.weight` of shape (12,)", "no rank would put together"]),
                ("listed", 0, ["SGD has 1 parameters (the first of shape ())", "Keep them in `nn.ParameterList`"]),
            )
            for grid in range(3)
        ),
        pytest.param("renamed", 0, ["`net.final_norm` is given `second` in a hook", ONE_STAGE]),
    ],
)
def test_parameters_that_no_rank_knows_are_not_left_untrained(what: str, grid: int, wanted: list[str]) -> None:
    options: dict[str, Any] = {"devices": 2, "check": False, "grace": 20, "deadline": 60}
    _refused(run_trainers(refusals.fit, *_GRIDS[grid], what, **options), *wanted)


def test_a_part_behind_the_layers_that_a_hook_builds_anew_trains_as_in_one_process() -> None:
    plain = run_trainers(refusals.rebuilt, None, devices=1)[0].value
    for outcome in run_trainers(refusals.rebuilt, (2, 1), devices=2):
        for name, weight in outcome.value.items():
            torch.testing.assert_close(weight, plain[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("module", "layout", "wanted"),
    [
        ("balanced", (1, 2), ["`config.output_router_logits=True`", "`data_parallel_size=2`", "`self.all_gather("]),
        pytest.param(
            "balanced", (2, 1), ["`config.output_router_logits=True`", "not known here", ONE_STAGE], marks=WIDE
        ),
        pytest.param("grouped", (1, 2), ["`experts_implementation='grouped_mm'`", "float64"], marks=WIDE),
    ],
)
def test_mixtures_of_experts_with_another_loss_are_refused(
    module: str, layout: tuple[int, int], wanted: list[str]
) -> None:
    _refused(run_trainers(refusals.fit, layout, {}, module, devices=2, check=False, grace=20, deadline=60), *wanted)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            {"pipeline_parallel_size": 3},
            "2 devices cannot be divided into replicas of 3 ranks (tensor_parallel_size=1 × pipeline_parallel_size=3); "
            "use `devices=3`",
        ),
        ({"pipeline_parallel_size": 0}, "`pipeline_parallel_size=0` must be an integer of at least 1."),
        (
            {"pipeline_parallel_size": 2, "data_parallel_size": 2},
            "pipeline_parallel_size=2 × data_parallel_size=2 needs 4 devices but the Trainer has 2; use `devices=4`",
        ),
        (
            {"pipeline_parallel_size": 2, "micro_batch_size": 0},
            "`micro_batch_size=0` must be 'auto' or an integer of at least 1.",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_schedule": "2f2b"},
            "unknown pipeline_schedule='2f2b'; use one of gpipe, 1f1b, ",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_layers": "net.nothing"},
            "`pipeline_layers='net.nothing'` names no submodule.",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_split": [1, 2]},
            "`pipeline_split=[1, 2]` must be 2 positive layer counts that add up to the 4 layers of `net.layers`.",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_split": [4]},
            "`pipeline_split=[4]` must be 'auto' or a list of 2 positive layer counts, one per pipeline stage",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_their_values(arguments: dict[str, Any], wanted: str) -> None:
    outcomes = run_trainers(refusals.strategy_with, arguments, devices=2, check=False, grace=20, deadline=60)
    _refused(outcomes, wanted)


def test_fewer_layers_than_stages_are_refused_with_both_numbers() -> None:
    outcomes = run_trainers(refusals.fit, (3, 1), {}, "short", devices=3, check=False, grace=20, deadline=60)
    _refused(outcomes, "the trunk `net.layers` has 2 layers, fewer than the 3 pipeline stages")


def test_stages_that_load_different_batches_are_refused_on_every_rank() -> None:
    outcomes = run_trainers(refusals.unequal_batches, (3, 1), devices=3, check=False, grace=20, deadline=60)
    _refused(
        outcomes,
        "the pipeline stages of one replica loaded different batches",
        "`trainer.strategy.distributed_sampler_kwargs` instead of the global rank",
    )


def test_callbacks_of_the_other_lightning_namespace_are_refused_by_name() -> None:
    outcomes = run_trainers(refusals.old_callback, devices=2, check=False, grace=20, deadline=60)
    _refused(outcomes, "LearningRateMonitor comes from `pytorch_lightning`; import it from `lightning.pytorch`.")


@pytest.mark.parametrize("module", ["twice", "never", "trunkless", "shared"])
def test_without_a_pipeline_nothing_of_this_is_refused(module: str) -> None:
    run_trainers(refusals.fit, (1, 2), {}, module, devices=2)


@pytest.mark.parametrize(
    ("module", "stages"),
    [("mask", 2), ("twice", 2), pytest.param("gradient", 2, marks=WIDE), pytest.param("gradient", 3, marks=WIDE)],
)
def test_what_a_later_step_does_first_is_that_of_one_process(module: str, stages: int) -> None:
    expected = run_trainers(refusals.late, None, module, devices=1)[0].value
    for outcome in run_trainers(refusals.late, (stages, 1), module, devices=stages):
        for name, weight in outcome.value.items():
            assert torch.allclose(weight, expected[name], rtol=1e-9, atol=1e-9), name


@pytest.mark.wide
def test_what_a_second_step_reads_first_is_that_of_one_process_on_stages_that_do_not_hold_it() -> None:
    expected = run_trainers(refusals.late, (1, 1), "mask", devices=1)[0].value
    for outcome in run_trainers(refusals.late, (3, 1), "mask", devices=3):
        for name, value in outcome.value.items():
            torch.testing.assert_close(value, expected[name], rtol=0.0, atol=1e-9, msg=name)


def test_a_part_that_is_called_once_more_in_a_later_step_says_so() -> None:
    with pytest.raises(RuntimeError) as failure:
        refuse_part("layers", "embed", 4)
    said = str(failure.value)
    assert "`embed` was called when layer 4 of `layers` was expected" in said
    assert "a later training step runs the model again and the first did not" in said and ONE_STAGE in said
