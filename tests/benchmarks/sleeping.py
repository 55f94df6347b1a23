"""Schedules on stages that sleep: real processes, real messages, and time that two cores are enough for.

A layer sleeps in forward, in the input half of its backward and in the weight half, so eight stages show their bubbles
on a laptop. Measured against the simulator, and against the classes of ``torch.distributed.pipelining`` on the same
layers, by ``python -m tests.benchmarks.schedules``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.pipeline.schedule import Schedule, make_schedule
from lightning_megatron.pipeline.timeline import Costs, simulate
from tests.harness import RankInfo, ReusedProcesses

WIDTH = 8
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


@dataclass(frozen=True)
class Sleeps:
    """A run; times in seconds per whole stage, which has two layers.

    Attributes:
        stages: ranks.
        micro_batches: per step.
        forward: of a stage.
        backward_input: of a stage.
        backward_weight: of a stage.
        steps: measured after one that is not.
    """

    stages: int = 8
    micro_batches: int = 16
    forward: float = 0.04
    backward_input: float = 0.04
    backward_weight: float = 0.04
    steps: int = 3


class Sleep(torch.autograd.Function):
    """Identity that takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None, None


class _Nap:
    """A gradient hook that sleeps. It passes for one of the package's own: a user's runs once per batch."""

    __module__ = "lightning_megatron.data_parallel"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, _: Tensor) -> None:
        time.sleep(self.seconds)


class SleepingLayer(nn.Module):
    """Half a stage; ``[batch, WIDTH]`` to the same.

    Args:
        sleeps: times.
        ours: whether the weight half sleeps in a hook such as this package has itself, or in one that torch's split
            backward calls.
    """

    def __init__(self, sleeps: Sleeps, ours: bool) -> None:
        super().__init__()
        self.sleeps = sleeps
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        nap = _Nap(sleeps.backward_weight / 2)
        if ours:
            self.linear.weight.register_post_accumulate_grad_hook(nap)
        else:
            self.linear.weight.register_hook(nap)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Sleep.apply(x, self.sleeps.forward / 2, self.sleeps.backward_input / 2))


class Sleeper(LightningModule):
    """Two sleeping layers per stage, behind a shift so that the first has a gradient to pass on too."""

    def __init__(self, sleeps: Sleeps, ours: bool = True) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList([SleepingLayer(sleeps, ours) for _ in range(2 * sleeps.stages)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch + self.shift
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Piece(nn.Module):
    """A virtual stage, cut by hand."""

    def __init__(self, whole: Sleeper, piece: int, pieces: int) -> None:
        super().__init__()
        size = len(whole.layers) // pieces
        self.layers = nn.ModuleList(list(whole.layers)[piece * size : (piece + 1) * size])
        self.shift = whole.shift if piece == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.shift is None else x + self.shift
        for layer in self.layers:
            x = layer(x)
        return x


class Watch(Callback):
    """Wall time of each step but the first, and the makespan that the strategy recorded."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.makespans: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        distributed.barrier()
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        distributed.barrier()
        if batch_idx:
            self.seconds.append(time.perf_counter() - self.begin)
            timeline = trainer.strategy.measured_timeline()  # type: ignore[attr-defined]
            self.makespans.append(timeline.makespan)


def ours(info: RankInfo, schedule: str, sleeps: Sleeps) -> tuple[list[float], list[float]]:
    """Steps of a whole Trainer: wall times, and measured makespans."""
    watch = Watch()
    strategy = MegatronStrategy(
        pipeline_parallel_size=sleeps.stages,
        micro_batch_size=1,
        pipeline_schedule=schedule,
        pipeline_split=[2 * sleeps.stages // pieces(schedule, sleeps)] * pieces(schedule, sleeps),
        record_timeline=True,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=info.world_size,
        strategy=strategy,
        plugins=[ReusedProcesses(info)],
        max_steps=1 + sleeps.steps,
        logger=False,
        callbacks=[watch],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=info.directory,
    )
    torch.manual_seed(0)
    batches: Any = DataLoader(_batches(sleeps), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Sleeper(sleeps), train_dataloaders=batches)
    return watch.seconds, watch.makespans


def theirs(info: RankInfo, schedule: str, sleeps: Sleeps) -> list[float]:
    """Wall times of steps of torch's class for the same schedule, in a bare loop."""
    address = f"tcp://127.0.0.1:{info.port}"
    distributed.init_process_group("gloo", init_method=address, rank=info.rank, world_size=info.world_size)
    torch.manual_seed(0)
    whole, plan = Sleeper(sleeps, ours=False), shape_of(schedule, sleeps)
    indices = [plan.virtual_stage(info.rank, chunk) for chunk in range(plan.chunks)]
    stages = [
        pipelining.PipelineStage(
            Piece(whole, index, plan.virtual_stages), index, plan.virtual_stages, torch.device("cpu")
        )
        for index in indices
    ]
    make: Callable[..., Any] = getattr(pipelining, PEERS[schedule])
    runner = make(stages if plan.chunks > 1 else stages[0], sleeps.micro_batches, loss_fn=_square)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=1e-3)
    has_loss, seconds = plan.virtual_stages - 1 in indices, []
    for index, batch in enumerate(_batches(sleeps)):
        distributed.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs = (batch,) if 0 in indices else ()
        runner.step(*inputs, **({"target": batch, "losses": losses} if has_loss else {}), return_outputs=False)
        optimizer.step()
        distributed.barrier()
        if index:
            seconds.append(time.perf_counter() - begin)
    return seconds


def _square(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def _batches(sleeps: Sleeps) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(1 + sleeps.steps, sleeps.micro_batches, WIDTH, generator=generator))


def shape_of(schedule: str, sleeps: Sleeps) -> Schedule:
    """The schedule of one step."""
    return make_schedule(schedule, sleeps.stages, sleeps.micro_batches)


def pieces(schedule: str, sleeps: Sleeps) -> int:
    """Virtual stages of a schedule."""
    return shape_of(schedule, sleeps).virtual_stages


def simulated(schedule: str, sleeps: Sleeps) -> float:
    """Makespan by the simulator, with free messages."""
    plan = shape_of(schedule, sleeps)
    times = (sleeps.forward, sleeps.backward_input, sleeps.backward_weight)
    costs = Costs.uniform(plan.virtual_stages, *(seconds / plan.chunks for seconds in times))
    return float(simulate(plan, costs).makespan)
