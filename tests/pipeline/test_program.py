"""A stage's program says what its schedule says, waits where a message is needed, and posts receives early."""

from __future__ import annotations

import pytest

from lightning_megatron.pipeline.run.program import Action, compile_stage
from lightning_megatron.pipeline.schedule import Kind, Schedule, lower, make_schedule

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
POSTS = {Action.POST_FORWARD, Action.POST_FORWARD_EARLY, Action.POST_BACKWARD, Action.POST_BACKWARD_EARLY}
WAITS = {Action.WAIT_FORWARD, Action.WAIT_BACKWARD}
COMPUTATIONS = {Action.FORWARD, Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT}


def lowered(name: str, stages: int = 3, micro_batches: int = 5) -> Schedule:
    return lower(make_schedule(name, stages, micro_batches))


@pytest.mark.parametrize("name", NAMES)
def test_computations_and_sends_stand_in_the_order_of_the_schedule(name: str) -> None:
    schedule = lowered(name)
    for stage, instructions in enumerate(schedule.instructions):
        slots = compile_stage(schedule, stage, post_early=True)
        kept = [
            slot.position
            for slot in slots
            if slot.action not in WAITS | {Action.POST_FORWARD_EARLY, Action.POST_BACKWARD_EARLY}
        ]
        assert kept == list(range(len(instructions)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("early", [False, True])
def test_every_wait_stands_right_before_its_computation_and_after_its_receive(name: str, early: bool) -> None:
    schedule = lowered(name)
    for stage in range(schedule.stages):
        slots = compile_stage(schedule, stage, post_early=early)
        posted: set[tuple[bool, tuple[int, int]]] = set()
        waited = 0
        for slot, following in zip(slots, [*slots[1:], None], strict=True):
            forward = "FORWARD" in slot.action.name
            if slot.action in POSTS:
                posted.add((forward, slot.place))
            if slot.action in WAITS:
                waited += 1
                assert (forward, slot.place) in posted
                assert following is not None and following.action in COMPUTATIONS and following.place == slot.place
        receives = sum(step.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD) for step in schedule.instructions[stage])
        assert waited == receives


@pytest.mark.parametrize("name", NAMES)
def test_a_gradients_buffer_is_never_posted_before_its_forward(name: str) -> None:
    schedule = lowered(name)
    for stage in range(schedule.stages):
        ran: set[tuple[int, int]] = set()
        for slot in compile_stage(schedule, stage, post_early=True):
            if slot.action is Action.FORWARD:
                ran.add(slot.place)
            if slot.action in (Action.POST_BACKWARD, Action.POST_BACKWARD_EARLY):
                assert slot.place in ran


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_of_a_message_use_one_tag(name: str) -> None:
    schedule = lowered(name)
    sent, received = [], []
    for stage in range(schedule.stages):
        for slot in compile_stage(schedule, stage, post_early=False):
            if slot.action in (Action.SEND_FORWARD, Action.SEND_BACKWARD):
                sent.append((stage, slot.peer, slot.tag, slot.micro_batch))
            if slot.action in POSTS:
                received.append((slot.peer, stage, slot.tag, slot.micro_batch))
    assert sorted(sent) == sorted(received) and len(set(sent)) == len(sent)


def test_at_the_turn_of_a_v_the_result_stays_on_the_rank() -> None:
    schedule = lowered("zb-v", stages=2, micro_batches=2)
    onward = {
        (slot.action, slot.place): slot.onward
        for slot in compile_stage(schedule, 1, post_early=True)
        if slot.onward is not None and slot.action in COMPUTATIONS
    }
    forwards = {(Action.FORWARD, (0, index)): (1, index) for index in range(2)}
    backwards = {(Action.BACKWARD_INPUT, (1, index)): (0, index) for index in range(2)}
    assert onward == {**forwards, **backwards}
