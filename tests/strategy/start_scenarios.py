"""What ranks start training with, however the module was built."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers import (
    ColumnParallelLinear,
    ParallelMLP,
    ParallelMultiheadAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.parity.zoo.data import LENGTH, VOCABULARY
from tests.parity.zoo.huggingface import build_model
from tests.parity.zoo.language import NanoGPT, RelativeBias, TorchLayers
from tests.parity.zoo.tasks import TokenTask

WIDTH = 16


class DropInLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = ParallelMultiheadAttention(WIDTH, 4, batch_first=True, num_key_value_heads=2)
        self.mlp = ParallelMLP(WIDTH, 24, gated=True)
        self.up, self.down = ColumnParallelLinear(WIDTH, 32), RowParallelLinear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x) + self.down(torch.tanh(self.up(x)))


class DropInNet(nn.Module):
    """A model out of drop-in layers, built before any process group exists."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([DropInLayer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class FixedLength(RelativeBias):
    """Takes sequences of one length only, so no guessed input runs; its layers alone run without the bias."""

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.size(1) != LENGTH:
            raise ValueError(f"sequences have {LENGTH} tokens")
        return super().forward(tokens)


NETS: dict[str, Any] = {
    "fixed_length": FixedLength,
    "drop_in": DropInNet,
    "gpt": NanoGPT,
    "encoder": TorchLayers,
    "llama": lambda: build_model("llama"),
    "gpt2": lambda: build_model("gpt2"),
}


class Built(TokenTask):
    """Builds its network at once, or late and without memory.

    Args:
        kind: key of `NETS`.
        late: build it in ``configure_model``, on the meta device.
        device: where it is built there.
    """

    def __init__(self, kind: str, late: bool, device: str = "meta") -> None:
        super().__init__()
        self.kind, self.at = kind, device
        self.net: Any = None if late else NETS[kind]()

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device(self.at):
                self.net = NETS[self.kind]()

    def loss(self, batch: Any) -> Tensor:
        out = self.net(batch[0], batch[0] >= 0) if self.kind == "encoder" else self.net(batch[0])
        out = out[0] if isinstance(out, tuple) else getattr(out, "logits", out)
        return nn.functional.cross_entropy(out.flatten(0, 1), batch[1].flatten())


class Start(Callback):
    """Notes the whole model, and what a hook of this rank sees of it, when training starts."""

    def __init__(self) -> None:
        self.whole: dict[str, Tensor] = {}
        self.seen: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}
        whole = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        self.whole = {name: value.clone() for name, value in whole.items()}


def start(
    info: RankInfo, layout: tuple[int, int], kind: str, late: bool, seeded: bool, load: str | None, device: str = "meta"
) -> Any:
    """The whole initial model (rank 0) and what a hook of this rank sees of it.

    Args:
        info: this process.
        layout: tensor- and pipeline-parallel size.
        kind: key of `NETS`.
        late: build it on the meta device.
        seeded: seed every rank alike; else every rank draws its own weights.
        load: path of a state that is loaded into the module before the Trainer sees it.
        device: where a late one is built.
    """
    noted = Start()
    torch.manual_seed(1 if seeded else 1 + info.rank)
    strategy = MegatronStrategy(tensor_parallel_size=layout[0], pipeline_parallel_size=layout[1], micro_batch_size=2)
    trainer = make_trainer(info, strategy, max_steps=1, limit_val_batches=0, callbacks=[noted])
    module = Built(kind, late, device)
    if load is not None:
        module.load_state_dict(torch.load(Path(load), weights_only=True))
    trainer.fit(module)
    return noted.whole, noted.seen


class Wide(TokenTask):
    """Layers of 8 MiB each, built without memory.

    Args:
        in_hook: build them in ``configure_model``; else they are there.
        layers: how many.
    """

    def __init__(self, in_hook: bool, layers: int = 32) -> None:
        super().__init__()
        self.count = layers
        self.embed, self.layers = nn.Embedding(VOCABULARY, 1024), nn.ModuleList()
        self.head = nn.Linear(1024, VOCABULARY)
        if not in_hook:
            self.fill()

    def fill(self) -> None:
        self.layers.extend(nn.Sequential(_narrow(1024, 512), _narrow(512, 1024)) for _ in range(self.count))

    def configure_model(self) -> None:
        if not self.layers:
            with torch.device("meta"):
                self.fill()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _narrow(into: int, out: int) -> nn.Linear:
    return nn.Linear(into, out, bias=False, dtype=torch.float64)


class Peak(Callback):
    """Notes by how much this process's memory has risen at most, and a sum of its weights, when training starts."""

    def __init__(self) -> None:
        self.before, self.risen, self.last = 0, 0, 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self.before = _resident("VmHWM")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.risen = _resident("VmHWM") - self.before


def _resident(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def peak(info: RankInfo, layout: tuple[int, int], in_hook: bool) -> tuple[int, dict[str, Tensor]]:
    """Bytes that a process has needed to start at most, and the whole module's weights (rank 0)."""
    _start_wide(info, layout, in_hook, layers=4)  # imports what a start needs
    return _start_wide(info, layout, in_hook, layers=32)


def _start_wide(info: RankInfo, layout: tuple[int, int], in_hook: bool, layers: int) -> tuple[int, dict[str, Tensor]]:
    torch.manual_seed(1)
    strategy = MegatronStrategy(tensor_parallel_size=layout[0], pipeline_parallel_size=layout[1], micro_batch_size=2)
    noted, start = Peak(), Start()
    trainer = make_trainer(info, strategy, max_steps=1, limit_val_batches=0, callbacks=[noted, start])
    if in_hook:
        module = Wide(in_hook, layers)
    else:
        with trainer.init_module(empty_init=True):
            module = Wide(in_hook, layers)
    trainer.fit(module)
    return noted.risen, {name: value for name, value in start.whole.items() if "31" in name}


def fit_with(info: RankInfo, kind: str, arguments: dict[str, Any]) -> None:
    """One step of a network of `NETS` with a strategy of these arguments."""
    make_trainer(info, MegatronStrategy(**arguments), max_steps=1, limit_val_batches=0).fit(Built(kind, late=False))
