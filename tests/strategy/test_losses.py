"""A step in micro-batches gives the loss, gradients, logs and counters of the whole batch, whatever the loss is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.utils.parametrizations import spectral_norm

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages.late import LateAnswer
from lightning_megatron.pipeline.cut.partition import make_partition
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.carried.joined_entries import entry_of_all
from lightning_megatron.strategy.logs.combining import Logged, Mean, fitting, likeliest
from lightning_megatron.strategy.loss import said as said_of_losses
from lightning_megatron.strategy.loss.counted import Counted, candidates
from lightning_megatron.strategy.loss.said import say_how_cut
from lightning_megatron.strategy.loss.tables import Table
from lightning_megatron.strategy.loss.traces import Traces
from lightning_megatron.strategy.loss.weighing import Reading, TrialRun, find
from lightning_megatron.strategy.loss.written import Join, Written, are_unlike, judge, was_seen
from lightning_megatron.strategy.options.options import Options
from lightning_megatron.strategy.step.engine import StepEngine
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, count_as_one_process, differences, trainer_for
from tests.strategy.loss_modules import (
    BATCH,
    REFUSED,
    SAMPLED,
    WEIGHED,
    WHOLE,
    Dropping,
    FirstTokens,
    Flat,
    Labelled,
    Late,
    LogsHits,
    LogsOthers,
    Noisy,
    PairsApart,
    SavesItself,
    SetByFirstBatch,
    Task,
    tokens,
)
from tests.strategy.test_step import CPU, ENGINES, engine_of, gradients, mesh, run  # noqa: F401  (a fixture)

BATCHES = [tokens(8), tokens(7, seed=1), tokens(8, seed=2)]


def _steps(module: Task, mesh: ParallelMesh, batches: list[Any], **options: Any) -> tuple[list[Any], Reading, int]:  # noqa: F811
    """What every step gives: loss, logs, the counter and the gradients; what was read; the most micro-batches."""
    engine = engine_of(module, mesh, **options)
    found = _found(engine, module, batches)
    cuts = [count for count, forward_only in engine.schedules if not forward_only]
    return found, engine._in_parts.cuts.trials.reading, max(cuts, default=0)


def _found(engine: StepEngine, module: Task, batches: list[Any]) -> list[Any]:
    """What every step gives: loss, logs, the counter, the buffers and the gradients."""
    found = []
    for batch in batches:
        output, outcome = run(engine, module, batch)
        logs = {key.name: float(row[0]) for key, row in zip(outcome.logs.keys, outcome.logs.rows, strict=True)}
        buffers = [buffer.clone() for buffer in module.buffers()]
        found.append([output["loss"].detach(), logs, getattr(module, "calls", 0), buffers, *gradients(module)])
    return found


def _cut_on_one_rank(module: Task, mesh: ParallelMesh, chunks: int, **options: Any) -> StepEngine:  # noqa: F811
    """The engine of a pipeline of one rank with several virtual stages: all of a pipeline but the other processes."""
    given = Options(pipeline_schedule="interleaved", virtual_pipeline_parallel_size=chunks, **options).engine()
    streams, partition = SegmentStreams(CPU, 0, 7), make_partition(module, given.make_schedule(1, 1, forward_only=True))
    presence = Presence.of_stage(module, partition, 0, {}, 0)
    stage = Stage(module, partition, presence, CPU, streams)
    engine = StepEngine(module, mesh, CPU, stage, presence, streams, TensorState(), given)
    ENGINES.append(engine)
    engine.model_gradients.prepare(
        {}, [torch.optim.SGD(module.parameters(), lr=0.1)], whole=False, reads_gradients=False
    )
    module.__dict__["log"] = lambda *args, **kwargs: engine.recording.recorder.log(*args, **kwargs)
    return engine


@pytest.mark.everyday(3)
@pytest.mark.parametrize(
    ("name", "choice", "size"),
    [
        *((name, "auto", 2) for name in WHOLE),
        *((name, True, 3) for name in ("counted", "conditioned", "flat")),
        *((name, "auto", 1) for name in ("alike", "by_class", "fifth")),
    ],
)
def test_layers_run_in_micro_batches_where_the_loss_is_one_of_the_batch(
    mesh: ParallelMesh,  # noqa: F811
    name: str,
    choice: bool | str,
    size: int,
) -> None:
    build: Any = {**WEIGHED, **WHOLE, "flat": Flat}[name]
    expected, _, _ = _steps(build(), mesh, BATCHES)
    module = build()
    engine = _cut_on_one_rank(module, mesh, 2, micro_batch_size=size, whole_batch_loss=choice)
    got = _found(engine, module, BATCHES)
    assert not list(differences("", got, expected, 1e-12))
    assert bool(engine._in_parts.around) is build.layers_run_apart


@pytest.mark.parametrize("name", [*WEIGHED, *WHOLE])
def test_a_step_in_micro_batches_is_that_of_the_whole_batch(mesh: ParallelMesh, name: str) -> None:  # noqa: F811
    build = {**WEIGHED, **WHOLE}[name]
    late = name == "late"
    batches = [tokens(8, padded_from=8), tokens(8, padded_from=8, seed=1), *BATCHES] if late else BATCHES
    expected, _, _ = _steps(build(), mesh, batches)
    got, reading, cuts = _steps(build(), mesh, batches, micro_batch_size=2)
    assert not list(differences("", got, expected, 1e-12))
    assert reading.whole is (name in WHOLE)
    assert cuts == (1 if name in WHOLE else 4), "micro-batches run where they may"


def test_a_weight_that_the_first_batch_sets_is_tried_as_it_is(mesh: ParallelMesh) -> None:  # noqa: F811
    expected, _, _ = _steps(SetByFirstBatch(), mesh, BATCHES)
    got, reading, cuts = _steps(SetByFirstBatch(), mesh, BATCHES, micro_batch_size=2)
    assert not list(differences("", got, expected, 1e-12))
    assert reading.writes == "centre" and cuts == 1


@pytest.mark.parametrize("ignored", [-100, -1])
def test_micro_batches_without_a_target_count_nothing(mesh: ParallelMesh, ignored: int) -> None:  # noqa: F811
    x, _ = tokens(8)
    targets = torch.tensor([3, 1, 2, 4, 5, ignored, 6, ignored])  # those that come last are tried, too
    first, second = Labelled(), Labelled()
    first.ignored = second.ignored = ignored
    batches = [(x, targets), (x.roll(1, 0), targets.roll(3))]
    expected, _, _ = _steps(first, mesh, batches)
    got, reading, cuts = _steps(second, mesh, batches, micro_batch_size=1)
    assert not list(differences("", got, expected, 1e-12))
    assert not reading.whole and cuts == 1, "a micro-batch that counts nothing would have gradients that are no numbers"


@pytest.mark.parametrize("build", [Dropping, Noisy])
def test_random_numbers_do_not_make_a_mean_look_like_something_else(mesh: ParallelMesh, build: type[Task]) -> None:  # noqa: F811
    _, reading, _ = _steps(build(), mesh, BATCHES, micro_batch_size=2)
    assert not reading.whole and reading.way is None


def test_a_trial_leaves_nothing_behind(mesh: ParallelMesh) -> None:  # noqa: F811
    found = []
    for choice in ("auto", False):
        module = Dropping()
        engine = engine_of(module, mesh, micro_batch_size=2, whole_batch_loss=choice)
        state = torch.get_rng_state()
        output, outcome = run(engine, module, BATCHES[0])
        assert torch.equal(torch.get_rng_state(), state)
        found.append([output["loss"].detach(), outcome.logs.rows, *gradients(module)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), "bit for bit as without it"


def test_false_takes_the_mean_and_true_keeps_the_batch(mesh: ParallelMesh) -> None:  # noqa: F811
    expected, _, _ = _steps(WHOLE["in_batch"](), mesh, BATCHES)
    apart, _, cuts = _steps(WHOLE["in_batch"](), mesh, BATCHES, micro_batch_size=2, whole_batch_loss=False)
    assert cuts == 4 and list(differences("", apart, expected, 1e-3))
    whole, _, cuts = _steps(WHOLE["in_batch"](), mesh, BATCHES, micro_batch_size=2, whole_batch_loss=True)
    assert cuts == 1 and not list(differences("", whole, expected, 1e-12))


def test_a_micro_batch_without_a_target_keeps_its_batch_whole(mesh: ParallelMesh) -> None:  # noqa: F811
    x, y = tokens(8, seed=3)
    y[2:4] = -100
    batches = [*BATCHES, (x, y)]
    expected, _, _ = _steps(Task(), mesh, batches)
    got, reading, _ = _steps(Task(), mesh, batches, micro_batch_size=2)
    assert not list(differences("", got, expected, 1e-12)) and not reading.whole


def test_an_error_after_a_wrong_cut_says_how_the_batch_was_cut(mesh: ParallelMesh) -> None:  # noqa: F811
    class Masked(Task):
        def loss(self, mask: Tensor, batch: Any) -> Tensor:
            return self.each(*batch)

    x, _ = tokens(8)
    with pytest.raises(ValueError, match="batch_size") as caught:
        _steps(Masked(), mesh, [(torch.ones(6, 6), (x, tokens(6)[1]))], micro_batch_size=2)
    assert "along dimension 0 of the tensors as long as its first one, 6" in "".join(caught.value.__notes__)


class Normed(Task):
    """Batch norm in the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.BatchNorm1d(6).double() for _ in range(4))


class Spectral(Task):
    """Each forward goes on with the estimate of the one before."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            spectral_norm(layer[0])  # type: ignore[index]


@pytest.mark.parametrize(("build", "cut"), [(Normed, 1), (Spectral, 4)])
def test_statistics_in_the_layers_are_those_of_the_batch(mesh: ParallelMesh, build: type[Task], cut: int) -> None:  # noqa: F811
    expected, _, _ = _steps(build(), mesh, BATCHES)
    got, _, cuts = _steps(build(), mesh, BATCHES, micro_batch_size=2)
    assert cuts == cut and not list(differences("", got, expected, 1e-12))


def test_statistics_over_micro_batches_are_said_once(mesh: ParallelMesh) -> None:  # noqa: F811
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(said_of_losses, "rank_zero_info", said.append)
        _steps(Normed(), mesh, BATCHES, micro_batch_size=2, whole_batch_loss=False)
    assert len(said) == 1 and "`layers.0` (BatchNorm1d)" in said[0]


def test_numbers_that_are_not_made_of_those_of_micro_batches_are_said_by_name_and_line(mesh: ParallelMesh) -> None:  # noqa: F811
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(said_of_losses, "rank_zero_warn", said.append)
        found, *_ = _steps(
            LogsOthers(), mesh, [tokens(8, seed=1), tokens(8, seed=2), tokens(8, seed=3)], micro_batch_size=2
        )
    assert len(said) == 2, said
    assert re.search(r"given as `ratio` \(\S+\.py:\d+\) for a batch is not made of", said[0]), said
    assert "step 2 logged `many` as the mean of its micro-batches" in said[1], said
    assert found[2][1]["many"] == float((tokens(8, seed=3)[0] > 8).sum())


class Masked(Task):
    """A mean over the tokens of a mask of floats."""

    def loss(self, x: Tensor, y: Tensor, kept: Tensor) -> Tensor:  # type: ignore[override]
        each = self.each(x, y, reduction="none").view_as(y)
        loss = (each * kept).sum() / kept.sum()
        self.log_dict({"perplexity": loss.exp(), "tokens": kept.sum()})
        return loss


def test_a_mean_over_a_mask_of_floats_runs_in_micro_batches_though_all_was_in_the_first_batches_mask(
    mesh: ParallelMesh,  # noqa: F811
) -> None:
    batches = []
    for seed in range(3):
        x, y = tokens(8, padded_from=8 if seed == 0 else 0, seed=seed)
        batches.append((x, y.clamp(min=1), (y != -100).double()))
    expected, _, _ = _steps(Masked(), mesh, batches)
    got, reading, cuts = _steps(Masked(), mesh, batches, micro_batch_size=2)
    assert reading.way == Counted(2, False, None) and cuts == 4
    assert not list(differences("", got, expected, 1e-12))


def _part(loss: float, **logs: float) -> TrialRun:
    return TrialRun(loss, torch.float64, {key: Logged(value, wide=True) for key, value in logs.items()})


def test_batches_of_unlike_numbers_of_tensors_are_weighed_by_what_all_have() -> None:
    rows = [torch.arange(length) for length in (3, 2, 4)]
    assert {way.place for way in candidates(rows)} == {0}
    assert candidates(rows, rows[:2], rows[2:]) == []


def test_pairs_of_micro_batches_with_as_many_positives_do_not_make_a_mean() -> None:
    alike = find([_part(2.0), _part(1.0)], _part(1.5), [2, 2], {})
    differs = find([_part(2.0, right=1.0), _part(1.0, right=2.0)], _part(1.25, right=3.0), [2, 2], {})
    found = alike.joined([differs])
    assert (
        alike.fits
        and not found.fits
        and Reading().after(found).within == {"right": "sum"}
        and found.numbers == (1.25, 1.5)
    )


def test_ways_of_weighing_are_told_apart_by_numbers() -> None:
    _, y = tokens(4, padded_from=1)
    way = Counted(0, False, -100)
    assert way in candidates(y)
    counts = {way: [5.0, 15.0]}
    for whole, fits in ((1.5, [None]), (1.25, [way]), (3.0, ["sum"]), (1.4, [])):
        assert list(find([_part(2.0), _part(1.0)], _part(whole), [2, 2], counts).fits) == fits
    equal = find([_part(2.0), _part(2.0)], _part(2.0), [2, 2], counts)
    assert not equal.tells and list(equal.fits) == [None, way]
    assert not find([_part(float("nan")), _part(2.0)], _part(float("nan")), [2, 2], counts).tells
    empty = find([_part(float("nan")), _part(2.0)], _part(2.0), [2, 2], {way: [0.0, 15.0]})
    assert not empty.tells and list(empty.fits) == [way], "a mean over samples would be no number"
    counts = {way: [0.0, 15.0, 5.0]}
    some = find([_part(float("nan")), _part(2.0), _part(1.0)], _part(1.75), [2, 2, 2], counts)
    assert some.tells and list(some.fits) == [way]
    assert not find([_part(float("nan")), _part(2.0), _part(1.0)], _part(1.5), [2, 2, 2], counts).fits


def test_what_a_part_lacks_and_the_whole_has_is_counted_in_no_known_way() -> None:
    parts = [_part(float("nan")), _part(2.0)]
    assert not find(parts, _part(2.0), [2, 2], {Counted(0, False, -100): [5.0, 15.0]}).fits


def test_a_way_that_fits_as_in_float32_does_not_where_all_is_computed_in_float64() -> None:
    for exact, off, fits in ((True, 1e-8, []), (False, 1e-8, [None]), (True, 1e-14, [None])):
        found = find([_part(2.0), _part(1.0)], _part(1.5 + off), [2, 2], {})
        found.settle("", exact=exact)
        assert list(found.fits) == fits
    opaque = find([_part(float("nan")), _part(2.0)], _part(float("nan")), [2, 2], {})
    opaque.settle("", exact=True)
    assert opaque.fits


def test_a_sum_that_one_part_alone_has_shown_is_tried_again_where_several_have_numbers(mesh: ParallelMesh) -> None:  # noqa: F811
    def batch(*hits: int) -> Any:
        x, y = tokens(8)
        return torch.cat((torch.tensor([[3 if row in hits else 1] for row in range(8)]), x[:, 1:]), 1), y

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(said_of_losses, "rank_zero_warn", said.append)
        batches = [batch(0), batch(5), batch(0, 2), batch(0, 2, 4)]
        found, reading, _ = _steps(LogsHits(), mesh, batches, micro_batch_size=2)
    assert [step[1]["hits"] for step in found] == [1, 1, 2, 3]
    assert [step[1]["score"] for step in found] == [0.5, 0.5, 1.0, 0.375], "the third is not yet known, the last a mean"
    assert reading.within["hits"] == "sum" and reading.within["score"] is None and not reading.slight
    assert "given as `score` (" in said[0] and "step 3 logged `score` as the sum of its micro-batches" in said[1], said
    assert len(said) == 2


def test_logged_values_combine_as_they_do_over_the_batch() -> None:
    parts = [_part(2.0, mean=1.0, sum=3.0, most=4.0, other=1.0), _part(1.0, mean=3.0, sum=5.0, most=2.0, other=2.0)]
    found = find(parts, _part(1.5, mean=2.0, sum=8.0, most=4.0, other=9.0), [2, 2], {})
    assert Reading().after(found).within == {"mean": Mean("weights"), "sum": "sum", "most": "max", "other": None}


@pytest.mark.parametrize(("dtype", "exact", "how"), [(torch.float32, False, ""), (torch.float64, True, "exp")])
def test_a_function_of_a_mean_that_rounding_hides_is_read_as_a_mean(dtype: torch.dtype, exact: bool, how: str) -> None:
    values = [math.exp(2.001), math.exp(2.0)]
    parts = [TrialRun(2.0 + n, dtype, {"ppl": Logged(value, wide=exact)}) for n, value in enumerate(values)]
    found = find(parts, TrialRun(2.5, dtype, {"ppl": Logged(math.exp(2.0005), wide=exact)}), [2, 2], {})
    found.settle("", exact=exact)
    assert Reading().after(found).within == {"ppl": Mean("weights", how)}


def test_a_value_that_some_parts_do_not_log_is_that_of_those_which_do_or_of_none() -> None:
    losses, way = [_part(2.0), _part(1.0)], Counted(0, False, 0)
    one, other = _part(2.0, seldom=3.0), _part(1.0, seldom=5.0)
    for parts, whole, how in (
        ([one, losses[1]], 4.0, None),
        ([one, other], 4.5, Mean(way)),
        ([_part(2.0, seldom=math.nan), other], 5.0, Mean(way)),
    ):
        counts = {way: [1.0, 3.0] if not math.isnan(parts[0].logs["seldom"].value) else [0.0, 3.0]}
        found = find(parts, _part(1.5, seldom=whole), [2, 2], counts)
        assert Reading().after(found).within == {"seldom": how}
    assert Reading().after(find([one, other], _part(1.5), [2, 2], {})).within == {"seldom": None}
    assert Reading().after(find([one, losses[1]], _part(1.5, seldom=3.0), [2, 2], {})).within == {}


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("exp", math.exp),
        ("root", math.sqrt),
        ("square", lambda x: x * x),
        ("inverse", lambda x: 1 / x),
        ("-decibels", lambda x: -10 * math.log10(x)),
        ("log2", math.log2),
    ],
)
def test_a_function_of_a_mean_over_targets_is_put_together(name: str, of: Callable[[float], float]) -> None:
    way, weights = Counted(0, False, -100), {"sizes": [2.0, 2.0], Counted(0, False, -100): [5.0, 15.0]}
    ways = fitting([of(2.0), of(1.0)], of(1.25), weights, 1e-9)
    assert likeliest(ways) == Mean(way, name)
    assert float(Mean(way, name)(torch.tensor([of(2.0), of(4.0)]), torch.tensor([1.0, 3.0]))) == pytest.approx(of(3.5))


def test_a_sum_of_which_one_part_has_all_is_no_mean_over_what_that_part_counts() -> None:
    ways = {"weights": [1.0, 1.0], "sizes": [1.0, 1.0], Counted(1, False, 0): [1.0, 0.0]}
    assert likeliest(fitting([1.0, 0.0], 1.0, ways, 1e-6)) == "sum"


def test_what_one_replica_rules_out_is_ruled_out() -> None:
    whole = find([_part(2.0), _part(1.0)], _part(9.0), [2, 2], {})
    mean = find([_part(2.0), _part(1.0)], _part(1.5), [2, 2], {})
    assert mean.joined([mean]).fits and not mean.joined([whole]).fits


def test_a_way_once_ruled_out_does_not_come_back() -> None:
    way = Counted(0, False, -100)
    both = find([_part(2.0), _part(1.0)], _part(1.5), [2, 2], {way: [4, 4]})
    reading = Reading().after(both)
    assert reading.way is None and list(reading.open()) == [way]
    later = reading.after(find([_part(2.0), _part(1.0)], _part(1.25), [2, 2], {way: [5, 15]}))
    assert later.way == way and not later.whole
    ruled_out = later.after(find([_part(2.0), _part(1.0)], _part(1.5), [2, 2], {way: [5, 15]}))
    assert ruled_out.whole
    equal = find([_part(2.0), _part(2.0)], _part(2.0), [2, 2], {})
    assert equal.fits and ruled_out.after(equal).whole


@pytest.mark.parametrize(("spacing", "fits"), [(2**-7, True), (0.0, False)])
def test_a_loss_in_bfloat16_is_a_mean_but_for_its_own_rounding(spacing: float, fits: bool) -> None:
    runs = [TrialRun(loss, torch.bfloat16, {}, spacing) for loss in (3.375, 3.375, 3.359375)]
    assert bool(find(runs[:2], runs[2], [2, 2], {}).fits) is fits


def test_what_a_step_writes_is_put_back_and_judged() -> None:
    class Meter:
        total = 0.0

        def __init__(self) -> None:
            self.best = 5.0

    class Writes(torch.nn.Module):
        seen = 0

        def __init__(self) -> None:
            super().__init__()
            self.meter, self.kept, self.table = Meter(), [], {"samples": 0}
            self.register_buffer("mean", torch.zeros(2))

        def step(self, x: Tensor) -> None:
            self.seen += 1
            self.table["samples"] += len(x)
            self.kept.append(x)
            self.mean += x.mean()
            self.meter.best = float(x.max())

    module, x = Writes(), torch.arange(5.0)
    traces, changes = Traces(module), []
    for part in (x[:2], x[2:], x):
        module.step(part)
        changes.append(traces.changes())
        traces.put_back()
    assert "seen" not in vars(module) and module.table == {"samples": 0} and module.kept == []
    assert not module.mean.any() and module.meter.best == 5.0
    kinds, writes, *_ = judge([Join(changes[:2], changes[2])])
    assert kinds == {("", "seen"): ("same",), ("table", "samples"): ("sum",)} and writes in ("meter.best", "mean")
    assert judge([Join([{}, {}], {})])[:3] == ({}, "", False)
    right = ("", "right")
    added = Join([{}, {right: (3, 5)}], {right: (3, 5)})
    alike = Join([{right: (3, 4)}, {right: (3, 4)}], {right: (3, 4)})
    mean = ("layers.0", "mean")
    unlike = Join([{mean: (0, 4)}, {mean: (0, 6)}], {mean: (0, 5)})
    assert judge([unlike], ["layers.0"])[1] == "" and judge([unlike], ["layers.0"], {mean})[1] == "layers.0.mean"
    assert judge([added]) == ({right: ("sum",)}, "", False, {right})
    weighed = Join([{mean: (0, 4.0)}, {mean: (0, 6.0)}], {mean: (0, 5.0)}, {"sizes": (2.0, 2.0)})
    assert judge([weighed], ["layers.0"], (), {mean})[:2] == ({mean: (("anew", "sizes"),)}, "")  # a hook reads it
    assert judge([unlike], ["layers.0"], (), {mean})[1] == "layers.0.mean"  # of integers there is no mean
    again = Join([{mean: (5, 4)}, {mean: (5, 6)}], {})  # the whole had left its mean before: no count that goes on
    assert judge([again], ["layers.0"])[0] == {}
    assert judge([alike]) == ({right: ("same",)}, "", False, set()) and judge([added, alike])[1] == "right"
    begun = Join([{right: (None, [1])}, {right: (None, [2])}], {right: (None, [1, 2])})  # a list where nothing was
    shut = Join([{right: ({1}, None)}, {right: ({1}, {1, 2})}], {right: ({1}, {1, 2})})
    assert judge([begun])[:2] == judge([shut])[:2] == ({}, "right")


def test_entries_that_parts_set_are_no_sums_until_two_of_them_add_to_one() -> None:
    sums, start = ("sums", None), [torch.zeros(2), torch.ones(2)]
    first = [{sums: (start, [torch.ones(2), start[1]])}, {sums: (start, [start[0], 2 * start[1]])}]
    apart = Join(first, {sums: (start, [torch.ones(2), 2 * start[1]])}, assigned={sums})
    assert judge([apart])[:2] == ({sums: ("set",)}, "sums")
    assert judge([apart], cut=False)[1] == "" and judge([Join(apart.parts, apart.whole)])[0] == {sums: ("sum",)}
    both = Join([first[0]] * 2, {sums: (start, [2 * torch.ones(2), start[1]])}, assigned={sums})
    assert judge([both])[0] == {sums: ("sum",)}


def test_rows_that_some_parts_append_are_one_entry_of_the_batch() -> None:
    kept, rows = ("kept", None), torch.arange(5.0)
    both = Join([{kept: ([], [rows[:2]])}, {kept: ([], [rows[2:]])}], {kept: ([], [rows])}, {"sizes": (3.0, 3.0)})
    alone = Join([{kept: ([], [rows[:2]])}, {}], {kept: ([], [rows[:2]])}, {"sizes": (3.0, 3.0)})
    empty = Join([{kept: ([], [rows[:0]])}] * 2, {kept: ([], [rows[:0]])})
    assert (
        judge([both]).kinds == judge([both, alone]).kinds == judge([alone, empty, both]).kinds == {kept: ("stacked",)}
    )
    assert was_seen([both], kept) == (True, False) and was_seen([alone], kept) == (False, True)
    pairs = [{kept: ([], [(rows[:size], rows[size])])} for size in (2, 3)]
    mixed = Join(pairs, {kept: ([], [(rows, rows[2])])}, {"sizes": (3.0, 3.0)})  # a number beside rows of any number
    assert judge([mixed]).kinds == {}
    assert entry_of_all([{"x": rows[:2]}, {"x": rows[2:]}], "stacked", [1, 1], [1, 1])["x"].equal(rows)


def test_a_number_that_one_part_changes_alone_adds_up_only_when_two_have_shown_it() -> None:
    written, hits, place = Written(), ("", "hits"), (Table("", {}, ("hits",), ()), "hits")
    alone = judge([Join([{hits: (0, 1)}, {}], {hits: (0, 1)})])
    assert alone.kinds == {hits: ("sum",)} and alone.whole == "" and alone.alone == {hits}
    assert written.note(alone) == ""
    written.learn(hits, ("sum",), place, None)
    assert written.note(judge([])) == ""  # a batch in which none has changed it shows nothing
    assert written.undecided == "hits" and written.note(alone) == ""
    once = judge([Join([{hits: (1, 2)}, {hits: (1, 2)}], {hits: (1, 2)})])
    assert written.note(once) == "hits" and written.undecided == ""
    assert written.note(judge([Join([{hits: (1, 2)}, {hits: (1, 3)}], {hits: (1, 4)})])) == ""
    lists = judge([Join([{hits: ([], [4])}, {}], {hits: ([], [4])})])
    assert lists.kinds[hits][0] == "each" and lists.alone == {hits}
    inside = judge([Join([{hits: (0, 1)}, {}], {hits: (0, 1)})], [""])
    assert inside.alone == set()  # what a layer writes, and nothing reads again


def test_what_micro_batches_leave_is_compared_where_it_is_small() -> None:
    assert not are_unlike([1, 1, 1]) and are_unlike([1, 2, 1]) and not are_unlike([True])
    assert are_unlike([torch.ones(2), torch.zeros(2)]) and not are_unlike([torch.ones(2), torch.ones(2)])
    assert not are_unlike([torch.zeros(2000), torch.ones(2000)]) and not are_unlike([[1], [2]])
    assert not LateAnswer(torch.tensor(False)) and LateAnswer(torch.tensor(True))


class Ways(Callback):
    """Notes in how many micro-batches the layers ran where the loss was one of the whole batch."""

    apart: tuple[int, ...] = ()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = getattr(trainer.strategy, "run", None)
        self.apart = tuple(run.engine._in_parts.around) if run is not None else ()


def trained(info: RankInfo, layout: Layout | None, name: str, arguments: Mapping[str, Any]) -> Any:
    """Losses, logged values, the counter and the weights of a run."""
    from lightning_megatron.strategy.strategy import MegatronStrategy
    from tests.strategy.habit_scenarios import Losses

    losses, ways = Losses(), Ways()
    trainer = trainer_for(info, layout, arguments, max_epochs=1, callbacks=[losses, ways])
    refused = {key: build for key, (build, _) in REFUSED.items()}
    single = {"logs_others": LogsOthers, "pairs_apart": PairsApart, "saves_itself": SavesItself}
    single |= {"first_tokens": FirstTokens}
    module = {**WEIGHED, **WHOLE, **refused, **single, **SAMPLED}[name]()
    trainer.fit(module)
    strategy = trainer.strategy
    weights = strategy.full_state_dict() if isinstance(strategy, MegatronStrategy) else module.state_dict()
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    whole = {key: value.clone() for key, value in weights.items()} if weights else {}
    return {
        "losses": losses.values,
        "logged": logged,
        "calls": float(getattr(module, "calls", 0)),
        "weights": whole,
        "apart": ways.apart,
    }


EVERYDAY = [
    ("logs", (2, 1), {}),
    ("padded", (2, 2), {}),
    ("alike", (2, 1), {}),
    ("fifth", (2, 1), {"micro_batch_size": 1}),
    ("in_batch", (2, 1), {}),
    ("conditioned", (2, 1), {"pipeline_schedule": "zb-v"}),
    ("between", (2, 1), {}),
    ("followed", (2, 1), {}),
    ("normed", (2, 1), {"activation_recompute": "full"}),
    ("warming", (2, 1), {"pipeline_schedule": "zb-v"}),
    ("counted", (2, 1), {"pipeline_schedule": "interleaved"}),
]
LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    ((2, 1), {}),
    ((4, 1), {}),
    ((2, 1), {"pipeline_schedule": "gpipe"}),
    ((2, 1), {"pipeline_schedule": "interleaved"}),
    ((2, 1), {"pipeline_schedule": "zb-h1"}),
    ((2, 1), {"pipeline_schedule": "zb-v"}),
    ((2, 1), {"activation_recompute": "full"}),
    ((2, 1), {"tensor_parallel_size": 2}),
    ((2, 1), {"whole_batch_loss": True, "micro_batch_size": 3}),
    ((1, 1), {}),
]
ROWS = [
    *((name, layout, arguments) for name in (*WEIGHED, *WHOLE) for layout, arguments in LAYOUTS),
    *(
        (name, (2, 1), {"tensor_parallel_size": 2, "sequence_parallel": True})
        for name in ("in_batch", "mixed", "focal")
    ),
]


def _check(name: str, layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(trained, None, name, {})
    devices = layout[0] * layout[1] * arguments.get("tensor_parallel_size", 1)
    first, *others = run_trainers(trained, layout, name, arguments, devices=devices)
    apart = [outcome.value["apart"] for outcome in (first, *others)]
    asked = arguments.get("whole_batch_loss") is True and name != "warming"  # a counter that the loss follows
    is_whole = name in WHOLE or asked
    runs_apart = is_whole and layout[0] > 1 and (WHOLE | WEIGHED)[name]().layers_run_apart
    assert all(bool(counts) is runs_apart for counts in apart), apart
    assert not list(differences("", first.value | {"apart": ()}, expected, 1e-9))
    for other in others:
        assert not list(differences("logged", other.value["logged"], expected["logged"], 1e-9))


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("name", "layout", "arguments"), EVERYDAY, ids=str)
def test_a_pipeline_trains_on_the_loss_of_the_whole_batch(name: str, layout: Layout, arguments: dict[str, Any]) -> None:
    _check(name, layout, arguments)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "layout", "arguments"), [row for row in ROWS if row not in EVERYDAY], ids=str)
def test_every_layout_trains_on_it(name: str, layout: Layout, arguments: dict[str, Any]) -> None:
    _check(name, layout, arguments)


@pytest.mark.parametrize("layout", [(2, 1), pytest.param((1, 1), marks=pytest.mark.wide)])
def test_pairs_that_no_two_neighbours_hold_train_as_in_one_process(layout: Layout) -> None:
    count_as_one_process(trained, "pairs_apart", layout, {"micro_batch_size": 2})


@pytest.mark.parametrize(
    "arguments",
    [
        {"micro_batch_size": 1},
        pytest.param({"micro_batch_size": 2}, marks=pytest.mark.wide),
        pytest.param({"micro_batch_size": 1, "pipeline_schedule": "zb-v"}, marks=pytest.mark.wide),
    ],
)
def test_layers_that_are_unlike_for_many_samples_train_as_in_one_process(arguments: Any) -> None:
    count_as_one_process(trained, "first_tokens", (2, 1), arguments)


def test_buffers_that_modules_put_into_their_state_are_those_of_their_stage() -> None:
    count_as_one_process(trained, "saves_itself", (2, 1), {})


@pytest.mark.wide
@pytest.mark.parametrize("layout", [(2, 1), (1, 1)])
def test_pairs_in_micro_batches_far_apart_train_as_in_one_process(layout: Layout) -> None:
    count_as_one_process(trained, "pairs_apart", layout, {"micro_batch_size": 1})


@pytest.mark.parametrize("name", ["vector", *(pytest.param(n, marks=pytest.mark.wide) for n in list(REFUSED)[1:])])
def test_what_one_process_refuses_is_refused_under_a_pipeline(name: str) -> None:
    for outcome in run_trainers(trained, (2, 1), name, {}, devices=2, check=False, grace=20.0):
        said = f"{outcome.error}{outcome.output}"
        assert outcome.error is not None and re.search(REFUSED[name][1], said), said


def test_padding_that_comes_late_was_not_there_before() -> None:
    _, first = tokens(2 * BATCH, padded_from=Late.padded_from)
    assert (first[:BATCH] != -100).all() and (first[BATCH:] == -100).any()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("The size of tensor a (4) must match the size of tensor b (6) at dimension 1"), True),
        (IndexError("index 5 is out of bounds for dimension 0 with size 2"), True),
        (ValueError("Expected input batch_size (4) to match target batch_size (32)."), True),
        (RuntimeError("CUDA driver initialization failed"), False),
        (ValueError("the tokenizer has no padding token"), False),
        (RuntimeError("Internal: no such attribute\n  x.view(batch, size)"), False),
    ],
)
@pytest.mark.parametrize("batch", [(torch.ones(8, 2), torch.ones(8)), (torch.ones(6, 6), torch.ones(8))])
def test_only_an_error_about_sizes_is_told_how_the_batch_was_cut(error: Exception, told: bool, batch: Any) -> None:
    with pytest.raises(type(error)) as caught:
        raise type(error)(*error.args)
    say_how_cut(caught.value, batch, 4)
    assert bool(getattr(caught.value, "__notes__", [])) == told
