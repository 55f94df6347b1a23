"""The simulator gives the closed forms of the papers exactly, and models costs and links as it says."""

from __future__ import annotations

import itertools
import json
import struct
import sys
from fractions import Fraction
from types import FrameType
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_megatron.pipeline.pictures.drawing import kinds_in, ticks
from lightning_megatron.pipeline.pictures.image import draw
from lightning_megatron.pipeline.schedule import SCHEDULES, Schedule, lower, make_schedule
from lightning_megatron.pipeline.timeline import (
    Costs,
    Timeline,
    check,
    chrome_trace,
    png,
    simulate,
    svg,
    text_grid,
    title,
)

STAGES = (1, 2, 3, 4, 8)
COSTS = ((1, 1, 1), (2, 3, 2), (3, 4, 2), (2, 2, 1))
"""F, I, W; the forms of ZB-H1 and H2 hold where W is no longer than F and I, as in a transformer."""


def timeline(name: str, stages: int, count: int, costs: tuple[int, int, int] = (1, 1, 1), **options: int) -> Timeline:
    schedule = make_schedule(name, stages, count, **options)
    return simulate(schedule, Costs.uniform(schedule.virtual_stages, *costs))


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_bubble_of_1f1b_and_gpipe_is_p_minus_1_over_m(name: str) -> None:
    for stages, count, costs in itertools.product(STAGES, (1, 2, 3, 5, 8, 13), COSTS):
        found = timeline(name, stages, count, costs)
        assert found.bubble_fraction == float(Fraction(stages - 1, count))
        assert found.makespan == (count + stages - 1) * sum(costs)
        assert found.step_bubble_fraction == found.bubble_fraction


def test_bubble_of_interleaving_is_p_minus_1_over_v_m() -> None:
    for stages, chunks, costs in itertools.product(STAGES, (2, 3, 4), COSTS):
        # Any number of micro-batches from p on, not only multiples.
        for count in range(stages, 3 * stages + 1):
            found = timeline("interleaved", stages, count, costs, chunks=chunks)
            assert found.bubble_fraction == float(Fraction(stages - 1, chunks * count)), (stages, chunks, count)


def test_bubble_of_interleaving_does_not_depend_on_the_group_size() -> None:
    for stages, chunks in itertools.product((2, 3, 4), (2, 3)):
        for group_size, count in itertools.product((stages, stages + 1, 2 * stages), range(stages, 4 * stages)):
            found = timeline("interleaved", stages, count, chunks=chunks, group_size=group_size)
            assert found.bubble_fraction == float(Fraction(stages - 1, chunks * count))


def test_idle_time_of_zb_h1_is_p_minus_1_times_f_plus_i_minus_w() -> None:
    for stages, costs in itertools.product(STAGES, COSTS):
        forward, backward, weight = costs
        for count in (stages, stages + 1, 2 * stages, 3 * stages + 1):
            found = timeline("zb-h1", stages, count, costs)
            assert max(found.idle) == (stages - 1) * (forward + backward - weight)
            assert found.bubble_fraction == max(found.idle) / (count * sum(costs))
            assert max(found.peak_activations) <= stages


def test_idle_time_of_zb_h2_is_p_minus_1_times_f_plus_i_minus_2w() -> None:
    for stages, costs in itertools.product(STAGES, COSTS):
        forward, backward, weight = costs
        for count in (2 * stages - 1, 2 * stages, 3 * stages + 1):
            found = timeline("zb-h2", stages, count, costs)
            assert max(found.idle) == (stages - 1) * (forward + backward - 2 * weight)
            assert found.bubble_fraction == max(found.idle) / (count * sum(costs))
            assert max(found.peak_activations) <= 2 * stages - 1


def test_zb_v_has_no_bubble_at_the_memory_of_1f1b() -> None:
    for stages in STAGES:
        for count in (2 * stages - 1, 2 * stages, 4 * stages + 1):
            found = timeline("zb-v", stages, count)
            assert found.bubble_fraction == 0
            # Chunks of a V are half as large as a stage of 1F1B.
            assert max(found.peak_activations) <= 2 * max(timeline("1f1b", stages, count).peak_activations)


def test_zb_v_beats_interleaving_which_beats_1f1b_in_time_to_the_end_of_the_step() -> None:
    for stages, factor in itertools.product((2, 4, 8), (2, 3, 5)):
        count = factor * stages
        # Two chunks share what one stage does.
        whole = timeline("1f1b", stages, count, (2, 2, 2)).makespan
        halves = timeline("interleaved", stages, count, chunks=2).makespan
        vee = timeline("zb-v", stages, count).makespan
        work = 6 * count
        assert (whole - work, halves - work, vee - work) == (6 * (stages - 1), 3 * (stages - 1), stages - 1)


def test_dualpipe_v_lies_between_interleaving_and_zb_v() -> None:
    for stages in (2, 3, 4, 8):
        count = 3 * stages
        found = timeline("dualpipe-v", stages, count)
        assert max(found.idle) == stages - 1
        assert max(found.peak_activations) == 2 * stages + 1
        assert timeline("zb-v", stages, count).bubble_fraction < found.bubble_fraction
        assert found.bubble_fraction < timeline("interleaved", stages, count, chunks=2).bubble_fraction


def test_no_schedule_is_longer_than_1f1b_for_any_number_of_micro_batches() -> None:
    for stages, count in itertools.product((1, 2, 3, 4), range(1, 14)):
        longest = timeline("1f1b", stages, count, (2, 2, 2)).makespan
        for name in ("interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"):
            costs = (1, 1, 1) if make_schedule(name, stages, count).chunks == 2 else (2, 2, 2)
            assert timeline(name, stages, count, costs).makespan <= longest, (name, stages, count)


def test_peak_activations_are_those_of_the_papers() -> None:
    for stages, count in itertools.product((1, 2, 3, 4, 8), (1, 2, 5, 8, 16)):
        assert timeline("1f1b", stages, count).peak_activations == tuple(min(stages - r, count) for r in range(stages))
        assert timeline("gpipe", stages, count).peak_activations == (count,) * stages
        forward_only = make_schedule("1f1b", stages, count, forward_only=True)
        assert simulate(forward_only).peak_activations == (0,) * stages


def test_interleaving_holds_one_plus_p_minus_1_over_pv_times_1f1b() -> None:
    for stages, chunks in itertools.product((2, 4, 8), (2, 3, 4)):
        peak = max(timeline("interleaved", stages, 4 * stages, chunks=chunks).peak_activations)
        assert Fraction(peak, chunks) == stages * (1 + Fraction(stages - 1, stages * chunks))


def test_latency_is_paid_once_per_hop_of_the_critical_path() -> None:
    schedule = make_schedule("1f1b", 4, 1)
    assert simulate(schedule, Costs.uniform(4, latency=0.5)).makespan == 4 * 3 + 6 * 0.5


def test_the_turn_of_a_vee_is_free() -> None:
    schedule = make_schedule("zb-v", 2, 1)
    # Down and up once each way over one link: virtual stages 0 | 1 2 | 3.
    free, slow = (simulate(schedule, Costs.uniform(4, latency=latency)).makespan for latency in (0.0, 1.0))
    assert slow - free == 4


def test_a_link_carries_one_message_at_a_time() -> None:
    schedule = make_schedule("gpipe", 2, 3, forward_only=True)
    found = simulate(schedule, Costs.uniform(2, message_size=6.0, bandwidth=2.0))
    # Messages of 3 units of time leave at 1, 4 and 7, behind each other; latency alone would let them overlap.
    assert found.starts[1] == (4.0, 7.0, 10.0)
    assert simulate(schedule, Costs.uniform(2, latency=3.0)).starts[1] == (4.0, 5.0, 6.0)


def test_costs_are_per_virtual_stage() -> None:
    schedule = make_schedule("zb-v", 2, 1)
    costs = Costs(forward=(1, 2, 3, 4), backward_input=(5, 6, 7, 8), backward_weight=(0.5,) * 4)
    found = simulate(schedule, costs)
    lengths = {}
    for rank, steps in enumerate(schedule.instructions):
        for step, start, end in zip(steps, found.starts[rank], found.ends[rank], strict=True):
            lengths[str(step)[0], schedule.virtual_stage(rank, step.chunk)] = end - start
    assert [lengths["F", piece] for piece in range(4)] == [1, 2, 3, 4]
    assert [lengths["I", piece] for piece in range(4)] == [5, 6, 7, 8]


def test_a_slow_stage_sets_the_pace() -> None:
    schedule = make_schedule("1f1b", 3, 50)
    slow = simulate(schedule, Costs((1, 2, 1), (1, 2, 1), (1, 2, 1)))
    assert 50 * 6 <= slow.makespan <= 50 * 6 + 2 * 6
    assert slow.busy == (150, 300, 150)


def test_an_unsplit_backward_takes_both_halves() -> None:
    assert simulate(make_schedule("1f1b", 1, 1), Costs.uniform(1, 1, 10, 100)).makespan == 111
    assert simulate(make_schedule("1f1b", 1, 1), Costs.slots(1)).makespan == 2


def test_transfers_in_the_lists_change_no_time() -> None:
    for name in SCHEDULES:
        schedule = make_schedule(name, 3, 5)
        assert simulate(lower(schedule)) == simulate(schedule)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (lambda: Costs((1, 1), (1, 1), (1,)), "one number per virtual stage"),
        (lambda: Costs.uniform(2, forward=-1), "must not be negative"),
        (lambda: Costs.uniform(2, bandwidth=0), "bandwidth=0 must be above 0"),
    ],
)
def test_impossible_costs_are_refused(costs: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        costs()  # type: ignore[operator]


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"costs are for 3 virtual stages, schedule 'zb-v' has 4 \(2 stages x 2 chunks\)"
    ):
        simulate(make_schedule("zb-v", 2, 3), Costs.uniform(3))


FIRST = ("1f1b", "interleaved", "zb-v")
FOR_EACH = [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.wide]) for name in SCHEDULES]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", FOR_EACH)
def test_64_stages_and_512_micro_batches_are_checked_and_simulated(name: str) -> None:
    schedule = make_schedule(name, 64, 512)
    check(schedule)
    found = simulate(schedule)
    assert found.makespan > 0 and found.bubble_fraction >= 0 and max(found.peak_activations) > 0


@pytest.mark.parametrize("name", FOR_EACH)
def test_checking_and_simulating_twice_the_micro_batches_takes_twice_the_work(name: str) -> None:
    few, many = (lines_run(make_schedule(name, 16, count)) for count in (128, 256))
    assert many < 2.2 * few


def lines_run(schedule: Schedule) -> int:
    """Lines of Python that checking and simulating a schedule takes, those of loops as often as they run."""
    lines = 0

    def note(_: FrameType, event: str, __: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        check(schedule)
        simulate(schedule)
    finally:
        sys.settrace(before)
    return lines


def test_times_draw_as_columns() -> None:
    grid = text_grid(simulate(make_schedule("1f1b", 2, 2)))
    assert grid.splitlines() == [
        "stage 0  F0 F1 .. .. B0 -- .. B1 --",
        "stage 1  .. F0 B0 -- F1 B1 -- .. ..",
    ]


def test_stage_numbers_are_aligned() -> None:
    lines = text_grid(simulate(make_schedule("gpipe", 11, 1))).splitlines()
    assert lines[0].startswith("stage  0  F0")
    assert lines[10].startswith("stage 10  ..")


def test_the_svg_has_a_bar_for_each_computation_with_its_times() -> None:
    found = simulate(make_schedule("zb-v", 3, 5))
    root = ElementTree.fromstring(svg(found))
    tips = [tip.text for tip in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) == sum(map(len, found.schedule.instructions))
    assert "F0.0: 0 to 1" in tips
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert title(found) in texts
    assert {"stage 0", "stage 1", "stage 2", "time"} <= set(texts)
    measured = [text.text for text in ElementTree.fromstring(svg(found, "s")).iter("{http://www.w3.org/2000/svg}text")]
    assert (
        "time (s)" in measured
        and title(found, "s") in measured
        and f"makespan {found.makespan:.5g} s," in title(found, "s")
    )


def test_times_of_an_axis_are_round_and_their_labels_do_not_touch() -> None:
    assert ticks(33, 28) == list(range(34))
    assert ticks(0.21084, 700) == [0.0, 0.1, 0.2]
    assert ticks(0.0, 28) == [0.0]
    for length, scale in itertools.product((1e-4, 0.2, 7.0, 33.0, 1234.5, 98765.0), (0.16, 2.0, 28.0, 3000.0)):
        times = ticks(length, scale)
        wide = [6.2 * len(f"{time:g}") for time in times]
        middles = [time * scale for time in times]
        ends = [(middle - half / 2, middle + half / 2) for middle, half in zip(middles, wide, strict=True)]
        assert all(before[1] < after[0] for before, after in itertools.pairwise(ends))


def test_a_legend_names_what_its_schedule_has() -> None:
    plain, split = simulate(make_schedule("1f1b", 2, 4)), simulate(make_schedule("zb-v", 2, 4))
    assert [name for name, _ in kinds_in(plain.schedule)] == ["forward", "backward"]
    assert [name[-3:] for name, _ in kinds_in(split.schedule)] == ["ard", "(I)", "(W)"]
    assert "paler: later chunks" in svg(split) and "weight half" not in svg(plain) and "paler" not in svg(plain)


def test_the_png_shows_each_stage_busy_and_idle() -> None:
    found = timeline("1f1b", 2, 2)
    drawn = draw(found)
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    assert [text.get_text() for text in axes.texts] == ["F0", "F1", "B0", "B1", "F0", "B0", "F1", "B1"]
    bars = [path.get_extents() for row in axes.collections[1:] for path in row.get_paths()]
    assert sorted((round(bar.ymin + 0.45), bar.xmin, bar.xmax) for bar in bars) == [
        *[(0, 0, 1), (0, 1, 2), (0, 4, 6), (0, 7, 9)],
        *[(1, 1, 2), (1, 2, 4), (1, 4, 5), (1, 5, 7)],
    ]


def test_the_png_is_one_and_a_long_timeline_fits_it() -> None:
    picture = png(timeline("1f1b", 4, 300))
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">I", picture[16:20])[0] <= 6200


def test_the_svg_escapes_the_name_of_a_users_schedule() -> None:
    def mine(stages: int, chunks: int, count: int) -> list[list[str]]:
        return [["F0", "B0"]]

    mine.__name__ = "<b> & co"
    assert "&lt;b&gt; &amp; co" in svg(simulate(make_schedule(mine, 1, 1)))


def test_the_trace_holds_every_computation_at_its_time() -> None:
    found = simulate(make_schedule("interleaved", 2, 4))
    trace = json.loads(json.dumps(chrome_trace(found, microseconds=10.0)))
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == sum(map(len, found.schedule.instructions))
    assert {event["tid"] for event in bars} == {0, 1}
    assert max(event["ts"] + event["dur"] for event in bars) == found.makespan * 10
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["stage 0", "stage 1"]


def test_a_measured_timeline_is_read_from_its_own_first_start() -> None:
    schedule = make_schedule("1f1b", 1, 1)
    found = Timeline(schedule, ((100.0, 103.0),), ((102.0, 107.0),))
    assert (found.makespan, found.busy, found.idle) == (7.0, (6.0,), (1.0,))
    assert text_grid(found, unit=1.0) == "stage 0  F0 -- .. B0 -- -- --"
