"""Gradients that a hook puts elsewhere, or looks at while batches are accumulated; and kinds that no rank can sum."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trained_state, trainer_for
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask


class Rebound(TokenTask):
    """Lets the memory of gradients be other memory."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.net.head.weight = self.net.embed.weight

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.data = 0.5 * parameter.grad.data


class Sparse(TokenTask):
    """An embedding with sparse gradients."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD

    def __init__(self) -> None:
        super().__init__(Walker())
        self.net.embed = nn.Embedding(*self.net.embed.weight.shape, sparse=True)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)  # type: ignore[call-arg]


class SparseAdam(Sparse):
    """With an optimizer that takes no other gradients."""

    optimizer = torch.optim.SparseAdam


class Lazy(TokenTask):
    """A head that has no shape yet."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.net.head = nn.LazyLinear(self.net.head.out_features)


class Between(TokenTask):
    """Clips, logs and reads gradients behind each batch of those that are accumulated."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.net.head.weight = self.net.embed.weight

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("first", self.net.blocks[0].mlp[0].weight.detach().norm())

    def on_after_backward(self) -> None:
        for place in (0, 3):
            gradient = self.net.blocks[place].mlp[0].weight.grad
            gradient.clamp_(-0.01, 0.01)
            self.log(f"of {place}", gradient.norm())
        self.log("tied", self.net.head.weight.grad.norm())


class Behind(Callback):
    """Logs them when the batch is done, if they are still there."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        gradient = pl_module.net.blocks[1].mlp[0].weight.grad  # type: ignore[union-attr, index]
        if (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches:
            pl_module.log("behind", gradient.norm())


def accumulate(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> list[Any]:
    """What is logged behind each batch, and all weights on rank 0, where three batches are accumulated."""
    torch.manual_seed(7)
    found: list[Any] = []
    note = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: found.append({k: float(v) for k, v in trainer.callback_metrics.items()})
    )
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "max_epochs": 2, "limit_val_batches": 0}
    state = trained_state(info, layout, arguments, Between(), callbacks=[Behind(), note], **options)
    return [found, state if info.rank == 0 else {}]


class Halved(TokenTask):
    """Lets half of each gradient stay for the next update, and all of it every third time."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and batch_idx % 3:
                parameter.grad.mul_(0.5)


class Zeros(Halved):
    """Leaves zeros, where parameters go on by their momentum; every other loss does without the head."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        if batch_idx % 2:
            logits = logits.detach() + self.net.embed(batch[0]).sum(-1, keepdim=True)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Before(Halved):
    """Logs the gradients that the update has used, before they are cleared."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for name in ("embed", "blocks.0", "blocks.3", "head"):
            gradients = [p.grad.norm() for p in self.net.get_submodule(name).parameters() if p.grad is not None]
            self.log(name, torch.stack(gradients).norm() if gradients else torch.tensor(0.0))


def largest(module: nn.Module) -> Tensor:
    """The largest norm of a gradient."""
    return torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).max()


class Outside(Halved):
    """Updates the head alone: no optimizer clears the gradients of the rest, whose norms are logged."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net, 2))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.head.parameters(), lr=0.1)


CLEARED: dict[str, type[TokenTask]] = {kind.__name__: kind for kind in (Halved, Zeros, Before, Outside)}


def cleared(
    info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str, batches: int
) -> dict[str, Any]:
    """What is logged behind each batch, and all weights on rank 0, where ``batches`` make an update."""
    torch.manual_seed(7)
    found: list[Any] = []
    note = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: found.append({k: float(v) for k, v in trainer.callback_metrics.items()})
    )
    options: dict[str, Any] = {"accumulate_grad_batches": batches, "max_epochs": 2, "limit_val_batches": 0}
    state = trained_state(info, layout, arguments, CLEARED[kind](), callbacks=[note], **options)
    return {"logged": found, "weights": state if info.rank == 0 else {}}


class Another(TokenTask):
    """Takes another optimizer for the second epoch."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


class Fetches(TokenTask):
    """Fetches its batches itself."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)

    def val_dataloader(self) -> Any:
        return []


class Aliased(TokenTask):
    """A head on the memory of the embedding, with gradients of its own."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.net.head.weight.data = self.net.embed.weight.data


_ALL = (Rebound, Sparse, SparseAdam, Lazy, Another, Fetches, Aliased)
KINDS: dict[str, type[TokenTask]] = {kind.__name__: kind for kind in _ALL}


def validate_and_train(info: RankInfo, layout: Layout, arguments: Mapping[str, Any]) -> str:
    """What training a module says that has been validated."""
    module, trainer = Aliased(), trainer_for(info, layout, arguments, max_epochs=1)
    trainer.validate(module, verbose=False)
    try:
        trainer.fit(module)
    except MisconfigurationException as error:
        return str(error)
    return "nothing"


def train(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    """All weights after an epoch, on rank 0."""
    warnings.filterwarnings("ignore", ".*`dataloader_iter`")  # on purpose
    torch.manual_seed(7)
    return trained_state(
        info, layout, arguments, KINDS[kind](), max_epochs=1 + (kind == "Another"), limit_val_batches=0
    )
