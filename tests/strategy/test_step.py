"""The two ways of running a batch, on one rank in this very process: what each gives Lightning, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.layout import resolve_layout
from lightning_megatron.mesh.mesh import ParallelMesh, build_mesh
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.run.executor import PipelineExecutor
from lightning_megatron.pipeline.run.finality import WholeFinality
from lightning_megatron.pipeline.run.links import StageLinks
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep
from lightning_megatron.pipeline.stage.uncut import UncutModule
from lightning_megatron.strategy.options.options import Options
from lightning_megatron.strategy.step.among_stages import OneStage
from lightning_megatron.strategy.step.engine import StepEngine
from lightning_megatron.strategy.step.loss_checks import LossChecks
from lightning_megatron.strategy.step.plain_step import PlainStep
from lightning_megatron.strategy.step.scheduled_step import ScheduledStep
from lightning_megatron.strategy.step.step import Accumulation

CPU = torch.device("cpu")
ENGINES: list[StepEngine] = []  # of the test that runs: what they have replaced is given back when it ends


@pytest.fixture
def mesh() -> Iterator[ParallelMesh]:
    """A world of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield build_mesh(resolve_layout(1), "cpu")
    while ENGINES:
        ENGINES.pop().close()
    distributed.destroy_process_group()


class Net(LightningModule):
    """Layers with dropout, or none; logs, appends, and writes down in which order it is called."""

    def __init__(self, *, drop: float = 0.0, trunk: bool = True, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(drop)) for _ in range(3)]
        self.first, self.rest = (None, nn.ModuleList(layers)) if trunk else (layers[0], None)
        self.recompute = recompute
        self.order: list[str] = []
        self.seen: list[float] = []
        self.masks: list[Tensor] = []
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in [self.first] if self.rest is None else self.rest:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x

    def training_step(self, batch: Tensor) -> Any:
        self.order.append(f"F{int(batch[0, 0])}")
        y = self(batch)
        self.masks += [(y != 0).detach()]
        y.register_hook(lambda grad: self.order.append(f"B{int(batch[0, 0])}"))
        loss = y.square().mean()
        self.log("loss", loss)
        self.seen.append(loss.detach())
        return {"loss": loss, "rows": batch[:, 0]}


def engine_of(module: LightningModule, mesh: ParallelMesh, **options: Any) -> StepEngine:
    """The engine as a run would have it, with gradients set up."""
    presence, streams = Presence.uncut(module, {}), SegmentStreams(CPU, 0, 7)
    engine = StepEngine(module, mesh, CPU, None, presence, streams, TensorState(), Options(**options).engine())
    ENGINES.append(engine)
    if engine.sums_gradients:
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
        engine.model_gradients.prepare({}, optimizers, whole=False, reads_gradients=False)
    module.__dict__["log"] = lambda *args, **kwargs: engine.recording.recorder.log(*args, **kwargs)
    return engine


def rows(count: int) -> Tensor:
    """A batch whose row i begins with i."""
    batch = torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batch[:, 0] = torch.arange(count)
    return batch


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def run(engine: StepEngine, module: Any, batch: Tensor, window: Accumulation | None = None) -> tuple[Any, Any]:
    """What Lightning does with a step; its output and outcome."""
    window = window or Accumulation()
    step = engine.step(batch)
    output = step.forward(module.training_step, batch, window)
    early = step.finish()
    module.zero_grad()
    step.backward(output["loss"], Tensor.backward, window)
    late = step.finish()
    assert (early is None) != (late is None), "the outcome comes once"
    assert step.finish() is None
    return output, early or late


@pytest.mark.parametrize(
    ("options", "automatic", "size", "kind"),
    [
        ({}, True, 8, PlainStep),
        ({"micro_batch_size": 2}, True, 2, PlainStep),
        ({"micro_batch_size": 2}, True, 3, ScheduledStep),
        ({"micro_batch_size": 2}, False, 8, PlainStep),
    ],
)
def test_a_batch_of_several_micro_batches_takes_the_schedule(
    mesh: ParallelMesh, options: dict[str, Any], automatic: bool, size: int, kind: type
) -> None:
    module = Net()
    module.automatic_optimization = automatic
    assert type(engine_of(module, mesh, **options).step(rows(size))) is kind


@pytest.mark.parametrize("size", [8, 7])
def test_both_ways_give_the_gradients_losses_and_logs_of_the_whole_batch(mesh: ParallelMesh, size: int) -> None:
    found = []
    for options in ({}, {"micro_batch_size": 3}):
        module = Net()
        output, outcome = run(engine_of(module, mesh, **options), module, rows(size))
        assert [key.name for key in outcome.logs.keys] == ["loss"]
        found.append((output["loss"].detach(), output["rows"], outcome.logs.rows[0, 0], *gradients(module)))
        assert len(module.seen) == 1, "lists that a step appends to get an entry per batch"
        found[-1] += (module.seen[0],)
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


def test_one_stage_runs_its_micro_batches_one_at_a_time(mesh: ParallelMesh) -> None:
    module = Net()
    options = {"micro_batch_size": 2, "pipeline_schedule": "gpipe", "whole_batch_loss": False}
    run(engine_of(module, mesh, **options), module, rows(6))  # its list would get what is of the whole batch
    assert module.order == ["F0", "B0", "F2", "B2", "F4", "B4"]


def test_gradients_of_several_batches_add_up_to_their_mean(mesh: ParallelMesh) -> None:
    expected, module = Net(), Net()
    expected.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    whole = rows(8)
    for part in (whole[:4], whole[4:]):
        (expected.training_step(part)["loss"] / 2).backward()
    engine = engine_of(module, mesh, micro_batch_size=2)
    run(engine, module, whole[:4], Accumulation(2, first=True, last=False, scale=8.0))
    step = engine.step(whole[4:])
    output = step.forward(module.training_step, whole[4:], Accumulation(2, first=False, last=True, scale=8.0))
    assert not gradients(module), "out of sight, so that `zero_grad` before the backward cannot wipe them"
    step.backward(output["loss"], Tensor.backward, Accumulation())
    for found, wanted in zip(gradients(module), gradients(expected), strict=True):
        torch.testing.assert_close(found, 8 * wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("trunk", [True, False])
def test_every_micro_batch_of_every_step_draws_numbers_of_its_own(mesh: ParallelMesh, trunk: bool) -> None:
    module = Net(drop=0.5, trunk=trunk)
    options = {"micro_batch_size": 8, "whole_batch_loss": False}  # its list would get what is of the whole batch
    engine, state = engine_of(module, mesh, **options), torch.get_rng_state()
    for _ in range(2):
        run(engine, module, rows(16))
    assert torch.equal(torch.get_rng_state(), state), "the global stream is that of one process"
    pairs = [(i, j) for i in range(4) for j in range(i)]
    assert not any(torch.equal(module.masks[i], module.masks[j]) for i, j in pairs)
    again = Net(drop=0.5, trunk=trunk)
    run(engine_of(again, mesh, **options), again, rows(16))
    assert all(torch.equal(one, other) for one, other in zip(again.masks, module.masks, strict=False))


def test_recomputed_layers_of_one_stage_draw_what_they_drew(mesh: ParallelMesh) -> None:
    found = []
    for recompute in (False, True):
        module = Net(drop=0.5, recompute=recompute)
        run(engine_of(module, mesh, micro_batch_size=2), module, rows(4))
        found.append(gradients(module))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2}])
def test_a_loss_without_a_graph_fails_as_in_one_process(mesh: ParallelMesh, options: dict[str, Any]) -> None:
    module = Net()
    engine = engine_of(module, mesh, **options)
    call: Callable[[Tensor], Any] = lambda batch: {"loss": module.training_step(batch)["loss"].detach()}  # noqa: E731
    with pytest.raises(RuntimeError, match="does not require grad"):
        step = engine.step(rows(4))
        output = step.forward(call, rows(4), Accumulation())
        step.backward(output["loss"], Tensor.backward, Accumulation())


def test_the_outcome_of_a_plain_step_comes_at_once_where_no_backward_will_follow(mesh: ParallelMesh) -> None:
    module = Net()
    step = engine_of(module, mesh).step(rows(4))
    assert step.forward(lambda batch: None, rows(4), Accumulation()) is None
    assert step.finish() is not None and step.finish() is None
    module.automatic_optimization = False
    step.forward(module.training_step, rows(4), Accumulation())
    outcome = step.finish()
    assert outcome is not None and [key.name for key in outcome.logs.keys] == ["loss"]


def test_evaluation_of_one_stage_takes_the_batch_whole(mesh: ParallelMesh) -> None:
    module = Net()
    outcome = engine_of(module, mesh, micro_batch_size=2).evaluate(module.training_step, rows(6), "validation_step")
    assert module.order == ["F0"] and outcome.loss is None and len(outcome.output["rows"]) == 6


def test_only_the_last_backward_is_announced_as_final(mesh: ParallelMesh) -> None:
    module, told = Net(), []

    class Sink:
        def set_final(self, final: Any) -> None:
            told.append((final, list(module.order)))

    module.__dict__["log"] = lambda *_, **__: None
    whole = UncutModule(module, SegmentStreams(CPU, 0, 7))
    executor = PipelineExecutor(whole, StageLinks(mesh.group("pipeline_parallel"), [0], CPU), WholeFinality())
    schedule = OneStage(module, mesh, CPU, SegmentStreams(CPU, 0, 7)).schedule(3, forward_only=False)
    parts = rows(6).split(2)
    step = PipelineStep(schedule, lambda part, _: module.training_step(part), parts, "training_step", [1.0] * 3, Sink())
    executor.run(step)
    before = ["F0", "B0", "F2", "B2", "F4"]
    assert told == [(True, before), (False, [*before, "B4"])]
    assert sorted(step.outputs) == [0, 1, 2] and not step.outputs[0]["loss"].requires_grad
    assert not executor.runs, "nothing of the step is kept"
    whole.close()


def test_the_first_micro_batch_that_is_not_finite_is_remembered_until_asked_for() -> None:
    checks, (good, bad) = LossChecks(True, None), torch.tensor([1.0, float("nan")])
    checks.note([good, bad, bad])
    checks.note([bad, good])
    assert checks.take_bad() == 1 and checks.take_bad() is None
    silent = LossChecks(False, None)
    silent.note([bad])
    assert silent.take_bad() is None
