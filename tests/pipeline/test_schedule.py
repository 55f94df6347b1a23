"""Named schedules: their lists are those of the papers, for every number of stages, chunks and micro-batches."""

from __future__ import annotations

import itertools

import pytest

from lightning_megatron.pipeline.schedule import (
    SCHEDULES,
    Instruction,
    Kind,
    Placement,
    Schedule,
    lower,
    make_schedule,
    schedule_shape,
)
from lightning_megatron.pipeline.schedules.interleaved import group_sizes
from lightning_megatron.pipeline.schedules.plain import mirrored
from lightning_megatron.pipeline.timeline import Costs, check, simulate, text_grid

ALL_SIZES = list(itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 7, 8, 12)))


def grid(schedule: Schedule) -> str:
    return text_grid(simulate(schedule, Costs.slots(schedule.virtual_stages)))


def drawn(picture: str) -> str:
    return "\n".join(line.strip() for line in picture.strip().splitlines())


def test_1f1b_is_the_grid_of_the_design() -> None:
    assert grid(make_schedule("1f1b", 3, 4)) == drawn("""
        stage 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
    """)


def test_gpipe_does_all_forwards_first() -> None:
    assert grid(make_schedule("gpipe", 3, 3)) == drawn("""
        stage 0  F0 F1 F2 .. .. .. .. B0 B1 B2
        stage 1  .. F0 F1 F2 .. .. B0 B1 B2 ..
        stage 2  .. .. F0 F1 F2 B0 B1 B2 .. ..
    """)


def test_interleaved_goes_through_the_chunks_in_groups() -> None:
    assert grid(make_schedule("interleaved", 2, 4, chunks=2)) == drawn("""
        stage 0  F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 .... B2.1 .... B3.1 B2.0 B3.0
        stage 1  .... F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0 ....
    """)


def test_zb_h1_fills_the_drain_with_weight_halves() -> None:
    assert grid(make_schedule("zb-h1", 3, 4)) == drawn("""
        stage 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """)


def test_zb_h2_has_no_gap_inside_any_rank() -> None:
    assert grid(make_schedule("zb-h2", 3, 5)) == drawn("""
        stage 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..
        stage 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
        stage 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """)


def test_zb_v_turns_on_the_last_stage_and_returns_to_the_first() -> None:
    assert grid(make_schedule("zb-v", 2, 3)) == drawn("""
        stage 0  F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0.0 W0.0 F2.1 I2.1 W2.1 I1.0 W1.0 I2.0 W2.0 ....
        stage 1  .... F0.0 F0.1 F1.0 F1.1 I0.1 W0.1 F2.0 I0.0 W0.0 F2.1 I1.1 W1.1 I1.0 I2.1 I2.0 W1.0 W2.1 W2.0
    """)


def test_dualpipe_v_pairs_each_forward_with_a_backward_of_the_other_chunk() -> None:
    assert grid(make_schedule("dualpipe-v", 2, 4)) == drawn("""
        stage 0  F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 F3.0 B1.1 F2.1 B0.0 B2.1 F3.1 B1.0 B3.1 I2.0 W2.0 I3.0 W3.0
        stage 1  .... F0.0 F0.1 F1.0 F1.1 F2.0 B0.1 F2.1 B0.0 F3.0 B1.1 F3.1 B1.0 B2.1 B2.0 I3.1 I3.0 W3.1 W3.0
    """)


def test_1f1b_warms_up_with_the_forwards_of_the_following_stages() -> None:
    for stages, count in ALL_SIZES:
        for rank, steps in enumerate(make_schedule("1f1b", stages, count).instructions):
            before = next(at for at, step in enumerate(steps) if step.kind is Kind.BACKWARD)
            assert before == min(stages - rank, count)


def test_interleaved_order_of_the_facts_is_kept_exactly() -> None:
    schedule = make_schedule("interleaved", 2, 5, chunks=2, group_size=3)
    for rank in range(2):
        forwards = [step for step in schedule.instructions[rank] if step.kind is Kind.FORWARD]
        backwards = [step for step in schedule.instructions[rank] if step.kind is Kind.BACKWARD]
        assert [step.micro_batch for step in forwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
        assert [step.chunk for step in forwards] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
        assert [step.micro_batch for step in backwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
        assert [step.chunk for step in backwards] == [1, 1, 1, 0, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_warms_up_as_the_paper_says_where_groups_divide(chunks: int) -> None:
    for stages, groups in itertools.product((2, 3, 4, 8), (1, 2, 3)):
        for group_size in (stages, stages + 1, 2 * stages):
            count = groups * group_size
            schedule = make_schedule("interleaved", stages, count, chunks=chunks, group_size=group_size)
            for rank, steps in enumerate(schedule.instructions):
                warm_up = min(2 * (stages - rank - 1) + (chunks - 1) * group_size, count * chunks)
                assert len(steps) == 2 * count * chunks
                before = next(at for at, step in enumerate(steps) if step.kind is Kind.BACKWARD)
                assert before == min(warm_up + 1, count * chunks)


def test_a_short_tail_is_spread_over_the_groups() -> None:
    for stages, count in itertools.product(range(1, 9), range(1, 40)):
        for group_size in (stages, stages + 1, 2 * stages):
            sizes = group_sizes(stages, count, group_size)
            assert sum(sizes) == count
            assert min(sizes) >= min(stages, count)
            assert len(sizes) == max(1, -(-count // group_size) - (0 < count % group_size < stages))


def test_every_schedule_of_every_size_passes_the_checker() -> None:
    for name, (stages, count) in itertools.product(SCHEDULES, ALL_SIZES):
        check(make_schedule(name, stages, count))
        check(make_schedule(name, stages, count, forward_only=True))


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaving_passes_the_checker_for_any_number_of_micro_batches(chunks: int) -> None:
    for stages in (1, 2, 3, 4, 5):
        for count in range(1, 2 * stages + 4):
            for group_size in (stages, stages + 1, 2 * stages):
                check(make_schedule("interleaved", stages, count, chunks=chunks, group_size=group_size))
            check(make_schedule("interleaved", stages, count, chunks=chunks, forward_only=True))


def test_forward_only_does_every_forward_and_nothing_else() -> None:
    for name, (stages, count) in itertools.product(SCHEDULES, ALL_SIZES):
        schedule = make_schedule(name, stages, count, forward_only=True)
        shape = schedule_shape(name)
        assert (schedule.chunks, schedule.placement) == shape
        assert schedule.forward_only
        for steps in schedule.instructions:
            assert {(step.micro_batch, step.chunk) for step in steps} == set(
                itertools.product(range(count), range(shape.chunks))
            )
            assert len(steps) == count * shape.chunks


def test_backwards_behind_all_forwards_pass_the_checker_in_any_placement() -> None:
    for name, stages, micro_batches in itertools.product(SCHEDULES, (2, 3, 4), (1, 2, 5, 8)):
        forwards = make_schedule(name, stages, micro_batches, forward_only=True)
        both = mirrored(forwards)
        check(both)
        check(lower(both))
        for steps in both.instructions:
            kinds = [step.kind for step in steps]
            assert kinds == sorted(kinds, key=[Kind.FORWARD, Kind.BACKWARD].index) and len(kinds) % 2 == 0
        assert simulate(both).makespan == pytest.approx(3 * simulate(forwards).makespan), (
            "a backward takes two forwards"
        )


def test_placements_are_inverses_of_each_other() -> None:
    for placement, chunks, stages in itertools.product(Placement, (1, 2, 3, 4), (1, 2, 5)):
        schedule = Schedule("any", stages, chunks, 1, placement, ())
        places = [schedule.owner(piece) for piece in range(schedule.virtual_stages)]
        assert len(set(places)) == stages * chunks
        assert [schedule.virtual_stage(rank, chunk) for rank, chunk in places] == list(range(stages * chunks))


def test_vee_puts_the_first_and_the_last_virtual_stage_on_rank_0() -> None:
    schedule = make_schedule("zb-v", 4, 8)
    assert schedule.owner(0) == (0, 0)
    assert schedule.owner(7) == (0, 1)
    assert schedule.owner(3)[0] == schedule.owner(4)[0] == 3


def test_zb_h2_keeps_within_its_memory_limit_and_uses_it() -> None:
    idle = []
    for limit in range(6, 12):
        timeline = simulate(make_schedule("zb-h2", 6, 24, memory_limit=limit))
        assert timeline.peak_activations == (limit,) * 6
        idle.append(max(timeline.idle))
    assert idle == [5, 4, 3, 2, 1, 0]


def test_schedule_shape_is_that_of_the_built_schedule() -> None:
    for name in SCHEDULES:
        schedule = make_schedule(name, 2, 4)
        assert schedule_shape(name) == (schedule.chunks, schedule.placement)
    assert schedule_shape("interleaved", 3).chunks == 3
    assert schedule_shape("zb-v") == (2, Placement.VEE)


def test_instructions_read_as_in_the_grids() -> None:
    assert str(Instruction(Kind.FORWARD, 0, 1)) == "F0.1"
    assert str(Instruction(Kind.SEND_BACKWARD, 12, 0, peer=3)) == "SB12.0>3"
    assert str(Instruction(Kind.RECV_FORWARD, 2, 1, peer=0)) == "RF2.1<0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 2, 2, {}), "unknown pipeline_schedule='1f2b'; use one of gpipe, 1f1b"),
        (("1f1b", 0, 2, {}), "stages=0 must be at least 1"),
        (("1f1b", 2, 0, {}), "micro_batches=0 must be at least 1"),
        (("1f1b", 2, 2, {"chunks": 2}), "virtual_pipeline_parallel_size=1 .*'interleaved' takes any number"),
        (("zb-v", 2, 2, {"chunks": 3}), "puts 2 chunk.s. on each stage, got chunks=3"),
        (("interleaved", 2, 2, {"chunks": 0}), "chunks=0 .* must be at least 1"),
        (("interleaved", 4, 8, {"chunks": 2, "group_size": 3}), "group_size=3 is below stages=4.* use 4 or more"),
        (("zb-h2", 4, 8, {"memory_limit": 3}), "memory_limit=3 is below stages=4.*memory_limit=4 to 7"),
        (("1f1b", 2, 2, {"group_size": 4}), "does not know the option.s. group_size; it takes no options"),
        (("zb-v", 2, 2, {"placement": "loop"}), "has placement 'vee', got 'loop'"),
    ],
)
def test_wrong_arguments_are_named_with_their_values(
    arguments: tuple[str, int, int, dict[str, int]], message: str
) -> None:
    name, stages, count, options = arguments
    with pytest.raises(ValueError, match=message):
        make_schedule(name, stages, count, **options)  # type: ignore[arg-type]
