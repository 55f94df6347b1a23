"""A module whose logits are computed in pieces, as each layout has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from tests.checkpoints.reshard_scenarios import HIDDEN, Layer
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import TokenTask


class Decoder(nn.Module):
    """A decoder with a tied head, or the table of its embedding in the place of one, by a product known or not; or a
    head alone is trained.
    """

    def __init__(self, head: str) -> None:
        super().__init__()
        self.kind = head
        self.embedding, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        if head in ("own", "tied", "frozen"):
            self.head = nn.Linear(HIDDEN, VOCABULARY, bias=head == "own")
        if head == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.kind != "frozen"):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            x = self.norm(x)
        if self.kind == "einsum":
            return torch.einsum("bsh,vh->bsv", x, self.embedding.weight)
        return self.head(x) if hasattr(self, "head") else F.linear(x, self.embedding.weight)


class Task(TokenTask):
    """Weighs and smooths its targets, shifts them inside, adds a z-loss, logs its accuracy, and returns logits."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        logits = self.net(tokens)
        weight = torch.linspace(1.0, 2.0, VOCABULARY, dtype=torch.float64)
        targets = torch.where(torch.arange(targets.shape[1]) % 5 == 0, -100, targets)
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), targets[:, 1:], label_smoothing=0.1)
        loss = loss + 0.1 * F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight, reduction="none").mean()
        loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        self.log("accuracy", (logits.argmax(-1) == targets).double().mean(), sync_dist=True)
        return {"loss": loss, "last": logits[:, -1].detach()}


def train(info: RankInfo, head: str, arguments: dict[str, Any] | None) -> dict[str, Any]:
    """Losses, metrics, predictions and weights of a run; a plain one without arguments."""
    torch.manual_seed(7)
    module = Task(Decoder(head))
    strategy: Any = "auto" if arguments is None else MegatronStrategy(**arguments)
    trainer = make_trainer(info, strategy, max_epochs=1, limit_val_batches=2)
    trainer.fit(module)
    found: dict[str, Any] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["predicted"] = torch.cat(trainer.predict(module) or []).double()
    if arguments is None:
        return found | {"weights": {name: value.detach() for name, value in module.state_dict().items()}}
    told = strategy.loss_report
    if trainer.global_rank == 0:  # on the stage of the loss
        assert "in pieces" in told and "`cross_entropy`" in told and "`argmax`" in told, told
    return found | {"weights": strategy.full_state_dict()}
