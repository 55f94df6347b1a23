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


def _pairs(generator: torch.Generator) -> Batch:
    """Images and texts that belong together."""
    text = _text(generator)
    ends = text["attention_mask"].sum(1, keepdim=True) - 1
    return {
        "input_ids": text["input_ids"].scatter(1, ends, 2),
        "attention_mask": text["attention_mask"],
        "pixel_values": _images(generator),
    }


def _series(generator: torch.Generator) -> Batch:
    past, future = (torch.randn(SAMPLES, n, 3, generator=generator, dtype=torch.float64) for n in (16, 4))
    return {"past_values": past, "future_values": future}


def _clip() -> nn.Module:
    text, vision = {**_TEXT, "bos_token_id": 1, "eos_token_id": 2}, {**_SIZES, **_IMAGE}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def _blip() -> nn.Module:
    text = {**_TEXT, **_NO_DROP, "encoder_hidden_size": 16, "is_decoder": True, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.BlipConfig(text_config=text, vision_config={**_SIZES, **_IMAGE}, projection_dim=8)
    return transformers.BlipForConditionalGeneration(config)


def _patchtst() -> nn.Module:
    config = transformers.PatchTSTConfig(
        num_input_channels=3,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        prediction_length=4,
        num_hidden_layers=4,
        d_model=16,
        num_attention_heads=4,
        ffn_dim=24,
        dropout=0.0,
        head_dropout=0.0,
        loss="mse",
    )
    return transformers.PatchTSTForPrediction(config)


def _forecast() -> nn.Module:
    layers = {f"{side}_layer{what}": n for side in ("encoder", "decoder") for what, n in (("s", 2), ("drop", 0))}
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2],
        num_time_features=1,
        d_model=16,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        **layers,
    )
    return transformers.TimeSeriesTransformerForPrediction(config)


def _times(generator: torch.Generator) -> Batch:
    """Series of numbers with their times; some of the past were not observed."""
    found = {}
    for span, length in (("past", 10), ("future", 4)):
        found[f"{span}_values"] = torch.randn(SAMPLES, length, generator=generator, dtype=torch.float64) + 2
        found[f"{span}_time_features"] = torch.randn(SAMPLES, length, 1, generator=generator, dtype=torch.float64)
    return {**found, "past_observed_mask": torch.rand(SAMPLES, 10, generator=generator) > 0.1}


def _big_bird() -> nn.Module:
    """Sparse attention, with random blocks for each head; short texts, as a guess is, make it another module."""
    sparse = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1, "hidden_act": "gelu"}
    return transformers.BigBirdForMaskedLM(transformers.BigBirdConfig(**_TEXT, **_NO_DROP, **sparse))


def _long(generator: torch.Generator) -> Batch:
    first, second = _text(generator), _text(generator)
    return {key: torch.cat([first[key], second[key]], 1) for key in first}


def _prophetnet() -> nn.Module:
    sides = {
        f"{of}_{side}{what}": size
        for side in ("encoder", "decoder")
        for of, what, size in (("num", "_layers", 2), ("num", "_attention_heads", 4))
    }
    drops = {"attention_dropout": 0.0, "dropout": 0.0, "activation_dropout": 0.0}
    config = transformers.ProphetNetConfig(
        vocab_size=WORDS,
        hidden_size=16,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=64,
        pad_token_id=0,
        decoder_start_token_id=0,
        num_buckets=8,
        relative_max_distance=16,
        **sides,
        **drops,
    )
    return transformers.ProphetNetForConditionalGeneration(config)


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


def _contrast(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
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
    "captions": Kind(_llava, _captions, tolerance=1e-8),
    "answers": Kind(_bert, _answers),
}
SPLIT: dict[str, Kind] = {
    "images and texts": Kind(_clip, _pairs, _contrast),
    "texts of images": Kind(_blip, lambda generator: {**_text(generator), "pixel_values": _images(generator)}),
    "series": Kind(_patchtst, _series),
    "series with times": Kind(_forecast, _times),
    "sparse attention": Kind(_big_bird, _long, tolerance=1e-7),
    "masks by head": Kind(_prophetnet, _text, tolerance=1e-7),
}
"""Kinds for which a plan of tensor parallelism is hard to find."""


class Task(LightningModule):
    """Trains and validates the model of a kind.

    Args:
        kind: key of `KINDS` or `SPLIT`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = {**KINDS, **SPLIT}[kind]
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
