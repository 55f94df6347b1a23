"""Names that a reader of a page has already: blocks of a page run one after the other, with these and each other's."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from datasets import Dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import lightning_megatron
from lightning_megatron import MegatronStrategy, data, load_hf_weights
from lightning_megatron.callbacks import PipelineTimeline


class Module(L.LightningModule):
    """An ordinary module."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.sizes = sizes
        self.model = types.SimpleNamespace(generate=lambda tokens: tokens)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class UnstartedTrainer(L.Trainer):
    """Lightning's Trainer with the arguments of a page, on CPU processes; starts none of them."""

    def __init__(self, **arguments: Any) -> None:
        defaults = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        if any(isinstance(callback, ModelCheckpoint) for callback in arguments.get("callbacks", ())):
            del defaults["enable_checkpointing"]
        if arguments.get("strategy") == "ddp":  # stands beside ours, in a comparison
            arguments["devices"] = 1
        super().__init__(**{**defaults, **arguments, "accelerator": "cpu"})

    def fit(self, *arguments: Any, **options: Any) -> None:
        """Nothing."""

    def validate(self, *arguments: Any, **options: Any) -> Any:
        """Nothing."""
        return [{}]

    test = predict = validate


def names(page: Path) -> dict[str, Any]:
    """What the blocks of ``page`` begin with."""
    lightning = types.ModuleType("lightning")
    lightning.__dict__.update(vars(L), Trainer=UnstartedTrainer)
    found: dict[str, Any] = {
        "__name__": "__main__",
        "F": F,
        "L": lightning,
        "MegatronStrategy": MegatronStrategy,
        "ModelCheckpoint": ModelCheckpoint,
        "MyLightningModule": Module,
        "PipelineTimeline": PipelineTimeline,
        "Trainer": UnstartedTrainer,
        "data": data,
        "lightning_megatron": lightning_megatron,
        "load_hf_weights": load_hf_weights,
        "module": Module(),
        "nn": nn,
        "prompt": torch.zeros(1, 4, dtype=torch.long),
        "token_rows": [torch.zeros(2, 9, dtype=torch.long)],
        "torch": torch,
    }
    return found


def check_data(found: dict[str, Any], folder: Path) -> None:
    """The data module of ``data.md`` makes its batches."""
    trainer = types.SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 1})

    def tokenizer(texts: list[str]) -> dict[str, Any]:
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}

    module = found["Texts"](folder / "rows", tokenizer)
    module.trainer = trainer
    module.prepare_data()
    module.setup("fit")
    assert next(iter(module.train_dataloader()))["position_ids"].shape == (4, 16)
    stream = Dataset.from_dict({"text": ["one two three"] * 9000}).to_iterable_dataset()
    own = types.SimpleNamespace(code=stream, prose=stream, tokenizer=tokenizer, trainer=trainer)
    loader = found["train_dataloader"](own)
    assert loader.batch_size == 128 and loader.num_workers == 1


def check_counting(found: dict[str, Any], folder: Path) -> None:
    """The weight of ``micro_batches.md`` counts what a loss takes the mean of."""
    assert found["count_targets"]({"labels": torch.tensor([[1, 2, -100], [3, -100, -100]])}) == 1


def check_build(found: dict[str, Any], folder: Path) -> None:
    """The function of ``rehearsal.md`` builds a module."""
    module, batch = found["build"]()
    assert module.sizes["layers"] == 128 and batch[0].shape == (512, 2048)


CHECKS = {"data.md": check_data, "micro_batches.md": check_counting, "rehearsal.md": check_build}
