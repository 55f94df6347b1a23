"""Training with every kind of optimizer, whose work replicas share, and what a rank holds of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron.data_parallel.windows.arriving import ArrivingWindows
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.parity.zoo.data import VOCABULARY, Items, loader
from tests.parity.zoo.language import NanoGPT

BATCH = 12  # divisible by 2, 3 and 4 replicas


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """What an optimizer's closure gives, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Lion(torch.optim.Optimizer):
    """A third party's optimizer: signs of an interpolated momentum (arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                first, second = group["betas"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(average.lerp(parameter.grad, 1 - first).sign(), alpha=group["lr"])
                average.lerp_(parameter.grad, 1 - second)
        return loss


class Early(torch.optim.Optimizer):
    """Takes the parameters out of its groups before its closure has run."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        loss = evaluated(closure)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
        return loss


torch.optim.SGD([torch.zeros(1)], lr=1.0)  # once there is one, the `step` that a subclass calls runs hooks as well


class Insisting(torch.optim.SGD):
    """Cannot step without a closure."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = evaluated(lambda: closure())
        super().step()
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adam_foreach": lambda groups: torch.optim.Adam(groups, lr=1e-2, foreach=True, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True, momentum=0.5),
    "insisting": lambda groups: Insisting(groups, lr=0.05, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1),
    "lion": lambda groups: Lion(groups, lr=1e-3),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "muon": lambda groups: torch.optim.Muon(groups[:1], lr=1e-2),  # takes matrices only; the rest is not trained
}
REFUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"early": lambda groups: Early(groups)}


@dataclass(frozen=True)
class Setup:
    """A training run.

    Attributes:
        layout: pipeline, data and tensor-parallel size; ``None`` for a plain Trainer.
        strategy: arguments of the strategy.
        trainer: arguments of the Trainer.
        module: arguments of the module.
    """

    layout: tuple[int, int, int] | None = None
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        pipeline, data, tensor = self.layout or (1, 1, 1)
        return pipeline * data * tensor


class SharedTask(LightningModule):
    """A small GPT with a tied head, two parameter groups and a schedule.

    Args:
        optimizer: key of `OPTIMIZERS` or `REFUSED`.
        unused: every second batch leaves a branch of the network without gradient.
        frozen: begin with the first layers frozen; a callback unfreezes them and adds their group.
        added: the first layer is frozen, to get a group of its own when training starts.
    """

    def __init__(
        self, optimizer: str = "adamw", unused: bool = False, frozen: bool = False, added: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = NanoGPT(4)
        self.branch = nn.Linear(VOCABULARY, 1)
        self.optimizer, self.unused, self.frozen, self.added = optimizer, unused, frozen, added

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        return torch.stack([s["tokens"] for s in samples]), torch.stack([s["targets"] for s in samples])

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self, Items(4 * BATCH), self.collate, size=BATCH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, loss = self.net(*batch)
        if not (self.unused and batch_idx % 2):
            loss = loss + self.branch(logits).square().mean()
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def trained(self) -> Iterable[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.named_parameters() if p.requires_grad]

    def configure_optimizers(self) -> Any:
        if self.frozen or self.added:
            BaseFinetuning.freeze(self.net.transformer.h[: 1 if self.added else 2], train_bn=False)
        matrices = [p for _, p in self.trained() if p.dim() >= 2]
        vectors = [p for _, p in self.trained() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-3}]
        optimizer = (OPTIMIZERS | REFUSED)[self.optimizer](groups)
        if self.frozen or self.added:  # torch's schedules do not follow a group that is added later
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3) * 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class RegroupedTask(SharedTask):
    """Changes what is trained, and in which group, in a hook.

    Args:
        named: freeze one parameter by its name for the first epoch, another one for the second.
        **others: of `SharedTask`.
    """

    def __init__(self, named: bool = False, **others: Any) -> None:
        super().__init__(**others)
        self.named = named

    def on_train_epoch_start(self) -> None:
        if self.named:
            self.net.transformer.wpe.weight.requires_grad_(self.current_epoch != 0)
            self.branch.bias.requires_grad_(self.current_epoch != 1)
        if self.added:
            groups = self.trainer.optimizers[0].param_groups
            held = {id(parameter) for group in groups for parameter in group["params"]}
            first = [p.requires_grad_() for p in self.net.transformer.h[0].parameters()]
            if first and id(first[0]) not in held:
                self.trainer.optimizers[0].add_param_group({"params": first, "lr": 2e-3})


class Unfreeze(BaseFinetuning):
    """Lightning's own way of unfreezing: a parameter group more from the third batch on."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """The module has done it, before it made its optimizer."""

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.transformer.h[:2], optimizer, lr=1e-2)


class Watch(Callback):
    """Writes down losses, and the optimizer's class and groups between steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        self.rates += [group["lr"] for group in trainer.optimizers[0].param_groups]


def train(info: RankInfo, setup: Setup, resume: str | None = None, save: str | None = None) -> dict[str, Any]:
    """Trains and reports losses, rates, whole weights (on rank 0) and elements of optimizer state.

    Args:
        info: this process.
        setup: of the run.
        resume: checkpoint to go on from.
        save: where to save one at the end.
    """
    strategy: Any = "auto"
    if setup.layout is not None:
        from lightning_megatron import MegatronStrategy

        strategy = MegatronStrategy(*setup.layout, **setup.strategy)
    watch = Watch()
    callbacks: list[Callback] = [watch, Unfreeze()] if setup.module.get("frozen") else [watch]
    options = {"max_epochs": 2, "limit_val_batches": 0, **setup.trainer}
    trainer = make_trainer(info, strategy, callbacks=callbacks, **options)
    task = RegroupedTask if {"named", "added"} & setup.module.keys() else SharedTask
    module = task(**setup.module)
    if options.get("precision") not in (None, "64-true"):
        module = module.float()
    trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    whole = trainer.strategy.full_state_dict() if setup.layout is not None else module.state_dict()
    optimizer = trainer.optimizers[0]
    members = [id(p) for group in optimizer.param_groups for p in group["params"]]
    return {
        "losses": watch.losses,
        "rates": watch.rates,
        "weights": {name: value.detach().clone() for name, value in whole.items()},
        "state_elements": sum(v.numel() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
        "updates_matrices": any(key.dim() > 1 for key in optimizer.state),
        "holds_module": set(members) <= {id(p) for p in module.parameters()},
    }


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float) -> list[str]:
    """What differs from the reference, in words; weights are compared where ``found`` has them."""
    words = []
    for key in ("losses", "rates"):
        if found[key] != pytest.approx(wanted[key], rel=tolerance, abs=tolerance):
            words.append(f"{key} {found[key]} instead of {wanted[key]}")
    for name, value in found["weights"].items():
        if not torch.allclose(value, wanted["weights"][name], rtol=tolerance, atol=tolerance):
            words.append(f"{name} differs by {(value - wanted['weights'][name]).abs().max():.3g}")
    return words


class NormOf(SharedTask):
    """Logs the norm of whole gradients by itself, as a plain Trainer's user would."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("grad_norm", nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))


def norms(info: RankInfo, setup: Setup) -> list[float]:
    """``grad_norm`` after every batch: logged by the module on one process, by the strategy elsewhere."""
    found: list[float] = []

    class Note(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            found.append(float(trainer.callback_metrics["grad_norm"]))

    strategy: Any = "auto"
    if setup.layout is not None:
        from lightning_megatron import MegatronStrategy

        strategy = MegatronStrategy(*setup.layout, **setup.strategy)
    trainer = make_trainer(info, strategy, max_epochs=1, limit_val_batches=0, callbacks=[Note()])
    trainer.fit(NormOf() if setup.layout is None else SharedTask())
    return found


class OwnUse(SharedTask):
    """Uses weights without calling the modules that hold them.

    Args:
        kind: ``always``, ``later`` (from the second batch on, and a copy of the module); if ``unseen``, torch reports
            no use, and if ``early`` too, only a weight is used whose module is called afterwards.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.apart, self.kind = nn.Linear(VOCABULARY, 3), kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if "later" in self.kind and batch_idx == 0:
            return self.net(*batch)[1]
        copied = copy.deepcopy(self.apart) if self.kind == "later" else None
        with torch._C.DisableTorchFunctionSubclass() if "unseen" in self.kind else nullcontext():
            penalty = self.net.transformer.wpe.weight.sum().square()
            penalty = penalty if "early" in self.kind else penalty + self.apart.weight.square().sum()
        if copied is not None:
            penalty = penalty * copied.weight.detach().square().sum()
        return self.net(*batch)[1] + 0.1 * penalty


def quiet(info: RankInfo, setup: Setup, own_use: str | None = None) -> dict[str, Any]:
    """Trains without a callback that could look at weights; reports how many gathers a step left under way."""
    strategy: Any = "auto"
    if setup.layout is not None:
        from lightning_megatron import MegatronStrategy

        strategy = MegatronStrategy(*setup.layout, **setup.strategy)
    trainer = make_trainer(info, strategy, max_epochs=2, limit_val_batches=0, **setup.trainer)
    module = SharedTask() if own_use in (None, "compiled") else OwnUse(str(own_use))
    if own_use == "compiled":
        blocks = module.net.transformer.h
        for index, block in enumerate(blocks):
            blocks[index] = torch.compile(block, backend="eager")
    pending, start = list[int](), ArrivingWindows.start

    def counted(self: ArrivingWindows, buckets: Any) -> None:
        start(self, buckets)
        pending.append(len(self.under_way))

    with mock.patch.object(ArrivingWindows, "start", counted):
        trainer.fit(module)
    whole = trainer.strategy.full_state_dict() if setup.layout is not None else module.state_dict()
    return {"weights": {name: value.detach().clone() for name, value in whole.items()}, "pending": pending}
