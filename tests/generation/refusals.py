"""Modules that generate where, or how, a pipeline cannot."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import MambaConfig, MambaForCausalLM

from lightning_megatron import MegatronStrategy
from tests.generation.scenarios import Talks, prompts
from tests.generation.strangers import Block, Greedy, Network
from tests.harness import RankInfo
from tests.parity.train import make_trainer


class Guarded(Talks):
    """Generates on rank 0 only."""

    def __init__(self) -> None:
        super().__init__("gpt2")

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", self.model(input_ids=batch, labels=batch).loss)
        if self.trainer.is_global_zero:
            self.tokens(batch)


class DropsOut(Block):
    """Draws random numbers in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, training=True)


class Dropping(Greedy):
    """Layers that draw, called repeatedly."""

    block = DropsOut


class Unknown(Talks):
    """Generates with a cache that is divided nobody knows how."""

    def __init__(self) -> None:
        super().__init__("gpt2")

    def predict_step(self, batch: Tensor, index: int) -> Any:
        from transformers.cache_utils import DynamicCache, DynamicLayer

        class Odd(DynamicLayer):
            pass

        cache = DynamicCache()
        cache.layer_class_to_replicate = Odd
        return self.model.generate(batch, max_new_tokens=2, past_key_values=cache)


class KeepsStates(pl.LightningModule):
    """A model of state spaces, whose layers keep states whatever cache it is given."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 4, "state_size": 4}
        self.model: Any = MambaForCausalLM(MambaConfig(vocab_size=64, eos_token_id=None, pad_token_id=0, **sizes))

    def predict_step(self, batch: Tensor, index: int) -> Any:
        return self.model.generate(batch, max_new_tokens=2)


class WithGradients(Network):
    """Calls its model outside of a step, with gradients."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        with torch.enable_grad():
            self(batch)


REFUSALS: dict[str, tuple[Any, str]] = {
    "guarded": (Guarded, "`trainer.is_global_zero`"),
    "dropping": (Dropping, "draws random numbers in a step that calls the model repeatedly"),
    "unknown": (Unknown, "cache of class `Odd`"),
    "states": (KeepsStates, "whatever cache is asked for. Generate with `use_cache=False`"),
    "gradients": (WithGradients, "under `torch.no_grad()`"),
}


def refused(info: RankInfo, name: str) -> str:
    """What a rank is told in the first run."""
    module = REFUSALS[name][0]().double()
    pl.seed_everything(7, verbose=False)
    trainer = make_trainer(info, MegatronStrategy(2), max_epochs=1, num_sanity_val_steps=0)
    loader = DataLoader(prompts(4), batch_size=2)
    try:
        if name == "gradients":
            trainer.fit(module, loader)
        elif name == "guarded":
            trainer.validate(module, loader, verbose=False)
        else:
            trainer.predict(module, loader)
    except RuntimeError as error:
        return str(error)
    return "nothing"
