"""Trains with Lightning's finetuning callbacks, at any layout, and goes on after layers have been unfrozen."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.scenario import trainer_for
from tests.parity.train import make_trainer
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask
from tests.strategy.averaging_scenarios import Regression

EPOCHS = 4


class LayerByLayer(BaseFinetuning):
    """Unfreezes one layer per epoch, from the last to the first: a parameter group more each time."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.layers)

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        self.unfreeze_and_add_param_group(module.layers[3 - epoch], optimizer, lr=1e-3 * (epoch + 1))


class FromTheHead(LayerByLayer):
    """The head alone is trained at first."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.into, module.layers])


class Thawed(Regression):
    """Its first layers are a backbone."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.backbone = nn.ModuleList(list(self.layers)[:layers])

    def configure_optimizers(self) -> Any:
        return AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-2)


class Untied(Thawed):
    """Its head has a weight of its own."""

    def __init__(self) -> None:
        super().__init__(4)
        self.out = nn.Linear(self.out.in_features, self.out.out_features, bias=False).double()


class Groups(Callback):
    """Learning rates and validation loss of every epoch; saves at the end of one."""

    def __init__(self, path: str | None, stop: int) -> None:
        self.path, self.stop = path, stop
        self.found: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.found += [float(trainer.callback_metrics["val_loss"])]
        self.found += [group["lr"] for group in trainer.optimizers[0].param_groups]
        if self.path is not None and trainer.current_epoch == self.stop:
            trainer.save_checkpoint(self.path)


def thawed(
    info: RankInfo, layers: int | None, sizes: tuple[int, int, int] | None, stop: int, saves: str | None, goes_on: bool
) -> tuple[list[float], dict[str, Any], dict[str, Tensor]]:
    """What each epoch had, the logged learning rates, and the weights at the end, on rank 0.

    Args:
        info: of this rank.
        layers: how many are a backbone that is unfrozen at once; ``None`` to unfreeze them one by one, and 0 from a
            head on whose stage alone there is something to train.
        sizes: of the layout; ``None`` for plain Lightning.
        stop: epoch after which there is a checkpoint.
        saves: its path.
        goes_on: whether to resume from it, instead of saving it.
    """
    strategy: Any = "auto" if sizes is None else MegatronStrategy(*sizes)
    thaw: BaseFinetuning = FromTheHead() if layers == 0 else LayerByLayer()
    if layers:
        thaw = BackboneFinetuning(1, backbone_initial_lr=1e-3)
    groups, rates = Groups(None if goes_on else saves, stop), LearningRateMonitor()
    logger = CSVLogger(f"{info.directory}/logs", version=f"{info.rank}-{sizes}-{goes_on}")
    callbacks: list[Any] = [thaw, groups, rates]
    options = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "callbacks": callbacks, "logger": logger}
    trainer = make_trainer(info, strategy, precision="64-true", **options)
    module = Untied() if layers == 0 else Thawed(layers or 4)
    trainer.fit(module, ckpt_path=saves if goes_on else None)
    state = module.state_dict() if sizes is None else strategy.full_state_dict()
    return groups.found, dict(rates.lrs), {name: value.clone() for name, value in state.items()}


class ByStep(TokenTask):
    """Trains the layers from the last one down, one more with each batch; or fewer, if it ``freezes``."""

    def __init__(self, freezes: bool) -> None:
        super().__init__(LearnedPositions())
        self.freezes = freezes

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for number, layer in enumerate(self.net.layers):
            layer.requires_grad_(number >= (batch_idx if self.freezes else 3 - batch_idx))


def by_step(info: RankInfo, schedule: str, freezes: bool) -> dict[str, Tensor]:
    """Weights after an epoch in which other layers are trained in each batch; in one process without a schedule."""
    torch.manual_seed(7)
    arguments = {"pipeline_schedule": schedule, "micro_batch_size": 1} if schedule else {}
    layout = (2, 1) if schedule else None
    trainer = trainer_for(info, layout, arguments, max_epochs=1, limit_val_batches=0)
    module = ByStep(freezes)
    trainer.fit(module)
    state = trainer.strategy.full_state_dict() if layout is not None else module.state_dict()  # type: ignore[attr-defined]
    return {name: value.double().clone() for name, value in state.items()}
