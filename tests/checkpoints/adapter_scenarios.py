"""Training adapters of peft at a layout, and what their checkpoints are compared with."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo, run_trainers
from tests.parity.train import make_trainer

LOW_RANK: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM"}

_PARTS = ["q_proj", "v_proj", "o_proj", "down_proj"]
OTHERS: dict[str, Any] = {
    "vera": partial(peft.VeraConfig, target_modules=["q_proj"], r=4),
    "loha": partial(peft.LoHaConfig, target_modules=_PARTS, r=2, init_weights=False),
    "lokr": partial(peft.LoKrConfig, target_modules=_PARTS, r=2, init_weights=False),
    "oft": partial(peft.OFTConfig, target_modules=["q_proj"], r=4, oft_block_size=0),
    "p-tuning": partial(peft.PromptEncoderConfig, num_virtual_tokens=3, encoder_hidden_size=8),
    "norms": partial(peft.LNTuningConfig, target_modules=["input_layernorm"]),
    "some tokens": partial(peft.TrainableTokensConfig, target_modules=["embed_tokens"], token_indices=[1, 2, 3]),
}


def base_of(kind: str) -> PreTrainedModel:
    """The pretrained model, in float64; the same each time."""
    torch.manual_seed(0)
    if kind == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, use_cache=False, **sizes, **dropouts)).double()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["tie_word_embeddings"] = kind.startswith("tied")
    sizes["num_key_value_heads"] = {"few prefix": 2, "one": 1}.get(kind, 4)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes)).double()  # type: ignore[arg-type]


def config_of(kind: str) -> peft.PeftConfig:
    """The adapter that is trained."""
    if kind == "dora":
        return peft.LoraConfig(target_modules="all-linear", use_dora=True, **LOW_RANK)
    if kind == "tied head":
        return peft.LoraConfig(target_modules=["q_proj", "lm_head"], **LOW_RANK)
    if kind == "tied head saved":
        return peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], **LOW_RANK)
    if kind == "layers saved":
        saved = ["embed_tokens", "input_layernorm", "lm_head"]
        return peft.LoraConfig(target_modules=["q_proj"], modules_to_save=saved, **LOW_RANK)
    if kind in ("tied embedding", "two"):
        return peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], **LOW_RANK)
    if kind == "embedding dora":
        return peft.LoraConfig(target_modules=["v_proj", "embed_tokens"], use_dora=True, **LOW_RANK)
    if kind == "bias":
        return peft.LoraConfig(target_modules=["v_proj"], lora_bias=True, **LOW_RANK)
    if kind == "gpt2":
        return peft.LoraConfig(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **LOW_RANK)
    if kind in ("prefix", "few prefix", "one"):
        return peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    if kind == "projected prefix":
        return peft.PrefixTuningConfig(
            num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=8, task_type="CAUSAL_LM"
        )
    if kind == "pissa":
        return peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM", r=4)
    if kind == "adalora":
        ranks = {"init_r": 4, "target_r": 2, "total_step": 6, "tinit": 0, "tfinal": 1, "init_lora_weights": False}
        return peft.AdaLoraConfig(target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", **ranks)  # type: ignore[arg-type]
    if kind in OTHERS:
        return OTHERS[kind](task_type="CAUSAL_LM")
    if kind == "prompt":
        return peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    if kind == "ia3":
        parts = ["k_proj", "v_proj", "down_proj"]
        return peft.IA3Config(target_modules=parts, feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    saved = {"modules_to_save": ["lm_head"], "use_rslora": True}
    return peft.LoraConfig(target_modules=["q_proj", "o_proj", "embed_tokens"], **saved, **LOW_RANK)  # type: ignore[arg-type]


def logits_of(model: torch.nn.Module) -> Tensor:
    """Of a few tokens."""
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=torch.arange(8)[None]).logits
    return logits


class Adapted(LightningModule):
    """A frozen model with an adapter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        base, config, self.kind = base_of(kind), config_of(kind), kind
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
        if self.kind == "in turns":
            self.model.set_adapter("other" if index % 2 else "default")
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)

    def train_dataloader(self) -> DataLoader[Tensor]:
        tokens = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(3))
        return DataLoader(tokens, batch_size=8)  # type: ignore[arg-type]


class Allocating(Adapted):
    """Moves ranks between its layers."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.model.base_model.update_and_allocate(self.trainer.global_step)


class Small(Adapted):
    """Leaves the frozen weights out of checkpoints.

    Args:
        kind: of the adapter.
        how: ``"hook"`` or ``"state"``: by which method.
    """

    def __init__(self, kind: str, how: str) -> None:
        super().__init__(kind)
        self.strict_loading, self.how = False, how

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return self._trained(state) if self.how == "state" else state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.how == "hook":
            checkpoint["state_dict"] = self._trained(checkpoint["state_dict"])

    def _trained(self, state: dict[str, Any]) -> dict[str, Any]:
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: value for name, value in state.items() if name in trained}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def train_small(info: RankInfo, how: str, path: str, sizes: dict[str, Any], steps: int, saves: bool) -> dict[str, Any]:
    """What is trained, after ``steps`` that go on from ``path`` if there is a checkpoint; one is saved if asked for."""
    strategy, module = MegatronStrategy(**sizes), Small("llama", how)
    trainer = make_trainer(info, strategy, max_steps=steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, ckpt_path=None if saves else path or None)
        if saves:
            trainer.save_checkpoint(path)
    return {name: value for name, value in strategy.full_state_dict().items() if "lora" in name or "saved" in name}


def train_adapter(info: RankInfo, kind: str, path: str, sizes: dict[str, Any]) -> None:
    """Two steps, and a checkpoint at ``path``."""
    strategy = MegatronStrategy(**sizes) if sizes else "auto"
    trainer = make_trainer(info, strategy, max_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Allocating(kind) if kind == "adalora" else Adapted(kind))
        trainer.save_checkpoint(path)


def trained(kind: str, folder: Path, **sizes: Any) -> Path:
    """The checkpoint of a run at a layout, trained where ``folder`` does not hold it yet."""
    path = folder / f"{kind} {' '.join(map(str, sizes.values()))}.ckpt"
    if not path.exists():
        given = (sizes.get(f"{axis}_parallel_size", 1) for axis in ("pipeline", "tensor", "data"))
        run_trainers(train_adapter, kind, str(path), sizes, devices=math.prod(given))
    return path


def held_by_training(info: RankInfo, kind: str, sizes: dict[str, Any]) -> tuple[int, int]:
    """Bytes of Adam's moments on this rank, and of gradients after a step."""
    module = Adapted(kind)
    module.configure_optimizers = lambda: torch.optim.Adam(  # type: ignore[method-assign]
        [parameter for parameter in module.parameters() if parameter.requires_grad]
    )
    trainer = make_trainer(info, MegatronStrategy(**sizes), max_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
    (optimizer,) = trainer.optimizers
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    held = [sum(one.numel() * one.element_size() for one in found if one.numel() > 1) for found in (state, gradients)]
    return held[0], held[1]


def saved_alone(info: RankInfo, kind: str, folder: str, sizes: dict[str, Any], adapter: str | None) -> tuple[str, Any]:
    """What asking for an adapter that is not there raises; and, after two steps, the whole state. Saves the adapter in
    a hook."""
    strategy = MegatronStrategy(**sizes)
    module = Adapted(kind)
    module.on_train_end = lambda: strategy.save_adapter(folder, adapter)  # type: ignore[method-assign]
    trainer = make_trainer(info, strategy, max_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
    try:
        strategy.save_adapter(folder, "absent")
    except ValueError as error:
        return str(error), strategy.full_state_dict()
    return "nothing", None


def merged_for_good(info: RankInfo, sizes: dict[str, Any]) -> None:
    """Training, whose last hook merges the adapter and leaves PEFT."""
    module = Adapted("llama")

    def merge() -> None:
        module.model = module.model.merge_and_unload()

    module.on_train_end = merge  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(info, MegatronStrategy(**sizes), max_steps=1).fit(module)
