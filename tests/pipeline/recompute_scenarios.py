"""Recomputation of models nobody wrote for it, in whole Trainers, with dropout."""

from __future__ import annotations

from typing import Any

import torch

from tests.harness import RankInfo
from tests.parity.scenario import trainer_for
from tests.parity.zoo import huggingface
from tests.parity.zoo.huggingface import PretrainedTask

DROPOUT = {
    "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.1},
    "llama": {"attention_dropout": 0.2},
}


def with_dropout(info: RankInfo, name: str, arguments: dict[str, Any]) -> dict[str, float]:
    """Losses of three batches and of validation, with every dropout of the model on."""
    original = huggingface.CONFIGS[name]
    huggingface.CONFIGS[name] = (*original[:2], {**original[2], **DROPOUT[name]})
    try:
        torch.manual_seed(2)
        module = PretrainedTask(name, labels=True)
    finally:
        huggingface.CONFIGS[name] = original
    module.model.train()
    trainer = trainer_for(info, (2, 1), arguments, max_steps=3)
    trainer.fit(module)
    return {key: float(value) for key, value in trainer.callback_metrics.items()}
