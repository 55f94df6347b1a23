"""What crosses between stages: nests of any dtype, in parts over tensor ranks, never more of it held than needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_megatron.pipeline.run.links import USUAL_LINKS
from lightning_megatron.pipeline.schedule import make_schedule
from tests.harness import run_trainers
from tests.parity.scenario import Layout, compare_scenario
from tests.pipeline.boundary_scenarios import choosing_run, dict_run, growing_run, pair_run, placed_run, writing_run
from tests.pipeline.transfer_scenarios import bytes_sent, held, shapes_sent

ALL_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v")
LAYOUTS: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((3, 1), {"pipeline_schedule": "zb-h1", "activation_recompute": "full", "micro_batch_size": 3}),
    ((2, 1), {"pipeline_schedule": "interleaved", "virtual_pipeline_parallel_size": 3}),
    ((2, 1), {"pipeline_schedule": "zb-v", "variable_shapes": True}),
]


@pytest.mark.parametrize(
    ("scenario", "layout", "arguments"),
    [
        (dict_run, *LAYOUTS[0]),
        (pair_run, *LAYOUTS[2]),
        *(pytest.param(dict_run, *rest, marks=pytest.mark.wide) for rest in LAYOUTS[1:]),
        *(pytest.param(pair_run, *rest, marks=pytest.mark.wide) for rest in LAYOUTS[:2]),
    ],
)
def test_layers_may_hand_on_dicts_tuples_integers_and_other_dtypes(
    scenario: Callable[..., Any], layout: tuple[int, int], arguments: dict[str, Any]
) -> None:
    compare_scenario(scenario, layout, **arguments)


@pytest.mark.parametrize(
    ("schedule", "tensor", "recompute"),
    [
        ("1f1b", 1, None),
        ("zb-v", 2, "full"),
        *(
            pytest.param(schedule, tensor, recompute, marks=pytest.mark.wide)
            for schedule in ("interleaved", "zb-v")
            for tensor in (1, 2)
            for recompute in (None, "full", ["*.act", "*.up"])
        ),
    ],
)
def test_layers_may_write_into_what_they_are_given(schedule: str, tensor: int, recompute: Any) -> None:
    options = {"pipeline_schedule": schedule, "tensor_parallel_size": tensor, "activation_recompute": recompute}
    compare_scenario(writing_run, (2, 1), **options)


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [((2, 1), "zb-v"), *(pytest.param((4, 1), n, marks=pytest.mark.wide) for n in ("1f1b", "gpipe"))],
)
def test_sequences_may_grow_from_epoch_to_epoch(layout: Layout, schedule: str) -> None:
    compare_scenario(growing_run, layout, pipeline_schedule=schedule, micro_batch_size=2)


@pytest.mark.parametrize("schedule", ["1f1b", *(pytest.param(n, marks=pytest.mark.wide) for n in ALL_SCHEDULES[2:])])
def test_code_behind_the_layers_may_use_what_was_made_of_their_arguments(schedule: str) -> None:
    compare_scenario(placed_run, (2, 1), pipeline_schedule=schedule)


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ((2, 1), {"pipeline_schedule": "zb-v"}),
        *(
            pytest.param((stages, 1), {"pipeline_schedule": schedule, "micro_batch_size": size}, marks=pytest.mark.wide)
            for stages, schedule in ((2, "1f1b"), (4, "1f1b"), (2, "interleaved"), (2, "gpipe"))
            for size in (2, 8)
        ),
    ],
)
def test_layers_may_choose_shapes_and_numbers_by_their_data(layout: Layout, arguments: dict[str, Any]) -> None:
    compare_scenario(choosing_run, layout, variable_shapes=True, **arguments)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("schedule", "through_memory"),
    [
        ("gpipe", True),
        ("zb-v", True),
        ("1f1b", False),
        *(pytest.param(name, memory, marks=pytest.mark.wide) for name in ALL_SCHEDULES for memory in (True, False)),
    ],
)
def test_receives_and_outputs_held_do_not_grow_with_the_micro_batches(schedule: str, through_memory: bool) -> None:
    few, many = (run_trainers(held, schedule, count, through_memory, devices=3) for count in (6, 18))
    chunks = make_schedule(schedule, 3, 18).chunks
    for one, other in zip(few, many, strict=True):
        assert other.value["left"] == one.value["left"] == 0
        assert other.value["shapes"] == one.value["shapes"]
        assert other.value["posted"] <= 2 * chunks + 1, other.value
        assert other.value["outputs"] <= USUAL_LINKS.under_way * 2 * chunks, other.value


def test_shapes_travel_once_per_shape_of_micro_batch_and_epoch() -> None:
    # Rank 1 is the first stage; micro-batches of 3 and 2 samples, and of 1 in the last batch of an epoch of three. The
    # model's code has a loop, so it is tried on a micro-batch first.
    for steps, shapes in ((1, 3), (2, 3), (3, 4), (5, 6)):
        assert [outcome.value for outcome in run_trainers(shapes_sent, steps, False, devices=2)] == [0, shapes]
    assert run_trainers(shapes_sent, 1, True, devices=2)[1].value == 4, "with variable shapes, with every micro-batch"


@pytest.mark.wide
@pytest.mark.parametrize("through_memory", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_two_tensor_ranks_send_half_the_bytes_each(through_memory: bool) -> None:
    whole = [outcome.value for outcome in run_trainers(bytes_sent, 1 << 40, through_memory, devices=4)]
    parts = [outcome.value for outcome in run_trainers(bytes_sent, 1, through_memory, devices=4)]
    assert all(count > 0 for count in parts)
    assert [2 * count for count in parts] == whole
