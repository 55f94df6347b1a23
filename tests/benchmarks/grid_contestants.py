"""Both sides of the duel on two stages of two tensor-parallel ranks each.

The peer is what torch offers for it: ``Schedule1F1B`` over stages cut by hand, each split by ``parallelize_module``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from lightning_megatron import MegatronStrategy
from tests.benchmarks.contestants import WARM_UP, Clock, Round, alternate, ensure_group, trainer_round
from tests.benchmarks.model import Size, make_batches, optimizer_of, token_loss
from tests.benchmarks.split_model import SplittableGPT, SplittableTask, plain_plans
from tests.harness import RankInfo


class Half(nn.Module):
    """One of two stages; tokens or hidden states to hidden states or logits."""

    def __init__(self, whole: SplittableGPT, first: bool) -> None:
        super().__init__()
        middle = len(whole.layers) // 2
        layers = list(whole.layers)
        self.layers = nn.ModuleList(layers[:middle] if first else layers[middle:])
        self.embed = whole.embed if first else None
        self.norm, self.head = (None, None) if first else (whole.norm, whole.head)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def ours(info: RankInfo, size: Size, steps: int) -> Round:
    """This package, the module unchanged."""
    strategy = MegatronStrategy(
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        micro_batch_size=size.micro_batch,
        pipeline_split=[size.layers // 2] * 2,
    )
    return trainer_round(info, size, steps, strategy, size.batch, SplittableTask)


def theirs(info: RankInfo, size: Size, steps: int) -> Round:
    """torch's 1F1B over DTensors, in a bare loop."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    torch.manual_seed(0)
    which = mesh["pipeline"].get_local_rank()
    module = Half(SplittableGPT(size), which == 0)
    ends, layer = plain_plans()
    for block in module.layers:
        parallelize_module(block, mesh["tensor"], layer)
    here = {name: style for name, style in ends.items() if getattr(module, name) is not None}
    parallelize_module(module, mesh["tensor"], here)
    stage = PipelineStage(module, which, 2, torch.device("cpu"), group=mesh["pipeline"].get_group())
    schedule = Schedule1F1B(stage, size.micro_batches, loss_fn=token_loss)
    optimizer, clock = optimizer_of(module), Clock()
    losses: list[Any] = []
    for index, (tokens, targets) in enumerate(make_batches(size, WARM_UP + steps, size.batch)):
        if index == WARM_UP:
            clock = Clock()
        optimizer.zero_grad()
        losses = []
        with loss_parallel():
            if which == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=targets, losses=losses, return_outputs=False)
        optimizer.step()
    times = clock.per_step(steps)
    whole = [loss.detach().full_tensor() for loss in losses]
    return Round(*times, float(torch.stack(whole).mean()) if whole else float("nan"))


def duel(info: RankInfo, size: Size, steps: int, rounds: int) -> list[tuple[Round, Round]]:
    """Alternates the two contestants."""
    ensure_group(info)
    return alternate(lambda: ours(info, size, steps), lambda: theirs(info, size, steps), rounds)
