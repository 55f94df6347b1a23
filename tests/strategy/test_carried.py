"""What steps of several replicas go on from is what one process has written from all samples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.strategy.carried.step_stores import (
    is_plainly_written,
    line_of_store,
    names_of_clocks,
    stored_behind_counts,
    stored_names,
)
from lightning_megatron.strategy.carried.unlike_writes import UnlikeWrites
from lightning_megatron.strategy.carried.ways_on import ways_on
from lightning_megatron.strategy.loss.written import Join, kind_of_new
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
from tests.strategy.carried_scenarios import (
    CARRIES,
    Centre,
    Codebook,
    Counts,
    Frequencies,
    Peak,
    Queue,
    Rare,
    Replay,
    Several,
    SteeredByOutputs,
    Stopwatch,
    carried,
)

WIDE = pytest.mark.wide
UNCUT: dict[str, Any] = {"micro_batch_size": "auto"}


def samples(part: tuple[Any, ...]) -> float:
    """What a micro-batch counts, as a user may say it."""
    return float(len(part[0]))


LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    ((1, 2), UNCUT),
    ((2, 2), {"micro_batch_size": 1}),
    ((1, 2), {"micro_batch_size": 1}),
    ((1, 4), UNCUT),
    ((1, 2), {**UNCUT, "weight_sharding": True}),
    ((1, 2), {**UNCUT, "tensor_parallel_size": 2}),
    ((2, 2), {"pipeline_schedule": "zb-v", "micro_batch_size": 2}),
    ((1, 2), {**UNCUT, "micro_batch_loss_weight": samples}),
    ((2, 1), {"micro_batch_size": 1, "micro_batch_loss_weight": samples}),
    ((2, 2), {"micro_batch_size": 1, "micro_batch_loss_weight": samples}),
]
EVERYDAY = {
    (name, 0)
    for name in ("Codebook", "Queue", "Frequencies", "Centre", "Counts", "Several", "OfClass", "SteeredByForward")
}
EVERYDAY |= {("Codebook", 1), ("SetBack", 1), ("Queue", 7), ("Counts", 8), ("BySource", 1)}
PASSES = "each step runs once more before, forward only, on the samples of all replicas"
MEANS = ("Centre", "Steered", "SteeredByForward", "SteeredByLayer")  # these come together without a pass
ROWS = [
    pytest.param(name, layout, arguments, marks=() if (name, number) in EVERYDAY else WIDE)
    for number, (layout, arguments) in enumerate(LAYOUTS)
    for name in CARRIES
    if name not in ("Stopwatch", "Remembers")
]


@pytest.mark.everyday(3)
@pytest.mark.parametrize(("name", "layout", "arguments"), ROWS, ids=str)
def test_replicas_go_on_from_what_one_process_has_written(
    name: str, layout: Layout, arguments: Mapping[str, Any]
) -> None:
    expected = one_process(carried, None, name, {})
    ranks = layout[0] * layout[1] * arguments.get("tensor_parallel_size", 1)
    for found in run_trainers(carried, layout, name, arguments, devices=ranks):
        here = {key: value for key, value in found.value.items() if value}
        assert not list(differences("", here, {key: expected[key] for key in here}, 1e-9)), found.output
        assert (PASSES in found.output) == (name not in MEANS and found.rank == 0 and layout[1] > 1)


@pytest.mark.parametrize("layout", [(1, 2), pytest.param((2, 2), marks=WIDE)], ids=str)
def test_a_pass_that_would_miss_what_is_kept_of_each_sample_is_refused(layout: Layout) -> None:
    ranks = layout[0] * layout[1]
    for found in run_trainers(carried, layout, "Remembers", UNCUT, devices=ranks, check=False, grace=20.0):
        assert re.search("cannot write what one process writes.*keeps `hidden` of each sample", f"{found.error}")


@pytest.mark.parametrize(
    ("name", "layout", "value"),
    [
        ("Rare", (1, 2), "seen"),
        ("ByHand", (1, 2), "centre"),
        pytest.param("ByHand", (2, 2), "centre", marks=WIDE),
    ],
)
def test_what_replicas_write_unlike_that_no_trial_has_seen_is_refused(name: str, layout: Layout, value: str) -> None:
    said = rf"has written `{value}` \(.*carried_scenarios.py:\d+\) and goes on from it, and one of the 2 replicas"
    for found in run_trainers(carried, layout, name, UNCUT, devices=layout[0] * layout[1], check=False, grace=20.0):
        assert re.search(said, f"{found.error}"), found.error


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("RareGathered", (1, 2)),
        ("ByHandGathered", (1, 2)),
        pytest.param("ByHandGathered", (2, 2), marks=WIDE),
    ],
)
def test_what_replicas_write_from_what_they_gather_is_that_of_one_process(name: str, layout: Layout) -> None:
    expected = one_process(carried, None, name, {})
    for found in run_trainers(carried, layout, name, UNCUT, devices=layout[0] * layout[1]):
        here = {key: value for key, value in found.value.items() if value}
        assert not list(differences("", here, {key: expected[key] for key in here}, 1e-9)), found.output


class _Writer(LightningModule):
    """Has what a step may write."""

    late = 0

    def __init__(self) -> None:
        super().__init__()
        self.count, self.width = 0, 4
        self.rows: list[int] = []
        self.register_buffer("table", torch.zeros(2))

    def training_step(self, batch: int) -> None:
        self.count += batch
        self.rows.append(self.width)
        self.table[0] += 1
        self.late += batch
        print(self.late, self.count, self.rows, self.table)


def test_what_a_step_writes_on_one_rank_by_its_number_ends_no_run() -> None:
    for found in run_trainers(carried, (1, 2), "FirstRank", UNCUT, devices=2, check=False):
        assert found.error is None, found


def test_what_a_step_may_write_is_looked_at_in_every_step() -> None:
    module = _Writer()
    carried = SimpleNamespace(ways={}, passed=frozenset(), clocks=set(), seen=set())
    replicas: Any = SimpleNamespace(carried=carried, comes_together=lambda _: False)
    writes = UnlikeWrites(module, torch.device("cpu"), replicas)
    for step in range(1, 8):
        writes.begin()
        if step == 5:
            module.training_step(1)
        found = {f"{name}{'' if key is None else f'.{key}'}".lstrip(".") for name, key in dict(writes._written())}
        assert found == ({"count", "rows", "table", "late"} if step == 5 else set()), step
    writes.begin()
    module.width = 5  # by nothing that is known of
    assert [key for (_, key), _ in writes._written()] == ["width"]


def test_the_line_that_stores_to_an_attribute_is_found() -> None:
    line = line_of_store([Rare.loss], "seen")
    path, number = line.rsplit(":", 1)
    assert "self.seen[self.word] += 1" in Path(path).read_text().splitlines()[int(number) - 1]
    assert not line_of_store([Rare.loss], "nothing")


def test_a_clock_asks_for_no_pass() -> None:
    found = run_trainers(carried, (1, 2), "Stopwatch", UNCUT, devices=2)[0]
    assert PASSES not in found.output


def test_each_replica_has_its_own_where_the_user_means_it() -> None:
    own = [
        each.value["kept"]["sums"]
        for each in run_trainers(carried, (1, 2), "Codebook", {**UNCUT, "whole_batch_loss": False}, devices=2)
    ]
    assert not torch.allclose(*own)


def _join(before: Any, *apart: Any, whole: Any) -> Join:
    changes = [{("", "x"): (before, now)} for now in (*apart, whole)]
    return Join(changes[:-1], changes[-1], {"sizes": [1.0, 1.0]})


@pytest.mark.parametrize(
    ("join", "kinds", "ways"),
    [
        (_join(3, 4, 5, whole=6), ("sum",), ("sum",)),
        (_join(0, 0, 5, whole=5), ("sum",), ()),  # the largest, or a sum
        (_join(0.0, 1.0, 3.0, whole=2.0), (), ("sizes",)),
        (_join(0.0, 1.0, 3.0, whole=3.0), (), ()),
        (_join(0.0, 1.0, 1.0 + 1e-15, whole=1.0), (), ()),  # too close together to tell
        (_join([], [1.0], [2.0], whole=[1.5]), ("sizes",), ("sizes",)),
        (_join(torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), whole=torch.ones(2)), ("set",), ()),
    ],
)
def test_only_what_surely_comes_together_needs_no_pass(join: Join, kinds: Any, ways: Any) -> None:
    assert ways_on([join], ("", "x"), kinds) == ways


def test_what_the_code_of_a_step_stores_to_in_each_step_is_read() -> None:
    assert stored_names([Counts.loss]) == {"counts", "right", "words_seen"}
    assert stored_names([Codebook.loss]) == {"used", "sums", "codes"}
    assert stored_names([Frequencies.loss]) == {"seen"}
    assert "slow" not in stored_names([Stopwatch.loss])
    assert names_of_clocks([Stopwatch.loss]) == {"began"}
    assert stored_behind_counts([Several.loss]) == {"level"}
    assert not stored_behind_counts([Rare.loss, Peak.loss, Replay.loss, Stopwatch.loss])


@pytest.mark.parametrize(
    ("kind", "name", "plainly"),
    [
        (Counts, "counts", True),
        (Counts, "right", True),
        (Counts, "words_seen", True),
        (Centre, "centre", True),
        (Codebook, "sums", True),
        (Codebook, "codes", True),  # of others, which are known by themselves
        (Peak, "peak", False),
        (Queue, "queue", False),
        (Queue, "at", False),
        (Replay, "nothing", False),
        (Stopwatch, "slow", False),
    ],
)
def test_how_an_attribute_is_written_is_read(kind: Any, name: str, plainly: bool) -> None:
    assert is_plainly_written([kind.loss], name) == plainly


def steered(info: RankInfo) -> None:
    """Train on two replicas."""
    trained_state(info, (1, 2), UNCUT, SteeredByOutputs(), max_epochs=1)


@pytest.mark.wide
def test_a_hook_that_steers_by_what_else_a_step_returns_is_warned_of() -> None:
    outcomes = run_trainers(steered, devices=2, check=False, grace=20.0)
    said = re.sub(r"\s+", " ", "".join(f"{outcome.error}{outcome.output}" for outcome in outcomes))
    assert re.search(r"`outputs\['last'\]` in \S+carried_scenarios.py:\d+ steers the next steps", said), said


def test_lists_that_some_micro_batches_only_have_are_of_no_known_kind() -> None:
    assert kind_of_new([1.0], [[1.0, 2.0], [1.0, 3.0]])
    assert not kind_of_new([1.0], [[1.0, 2.0], MISSING])
    assert not kind_of_new([1.0], [MISSING, [1.0]])
