"""A small GPT through any schedule: by this package in a whole Trainer, and by torch's class in a bare loop, or in a
Trainer too, as a module that optimizes by hand.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
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


class HandCut:
    """torch's class for a schedule, over this rank's hand-cut stages."""

    def __init__(self, info: RankInfo, name: str, size: Size) -> None:
        ensure_group(info)
        torch.manual_seed(0)
        whole, plan = GPT(size), make_schedule(name, info.world_size, size.micro_batches)
        count, indices = plan.virtual_stages, [plan.virtual_stage(info.rank, chunk) for chunk in range(plan.chunks)]
        self.pieces = nn.ModuleList([Piece(whole, index, count) for index in indices])
        stages = [
            pipelining.PipelineStage(piece, index, count, torch.device("cpu"))
            for piece, index in zip(self.pieces, indices, strict=True)
        ]
        make: Any = getattr(pipelining, PEERS[name])
        self._runner = make(stages[0] if name in SINGLE else stages, size.micro_batches, loss_fn=token_loss)
        self._first, self._last = 0 in indices, count - 1 in indices

    def step(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Forward and backward of a batch; the losses of its micro-batches, on the rank that has them."""
        losses: list[Tensor] = []
        inputs = (tokens,) if self._first else ()
        loss = {"target": targets, "losses": losses} if self._last else {}
        self._runner.step(*inputs, **loss, return_outputs=False)
        return losses


def theirs(info: RankInfo, name: str, size: Size, steps: int) -> Round:
    """torch's class in a bare loop."""
    cut = HandCut(info, name, size)
    optimizer = optimizer_of(cut.pieces)
    losses: list[Tensor] = []
    clock = Clock()
    for index, (tokens, targets) in enumerate(make_batches(size, WARM_UP + steps, size.batch)):
        if index == WARM_UP:
            clock = Clock()
        optimizer.zero_grad()
        losses = cut.step(tokens, targets)
        optimizer.step()
    times = clock.per_step(steps)
    return Round(*times, float(torch.stack(losses).detach().mean()) if losses else float("nan"))


class HandCutTask(LightningModule):
    """A Lightning module around torch's class; rank by rank, as Lightning knows of one process only."""

    def __init__(self, cut: HandCut) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.pieces, self._cut = cut.pieces, cut

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        losses = self._cut.step(*batch)
        self.log("train_loss", torch.stack(losses).detach().mean() if losses else float("nan"))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


def theirs_in_trainer(info: RankInfo, name: str, size: Size, steps: int) -> Round:
    """torch's class in a Trainer that logs the loss, as ours does."""
    cut = HandCut(info, name, size)
    return trainer_round(
        info, size, steps, SingleDeviceStrategy("cpu"), size.batch, lambda _: HandCutTask(cut), devices=1
    )


def duel(
    info: RankInfo, name: str, size: Size, steps: int, rounds: int, *, trainer: bool = False
) -> list[tuple[Round, Round]]:
    """Alternates the two contestants."""
    other = theirs_in_trainer if trainer else theirs
    return alternate(lambda: ours(info, name, size, steps), lambda: other(info, name, size, steps), rounds)
