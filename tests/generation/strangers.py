"""Modules as people write them whose steps and hooks call the model again and again."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from tests.generation.decoders import DECODERS
from tests.generation.own_caches import Allocates
from tests.generation.scenarios import NEW, Sizes, prompts, replica_of, tiny
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.parity.zoo.data import VOCABULARY

WIDTH, DEPTH = 16, 4


class Block(nn.Module):
    """Attention and a network, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        b, s, _ = x.shape
        return [part.view(b, s, 4, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]

    def mixed(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.mixed(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))


class KeepsCache(Block):
    """Keeps keys and values on itself while it decodes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        q, k, v = self.heads(x)
        if use_cache:
            if self.kept is not None:
                k, v = torch.cat([self.kept[0], k], 2), torch.cat([self.kept[1], v], 2)
            self.kept = (k, v)
        return self.mixed(x, F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1))


class ReturnsCache(Block):
    """Takes and returns keys and values."""

    def forward(self, x: Tensor, past: Any = None) -> Any:
        q, k, v = self.heads(x)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return self.mixed(x, F.scaled_dot_product_attention(q, k, v, is_causal=past is None)), (k, v)


class Network(pl.LightningModule):
    """A small decoder with learned positions."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(32, WIDTH))
        self.layers = nn.ModuleList(self.block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            self.embed.weight.mul_(2.0)
            self.head.weight.mul_(8.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def predict_step(self, batch: Tensor, index: int) -> Any:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Greedy(Network):
    """Calls itself for each token; no word of it in the class says so."""

    def predict_step(self, batch: Tensor, index: int) -> Any:
        for _ in range(NEW):
            batch = torch.cat([batch, self(batch)[:, -1:].argmax(-1)], 1)
        return batch


class Inline(Network):
    """Its step calls embedding, layers and head itself."""

    def predict_step(self, batch: Tensor, index: int) -> Any:
        for _ in range(NEW):
            x = self.embed(batch)
            for layer in self.layers:
                x = layer(x)
            batch = torch.cat([batch, self.head(self.norm(x))[:, -1:].argmax(-1)], 1)
        return batch


class Kept(Network):
    """Caches on the layers, taken off for each batch."""

    block = KeepsCache

    def predict_step(self, batch: Tensor, index: int) -> Any:
        new, at = batch, 0
        for layer in self.layers:
            layer.kept = None
        for _ in range(NEW):
            x = self.embed(new) + self.places[at : at + new.shape[1]]
            at += new.shape[1]
            for layer in self.layers:
                x = layer(x, use_cache=True)
            new = self.head(self.norm(x))[:, -1:].argmax(-1)
            batch = torch.cat([batch, new], 1)
        return batch


class Functional(Network):
    """Caches that layers take and return."""

    block = ReturnsCache

    def forward(self, ids: Tensor, caches: Any = None) -> Any:
        start = 0 if caches is None else caches[0][0].shape[2]
        x = self.embed(ids) + self.places[start : start + ids.shape[1]]
        kept = []
        for at, layer in enumerate(self.layers):
            x, cache = layer(x, None if caches is None else caches[at])
            kept.append(cache)
        return self.head(self.norm(x)), kept

    def predict_step(self, batch: Tensor, index: int) -> Any:
        new, caches = batch, None
        for _ in range(NEW):
            logits, caches = self(new, caches)
            new = logits[:, -1:].argmax(-1)
            batch = torch.cat([batch, new], 1)
        return batch


class Draws(Network):
    """Samples, stops where all rows have ended, counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.lengths: list[int] = []

    def predict_step(self, batch: Tensor, index: int) -> Any:
        done = torch.zeros(len(batch), dtype=torch.bool)
        while batch.shape[1] < 8 or (not bool(done.all()) and batch.shape[1] < 20):
            self.calls += 1
            drawn = torch.multinomial(self(batch)[:, -1].softmax(-1), 1)
            batch = torch.cat([batch, drawn], 1)
            done |= drawn[:, 0] < 6
        self.lengths.append(batch.shape[1])
        return batch, torch.tensor([self.calls, *self.lengths])


class Measures(Network):
    """A loss, then samples in later batches only, and a metric of them."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", self.training_step(batch, index))
        if index == 1:
            for _ in range(NEW):
                batch = torch.cat([batch, self(batch)[:, -1:].argmax(-1)], 1)
            self.metric(batch[:, -1].double())
            self.log("metric", self.metric)


class Augments(Network):
    """Three views of a batch, and what their mean says."""

    def test_step(self, batch: Tensor, index: int) -> None:
        views = torch.stack([self(batch.roll(shift, 1)).softmax(-1) for shift in range(3)])
        self.log("spread", views.std(0).mean())
        self.log("mean", views.mean(0).square().sum(-1).mean())


class Tied(Network):
    """Its head is the table of the embedding, read by its name."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T

    def predict_step(self, batch: Tensor, index: int) -> Any:
        for _ in range(NEW):
            batch = torch.cat([batch, self(batch)[:, -1:].argmax(-1)], 1)
        return batch


class Chats(pl.LightningModule):
    """Two turns with one cache; scores, a stopping criterion and a streamer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("llama")

    def predict_step(self, batch: Tensor, index: int) -> Any:
        from transformers import StoppingCriteria

        class Long(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
                return torch.full((len(input_ids),), input_ids.shape[1] >= 9)

        options: dict[str, Any] = {"return_dict_in_generate": True, "do_sample": False}
        first = self.model.generate(
            batch, max_new_tokens=20, stopping_criteria=[Long()], output_scores=True, output_logits=True, **options
        )
        turn = torch.cat([first.sequences, batch[:, :2]], 1)
        mask = torch.ones_like(turn)
        second = self.model.generate(
            turn, attention_mask=mask, past_key_values=first.past_key_values, max_new_tokens=3, **options
        )
        padded = torch.cat([torch.zeros_like(batch[:, :2]), batch], 1)
        mask = torch.cat([torch.zeros_like(batch[:, :2]), torch.ones_like(batch)], 1)
        third = self.model.generate(padded, attention_mask=mask, max_new_tokens=3, num_beams=2, num_return_sequences=2)
        return {"second": second.sequences, "scores": torch.stack(first.scores), "third": third}


class Assisted(pl.LightningModule):
    """Lets a small model that each rank has whole draft tokens, and then the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("llama")
        self.drafts = [tiny("llama")]  # in a list: no part of this module

    def predict_step(self, batch: Tensor, index: int) -> Any:
        options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
        rows = [self.model.generate(row[None], assistant_model=self.drafts[0], **options) for row in batch]
        rows += [self.model.generate(row[None], prompt_lookup_num_tokens=2, **options) for row in batch]
        return torch.cat(rows)


class Translates(pl.LightningModule):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": DEPTH, "num_heads": 4}
        config = T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
        self.model: Any = T5ForConditionalGeneration(config).eval()
        self.model.generation_config.eos_token_id = None
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(6.0)

    def predict_step(self, batch: Tensor, index: int) -> Any:
        greedy = self.model.generate(batch, max_new_tokens=NEW, do_sample=False)
        return greedy, self.model.generate(batch, max_new_tokens=NEW, do_sample=False, num_beams=2)


class Streams(pl.LightningModule):
    """Prints tokens on rank 0 as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("gpt2")

    def predict_step(self, batch: Tensor, index: int) -> Any:
        from transformers.generation.streamers import BaseStreamer

        class Prints(BaseStreamer):
            def put(self, value: Tensor) -> None:
                print(value.tolist(), end=" ")

            def end(self) -> None:
                print("end")

        streamer = Prints() if self.global_rank == 0 else None
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            tokens = self.model.generate(batch, max_new_tokens=3, do_sample=False, streamer=streamer)
        assert bool(said.getvalue()) == (self.global_rank == 0)
        return tokens


class Rollouts(Network):
    """Samples before each training step, and trains on what was sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.rolled: Any = None

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        with torch.no_grad():
            rolled = batch
            for _ in range(3):
                rolled = torch.cat([rolled, self(rolled)[:, -1:].argmax(-1)], 1)
        self.rolled = rolled

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(self.rolled, index)
        self.log("train_loss", loss)
        return loss


class Peeks(pl.LightningModule):
    """Generates after each training step, in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("gpt2")

    def training_step(self, batch: Tensor, index: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.eval()
        with torch.inference_mode():
            tokens = self.model.generate(prompts(3), max_new_tokens=3, do_sample=False)
            scores = self.model(input_ids=tokens).logits.log_softmax(-1)
            scores[:, 0] = 0.0
        self.train()
        self.log_dict({"tokens": tokens.double().square().mean(), "scores": scores.mean().clone()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


STRANGERS: dict[str, tuple[Any, str]] = {
    "greedy": (Greedy, "predict"),
    "inline": (Inline, "predict"),
    "kept": (Kept, "predict"),
    "functional": (Functional, "predict"),
    "draws": (Draws, "predict"),
    "measures": (Measures, "validate"),
    "augments": (Augments, "test"),
    "tied": (Tied, "predict"),
    "chats": (Chats, "predict"),
    "assisted": (Assisted, "predict"),
    "translates": (Translates, "predict"),
    "streams": (Streams, "predict"),
    "rollouts": (Rollouts, "fit"),
    "allocates": (Allocates, "predict"),
    "peeks": (Peeks, "fit"),
    **DECODERS,
}


def strange(info: RankInfo, name: str, sizes: Sizes | None, replica: int = 0, options: Mapping[str, Any] = {}) -> Any:
    """What a stranger's module gives on a rank: predictions, or metrics."""
    kind, where = STRANGERS[name]
    pl.seed_everything(7, verbose=False)
    module = kind().double()
    strategy: Any = "auto" if sizes is None else MegatronStrategy(*sizes, **options)
    trainer = make_trainer(info, strategy, max_epochs=1, limit_val_batches=0 if where == "fit" else None)
    mine = replica if sizes is None else replica_of(info.rank, sizes)
    loader = DataLoader(prompts(8)[4 * mine : 4 * mine + 4], batch_size=2)
    if where == "fit":
        trainer.fit(module, loader)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
    if where == "predict":
        return trainer.predict(module, loader)
    return getattr(trainer, where)(module, loader, verbose=False)[0]
