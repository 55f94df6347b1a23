"""A small network whose ``configure_optimizers`` looks at weights, built with memory or on the meta device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer

VOCABULARY, BATCH, BATCHES = 64, 8, 3
Sizes = tuple[int, int, int]  # stages, replicas, tensor ranks


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        nn.init.normal_(self.down.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + inner


class Net(nn.Module):
    """A table, blocks, a buffer and a head."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("ramp", torch.linspace(0.5, 1.0, width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) * self.ramp
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Task(pl.LightningModule):
    """Trains it.

    Args:
        meta: whether it is built on the meta device.
    """

    def __init__(self, meta: bool = False) -> None:
        super().__init__()
        self.meta = meta
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(5)
            with torch.device("meta" if self.meta else "cpu"):
                self.net = Net()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("val", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


class FanIn(Task):
    """Learning rates by the fan-in of each matrix (Yang et al., arXiv 2203.03466)."""

    def configure_optimizers(self) -> Any:
        return AdamW([{"params": [p], "lr": 0.1 / p.shape[-1]} for p in self.parameters()])


class ByNumber(Task):
    """Learning rates by the number of elements."""

    def configure_optimizers(self) -> Any:
        return AdamW([{"params": [p], "lr": 0.1 / p.numel() ** 0.5} for _, p in self.named_parameters()])


class ByNorm(Task):
    """Learning rates by the norm of each weight."""

    def configure_optimizers(self) -> Any:
        return AdamW([{"params": [p], "lr": 1e-4 + 0.01 * float(p.detach().norm())} for p in self.parameters()])


class Anchored(Task):
    """Keeps what the weights were, and is drawn there."""

    def configure_optimizers(self) -> Any:
        self.anchors = {n: p.detach().clone() for n, p in self.net.named_parameters() if n.startswith("head")}
        return super().configure_optimizers()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(
            (p - self.anchors[n]).square().sum() for n, p in self.net.named_parameters() if n in self.anchors
        )


class Lookahead(Optimizer):
    """Slow weights that follow fast ones (Zhang et al., arXiv 1907.08610), made in its constructor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(list(params), {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    slow = self.state[p]["slow"]
                    slow.lerp_(p - group["lr"] * p.grad, 0.5)
                    p.copy_(slow)
        return loss


class Following(Task):
    """An optimizer that keeps copies from its constructor on."""

    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters())


class BySize(LRScheduler):
    """A learning rate by the size of the model and the number of its weights."""

    def get_lr(self) -> Any:
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        scale = 1 + sum(p.numel() for p in weights) / 1e4 + len(weights) / 10 + self.last_epoch
        return [0.1 / scale for _ in self.optimizer.param_groups]


class Schedule(Task):
    """A scheduler of the user's looks at shapes."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": BySize(optimizer), "interval": "step"}}


class ByGradient(LRScheduler):
    """A learning rate by the norm of the last gradients."""

    def get_lr(self) -> Any:
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        return [0.01 / (1 + norm) for _ in self.optimizer.param_groups]


class GradientSchedule(Task):
    """A scheduler of the user's looks at gradients."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ByGradient(optimizer), "interval": "step"}}


class NormSchedule(Task):
    """Torch's scheduler is given a function that looks at weights."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()

        def scale(step: int) -> float:
            return 1 / (1 + float(self.net.layers[0].up.weight.detach().norm()))

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, scale), "interval": "step"}}


class OnOneRank(Task):
    """One rank alone looks."""

    def configure_optimizers(self) -> Any:
        if self.trainer.is_global_zero:
            self.norm = float(self.net.layers[3].up.weight.detach().norm())
        return super().configure_optimizers()


class Tied(Task):
    """The head is the table."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net.head.weight = self.net.table.weight


class Frozen(Task):
    """One layer does not train, and of another a weight."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net.layers[1].requires_grad_(False)
        self.net.layers[2].up.weight.requires_grad_(False)


class FrozenThere(Task):
    """A layer is frozen where the optimizer is made."""

    def configure_optimizers(self) -> Any:
        self.net.layers[0].requires_grad_(False)
        return super().configure_optimizers()


class Fused(Task):
    """A fused optimizer, which asks where parameters are."""

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2, fused=True)


class StartsWhole(Task):
    """A hook before the first step reads weights."""

    def on_fit_start(self) -> None:
        self.sum = float(sum(p.detach().double().sum() for p in self.net.layers.parameters()))
        assert self.sum == self.sum


class LoadsWhole(Task):
    """A hook reads weights while others are loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        total = float(self.net.layers[0].up.weight.detach().double().sum())
        assert total == total


class Looking(Task):
    """Looks at weights before a run and behind it: shapes, norms and numbers."""

    def __init__(self, meta: bool = False) -> None:
        super().__init__(meta)
        self.found: dict[str, Any] = {}

    def look(self, place: str) -> None:
        """Keep what there is to see."""
        if self.net is not None and place not in self.found:
            weights = self.net.table.weight, self.net.layers[0].up.weight, self.net.head.weight
            norms = [float(weight.detach().norm()) for weight in weights]
            count = sum(parameter.numel() for parameter in self.parameters())
            self.found[place] = [[*weight.shape] for weight in weights], norms, count

    def setup(self, stage: str) -> None:
        self.look(f"setup of {stage}")

    def train_dataloader(self) -> Any:
        return loader(0, 1)

    def on_fit_end(self) -> None:
        self.look("end of fit")

    def teardown(self, stage: str) -> None:
        self.look(f"teardown of {stage}")


class Outside(Looking):
    """The same in everything that is called beside the hooks of a step."""

    def train_dataloader(self) -> Any:
        self.look("loader")
        return super().train_dataloader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.look("before transfer")
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.look("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.look("after transfer")
        return batch


class OutsideStages(Looking):
    """Looks at all parameters, of which a stage has some only."""

    def look(self, place: str) -> None:
        """Keep what there is to see."""
        if self.net is not None and place not in self.found:
            norm = sum(float(parameter.detach().square().sum()) for parameter in self.parameters())
            self.found[place] = norm, len(list(self.parameters()))


class LooksTwice(pl.Callback):
    """Looks before a run and behind it."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.look(f"setup of {stage}, by a callback")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.look("end of fit, by a callback")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.look(f"teardown of {stage}, by a callback")


class DataThatLooks(pl.LightningDataModule):
    """Looks at the module where data are made, moved and given up."""

    def look(self, place: str) -> None:
        """Keep what there is to see."""
        module = self.trainer.lightning_module  # type: ignore[union-attr]
        module.look(f"{place} of the data")

    def train_dataloader(self) -> Any:
        self.look("loader")
        return loader(0, 1)

    def val_dataloader(self) -> Any:
        return loader(0, 1)

    def setup(self, stage: str) -> None:
        self.look(f"setup of {stage}")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.look("after transfer")
        return batch

    def teardown(self, stage: str) -> None:
        self.look(f"teardown of {stage}")


def seen_outside(
    info: RankInfo, sizes: Sizes | None = None, kind: str = "Outside", data: bool = False
) -> tuple[dict[str, Any], bool]:
    """What code beside steps finds in a fit, and in a validation behind it; and whether the module can be pickled.

    Args:
        info: this process.
        sizes: stages, replicas, tensor ranks; ``None`` for a plain Trainer.
        kind: of the module.
        data: whether a data module looks too.
    """
    strategy: Any = "auto"
    if sizes is not None:
        strategy = MegatronStrategy(
            pipeline_parallel_size=sizes[0], data_parallel_size=sizes[1], tensor_parallel_size=sizes[2]
        )
    trainer = make_trainer(info, strategy, max_steps=2, num_sanity_val_steps=0, callbacks=[LooksTwice()])
    module: Looking = {"Looking": Looking, "Outside": Outside, "OutsideStages": OutsideStages}[kind]()
    if data:
        given = DataThatLooks()
        trainer.fit(module, datamodule=given)
        trainer.validate(module, datamodule=given, verbose=False)
    else:
        trainer.fit(module, val_dataloaders=loader(0, 1))
        trainer.validate(module, loader(0, 1), verbose=False)
    return module.found, not any(callable(value) for value in vars(module).values())


class NormsBackward(Task):
    """Gives each gradient a norm of one, where ``backward`` has run."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.norm() + 1e-3)


class NormsAfter(Task):
    """The same in the hook behind it."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.norm() + 1e-3)


class HalvesBackward(Task):
    """A ``backward`` of its own that looks at no gradient."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (0.5 * loss).backward()  # type: ignore[no-untyped-call]


KINDS: dict[str, type[Task]] = {kind.__name__: kind for kind in (Task, *Task.__subclasses__())}


def loader(replica: int, replicas: int) -> DataLoader[Any]:
    """This replica's samples of three batches."""
    data = torch.randint(0, VOCABULARY, (BATCH * BATCHES, 9), generator=torch.Generator().manual_seed(3))
    size = BATCH // replicas
    mine = [BATCH * batch + replica * size + each for batch in range(BATCHES) for each in range(size)]
    return DataLoader(data, batch_size=size, sampler=mine)  # type: ignore[arg-type]


def trained(
    info: RankInfo,
    kind: str,
    sizes: Sizes | None = None,
    options: dict[str, Any] | None = None,
    steps: int = 3,
    load: str | None = None,
    save: str | None = None,
    meta: bool = False,
    precision: str = "64-true",
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights and logged numbers after a fit.

    Args:
        info: this process.
        kind: of the module.
        sizes: stages, replicas, tensor ranks; ``None`` for a plain Trainer.
        options: of the strategy.
        steps: optimizer steps.
        load: a checkpoint to go on from.
        save: where to write one.
        meta: whether the module is built on the meta device.
        precision: of the Trainer.
    """
    stages, replicas, tensor = sizes or (1, 1, 1)
    strategy: Any = "auto"
    if sizes is not None:
        given = {"micro_batch_size": 2, **(options or {})} if stages > 1 else options or {}
        strategy = MegatronStrategy(
            pipeline_parallel_size=stages, data_parallel_size=replicas, tensor_parallel_size=tensor, **given
        )
    trainer = make_trainer(info, strategy, max_steps=steps, limit_val_batches=1, precision=precision)
    module, replica = KINDS[kind](meta), info.rank // tensor % replicas
    trainer.fit(module, loader(replica, replicas), loader(replica, replicas), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    state = module.state_dict() if sizes is None else strategy.full_state_dict()
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {name: value.clone() for name, value in state.items()}, numbers
