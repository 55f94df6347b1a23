"""Mixtures whose experts are shared out generate the tokens of one process, between and after steps of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.train import make_trainer

VOCABULARY, PROMPTS = 64, 8
TWO: dict[str, Any] = {"expert_parallel_size": 2}
PP: dict[str, Any] = {"pipeline_parallel_size": 2, "micro_batch_size": 2}
TP: dict[str, Any] = {"tensor_parallel_size": 2}
Texts = dict[tuple[int, ...], list[list[int]]]


class Speaks(LightningModule):
    """Generates greedily, sampled and by beams in validation.

    Args:
        family: "Mixtral" or "Qwen3Moe".
    """

    def __init__(self, family: str) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
        own = {"num_local_experts" if family == "Mixtral" else "num_experts": 4, "num_experts_per_tok": 2}
        tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
        config = getattr(transformers, f"{family}Config")(**sizes, **own, **tokens, num_key_value_heads=2, head_dim=4)
        make = transformers.AutoModelForCausalLM.from_config
        self.model = make(config, experts_implementation="eager").double()
        self.texts: Texts = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ways: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"do_sample": True, "top_k": 1}]
        made = [self.model.generate(batch[0], max_new_tokens=6, **way) for way in ways]
        for row, prompt in enumerate(batch[0].tolist()):
            self.texts[tuple(prompt)] = [_ended(text[row].tolist()) for text in made]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _ended(tokens: list[int]) -> list[int]:
    """Without what fills up a text that has ended before others of its batch."""
    return tokens[: tokens.index(1) + 1] if 1 in tokens else tokens


class Prompts(LightningDataModule):
    """One batch of prompts."""

    def _loader(self) -> Any:
        tokens = torch.randint(3, VOCABULARY, (PROMPTS, 6), generator=torch.Generator().manual_seed(5))
        sizes = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        data = TensorDataset(tokens)
        return DataLoader(
            data, PROMPTS // sizes["num_replicas"], sampler=DistributedSampler(data, **sizes, shuffle=False)
        )

    def train_dataloader(self) -> Any:
        return self._loader()

    def val_dataloader(self) -> Any:
        return self._loader()


def texts(info: RankInfo, family: str, options: dict[str, Any] | None) -> Texts:
    """What this rank's prompts go on with, behind a step of training."""
    torch.manual_seed(3)
    module = Speaks(family)
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    trainer = make_trainer(info, strategy, max_epochs=1, precision="64-true", num_sanity_val_steps=0)
    trainer.fit(module, datamodule=Prompts())
    return module.texts


@pytest.mark.parametrize(
    ("family", "devices", "options"),
    [
        ("Mixtral", 2, TWO),
        *(
            pytest.param(*row, marks=pytest.mark.wide)
            for row in (
                ("Mixtral", 4, {**TWO, **PP}),
                ("Mixtral", 2, {**TWO, **TP}),
                ("Qwen3Moe", 2, TWO),
                ("Qwen3Moe", 4, {**TWO, **PP}),
                ("Qwen3Moe", 4, {**TWO, **PP, **TP}),
            )
        ),
    ],
    ids=str,
)
def test_experts_that_are_shared_out_generate_the_tokens_of_one_process(
    family: str, devices: int, options: Any
) -> None:
    wanted, found = one_process(texts, family, None), Texts()
    for outcome in run_trainers(texts, family, options, devices=devices):
        for prompt, made in outcome.value.items():
            assert found.setdefault(prompt, made) == made == wanted[prompt], prompt
    assert len(found) == PROMPTS
