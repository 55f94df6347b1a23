"""More Hugging Face configurations: mixtures of experts, state spaces, classifiers, images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import Task

LAYERS = 4
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_BERT = {**_BASE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 5}
_IMAGE = {"image_size": 8, "patch_size": 4}

CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", _GROUPED),
    "glm": ("GlmConfig", "GlmForCausalLM", {**_GROUPED, "head_dim": 4}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", _GROUPED),
    "persimmon": ("PersimmonConfig", "PersimmonForCausalLM", {**_BASE, "hidden_dropout": 0.0}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**_GROUPED, **_EXPERTS}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_GROUPED, **_EXPERTS, "head_dim": 4, "moe_intermediate_size": 8},
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", {**_BASE, "state_size": 4, "expand": 2, "conv_kernel": 3}),
}
CLASSIFIERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert_classifier": ("BertConfig", "BertForSequenceClassification", {**_BERT, "classifier_dropout": 0.0}),
    "roberta_classifier": (
        "RobertaConfig",
        "RobertaForSequenceClassification",
        {**_BERT, "max_position_embeddings": 40},
    ),
    "distilbert_classifier": (
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {
            "vocab_size": VOCABULARY,
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": LAYERS,
            "n_heads": 4,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
            "num_labels": 5,
        },
    ),
    "llama_classifier": ("LlamaConfig", "LlamaForSequenceClassification", {**_GROUPED, "num_labels": 5}),
    "electra_classifier": ("ElectraConfig", "ElectraForSequenceClassification", {**_BERT, "embedding_size": 8}),
    "deberta_classifier": (
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        {**_BERT, "relative_attention": True, "pos_att_type": "c2p|p2c", "position_buckets": 8, "share_att_key": True},
    ),
    "vit_classifier": ("ViTConfig", "ViTForImageClassification", {**_BERT, **_IMAGE}),
    "deit_classifier": ("DeiTConfig", "DeiTForImageClassification", {**_BERT, **_IMAGE}),
    "beit_classifier": (
        "BeitConfig",
        "BeitForImageClassification",
        {**_BERT, **_IMAGE, "drop_path_rate": 0.0, "use_relative_position_bias": True},
    ),
}


class Classifier(Task):
    """A sequence or image classifier with ``labels=``; images are recognised by the configuration."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        config_class, model_class, options = CLASSIFIERS[name]
        self.images = "image_size" in options
        self.model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        batch = default_collate(samples)
        if self.images:
            return {"pixel_values": batch["images"], "labels": batch["classes"]}
        return {"input_ids": batch["tokens"], "attention_mask": batch["mask"].long(), "labels": batch["classes"]}

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        loss = F.cross_entropy(self.model(**inputs).logits, batch["labels"])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
