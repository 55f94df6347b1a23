"""Averages of weights that modules, callbacks and objects of the user keep by name: saved, logged, gone on with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from lightning_megatron.checkpoints.files.directory import META, open_checkpoint
from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.strategy.loss_modules import Task


def average(shadow: dict[str, Tensor], net: nn.Module) -> None:
    """Follow the weights of a module."""
    with torch.no_grad():
        for name, p in net.named_parameters():
            shadow[name].lerp_(p, 0.1)


class InTheModule(Task):
    """Made in the constructor, saved as it is; its norm is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow = {name: p.detach().clone() for name, p in self.named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        average(self.shadow, self)

    def on_train_epoch_end(self) -> None:
        self.log("norm", torch.stack([value.norm() for value in self.shadow.values()]).norm())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["shadow"] = self.shadow

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.shadow = checkpoint["shadow"]


class OfAStage(Task):
    """Made when the fit starts, of this stage's weights; copied by name into the checkpoint, and written to a file."""

    shadow: dict[str, Tensor] | None = None
    folder = ""

    def on_fit_start(self) -> None:
        if self.shadow is None:
            self.shadow = {name: p.detach().clone() for name, p in self.named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.shadow is not None
        average(self.shadow, self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.shadow is not None
        checkpoint["kept"] = [{"shadow": {name: self.shadow[name].clone() for name, _ in self.named_parameters()}}]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.shadow = checkpoint["kept"][0]["shadow"]

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero and self.folder:
            torch.save(self.shadow, f"{self.folder}/shadow.pt")


class Averager:
    """Keeps averages of a part of a module, under the names that these have there."""

    def __init__(self, net: nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in net.named_parameters()}

    def update(self, net: nn.Module) -> None:
        average(self.values, net)

    def total(self) -> Tensor:
        return torch.stack([value.sum() for value in self.values.values()]).sum()


class InAnObject(Task):
    """An object of the user's keeps averages of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = Averager(self.layers)

    def on_before_zero_grad(self, _: Any) -> None:
        self.averages.update(self.layers)

    def on_train_epoch_end(self) -> None:
        self.log("total", self.averages.total())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["averages"] = self.averages.values

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.averages.values = checkpoint["averages"]


class Shadow(Callback):
    """A callback keeps averages, and says in its state how large they are."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        if not self.shadow:
            self.shadow = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        average(self.shadow, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "size": float(sum(value.abs().sum() for value in self.shadow.values()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shadow = state_dict["shadow"]


class OtherKeys(Task):
    """Averages under names with a start of their own, and squares of gradients under names without dots."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow = {f"ema.{name}": p.detach().clone() for name, p in self.named_parameters()}
        self.squares: dict[str, Tensor] = {}
        self.slashes: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_before_optimizer_step(self, _: Any) -> None:
        for name, p in self.named_parameters():
            self.shadow["ema." + name].lerp_(p, 0.1)
            self.slashes[name.replace(".", "/")] = 0.5 * self.slashes.get(name.replace(".", "/"), 0.0) + p
            key = name.replace(".", "_")
            self.squares[key] = self.squares.get(key, 0.0) + p.grad**2  # type: ignore[operator]

    def on_train_epoch_end(self) -> None:
        self.log("squares", sum(value.sum() for value in self.squares.values()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["shadow"], checkpoint["averages"], checkpoint["kept"] = self.shadow, self.squares, self.slashes

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.shadow, self.squares, self.slashes = (checkpoint[key] for key in ("shadow", "averages", "kept"))


class OtherWays(Task):
    """Averages in a dictionary for each module, and under pairs of a name and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow: dict[str, dict[str, Tensor]] = {}
        self.pairs: dict[tuple[str, int], Tensor] = {}

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for name, p in self.named_parameters():
            module, _, last = name.rpartition(".")
            each = self.shadow.setdefault(module, {})
            each[last] = 0.9 * each.get(last, 0.0) + p
            self.pairs[name, 0] = 0.5 * self.pairs.get((name, 0), 0.0) + p

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["shadow"], checkpoint["averages"] = self.shadow, {"of": {"pairs": self.pairs}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.shadow, self.pairs = checkpoint["shadow"], checkpoint["averages"]["of"]["pairs"]


class ByNumber(Task):
    """Averages in the order in which the weights come, which stages do not share."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow: dict[int, Tensor] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.shadow = {at: p.detach().clone() for at, p in enumerate(self.parameters())}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["shadow"] = self.shadow


class OneLayer(Task):
    """Keeps averages of the first layer under names that all layers have."""

    def on_fit_start(self) -> None:
        self.shadow = {name: p.detach().clone() for name, p in self.layers[0].named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        average(self.shadow, self.layers[0])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["shadow"] = self.shadow


class ByCallback(Task):
    """Has its averages kept by a callback."""

    def configure_callbacks(self) -> list[Callback]:
        return [Shadow()]


class Twins(Task):
    """Keeps averages of the layers under names that those of a second stack of them have too."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0)) for _ in range(4))
        self.after.double()
        self.shadow = {name: p.detach().clone() for name, p in self.layers.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        for layer in self.after:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits

    def on_train_batch_end(self, *_: Any) -> None:
        average(self.shadow, self.layers)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["shadow"] = self.shadow


class WritesAtOnce(InTheModule):
    """Writes averages into a file in the hook that has updated them."""

    def on_train_batch_end(self, *_: Any) -> None:
        average(self.shadow, self)
        torch.save(self.shadow, "never-written.pt")


KINDS: dict[str, type[Task]] = {
    each.__name__: each
    for each in (
        *(InTheModule, OfAStage, InAnObject, OtherKeys, OtherWays, ByNumber),
        *(OneLayer, ByCallback, Twins, WritesAtOnce),
    )
}
EPOCHS = 2


def kept(
    info: RankInfo,
    layout: Layout | None,
    arguments: Mapping[str, Any],
    kind: str,
    folder: str,
    epochs: int = EPOCHS,
    resumes: bool = False,
) -> Any:
    """What a run logs and saves of its averages, and its weights, on rank 0; on others what each has.

    Args:
        info: this process.
        layout: pipeline and data-parallel size; ``None`` for a plain Trainer.
        arguments: of the strategy.
        kind: of the module.
        folder: for the checkpoint of the last epoch that is trained.
        epochs: of the run.
        resumes: whether it goes on from the checkpoint of the epoch before.
    """
    module = KINDS[kind]()
    module.folder = folder  # type: ignore[assignment]
    path, saves = f"{folder}/{epochs}.ckpt", LambdaCallback(on_train_end=lambda *_: trainer.save_checkpoint(path))
    trainer = trainer_for(info, layout, arguments, max_epochs=epochs, enable_checkpointing=False, callbacks=[saves])
    trainer.fit(module, ckpt_path=f"{folder}/{epochs - 1}.ckpt" if resumes else None)
    if kind == "InTheModule":
        trainer.save_checkpoint(path := f"{folder}/after.ckpt")
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if layout is None:
        weights, saved = module.state_dict(), torch.load(path, weights_only=True)
    else:
        weights = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        saved = torch.load(Path(open_checkpoint(path).path) / META, weights_only=True) if info.rank == 0 else {}
    own = {key: saved[key] for key in ("shadow", "kept", "averages", "callbacks") if key in saved}
    left = {name: value.clone() for name, value in module.shadow.items()} if kind == "InTheModule" else None
    every = {"logged": logged, "left": left}
    return {"weights": dict(weights), "saved": own, **every} if info.rank == 0 else every
