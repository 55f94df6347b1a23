"""Hugging Face models that are given padding, packed documents, windows or a mask of the user's."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.context_parallel import rule_masks
from tests.harness import RankInfo
from tests.parity.train import local_weights, make_trainer
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.huggingface import CONFIGS

KINDS = ("padding", "left", "packed", "whole")
BATCH = 2


class Squares(TorchDispatchMode):
    """Counts the tensors [.., rows, tokens] that come into being, by their rows."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.rows, self.counts = tokens, Counter[int](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves(found) if self.counts else ():
            square = type(value) is Tensor and value.ndim > 1 and value.shape[-1] == self.tokens
            if square and value.untyped_storage().nbytes() >= self.tokens * value.shape[-2]:  # no view of fewer numbers
                self.rows[value.shape[-2]] += 1
        return found


class Library(LightningModule):
    """A causal language model of two layers."""

    def __init__(self, name: str, kind: str, attention: str, tokens: int) -> None:
        super().__init__()
        config_class, model_class, options = CONFIGS[name]
        places = "n_positions" if "n_positions" in options else "max_position_embeddings"
        depth = "n_layer" if "n_layer" in options else "num_hidden_layers"
        config = getattr(transformers, config_class)(**{**options, places: 128, depth: 2})
        config._attn_implementation = attention
        self.net, self.kind, self.tokens = getattr(transformers, model_class)(config), kind, tokens
        self.squares = Squares(tokens)

    def train_dataloader(self) -> DataLoader[Any]:
        ids = torch.randint(3, VOCABULARY, (2 * BATCH, self.tokens), generator=torch.Generator().manual_seed(3))
        return DataLoader(ids, batch_size=BATCH)  # type: ignore[arg-type]

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        samples, length = ids.shape
        at, given = torch.arange(length).expand(samples, length), {}
        if self.kind == "padding":
            given["attention_mask"] = (at < torch.tensor([[length - 3], [length // 2]])).long()
        if self.kind == "left":
            given["attention_mask"] = (at >= 3).long()
        if self.kind == "packed":
            given["position_ids"] = at % (length // 3)
        if self.kind == "whole":
            given["attention_mask"] = ((at[:, None] <= at[:, :, None]) & (at[:, None] > at[:, :, None] - 4))[:, None]
        loss = self.net(input_ids=ids, labels=ids, use_cache=False, **given).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, *_: Any) -> None:
        self.squares.counts = True

    def on_train_batch_end(self, *_: Any) -> None:
        self.squares.counts = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def train(
    info: RankInfo, name: str, kind: str, attention: str, tokens: int, arguments: dict[str, Any] | None
) -> dict[str, Any]:
    """The loss and the weights after two steps, and how often how many rows of all tokens came into being."""
    torch.manual_seed(7)
    module, strategy = Library(name, kind, attention, tokens), "auto" if arguments is None else None
    strategy = strategy or MegatronStrategy(**(arguments or {}))  # type: ignore[assignment]
    trainer = make_trainer(info, strategy, max_steps=2, limit_val_batches=0)
    with mock.patch.object(rule_masks, "AT_A_TIME", 3 * tokens), module.squares:
        trainer.fit(module)
    tensors = (arguments or {}).get("tensor_parallel_size", 1) > 1
    whole: Any = trainer.strategy
    weights = module.state_dict() if arguments is None else local_weights(module)
    weights = whole.full_state_dict() if tensors else weights
    found: dict[str, Any] = {"loss": float(trainer.callback_metrics["loss"]), "rows": module.squares.rows}
    found["report"] = "" if arguments is None else whole.context_report
    return found | {"weights": {each: value.detach().double().clone() for each, value in weights.items()}}
