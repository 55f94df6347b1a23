"""Trains with Lightning's averaging callbacks, at any layout, stopped and resumed or not."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer

EPOCHS, STOP, WIDTH = 4, 2, 12


class Counted(StochasticWeightAveraging):
    """Overrides what Lightning lets a subclass override, and counts the calls."""

    def __init__(self) -> None:
        super().__init__(swa_lrs=3e-2, swa_epoch_start=2, annealing_epochs=1)
        self.calls: list[str] = []

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("setup")
        super().setup(*args, **kwargs)

    def update_parameters(self, *args: Any) -> None:  # type: ignore[override]
        self.calls.append("update")
        StochasticWeightAveraging.update_parameters(*args)

    def transfer_weights(self, *args: Any) -> None:  # type: ignore[override]
        self.calls.append("transfer")
        StochasticWeightAveraging.transfer_weights(*args)


class Swapped(EMAWeightAveraging):
    """Overrides what makes, loads and exchanges the average, counts the calls, and calls Lightning's in both ways."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("setup")
        EMAWeightAveraging.setup(self, *args, **kwargs)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.calls.append("load")
        super().on_load_checkpoint(trainer, module, {**checkpoint})

    def _swap_models(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("swap")
        super()._swap_models(*args, **kwargs)

    def _copy_average_to_current(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("copy")
        WeightAveraging._copy_average_to_current(self, *args, **kwargs)


KINDS: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.8),
    "mean": lambda: WeightAveraging(use_buffers=False),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=3e-2, swa_epoch_start=2, annealing_epochs=1),
    "own": lambda: Swapped(decay=0.8),
}


class Layer(nn.Module):
    """An MLP with a residual, and a norm of the kind asked for."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Regression(LightningModule):
    """Four layers and a tied pair of projections; logs the validation loss, for which the average is used."""

    def __init__(self, batch_norm: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.data_type = dtype
        torch.manual_seed(5)
        self.into = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer(batch_norm) for _ in range(4))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.into.weight
        self.to(dtype)  # Lightning's callbacks copy the module before `precision` does this

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - batch.roll(1, 1)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self(batch) - batch.roll(1, 1)).square().mean(), sync_dist=True)

    def _loader(self, seed: int) -> DataLoader[Tensor]:
        data: Any = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=self.data_type)
        own = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        sampler: Any = DistributedSampler(data, shuffle=False, **own)
        return DataLoader(data, batch_size=8 // own["num_replicas"], sampler=sampler)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(1)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(2)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Notes(Callback):
    """Validation loss and learning rate of every epoch; saves at the end of one."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.found: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.found += [float(trainer.callback_metrics["val_loss"]), trainer.optimizers[0].param_groups[0]["lr"]]
        if self.path is not None and trainer.current_epoch == STOP - 1:
            trainer.save_checkpoint(self.path)


def averaged(
    info: RankInfo,
    kind: str,
    sizes: tuple[int, int, int] | None,
    saves: str | None = None,
    resumes: str | None = None,
    batch_norm: bool = False,
    precision: str = "64-true",
    micro_batch_size: int | str = "auto",
) -> tuple[list[float], dict[str, Tensor]]:
    """Notes of every epoch, and the weights at the end, on rank 0; ``sizes=None`` is plain Lightning."""
    notes = Notes(saves)
    strategy: Any = "auto" if sizes is None else MegatronStrategy(*sizes, micro_batch_size=micro_batch_size)
    options = {"max_epochs": EPOCHS, "callbacks": [KINDS[kind](), notes], "num_sanity_val_steps": 0}
    options["sync_batchnorm"] = batch_norm and sizes is not None
    trainer = make_trainer(info, strategy, precision=precision, **options)
    module = Regression(batch_norm, torch.float64 if precision == "64-true" else torch.float32)
    trainer.fit(module, ckpt_path=resumes)
    state = module.state_dict() if sizes is None else strategy.full_state_dict()
    assert "update_parameters" not in trainer.callbacks[0].__dict__, "the callback has its own methods back"
    return notes.found, {name: value.clone() for name, value in state.items()}


def counted(
    info: RankInfo, kind: type[Counted | Swapped], sizes: tuple[int, int, int] | None
) -> tuple[list[str], dict[str, Tensor]]:
    """Calls of the methods that a subclass overrides, and the weights at the end, on rank 0."""
    strategy: Any = "auto" if sizes is None else MegatronStrategy(*sizes)
    callback, module = kind(), Regression()
    make_trainer(info, strategy, max_epochs=EPOCHS, callbacks=[callback], num_sanity_val_steps=0).fit(module)
    state = module.state_dict() if sizes is None else strategy.full_state_dict()
    return callback.calls, {name: value.clone() for name, value in state.items()}
