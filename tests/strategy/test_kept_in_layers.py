"""What layers of the trunk keep, or hooks on them, is for the hooks behind a step what the whole batch has left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trainer_for

WIDE = pytest.mark.wide


class Layer(nn.Module):
    """Keeps rows, a mean, a sum, and what is made of none of those."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tables = nn.Linear(8, 8), {"peak": torch.tensor(0.0)}

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.linear(x).tanh()
        self.keep(out.detach())
        return out

    def keep(self, out: Tensor) -> None:
        """Does so."""
        self.rows, self.mean, self.positive = out, out.square().mean().item(), (out > 0).sum()


class Peaks(Layer):
    """Keeps maxima."""

    def keep(self, out: Tensor) -> None:
        self.tables["peak"] = out.abs().max()


class Sometimes(Layer):
    """Keeps rows of some micro-batches only."""

    def keep(self, out: Tensor) -> None:
        if out.mean() > 0.02:
            self.rows = out


class ReadByHook(LightningModule):
    """Its hook behind a batch logs what the first and the last layer have kept."""

    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([self.layer() for _ in range(4)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean((1, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.log_dict(self.read())

    def read(self) -> dict[str, Any]:
        """Numbers of the first and the last layer."""
        found: dict[str, Any] = {}
        for place in (0, 3):
            layer = self.layers[place]
            found |= {f"rows{place}": layer.rows.std(), f"mean{place}": layer.mean}
            found[f"positive{place}"] = layer.positive.to(layer.rows.dtype)
        return found

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(32, 4, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return DataLoader(TensorDataset(x, x.mean((1, 2)) + torch.arange(32) % 5), batch_size=8)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


class ReadByCallback(ReadByHook):
    """A callback does so."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def configure_callbacks(self) -> list[Callback]:
        class Reads(Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: ReadByHook, *_: Any) -> None:
                """Logs it."""
                pl_module.log("rows", pl_module.layers[2].rows.std())
                pl_module.log("mean", getattr(pl_module.layers[3], "mean"))  # noqa: B009

        return [Reads()]


class KeptByHooks(ReadByHook):
    """Hooks on layers keep it."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.linear.register_forward_hook(lambda module, _, out: setattr(module, "seen", out.detach()))

    def read(self) -> dict[str, Any]:
        return {f"seen{place}": self.layers[place].linear.seen.square().std() for place in (0, 3)}


class ReadPeaks(ReadByHook):
    """Reads maxima."""

    layer = Peaks

    def read(self) -> dict[str, Any]:
        return {f"peak{place}": self.layers[place].tables["peak"] for place in (0, 3)}


class ReadAtEnd(ReadByHook):
    """Reads rows at the end of an epoch."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        self.log("rows", self.layers[3].rows.std())


class ReadSometimes(ReadByHook):
    """Reads rows that not every micro-batch has left."""

    layer = Sometimes

    def read(self) -> dict[str, Any]:
        return {"rows": self.layers[3].rows.std() if hasattr(self.layers[3], "rows") else 0.0}


KINDS = {kind.__name__: kind for kind in (ReadByHook, ReadByCallback, KeptByHooks, ReadPeaks, ReadAtEnd, ReadSometimes)}


class Seen(Callback):
    """Numbers of each batch."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Those of the batch before."""
        self.logged.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Those of the last one."""
        self.on_train_batch_start(trainer)


def kept(info: RankInfo, layout: Layout | None, name: str, arguments: Mapping[str, Any]) -> Any:
    """What each step has logged."""
    torch.manual_seed(0)
    seen = Seen()
    trainer = trainer_for(info, layout, arguments, max_epochs=2, callbacks=[seen])
    trainer.fit(KINDS[name]().double())
    return seen.logged


LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    ((2, 1), {}),
    ((4, 1), {}),
    ((2, 1), {"pipeline_schedule": "zb-v"}),
    ((2, 1), {"activation_recompute": "full"}),
    ((2, 1), {"micro_batch_size": 4}),
]


@pytest.mark.parametrize(
    ("name", "layout", "arguments"),
    [
        pytest.param(name, *layout, marks=() if (name, number) == ("ReadByHook", 0) else WIDE)
        for name in KINDS
        if name != "ReadSometimes"
        for number, layout in enumerate(LAYOUTS)
    ],
    ids=str,
)
def test_hooks_find_what_layers_keep_of_a_batch(name: str, layout: Layout, arguments: Mapping[str, Any]) -> None:
    expected = one_process(kept, None, name, {})
    for found in run_trainers(kept, layout, name, arguments, devices=layout[0]):
        assert not list(differences("logged", found.value, expected, 1e-9)), found.output
