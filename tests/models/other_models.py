"""Hugging Face models besides language models with the usual loss: how each is built, its batches, its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trained_state
from tests.parity.zoo.data import loader

Batch = dict[str, Tensor]
WORDS, LENGTH, SAMPLES = 40, 12, 16
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
_NO_DROP = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TEXT = {**_SIZES, "vocab_size": WORDS, "max_position_embeddings": 64, "pad_token_id": 0}
_IMAGE = {"image_size": 16, "patch_size": 4}


def _text(generator: torch.Generator) -> Batch:
    """Token ids of texts of several lengths, their mask, and labels that leave out what is padded."""
    ids = torch.randint(4, WORDS, (SAMPLES, LENGTH), generator=generator)
    mask = torch.arange(LENGTH)[None] < torch.randint(5, LENGTH + 1, (SAMPLES, 1), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def _images(generator: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, 3, 16, 16, generator=generator, dtype=torch.float64)


def _segments(generator: torch.Generator) -> Batch:
    labels = torch.randint(0, 5, (SAMPLES, 16, 16), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = 255
    return {"pixel_values": _images(generator), "labels": labels}


def _captions(generator: torch.Generator) -> Batch:
    """Each text begins with an image of 16 patches."""
    text = _text(generator)
    begin = torch.full((SAMPLES, 16), 3)
    return {
        "input_ids": torch.cat([begin, text["input_ids"]], 1),
        "attention_mask": torch.cat([torch.ones_like(begin), text["attention_mask"]], 1),
        "labels": torch.cat([torch.full_like(begin, -100), text["labels"]], 1),
        "pixel_values": _images(generator),
    }


def _answers(generator: torch.Generator) -> Batch:
    """Where answers begin and end; in the second half some end behind their text, which the loss leaves out."""
    text = _text(generator)
    del text["labels"]
    begin, end = torch.randint(0, LENGTH, (2, SAMPLES), generator=generator)
    end[SAMPLES // 2 : SAMPLES // 2 + 3] = LENGTH + 5
    return {**text, "start_positions": begin, "end_positions": end}


def _bert() -> nn.Module:
    return transformers.BertForQuestionAnswering(transformers.BertConfig(**_TEXT, **_NO_DROP))


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT, num_key_value_heads=2))


def _beit() -> nn.Module:
    config = transformers.BeitConfig(
        **_SIZES,
        **_NO_DROP,
        **_IMAGE,
        num_labels=5,
        drop_path_rate=0.0,
        out_indices=[1, 2, 3, 4],
        pool_scales=[1, 2],
        auxiliary_channels=8,
        semantic_loss_ignore_index=255,
    )
    return transformers.BeitForSemanticSegmentation(config)


def _llava() -> nn.Module:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **_TEXT, "num_key_value_heads": 2},
        vision_config={"model_type": "clip_vision_model", **_SIZES, **_IMAGE, "projection_dim": 8},
        image_token_id=3,
        vision_feature_layer=-2,
        image_seq_length=16,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _own_loss(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _all_states(model: Any, batch: Batch) -> Tensor:
    found = model(**batch, output_hidden_states=True)
    loss: Tensor = found.loss + 0.1 * sum(state.square().mean() for state in found.hidden_states)
    return loss * len(found.hidden_states)


@dataclass(frozen=True)
class Kind:
    """A model with its data.

    Attributes:
        build: makes the model.
        data: its samples, from a generator.
        loss: of the model for a batch.
        tolerance: of weights; losses of language models are float32 in Transformers.
    """

    build: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Batch], Tensor] = _own_loss
    tolerance: float = 1e-9


KINDS: dict[str, Kind] = {
    "hidden_states": Kind(_llama, _text, _all_states),
    "segmentation": Kind(_beit, _segments),
    "captions": Kind(_llava, _captions),
    "answers": Kind(_bert, _answers),
}


class Task(LightningModule):
    """Trains and validates the model of a kind.

    Args:
        kind: key of `KINDS`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = KINDS[kind]
        self.model = self.kind.build()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(2.5 if parameter.dim() > 1 else 1.0)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.kind.loss(self.model, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.kind.loss(self.model, batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        data = self.kind.data(torch.Generator().manual_seed(7))
        return loader(self, [{key: value[at] for key, value in data.items()} for at in range(SAMPLES)])  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def train(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    """Trains for two epochs; the whole state."""
    torch.manual_seed(7)
    return trained_state(info, layout, arguments, Task(kind).double(), max_epochs=2)
