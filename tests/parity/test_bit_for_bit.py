"""At one process in float32, this strategy computes plain Lightning's numbers bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import RankInfo
from tests.harness.trainers import run_trainers
from tests.parity.train import make_trainer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-1),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, nesterov=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=1e-2, max_iter=3),
}


class Blocks(LightningModule):
    """A small transformer with dropout, trained on random tokens."""

    def __init__(self, optimizer: str, dropout: float, shuffle: bool) -> None:
        super().__init__()
        self.optimizer, self.dropout, self.shuffle = optimizer, dropout, shuffle
        self.embed = nn.Embedding(31, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 31)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = F.dropout(self.embed(batch), self.dropout, self.training)
        for layer in self.layers:
            hidden = layer(hidden)
        loss = F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(0, 31, (48, 9), generator=torch.Generator().manual_seed(5))
        return DataLoader(list(tokens), batch_size=8, shuffle=self.shuffle)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.found.append(outputs["loss"].clone())


def trained(info: RankInfo, strategy: Any, optimizer: str, dropout: float, options: dict[str, Any]) -> list[Tensor]:
    seed_everything(11)
    shuffle = options.pop("shuffle", False)
    module, losses = Blocks(optimizer, dropout, shuffle), Losses()
    settings = {"precision": "32-true", "max_epochs": 2, "callbacks": [losses], **options}
    make_trainer(info, strategy, **settings).fit(module)
    return [*losses.found, *module.state_dict().values(), torch.get_rng_state()]


def both(info: RankInfo, optimizer: str, dropout: float, options: dict[str, Any]) -> tuple[int, list[int]]:
    from lightning_megatron import MegatronStrategy

    plain = trained(info, "auto", optimizer, dropout, dict(options))
    ours = trained(info, MegatronStrategy(), optimizer, dropout, dict(options))
    pairs = zip(plain, ours, strict=True)
    return len(plain), [number for number, (one, other) in enumerate(pairs) if not torch.equal(one, other)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_process_computes_the_bits_of_plain_lightning(optimizer: str, dropout: float) -> None:
    clip = {} if optimizer == "lbfgs" else {"gradient_clip_val": 0.5}
    (outcome,) = run_trainers(both, optimizer, dropout, clip, devices=1)
    compared, different = outcome.value
    assert compared > 40
    assert different == []


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"precision": "64-true"},
        {"use_distributed_sampler": True},
        {"use_distributed_sampler": True, "shuffle": True},
    ],
)
def test_one_process_computes_the_bits_of_plain_lightning_with_options(options: dict[str, Any]) -> None:
    (outcome,) = run_trainers(both, "adamw", 0.1, options, devices=1)
    assert outcome.value[1] == []
