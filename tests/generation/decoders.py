"""Decoding with Hugging Face's models as people write it: processors with a memory, guidance, beams of one's own."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, WhisperConfig, WhisperForConditionalGeneration

from tests.generation.scenarios import tiny

NEW = 6


class _Fading(LogitsProcessor):
    """Holds tokens back that came lately."""

    def __init__(self) -> None:
        self.seen: Any = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        seen = torch.zeros_like(scores) if self.seen is None else 0.5 * self.seen
        self.seen = seen.scatter(1, input_ids[:, -1:], 1.0)
        return scores - 3 * self.seen


class _FifthEven(StoppingCriteria):
    """Ends at the fifth token or later, once the sum of all tokens is even."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        self.calls += 1
        return torch.full((len(input_ids),), self.calls > 4 and int(input_ids.sum()) % 2 == 0, dtype=torch.bool)


class Decoder(pl.LightningModule):
    """A Llama that continues prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("llama")


class Remembers(Decoder):
    """Samples three times for each prompt, with processors that keep a state."""

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        held: dict[str, Any] = {"logits_processor": [_Fading()], "stopping_criteria": [_FifthEven()]}
        torch.manual_seed(index)
        found: Tensor = self.model.generate(batch, max_new_tokens=NEW, do_sample=True, num_return_sequences=3, **held)
        return found


class EndsApart(Decoder):
    """Criteria and clocks that say something else on each rank but the first."""

    def predict_step(self, batch: Tensor, index: int) -> tuple[Tensor, Tensor]:
        late = not _is_first_rank(self)
        given: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
        ends = self.model.generate(batch, stopping_criteria=[lambda ids, _: len(ids[0]) > (9 if late else 7)], **given)
        return ends, self.model.generate(batch, max_time=60.0 if late else 0.0, num_beams=2, **given)


class OwnOptions(Decoder):
    """Limits and criteria that only some ranks give, and scores and ends drawn from numbers of each rank's own."""

    def predict_step(self, batch: Tensor, index: int) -> list[Tensor]:
        first = _is_first_rank(self)
        draws = random.Random(3 if first else self.global_rank)
        own: list[dict[str, Any]] = [
            {} if first else {"max_time": 0.0},
            {"max_time": 0.0} if first else {},
            {"stopping_criteria": [lambda ids, _: len(ids[0]) > 7]} if first else {},
            {"stopping_criteria": [lambda ids, _: draws.random() < 0.3]},
            {"logits_processor": [lambda ids, scores: scores + 20 * _like(scores, draws)]},
            {"logits_processor": [lambda ids, scores: -scores]} if first else {},
            {} if first else {"logits_processor": [lambda ids, scores: -scores]},
        ]
        return [self.model.generate(batch, max_new_tokens=NEW, do_sample=False, **given) for given in own]


def _is_first_rank(module: pl.LightningModule) -> bool:
    """Whether no rank of the same replica comes before this one."""
    mesh = getattr(module.trainer.strategy, "mesh", None)
    if mesh is None:
        return True
    return bool(mesh.coordinates.tensor == 0 and mesh.rank < mesh.layout.data * mesh.layout.tensor)


def _like(scores: Tensor, draws: random.Random) -> Tensor:
    return torch.tensor([draws.random() for _ in range(scores.shape[-1])], dtype=scores.dtype)


class Guided(Decoder):
    """Without classifier, two passes a token."""

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        flipped = batch.flip(1)
        found: Tensor = self.model.generate(batch, max_new_tokens=NEW, guidance_scale=1.5, negative_prompt_ids=flipped)
        return found


class TwoModels(Decoder):
    """A smaller model beside the larger one generates too, and drafts for it."""

    def __init__(self) -> None:
        super().__init__()
        self.small = tiny("gpt2")

    def predict_step(self, batch: Tensor, index: int) -> list[Tensor]:
        given: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
        found = [model.generate(batch, **given) for model in (self.small, self.model)]
        return [*found, self.model.generate(batch[:1], assistant_model=self.small, **given)]


class OwnBeams(Decoder):
    """Beams by hand, over a cache that it reorders."""

    def predict_step(self, batch: Tensor, index: int) -> tuple[Tensor, Tensor]:
        rows, beams = len(batch), 3
        ids, cache = batch.repeat_interleave(beams, 0), None
        scores = torch.zeros(rows, beams).double()
        scores[:, 1:] = -1e9
        for _ in range(NEW):
            given = self.model(ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True)
            cache, new = given.past_key_values, given.logits[:, -1].log_softmax(-1).view(rows, beams, -1)
            words = new.shape[-1]
            scores, at = (new + scores[..., None]).flatten(1).topk(beams)
            source = (at // words + torch.arange(rows)[:, None] * beams).flatten()
            cache.reorder_cache(source)
            ids = torch.cat([ids[source], (at % words).view(-1, 1)], 1)
        return ids, scores


class Fills(Decoder):
    """Fills places in the order of confidence, without a cache."""

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        ids = torch.cat([batch, torch.zeros_like(batch)], 1)
        left = torch.arange(ids.shape[1]).expand_as(ids) >= batch.shape[1]
        while bool(left.any()):
            sure, words = self.model(ids).logits.max(-1)
            at = sure.masked_fill(~left, -torch.inf).argmax(1, keepdim=True)
            ids, left = ids.scatter(1, at, words.gather(1, at)), left.scatter(1, at, False)
        return ids


class Shows(Decoder):
    """Returns what all layers gave, after calls for which nobody collected it, and changes scores in place."""

    def predict_step(self, batch: Tensor, index: int) -> tuple[Tensor, Any, Any]:
        batch = self.model.generate(batch, max_new_tokens=2, do_sample=False)
        options = {"output_hidden_states": True, "return_dict_in_generate": True, "do_sample": False}
        found = self.model.generate(batch, max_new_tokens=NEW, logits_processor=[_unlike_the_last], **options)
        return found.sequences, found.hidden_states, self.model(batch, output_hidden_states=True).hidden_states


def _unlike_the_last(input_ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, 5] -= 3.0
    scores[:, input_ids[0, -1]] *= 0.5
    scores[0, 2:9] += 0.25
    return scores


class Hears(pl.LightningModule):
    """Whisper: an encoder of sounds, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in _HALF.items()}
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        sizes |= {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
        config = WhisperConfig(vocab_size=48, suppress_tokens=None, begin_suppress_tokens=None, **sizes, **ids)  # type: ignore[arg-type]
        self.model: Any = WhisperForConditionalGeneration(config).eval()
        self.model.generation_config.update(is_multilingual=False, no_timestamps_token_id=3)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        sounds = torch.linspace(-1, 1, len(batch) * 8 * 32).double().view(len(batch), 8, 32)
        found: Tensor = self.model.generate(sounds * batch.double().mean(1)[:, None, None], max_new_tokens=NEW)
        return found


_HALF = {"layers": 4, "attention_heads": 4, "ffn_dim": 64}

DECODERS: dict[str, tuple[Any, str]] = {
    "remembers": (Remembers, "predict"),
    "ends apart": (EndsApart, "predict"),
    "own options": (OwnOptions, "predict"),
    "guided": (Guided, "predict"),
    "two models": (TwoModels, "predict"),
    "own beams": (OwnBeams, "predict"),
    "fills": (Fills, "predict"),
    "shows": (Shows, "predict"),
    "hears": (Hears, "predict"),
}
