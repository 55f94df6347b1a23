"""Tiny Hugging Face models and the LightningModule people put around them.

Many of these compute norms, softmax, rotary tables or their own loss in float32 whatever their weights are; the
registry records which, with the tolerance that leaves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.parity.zoo.data import LENGTH, VOCABULARY
from tests.parity.zoo.huggingface_more import CAUSAL
from tests.parity.zoo.tasks import Task

LAYERS = 4
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_PLAIN = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_GPT = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": LAYERS, "n_head": 4}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROP = {"attention_dropout": 0.0, "hidden_dropout": 0.0}

# name -> configuration class, model class, options
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_LLAMA, **_IDS}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_LLAMA, **_IDS, "sliding_window": 4}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_LLAMA, "head_dim": 4}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_LLAMA, **_IDS, "head_dim": 4}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_LLAMA, **_IDS, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 32},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_LLAMA, **_IDS, "head_dim": 4, "sliding_window": 4}),
    "phi": ("PhiConfig", "PhiForCausalLM", {**_PLAIN, **_IDS, "resid_pdrop": 0.0, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**_LLAMA, **_IDS}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {**_LLAMA, **_IDS, "partial_rotary_factor": 0.5}),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {**_LLAMA, **_IDS}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**_LLAMA, **_IDS}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {**_LLAMA, **_IDS}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {**_LLAMA, **_IDS}),
    "starcoder2": (
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        {**_LLAMA, **_IDS, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_LLAMA, **_IDS, "num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {**_GPT, **_IDS, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "gptj": (
        "GPTJConfig",
        "GPTJForCausalLM",
        {**_GPT, **_IDS, "rotary_dim": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "codegen": (
        "CodeGenConfig",
        "CodeGenForCausalLM",
        {**_GPT, **_IDS, "rotary_dim": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        "GPTBigCodeForCausalLM",
        {**_GPT, **_IDS, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_PLAIN, **_IDS, **_NO_DROP}),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            **_IDS,
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": LAYERS,
            "num_heads": 4,
            "attention_types": [[["global", "local"], LAYERS // 2]],
            "window_size": 4,
            "max_position_embeddings": 32,
            "attention_dropout": 0.0,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
        },
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            **_IDS,
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "ffn_dim": 24,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 16,
            "dropout": 0.0,
        },
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**_IDS, **_NO_DROP, **_GPT, "hidden_size": 16}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**_PLAIN, **_IDS, **_NO_DROP}),
    "falcon_alibi": ("FalconConfig", "FalconForCausalLM", {**_PLAIN, **_IDS, **_NO_DROP, "alibi": True}),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {**_IDS, "vocab_size": VOCABULARY, "d_model": 16, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 32},
    ),
    "biogpt": (
        "BioGptConfig",
        "BioGptForCausalLM",
        {**_PLAIN, **_IDS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0},
    ),
    "xglm": (
        "XGLMConfig",
        "XGLMForCausalLM",
        {
            **_IDS,
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "ffn_dim": 24,
            "num_layers": LAYERS,
            "attention_heads": 4,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "bert": (
        "BertConfig",
        "BertLMHeadModel",
        {**_PLAIN, "is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": LAYERS,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    **CAUSAL,
}


def build_model(name: str) -> nn.Module:
    """The tiny model called ``name`` in `CONFIGS`, initialised from torch's seed."""
    import transformers

    config_class, model_class, options = CONFIGS[name]
    config = getattr(transformers, config_class)(**options)
    return getattr(transformers, model_class)(config)


class PretrainedTask(Task):
    """Fine-tuning as in the manuals.

    Args:
        name: key of `CONFIGS`.
        labels: let the model compute its loss from ``labels=``; otherwise the step does it from the logits.
        encoded: wrap batches in the tokenizer's ``BatchEncoding``.
        recompute: turn the model's own gradient checkpointing on.
    """

    def __init__(self, name: str, labels: bool, encoded: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: Any = build_model(name)
        if recompute:
            older = getattr(self.model, "gradient_checkpointing_enable", None)
            getattr(self.model, "activation_checkpointing_enable", older)()
            self.model.config.use_cache = False

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        batch = default_collate(samples)
        data = {"input_ids": batch["tokens"], "attention_mask": batch["mask"].long(), "labels": batch["labels"]}
        if not self.hparams.encoded:
            return data
        from transformers import BatchEncoding

        return BatchEncoding(data)

    def loss(self, batch: Any) -> Tensor:
        if self.hparams.labels:
            return self.model(**batch).loss
        output = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"]).logits[:, LENGTH - 1].argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
