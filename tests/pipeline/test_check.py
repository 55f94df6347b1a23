"""Faulty schedules of every kind are refused with the reason and a grid that marks the place."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_megatron.pipeline.schedule import (
    SCHEDULES,
    Instruction,
    Kind,
    Placement,
    Schedule,
    lower,
    make_schedule,
)
from lightning_megatron.pipeline.schedules.check import ScheduleError, check
from lightning_megatron.pipeline.schedules.transfers import finishes_asynchronously

Lists = list[list[str]]


def written(lists: Lists) -> Callable[[int, int, int], Lists]:
    def mine(stages: int, chunks: int, micro_batches: int) -> Lists:
        return lists

    return mine


def refusal(lists: Lists, micro_batches: int = 2, chunks: int = 1, stages: int = 2) -> str:
    with pytest.raises(ScheduleError) as caught:
        make_schedule(written(lists), stages, micro_batches, chunks=chunks)
    return str(caught.value)


def test_a_users_schedule_may_be_written_as_in_the_grids() -> None:
    schedule = make_schedule(written([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]), 2, 2)
    assert schedule.instructions == make_schedule("1f1b", 2, 2).instructions
    assert schedule.name == "mine"


def test_a_users_function_is_told_stages_chunks_and_micro_batches() -> None:
    def mine(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Instruction, ...], ...]:
        assert (stages, chunks, micro_batches) == (3, 2, 5)
        return make_schedule("zb-v", stages, micro_batches).instructions

    schedule = make_schedule(mine, 3, 5, chunks=2, placement=Placement.VEE)
    assert schedule.instructions == make_schedule("zb-v", 3, 5).instructions
    assert make_schedule(mine, 3, 5, chunks=2, placement="vee", forward_only=True).forward_only


def test_a_deadlock_is_drawn_with_the_waiting_instructions_marked() -> None:
    assert refusal([["F0", "B0", "F1", "B1"], ["F1", "B1", "F0", "B0"]]) == (
        "pipeline_schedule 'mine' (stages=2, chunks=1, micro_batches=2) was refused: it deadlocks, the ranks wait for"
        " each other: stage 0 waits in B0.0, stage 1 waits in F1.0\n"
        "\n"
        "stage 0  F0  !B0 F1  B1\n"
        "stage 1  !F1 B1  F0  B0"
    )


def test_something_missing_is_drawn_at_the_end_of_its_row() -> None:
    text = refusal([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1"]])
    assert "stage 1 never does B (or I and W) of micro-batch 1 on chunk 0" in text
    assert text.endswith("stage 1  F0       B0       F1       !missing")


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([["F0", "F1", "B0", "B1"]], "it has 1 lists of instructions for 2 stages"),
        ([["F0", "B0"], ["F0", "B0", "F1", "B1"]], "stage 0 never does F of micro-batch 1"),
        ([["F0", "F1", "I0", "I1", "W0"]] * 2, "stage 0 never does W of micro-batch 1"),
        ([["F0", "F1", "W0", "I0", "I1", "W1"]] * 2, "stage 0, entry 2: W0.0 comes before its input half I0.0"),
        ([["F0", "F1", "B0", "B1"], ["B0", "F0", "F1", "B1"]], "stage 1, entry 0: B0.0 comes before its forward F0.0"),
        ([["F0", "F1", "B0", "B1"], ["F0", "F0", "B0", "B1"]], "stage 1, entry 1: F0.0 is done twice"),
        ([["F0", "F1", "B0", "B0"]] * 2, "stage 0, entry 3: B0.0 is done twice"),
        ([["F0", "F1", "B0", "I0", "W0"]] * 2, "I0.0 repeats a backward that was done whole"),
        ([["F0", "F1", "I0", "B0", "W0"]] * 2, "B0.0 repeats a backward that was done in halves"),
        ([["F0", "F1", "I0", "W0", "W0"]] * 2, "W0.0 is done twice"),
        ([["F0", "F2", "B0", "B2"]] * 2, "stage 0, entry 1: F2.0 names micro-batch 2; there are 2, from 0"),
        ([["F0", "F1.1", "B0", "B1"]] * 2, "stage 0, entry 1: F1.1 names chunk 1; each stage has 1, from 0"),
        ([["F0", "F1", "B0", "B1"], ["F0", "F1"]], "stage 1 never does B"),
    ],
)
def test_faults_of_a_list_are_named(lists: Lists, message: str) -> None:
    text = refusal(lists)
    assert message in text
    assert "!" in text or "lists of instructions" in text


@pytest.mark.parametrize("entry", ["X0", "F", "F-1", 7, None, "F0.0.0"])
def test_what_is_no_instruction_is_named(entry: object) -> None:
    with pytest.raises(ValueError, match="is no instruction: use an Instruction or a name such as"):
        make_schedule(written([["F0", entry]] * 2), 2, 1)  # type: ignore[list-item]


def test_a_function_that_returns_no_lists_is_named() -> None:
    with pytest.raises(ValueError, match="'mine' must return a list of instructions per stage"):
        make_schedule(written(3), 2, 1)  # type: ignore[arg-type]


def test_a_computation_for_a_chunk_in_the_wrong_order_deadlocks() -> None:
    # On one rank, chunk 1 needs chunk 0 of the same micro-batch.
    text = refusal([["F0.1", "F0.0", "B0.0", "B0.1"]], micro_batches=1, chunks=2, stages=1)
    assert "stage 0 waits in F0.1" in text


def lowered_with(change: Callable[[list[list[Instruction]]], None], name: str = "1f1b") -> Schedule:
    lowered = lower(make_schedule(name, 2, 3))
    lists = [list(steps) for steps in lowered.instructions]
    change(lists)
    return replace(lowered, instructions=tuple(map(tuple, lists)))


def find(steps: list[Instruction], text: str) -> int:
    return [str(step) for step in steps].index(text)


def move(steps: list[Instruction], text: str, to: int) -> None:
    steps.insert(to, steps.pop(find(steps, text)))


def test_messages_in_another_order_than_expected_are_refused() -> None:
    def swap(lists: list[list[Instruction]]) -> None:
        # Stage 1 posts the receive of micro-batch 1 first; both are there before they are needed.
        move(lists[1], "RF1.0<0", 0)

    with pytest.raises(ScheduleError) as caught:
        check(lowered_with(swap))
    assert "message 0 from stage 0 to stage 1 is sent as SF0.0>1 but received as RF1.0<0" in str(caught.value)
    assert "!SF0.0>1" in str(caught.value)
    assert "!RF1.0<0" in str(caught.value)


def test_sends_that_meet_head_on_are_refused_though_asynchronous_sends_would_pass() -> None:
    def meet(lists: list[list[Instruction]]) -> None:
        # Stage 1 sends the gradient before it posts the receive of an activation that stage 0 sends first.
        move(lists[1], "RF1.0<0", find(lists[1], "SB0.0>0"))

    lowered = lowered_with(meet)
    with pytest.raises(ScheduleError, match=r"deadlock if sends wait for their receives.*stage 0 in SF1\.0>1"):
        check(lowered)


def test_a_receive_before_the_send_that_it_depends_on_deadlocks_even_asynchronously() -> None:
    assert finishes_asynchronously([[1, ~1], [0, ~0]])
    assert not finishes_asynchronously([[~1, 1], [~0, 0]])
    assert not finishes_asynchronously([[1, 1], [~0, ~0, ~0]])


@pytest.mark.parametrize(
    ("text", "rank", "to", "message"),
    [
        ("RF1.0<0", 1, 6, "F1.0 comes before its receive RF1.0"),
        ("RB0.0<1", 0, 6, "B0.0 comes before its receive RB0.0"),
        ("SF0.0>1", 0, 0, "SF0.0>1 comes before its forward F0.0"),
        ("SB0.0>0", 1, 1, "SB0.0>0 comes before the backward whose gradient it sends"),
    ],
)
def test_transfers_on_the_wrong_side_of_their_computation_are_refused(
    text: str, rank: int, to: int, message: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(lowered_with(lambda lists: move(lists[rank], text, to)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lists: lists[0].remove(Instruction(Kind.SEND_FORWARD, 1, 0, 1)), "stage 0 never does SF"),
        (lambda lists: lists[1].remove(Instruction(Kind.SEND_BACKWARD, 2, 0, 0)), "stage 1 never does SB"),
        (lambda lists: lists[0].insert(2, lists[0][1]), "SF0.0>1 is done twice"),
        (lambda lists: lists[1].insert(2, lists[1][0]), "RF0.0<0 is done twice"),
        (lambda lists: lists[1].append(Instruction(Kind.SEND_FORWARD, 0, 0, 0)), "no other stage needs or makes"),
        (lambda lists: lists[0].insert(0, Instruction(Kind.SEND_FORWARD, 0, 0)), "SF0.0 is a transfer without a peer"),
        (lambda lists: lists[0].insert(0, Instruction(Kind.FORWARD, 0, 0, 1)), "is a computation with a peer"),
        (lambda lists: lists[0].insert(1, Instruction(Kind.SEND_FORWARD, 0, 0, 2)), "SF0.0>2 names peer 2"),
        (lambda lists: lists[0].insert(1, Instruction(Kind.SEND_FORWARD, 0, 0, 0)), "SF0.0>0 names peer 0"),
    ],
)  # fmt: skip
def test_faults_of_transfers_are_named(change: Callable[[list[list[Instruction]]], None], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(lowered_with(change))
    assert message in str(caught.value)


def test_a_transfer_to_the_wrong_stage_is_refused() -> None:
    lowered = lower(make_schedule("1f1b", 3, 2))
    first = list(lowered.instructions[0])
    first[1] = replace(first[1], peer=2)
    with pytest.raises(ScheduleError, match=r"SF0\.0>2 should name peer 1"):
        check(replace(lowered, instructions=(tuple(first), *lowered.instructions[1:])))


def test_activations_beyond_a_limit_are_refused_where_they_are_reached() -> None:
    check(make_schedule("1f1b", 4, 8), activation_limit=4)
    with pytest.raises(ScheduleError) as caught:
        check(make_schedule("gpipe", 4, 8), activation_limit=4)
    assert "stage 0 holds the activations of 8 forwards, activation_limit=4" in str(caught.value)
    assert "!F7" in str(caught.value)
    with pytest.raises(ScheduleError, match="stage 0 holds the activations of 7 forwards"):
        check(lower(make_schedule("zb-h2", 4, 8)), activation_limit=6)


def test_a_long_schedule_is_drawn_around_its_fault_only() -> None:
    good = make_schedule("1f1b", 40, 200)
    steps = list(good.instructions[20])
    at = 150
    steps[at], steps[at + 1] = steps[at + 1], steps[at]
    broken = steps[: at + 40] + steps[at + 41 :]
    with pytest.raises(ScheduleError) as caught:
        check(replace(good, instructions=(*good.instructions[:20], tuple(broken), *good.instructions[21:])))
    grid = str(caught.value).split("\n\n")[1].splitlines()
    assert len(grid) <= 16
    assert all(len(line) < 160 for line in grid)
    assert any(line.startswith("stage 20") and "!" in line for line in grid)


def mutations(schedule: Schedule, random_: random.Random) -> list[Schedule]:
    """The schedule with one entry dropped, repeated, or moved to another rank."""
    changed = []
    for _ in range(6):
        lists = [list(steps) for steps in schedule.instructions]
        rank = random_.randrange(schedule.stages)
        at = random_.randrange(len(lists[rank]))
        way = random_.randrange(3)
        step = lists[rank][at] if way == 1 else lists[rank].pop(at)
        if way:
            other = rank if way == 1 else (rank + 1) % schedule.stages
            lists[other].insert(random_.randrange(len(lists[other]) + 1), step)
        changed.append(replace(schedule, instructions=tuple(map(tuple, lists))))
    return changed


def test_no_dropped_repeated_or_misplaced_instruction_gets_through() -> None:
    random_ = random.Random(0)
    for name, stages, count in itertools.product(SCHEDULES, (2, 3, 4), (1, 3, 5)):
        schedule = make_schedule(name, stages, count)
        for original in (schedule, lower(schedule)):
            for changed in mutations(original, random_):
                with pytest.raises(ScheduleError):
                    check(changed)


def test_a_shuffled_schedule_passes_exactly_if_it_can_be_run_step_by_step() -> None:
    """The checker against a second, naive implementation of 'can this finish'."""
    random_ = random.Random(1)
    verdicts = []
    for _ in range(400):
        stages, count = random_.choice([1, 2, 3]), random_.choice([1, 2, 3])
        schedule = make_schedule(random_.choice(list(SCHEDULES)), stages, count)
        lists = [list(steps) for steps in schedule.instructions]
        for _ in range(random_.randrange(3)):
            steps = random_.choice(lists)
            at = random_.randrange(len(steps) - 1)
            steps[at], steps[at + 1] = steps[at + 1], steps[at]
        shuffled = replace(schedule, instructions=tuple(map(tuple, lists)))
        verdicts.append(finishes(shuffled))
        if verdicts[-1]:
            check(shuffled)
        else:
            with pytest.raises(ScheduleError):
                check(shuffled)
    assert 50 < sum(verdicts) < 350


def finishes(schedule: Schedule) -> bool:
    """Try every rank's next instruction again and again until nothing moves."""
    done: set[tuple[str, int, int]] = set()  # letter, virtual stage, micro-batch
    heads = [0] * schedule.stages
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(schedule.instructions):
            while heads[rank] < len(steps) and runnable(schedule, done, rank, steps[heads[rank]]):
                step = steps[heads[rank]]
                letter = "I" if step.kind is Kind.BACKWARD else step.kind.value
                done.add((letter, schedule.virtual_stage(rank, step.chunk), step.micro_batch))
                heads[rank] += 1
                moved = True
    return all(head == len(steps) for head, steps in zip(heads, schedule.instructions, strict=True))


def runnable(schedule: Schedule, done: set[tuple[str, int, int]], rank: int, step: Instruction) -> bool:
    piece, index = schedule.virtual_stage(rank, step.chunk), step.micro_batch
    if step.kind is Kind.FORWARD:
        return piece == 0 or ("F", piece - 1, index) in done
    if step.kind is Kind.BACKWARD_WEIGHT:
        return ("I", piece, index) in done
    last = piece == schedule.virtual_stages - 1
    return ("F", piece, index) in done and (last or ("I", piece + 1, index) in done)
