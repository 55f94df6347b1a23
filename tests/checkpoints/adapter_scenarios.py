"""Training adapters of peft at a layout, and what their checkpoints are compared with."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer

LOW_RANK: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM"}


def base_of(kind: str) -> PreTrainedModel:
    """The pretrained model, in float64; the same each time."""
    torch.manual_seed(0)
    if kind == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, use_cache=False, **sizes, **dropouts)).double()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["tie_word_embeddings"] = kind.startswith("tied")
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes)).double()  # type: ignore[arg-type]


def config_of(kind: str) -> peft.PeftConfig:
    """The adapter that is trained."""
    if kind == "dora":
        return peft.LoraConfig(target_modules="all-linear", use_dora=True, **LOW_RANK)
    if kind == "tied head":
        return peft.LoraConfig(target_modules=["q_proj", "lm_head"], **LOW_RANK)
    if kind == "tied head saved":
        return peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], **LOW_RANK)
    if kind in ("tied embedding", "two"):
        return peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], **LOW_RANK)
    if kind == "embedding dora":
        return peft.LoraConfig(target_modules=["v_proj", "embed_tokens"], use_dora=True, **LOW_RANK)
    if kind == "bias":
        return peft.LoraConfig(target_modules=["v_proj"], lora_bias=True, **LOW_RANK)
    if kind == "gpt2":
        return peft.LoraConfig(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **LOW_RANK)
    if kind == "prefix":
        return peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    if kind == "prompt":
        return peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    if kind == "ia3":
        parts = ["k_proj", "v_proj", "down_proj"]
        return peft.IA3Config(target_modules=parts, feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    saved = {"modules_to_save": ["lm_head"], "use_rslora": True}
    return peft.LoraConfig(target_modules=["q_proj", "o_proj", "embed_tokens"], **saved, **LOW_RANK)  # type: ignore[arg-type]


class Adapted(LightningModule):
    """A frozen model with an adapter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        base, config, self.turns = base_of(kind), config_of(kind), kind == "in turns"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            self.model = peft.get_peft_model(base, config).double()
            if kind == "two":
                self.model.add_adapter("other", peft.LoraConfig(target_modules=["o_proj"], **LOW_RANK))
                self.model.double()
            if kind in ("both", "in turns"):
                self.model.add_adapter("other", peft.LoraConfig(target_modules=["v_proj", "down_proj"], **LOW_RANK))
                self.model.base_model.set_adapter(["default", "other"])
                self.model.double()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.turns:
            self.model.set_adapter("other" if index % 2 else "default")
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)

    def train_dataloader(self) -> DataLoader[Tensor]:
        tokens = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(3))
        return DataLoader(tokens, batch_size=8)  # type: ignore[arg-type]


def train_adapter(info: RankInfo, kind: str, path: str, sizes: dict[str, Any]) -> None:
    """Two steps, and a checkpoint at ``path``."""
    strategy = MegatronStrategy(**sizes) if sizes else "auto"
    trainer = make_trainer(info, strategy, max_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Adapted(kind))
        trainer.save_checkpoint(path)
