"""A small GPT through any schedule: by this package in a whole Trainer, and by torch's class in a bare loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from lightning_megatron import MegatronStrategy
from lightning_megatron.pipeline.schedule import make_schedule
from tests.benchmarks.contestants import WARM_UP, Clock, Round, alternate, ensure_group, trainer_round
from tests.benchmarks.model import GPT, Size, make_batches, optimizer_of, token_loss
from tests.harness import RankInfo

PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
SINGLE = ("gpipe", "1f1b")


class Piece(nn.Module):
    """A virtual stage, cut by hand; tokens or hidden states to hidden states or logits."""

    def __init__(self, whole: GPT, piece: int, pieces: int) -> None:
        super().__init__()
        size = len(whole.layers) // pieces
        self.first, self.last = piece == 0, piece == pieces - 1
        if self.first:
            self.embed, self.positions = whole.embed, whole.positions
        self.layers = nn.ModuleList(list(whole.layers)[piece * size : (piece + 1) * size])
        if self.last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embed(x) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.last else x


def ours(info: RankInfo, name: str, size: Size, steps: int) -> Round:
    """This package in a Trainer, a stage per rank."""
    pieces = make_schedule(name, info.world_size, size.micro_batches).virtual_stages
    strategy = MegatronStrategy(
        pipeline_parallel_size=info.world_size,
        micro_batch_size=size.micro_batch,
        pipeline_schedule=name,
        pipeline_split=[size.layers // pieces] * pieces,
    )
    return trainer_round(info, size, steps, strategy, size.batch)


def theirs(info: RankInfo, name: str, size: Size, steps: int) -> Round:
    """torch's class in a bare loop."""
    ensure_group(info)
    torch.manual_seed(0)
    whole, plan = GPT(size), make_schedule(name, info.world_size, size.micro_batches)
    indices = [plan.virtual_stage(info.rank, chunk) for chunk in range(plan.chunks)]
    stages = [
        pipelining.PipelineStage(
            Piece(whole, index, plan.virtual_stages), index, plan.virtual_stages, torch.device("cpu")
        )
        for index in indices
    ]
    make: Any = getattr(pipelining, PEERS[name])
    runner = make(stages[0] if name in SINGLE else stages, size.micro_batches, loss_fn=token_loss)
    optimizer = optimizer_of(nn.ModuleList([stage.submod for stage in stages]))
    losses: list[Tensor] = []
    clock = Clock()
    for index, (tokens, targets) in enumerate(make_batches(size, WARM_UP + steps, size.batch)):
        if index == WARM_UP:
            clock = Clock()
        optimizer.zero_grad()
        losses = []
        inputs = (tokens,) if 0 in indices else ()
        loss = {"target": targets, "losses": losses} if plan.virtual_stages - 1 in indices else {}
        runner.step(*inputs, **loss, return_outputs=False)
        optimizer.step()
    times = clock.per_step(steps)
    return Round(*times, float(torch.stack(losses).detach().mean()) if losses else float("nan"))


def duel(info: RankInfo, name: str, size: Size, steps: int, rounds: int) -> list[tuple[Round, Round]]:
    """Alternates the two contestants."""
    return alternate(lambda: ours(info, name, size, steps), lambda: theirs(info, name, size, steps), rounds)
