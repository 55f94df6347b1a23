"""Modules whose weights are streamed, and what becomes of them on ranks."""

from __future__ import annotations

from threading import Event
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_megatron import MegatronStrategy, load_hf_weights
from tests.generation.folders import TEXTS, experts_of, make_tokenizer
from tests.harness import RankInfo
from tests.parity.train import make_trainer

OPTIONS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 1.5, "top_k": 20},
    {"do_sample": False, "num_beams": 3},
)


class FromFolder(pl.LightningModule):
    """A model of Hugging Face's that has no memory when it is built, or all of it."""

    def __init__(self, folder: str, in_memory: bool = False) -> None:
        super().__init__()
        self.folder, self.model = folder, None
        if in_memory:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(self.folder)
                self.model = AutoModelForCausalLM.from_config(config, dtype=config.dtype, **experts_of(config))
            self.model.eval()
            load_hf_weights(self, self.folder)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", self.model(input_ids=batch, labels=batch).loss)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model(input_ids=batch).logits

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(rows: int = 4) -> Any:
    """Token ids."""
    return DataLoader(torch.arange(1, 1 + rows * 5).view(rows, 5), batch_size=2)  # type: ignore[arg-type]


def streamed(
    info: RankInfo,
    folder: str,
    sizes: tuple[int, int, int],
    streaming: Any,
    in_memory: bool = False,
    others: dict[str, Any] | None = None,
    texts: list[str] = TEXTS,
) -> dict[str, Any]:
    """Tokens of lists, logits, a loss, and the bytes of weights; with ``others`` of the strategy's options."""
    strategy: Any = MegatronStrategy(*sizes, weight_streaming=streaming, **(others or {}))
    trainer = make_trainer(info, strategy)
    module = FromFolder(folder, in_memory)
    logits: Any = trainer.predict(module, loader())
    loss = trainer.validate(module, loader(), verbose=False)[0]["loss"]
    words = make_tokenizer()
    ids = [words(text)["input_ids"] for text in texts]
    tokens = [strategy.generate(ids, batch_size=2, max_new_tokens=6, **options) for options in OPTIONS]
    own = strategy.run.assembled.streamed.windows if streaming is not None else None
    if own is None:
        return {"tokens": tokens, "logits": logits, "loss": loss}
    sizes_of = sorted((window.size for window in own.windows), reverse=True)
    own.rest()
    bytes_ = {"peak": own.peak_bytes, "largest": sizes_of, "left": own.live_bytes, "whole": sum(sizes_of)}
    return {"tokens": tokens, "logits": logits, "loss": loss, **bytes_}


def paddings(info: RankInfo, folder: str) -> dict[str, float]:
    """Largest number in the padding of streamed weights, by name, where memory comes full of NaN."""
    strategy: Any = MegatronStrategy(tensor_parallel_size=2, weight_streaming="disk")
    make_trainer(info, strategy).predict(FromFolder(folder), loader())
    weights = strategy.run.assembled.streamed
    torch.use_deterministic_algorithms(True)  # fills what `torch.empty` gives with NaN
    try:
        read = weights._filled(weights.names)
    finally:
        torch.use_deterministic_algorithms(False)
    found = {}
    for name, value in read.items():
        held = torch.zeros(value.numel(), dtype=torch.bool)
        for box in weights._places[name][1].boxes:
            box.of_local(held.view(value.shape)).fill_(True)
        if not held.all():
            found[name] = float(value.flatten()[~held].abs().max())
    return found


class Odd(pl.LightningModule):
    """Layers, and weights that are used in ways of their own.

    Args:
        kind: what the step does.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        if kind == "buffers":
            for layer in self.layers:
                layer.register_buffer("scale", torch.full((8,), 1.5))
        self.norm = nn.LayerNorm(8)
        self.gain = nn.Parameter(torch.full((8,), 0.7))
        self.head = nn.Linear(8, 64, bias=False)
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "shared":
            self.layers[2].weight = self.layers[0].weight
        self.double()

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.embed(batch) * self.gain
        again = 2 if self.kind == "twice" else 1
        for layer in list(self.layers) * again if self.kind != "backwards" else reversed(list(self.layers)):
            x = x + layer(x).tanh() * getattr(layer, "scale", 1.0)
            if self.kind == "skips" and x.sum() > 0:
                break
        x = self.norm(x)
        if self.kind == "functional":
            return F.linear(x, self.embed.weight)
        if self.kind == "reads":
            return (
                self.head(x)
                + self.layers[1].weight.sum()
                + torch.cat([p.reshape(-1) for p in self.layers[3].parameters()]).norm()
            )
        if self.kind == "gradient":
            with torch.inference_mode(False), torch.enable_grad():
                start = self.embed(batch.clone()).detach().requires_grad_()
                y = start
                for layer in self.layers:
                    y = layer(y).tanh()
                (found,) = torch.autograd.grad(y.square().sum(), start)
            return found
        return self.head(x)


KINDS = ("plain", "tied", "shared", "buffers", "twice", "backwards", "skips", "functional", "reads", "gradient")


def odd(info: RankInfo, kind: str, streaming: Any, path: str | None, sizes: tuple[int, int, int] = (1, 1, 1)) -> Any:
    """Predictions of an odd module; plain Lightning's without streaming."""
    strategy: Any = "auto"
    if streaming is not None:
        strategy = MegatronStrategy(*sizes, weight_streaming=streaming, initial_weights=path)
    module = Odd(kind)
    found = make_trainer(info, strategy, inference_mode=False).predict(module, loader())
    return torch.stack([part.detach() for part in found])


def save_odd(kind: str, path: str) -> None:
    """The weights of an odd module as a file."""
    state = Odd(kind).state_dict()
    save_file({name: tensor.clone() for name, tensor in state.items()}, path)


class Slow(nn.Module):
    """A layer that computes until a read of the next layer has begun, or in vain for ``patience`` seconds."""

    patience = 0.0

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number
        self.begun: dict[int, Event] = {}
        self.met: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.number + 1 in self.begun:
            self.met.append(self.begun[self.number + 1].wait(self.patience))
        return self.linear(x)


class Reader(pl.LightningModule):
    """Four such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Slow(number) for number in range(4)])

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x


def meetings(info: RankInfo, ahead: int) -> list[bool]:
    """By layer but the last: whether the next one's weights were being read, or had been, while it computed."""
    strategy = MegatronStrategy(weight_streaming={"from": "cpu", "ahead": ahead})
    trainer, module = make_trainer(info, strategy), Reader()
    data: Any = DataLoader(torch.ones(2, 8, dtype=torch.float64), batch_size=2)  # type: ignore[arg-type]
    trainer.predict(module, data)
    windows = strategy.run.assembled.streamed.windows
    read, begun = windows.read, {number: Event() for number in range(4)}

    def noted(names: Any) -> Any:
        for number in {int(name.split(".")[1]) for name in names}:
            begun[number].set()
        return read(names)

    windows.read = noted
    layers: Any = module.layers
    for layer in layers:
        layer.begun, layer.patience = begun, 30.0 * ahead
    with torch.no_grad():
        module.predict_step(torch.ones(2, 8, dtype=torch.float64), 0)
    return [met for layer in layers for met in layer.met]


def refusals(info: RankInfo, what: str, folder: str) -> str:
    """What is raised."""
    try:
        _refused(info, what, folder)
    except Exception as error:
        return str(error)
    return "nothing"


def _refused(info: RankInfo, what: str, folder: str) -> None:
    kind = "cpu" if what in ("no layers", "no memory", "differ") else "disk"
    size = {"data_parallel_size": 2} if what == "differ" else {"pipeline_parallel_size": info.world_size}
    strategy: Any = MegatronStrategy(weight_streaming=kind, **size)
    trainer = make_trainer(info, strategy, max_steps=1)
    module: Any = FromFolder(folder)
    if what == "fit":
        trainer.fit(module, loader(), loader())
    elif what == "no files":
        trainer.predict(FromFolder(folder, in_memory=True), loader())
    elif what == "no memory":
        module.configure_model = lambda: _without_weights(module)
        trainer.predict(module, loader())
    elif what == "no layers":
        module = pl.LightningModule()
        module.linear = nn.Linear(5, 5)
        module.predict_step = lambda batch, index: module.linear(batch.float())
        trainer.predict(module, loader())
    elif what == "checkpoint":
        trainer.predict(module, loader(), ckpt_path=f"{folder}/plain.ckpt", weights_only=False)
    elif what == "differ":
        module = Odd("plain")
        torch.manual_seed(info.rank)
        nn.init.normal_(module.head.weight)
        trainer.predict(module, loader())
    else:
        trainer.predict(module, loader())
    if what == "save":
        trainer.save_checkpoint(f"{folder}/saved.ckpt")
    elif what == "state":
        module.model.model.state_dict()
    elif what == "pretrained":
        module.model.save_pretrained(f"{folder}/saved")
    elif what == "again":
        make_trainer(info, MegatronStrategy(info.world_size), max_steps=1).fit(module, loader(), loader())


def _without_weights(module: Any) -> None:
    with torch.device("meta"):
        module.model = module.model or AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(module.folder))
