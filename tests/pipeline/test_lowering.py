"""Lowering: every tensor that crosses ranks is sent and received once, and no two ranks disagree about the order."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from lightning_megatron.pipeline.schedule import (
    SCHEDULES,
    Kind,
    Placement,
    Schedule,
    halve_backwards,
    join_halves,
    lower,
    make_schedule,
)
from lightning_megatron.pipeline.timeline import Costs, check, simulate

PAIRS = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.RECV_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.RECV_BACKWARD: Kind.SEND_BACKWARD,
}


def everything() -> list[Schedule]:
    sizes = itertools.product((1, 2, 3, 4, 5), (1, 2, 3, 5, 8))
    made = []
    for name, (stages, count), forward_only in itertools.product(SCHEDULES, sizes, (False, True)):
        made.append(make_schedule(name, stages, count, forward_only=forward_only))
    made += [make_schedule("interleaved", p, m, chunks=3) for p, m in itertools.product((1, 2, 3), (1, 4, 7))]
    return made


EVERYTHING = everything()


def test_lowering_changes_no_computation() -> None:
    for schedule in EVERYTHING:
        assert lower(schedule).computations() == schedule


def test_1f1b_lowered_reads_as_expected() -> None:
    lists = [" ".join(map(str, steps)) for steps in lower(make_schedule("1f1b", 2, 3)).instructions]
    assert lists == [
        "F0.0 SF0.0>1 F1.0 SF1.0>1 RB0.0<1 B0.0 F2.0 SF2.0>1 RB1.0<1 B1.0 RB2.0<1 B2.0",
        "RF0.0<0 F0.0 RF1.0<0 B0.0 SB0.0>0 F1.0 B1.0 RF2.0<0 SB1.0>0 F2.0 B2.0 SB2.0>0",
    ]


def test_every_pair_of_ranks_lists_its_transfers_in_one_order_without_tags() -> None:
    for schedule in EVERYTHING:
        between = defaultdict(list)
        for rank, steps in enumerate(lower(schedule).instructions):
            for step in steps:
                if step.peer is not None:
                    kind = step.kind if rank < step.peer else PAIRS[step.kind]
                    between[rank, step.peer].append((kind, step.micro_batch))
        for (rank, peer), order in between.items():
            assert order == between[peer, rank], (schedule.name, rank, peer)


def test_transfers_number_what_crosses_ranks() -> None:
    for schedule in EVERYTHING:
        crossings = sum(
            schedule.owner(piece)[0] != schedule.owner(piece + 1)[0] for piece in range(schedule.virtual_stages - 1)
        )
        transfers = [step for steps in lower(schedule).instructions for step in steps if step.peer is not None]
        directions = 1 if schedule.forward_only else 2
        assert len(transfers) == 2 * directions * crossings * schedule.micro_batches


def test_a_send_stands_behind_its_computation_and_before_the_next_one() -> None:
    for schedule in EVERYTHING:
        for steps in lower(schedule).instructions:
            last = None
            for step in steps:
                if step.peer is None:
                    last = step
                elif step.kind.is_send:
                    assert last is not None
                    assert (last.micro_batch, last.chunk) == (step.micro_batch, step.chunk)
                    assert (last.kind is Kind.FORWARD) == (step.kind is Kind.SEND_FORWARD)


def test_the_turn_of_a_vee_needs_no_transfer() -> None:
    last = lower(make_schedule("zb-v", 3, 5)).instructions[2]
    assert not [step for step in last if step.kind is Kind.SEND_FORWARD and step.chunk == 0]
    assert not [step for step in last if step.kind is Kind.RECV_FORWARD and step.chunk == 1]


def test_one_stage_needs_no_transfer() -> None:
    for name in SCHEDULES:
        schedule = make_schedule(name, 1, 4)
        assert lower(schedule) == schedule


def test_lowering_twice_changes_nothing() -> None:
    lowered = lower(make_schedule("zb-v", 3, 5))
    assert lower(lowered) is lowered
    check(lowered)


def test_a_vee_of_four_chunks_turns_three_times() -> None:
    def order(stages: int, chunks: int, count: int) -> list[list[str]]:
        forwards = [f"F{index}.{chunk}" for index in range(count) for chunk in range(chunks)]
        backwards = [f"B{index}.{chunk}" for index in range(count) for chunk in reversed(range(chunks))]
        return [forwards + backwards for _ in range(stages)]

    schedule = make_schedule(order, 3, 4, chunks=4, placement="vee")
    assert schedule.placement is Placement.VEE
    assert [schedule.owner(piece)[0] for piece in range(12)] == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]
    check(lower(schedule))


def test_an_order_that_never_finishes_cannot_be_lowered() -> None:
    one_by_one = make_schedule("1f1b", 2, 2).instructions[1]
    bad = Schedule("mine", 2, 1, 2, Placement.LOOP, (one_by_one, one_by_one[2:] + one_by_one[:2]))
    # Stage 0 waits for the gradient of micro-batch 0, stage 1 for its activation of micro-batch 1.
    with pytest.raises(ValueError, match=r"'mine' never finishes: stage 0 waits in B0.0, stage 1 waits in F1.0"):
        lower(bad)


def test_halves_for_which_nobody_waits_become_one_backward() -> None:
    lists = [
        " ".join(map(str, s)) for s in join_halves(lower(make_schedule("zb-h1", 2, 3))).computations().instructions
    ]
    assert lists == ["F0.0 F1.0 B0.0 F2.0 B1.0 B2.0", "F0.0 I0.0 F1.0 I1.0 W0.0 F2.0 I2.0 W1.0 W2.0"]


def test_joined_schedules_are_whole_keep_their_transfers_and_are_as_fast() -> None:
    for schedule in EVERYTHING:
        lowered = lower(schedule)
        joined = join_halves(lowered)
        for before, after in zip(lowered.instructions, joined.instructions, strict=True):
            assert [s for s in before if s.kind.is_transfer] == [s for s in after if s.kind.is_transfer]
        check(joined)
        costs = Costs.uniform(schedule.virtual_stages)
        assert simulate(joined, costs).makespan == pytest.approx(simulate(schedule, costs).makespan)


def test_whole_backwards_of_a_split_schedule_can_be_halved() -> None:
    def kinds(schedule: Schedule) -> set[Kind]:
        return {step.kind for steps in schedule.computations().instructions for step in steps}

    for schedule in EVERYTHING:
        halved = halve_backwards(lower(schedule))
        check(halved)
        splits = Kind.BACKWARD_WEIGHT in kinds(schedule)
        assert Kind.BACKWARD not in kinds(halved) if splits else halved == lower(schedule)
    one = halve_backwards(lower(make_schedule("dualpipe-v", 2, 4))).instructions[1]
    assert "I1.0 SB1.0>0 W1.0" in " ".join(map(str, one))
