"""PEFT's adapters train as in one process where layers are cut unlike plain linear layers, or are given prefixes."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import peft
import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.harness import RankInfo, one_process, run_trainers
from tests.parallelize.models import VOCABULARY, hugging_face
from tests.parity.scenario import Layout, differences, trained_state

wide = pytest.mark.wide
KINDS: dict[str, Any] = {
    "dora": partial(peft.LoraConfig, r=4, target_modules="all-linear", use_dora=True, init_lora_weights=False),
    "ia3": partial(
        peft.IA3Config,
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
    "prefix": partial(peft.PrefixTuningConfig, num_virtual_tokens=3),
}


class Adapted(LightningModule):
    """A tiny Llama with an adapter, in float64."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        base: Any = hugging_face("llama", num_hidden_layers=4, num_key_value_heads=4, use_cache=False)
        for part in list(base.modules()):  # whose norms round to float32
            for name, child in part.named_children():
                if isinstance(child, LlamaRMSNorm):
                    setattr(part, name, nn.RMSNorm(child.weight.shape, 1e-6))
        with warnings.catch_warnings(action="ignore"):  # of names that PEFT reads from Transformers, deprecated there
            self.model: nn.Module = peft.get_peft_model(base, KINDS[kind](task_type="CAUSAL_LM")).double().train()

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        logits = self.model(input_ids=ids).logits[:, -ids.shape[1] :]
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        ids = torch.randint(VOCABULARY, (12, 8), generator=torch.Generator().manual_seed(3))
        return DataLoader(ids, batch_size=4)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(info: RankInfo, layout: Layout | None, arguments: dict[str, Any], kind: str) -> dict[str, Tensor]:
    return trained_state(info, layout, arguments, Adapted(kind), max_epochs=1, gradient_clip_val=0.5)


SHARDS = {"tensor_parallel_size": 2, "sequence_parallel": True}
ROWS: list[Any] = [
    pytest.param("dora", (1, 1), SHARDS, id="dora-sp"),
    pytest.param("ia3", (2, 1), SHARDS, id="ia3-pp2-sp"),
    pytest.param("prefix", (4, 1), {"micro_batch_size": 1}, id="prefix-pp4"),
    pytest.param("dora", (2, 1), SHARDS, id="dora-pp2-sp", marks=wide),
    pytest.param("ia3", (1, 1), SHARDS, id="ia3-sp", marks=wide),
    pytest.param("prefix", (2, 1), {"pipeline_schedule": "zb-v", "micro_batch_size": 1}, id="prefix-zb-v", marks=wide),
]


@pytest.mark.parametrize(("kind", "layout", "arguments"), ROWS)
def test_training_is_that_of_one_process(kind: str, layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(fit, None, {}, kind)
    devices = layout[0] * layout[1] * arguments.get("tensor_parallel_size", 1)
    found = run_trainers(fit, layout, arguments, kind, devices=devices)[0].value
    assert expected and not list(differences("", found, expected, 1e-9))
