"""The reference decoder trained over a layout."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.models import CausalLanguageModel, DecoderConfig
from tests.harness import RankInfo
from tests.parity.train import make_trainer

CONFIGS = {
    "llama": DecoderConfig(vocabulary=53, hidden=32, layers=4, heads=4, key_value_heads=2, intermediate=48),
    "deep": DecoderConfig(vocabulary=53, hidden=32, layers=8, heads=4, key_value_heads=2, intermediate=48),
    "gpt": DecoderConfig.gpt2(vocabulary=53, hidden=32, layers=4, heads=4, sequence=12),
    "prmoe": DecoderConfig(
        **{"vocabulary": 53, "hidden": 32, "layers": 4, "heads": 4, "intermediate": 48},
        **{"experts": (2, 4), "residual_expert": True},
    ),
    "palm": DecoderConfig(
        vocabulary=53, hidden=32, layers=4, heads=4, key_value_heads=1, parallel_block=True, tied=True, norm="layer"
    ),
}


class Losses(Callback):
    """Logged losses, one per step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train_loss"]))


def train(info: RankInfo, config: str, sizes: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of four steps in float64, and the whole weights (on rank 0) afterwards."""
    losses = Losses()
    strategy = MegatronStrategy(**sizes)
    torch.manual_seed(5)
    trainer = make_trainer(info, strategy, max_steps=4, limit_val_batches=1, callbacks=[losses])
    rows = torch.randint(0, 53, (4, 4, 13), generator=torch.Generator().manual_seed(2))
    batches: Any = DataLoader(list(rows), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(CausalLanguageModel(CONFIGS[config], lr=1e-2, warm_up=2, balance=0.1, z=0.01), batches, batches)
    return losses.seen, strategy.full_state_dict()
