"""Modules that a layout refuses, each beside what the message tells its author to write instead."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer

WIDTH, WORDS, TOKENS, BATCH, STEPS = 8, 20, 4, 4, 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Task(LightningModule):
    """Four layers between an embedding and a head; what all remedies come down to."""

    layer: type[nn.Module] = Mlp

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(self.layer() for _ in range(4))
        self.double()

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = layer(x)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.call(layer, x)
        logits: Tensor = self.head(x)
        return logits

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        words = torch.randint(0, WORDS, (BATCH * STEPS, TOKENS + 1), generator=torch.Generator().manual_seed(5))
        rows = TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())
        options = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        own = BATCH // options["num_replicas"]
        chosen = [at for at in range(len(rows)) if at % BATCH // own == options["rank"]]
        return DataLoader(Subset(rows, chosen), batch_size=own)


class TwiceLater(Task):
    first = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + (self.loss(batch) if batch_idx in {*range(self.first, 99)} else 0.0)


class TwiceAlways(TwiceLater):
    first = 0


class Keeping(Mlp):
    """Keeps a number for the step's loss, from some step on; before, nothing or a zero."""

    begins, zero = 1, False
    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.step >= self.begins:
            self.kept = out.square().mean()
        elif self.zero:
            self.kept = out.new_zeros(())
        return out


class KeepsLater(Task):
    layer = Keeping
    begins, zero = 1, False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for layer in self.layers:
            layer.step, layer.begins, layer.zero = batch_idx, self.begins, self.zero
        loss = self.loss(batch)
        return loss + sum(layer.kept for layer in self.layers) if batch_idx >= self.begins else loss


class KeepsZero(KeepsLater):
    zero = True


class KeepsAlways(KeepsLater):
    begins = 0


class Reentrant(Task):
    reentrant = True

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=self.reentrant)
        return out


class NotReentrant(Reentrant):
    reentrant = False


class SharedCheckpoint(Task):
    """One checkpoint around all of the model."""

    def loss(self, batch: Any) -> Tensor:
        logits = checkpoint(self, batch[0], use_reentrant=False)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class GradientOfInput(Task):
    """Penalises the gradient by a value from before the layers; or, told otherwise, from behind them."""

    early = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = before = self.embed(batch[0])
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())
        (gradient,) = torch.autograd.grad(loss, before if self.early else x, create_graph=True)
        return loss + gradient.square().sum()


class GradientOfLast(GradientOfInput):
    early = False


class CallsOutside(Task):
    """Calls the model in a hook, with gradients; before any step has run."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])


class CallsWithout(Task):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self(batch[0])


class LossPerSample(Task):
    """A loss per sample: of one number where a micro-batch is one sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        each = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="none")
        loss = each.view_as(batch[1]).mean(1)
        self.log("loss", loss)
        return loss


class CutsByContent(Task):
    """Computes on as many tokens as its data says."""

    def loss(self, batch: Any) -> Tensor:
        count = int(batch[0][:, 0].max()) % 3 + 2
        return super().loss((batch[0][:, :count], batch[1][:, :count]))


class LogsAcross(Task):
    def on_train_batch_end(self, *args: Any) -> None:
        self.log("norm", self.layers[0].up.weight.norm() + self.layers[3].up.weight.norm())


class LogsEach(Task):
    def on_train_batch_end(self, *args: Any) -> None:
        for index in (0, 3):
            self.log(f"norm {index}", self.layers[index].up.weight.norm())


class BackwardInHook(Task):
    def on_after_backward(self) -> None:
        (0.01 * self.layers[0].up.weight.square().sum()).backward()


class PenaltyBetween(Task):
    """Adds a penalty of what each layer gives, between the layers."""

    def loss(self, batch: Any) -> Tensor:
        x, penalty = self.embed(batch[0]), 0.0
        for layer in self.layers:
            x = layer(x)
            penalty = penalty + x.square().mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten()) + 0.1 * penalty


class Penalised(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.penalty = x.square().mean()
        return x


class PenaltyKept(Task):
    layer = Penalised

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * sum(layer.penalty for layer in self.layers)


class TermInStep(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 0.01 * self.layers[0].up.weight.square().sum()


class InPlaceOnView(Task):
    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        logits[..., :3].mul_(0.5)
        return logits


class ByIndex(Task):
    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        logits[..., :3] = logits[..., :3] * 0.5
        return logits


class Mixer(nn.Module):
    """One fused projection, cut in three; weighted by as many numbers as the whole has, or not."""

    whole = False

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fused(x).chunk(3, -1)
        mixed = torch.sigmoid(q) * torch.tanh(k) + v
        return x + self.out(mixed * torch.linspace(0.5, 1.5, WIDTH, dtype=mixed.dtype) if self.whole else mixed)


class WholeMixer(Mixer):
    whole = True


class Fused(Task):
    layer = Mixer


class FusedWhole(Task):
    layer = WholeMixer


def fit(info: RankInfo, build: type[Task], arguments: dict[str, Any] | None) -> dict[str, Tensor]:
    """Fits a task; the whole model's weights on global rank 0. ``None``: without this strategy."""
    strategy = "auto" if arguments is None else MegatronStrategy(**arguments)
    trainer = make_trainer(info, strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module := build())
    return module.state_dict() if arguments is None else trainer.strategy.full_state_dict()
