"""Steps that talk to the other replicas themselves, and steps that ask the Trainer to stop."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of
from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask


class Seen(Callback):
    """What was logged after every batch."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def _fit(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], module: Any, **options: Any) -> Any:
    seen = Seen()
    options = {"max_epochs": 2, "callbacks": [seen], **options}
    trainer = trainer_for(info, layout, {"micro_batch_size": 8 // (layout[1] if layout else 1), **arguments}, **options)
    trainer.fit(module)
    return [seen.values, trainer.global_step, trainer.current_epoch]


class Pairs(TokenTask):
    """Tells samples apart, those of all replicas; a replica finds its own by its number."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(LearnedPositions())

    def gathered(self, z: Tensor) -> Tensor:
        return self.all_gather(z, sync_grads=True).reshape(-1, z.shape[-1])

    def loss(self, batch: Any) -> Tensor:
        z = F.normalize(self.net(batch[0]).mean(1), dim=-1)
        replica = dist.get_rank() if dist.is_initialized() else 0
        return F.cross_entropy(z @ self.gathered(z).T / 0.1, torch.arange(len(z)) + replica * len(z))


class PairsByHand(Pairs):
    """The same with torch's own functions: with gradients, and without."""

    def gathered(self, z: Tensor) -> Tensor:
        if not dist.is_initialized():
            return z
        others = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(others, z.detach())
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            everyone = torch.cat(differentiable.all_gather(z))
        assert torch.equal(torch.cat(others), everyone)
        return everyone


class Reduced(TokenTask):
    """Sums and agrees over the replicas in every kind of step."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(LearnedPositions())

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            dist.barrier()
            told = [batch[0].sum() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(told, src=0)
        self.log("mean", mean, batch_size=len(batch[0]))
        return loss / mean.clamp(min=2.0)


def pairs(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    return _fit(info, layout, arguments, Pairs())


def pairs_by_hand(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    return _fit(info, layout, arguments, PairsByHand())


def reduced(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    return _fit(info, layout, arguments, Reduced())


class Stopping(TokenTask):
    """Asks to stop in the fifth batch, on the rank that computes the loss of the last replica."""

    def __init__(self, where: str) -> None:
        torch.manual_seed(7)
        super().__init__(LearnedPositions())
        self.where = where

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        parts = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        last = parts["rank"] == parts["num_replicas"] - 1
        if (self.where == "training") == self.training and self.trainer.global_step >= 4 and last:
            self.trainer.should_stop = True
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


class StoppingByPart(TokenTask):
    """Asks to stop after a batch of one sample, of which there is none."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(LearnedPositions())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_size_of(batch) == 1:
            self.trainer.should_stop = True
        return self.loss(batch)


def stopping_by_part(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    return _fit(info, layout, {**arguments, "micro_batch_size": 1}, StoppingByPart(), max_epochs=2)[1:]


def stopping_in_training(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    return _fit(info, layout, arguments, Stopping("training"), max_epochs=4)[1:]


def stopping_in_validation(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    return _fit(info, layout, arguments, Stopping("validation"), max_epochs=4)[1:]
