"""The decoder as a LightningModule that trains on rows of tokens."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.layers import router_losses
from lightning_megatron.models.config import DecoderConfig
from lightning_megatron.models.decoder import Decoder


class CausalLanguageModel(pl.LightningModule):
    """Trains the decoder to predict the next token.

    A batch is a tensor of token rows [batch, seq + 1], or a pair (inputs, targets) of [batch, seq] each.

    Args:
        config: of the decoder.
        lr: peak learning rate of AdamW.
        weight_decay: of matrices; vectors (norms, biases) have none.
        betas: of AdamW.
        warm_up: optimizer steps over which the learning rate rises linearly to ``lr``; 0 for none.
        balance: factor of the balancing loss of mixtures; it is not part of what is logged.
        z: factor of their z-loss.
        balance_scope: of which tokens that loss is; see :func:`~lightning_megatron.layers.router_losses`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warm_up: int = 0,
        balance: float = 0.0,
        z: float = 0.0,
        balance_scope: str = "sequence",
    ) -> None:
        super().__init__()
        self.config, self.lr, self.weight_decay, self.betas, self.warm_up = config, lr, weight_decay, betas, warm_up
        self.balance, self.z, self.balance_scope = balance, z, balance_scope
        self.decoder: Any = None

    def configure_model(self) -> None:
        """Build the decoder; the strategy may call this under the meta device."""
        if self.decoder is None:
            self.decoder = Decoder(self.config)

    def loss(self, batch: Any) -> Tensor:
        """Mean cross-entropy of the next token: a scalar."""
        tokens, targets = (batch[:, :-1], batch[:, 1:]) if isinstance(batch, Tensor) else batch
        logits = self.decoder(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Loss of one (micro-)batch, logged as ``train_loss``."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        if self.config.experts and (self.balance or self.z):
            loss = loss + router_losses(self.decoder, balance=self.balance, z=self.z, scope=self.balance_scope)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss as ``val_loss``."""
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW, fused on a GPU, with a linear warm-up."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=fused or None)
        if not self.warm_up:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warm_up))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
