"""In which order a run's loaders read: that of the user's sampler, unless several replicas have to share it out.

Lightning puts a sampler of its own into every loader of a distributed strategy: training data is shuffled by it, even
where the user's loader reads in order. With several replicas that is what ``DDPStrategy`` does, and what is wanted
here. With one replica every rank loads every sample, and the loader can stay as it is: then the first loss is the one
that plain Lightning has.

A run that goes on from a checkpoint keeps the order of the run that wrote it, whatever the number of replicas::

    saved with     resumed with 1 replica        with several
    one replica    the user's sampler            the user's sampler, its order dealt out to the replicas
    several        Lightning's, for one replica  Lightning's
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.pickling import HeldGroup
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.strategy.data.walk import order_state, restore_order
from lightning_megatron.strategy.lightning.trainer_access import fetched_loaders

OWN, LIGHTNINGS = "own", "lightning"
_REQUIRES, _RESOLVE = "_requires_distributed_sampler", "_resolve_sampler"


class Samplers:
    """Answers for Lightning which loaders get another sampler, from now until :meth:`release`.

    Args:
        trainer: of the run.
        mesh: the grid.

    Raises:
        AttributeError: this version of Lightning asks by other names.
    """

    def __init__(self, trainer: pl.Trainer, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._replaces = bool(trainer._accelerator_connector.use_distributed_sampler)
        connector = trainer._data_connector
        self._requires, self._resolve = getattr(connector, _REQUIRES), getattr(connector, _RESOLVE)
        self._order = OWN if mesh.layout.data == 1 else LIGHTNINGS
        self._replaced = Replacements()
        self._replaced.call(connector, _REQUIRES, self._is_replaced)
        self._replaced.call(connector, _RESOLVE, self._sampler_of)

    def release(self) -> None:
        """Let Lightning answer again."""
        self._replaced.take_back()

    @property
    def order(self) -> str | None:
        """Name of the order of the training data, for a checkpoint; ``None`` where the user's loaders are shards."""
        if self._replaces:
            return self._order
        return OWN if self._mesh.layout.data == 1 else None

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Keep the order of the run that wrote a checkpoint.

        Args:
            saved: this package's part of the checkpoint; without ``"order"`` it is of a version that used Lightning's.
        """
        order = saved.get("order", LIGHTNINGS)
        if order is not None:
            self._order = order

    def _is_replaced(self, loader: DataLoader[Any]) -> bool:
        keeps = self._order == OWN and self._mesh.layout.data == 1
        return not keeps and bool(self._requires(loader))

    def _sampler_of(self, loader: DataLoader[Any], shuffle: bool, mode: RunningStage | None = None) -> Any:
        deals = self._order == OWN and self._mesh.layout.data > 1 and mode == RunningStage.TRAINING
        return DealtSampler(loader.sampler, self._mesh) if deals else self._resolve(loader, shuffle=shuffle, mode=mode)


def deals_in_turns(module: pl.LightningModule) -> bool:
    """Whether the samples of training are dealt out to the replicas in turns, as torch's distributed samplers do."""
    combined, _ = fetched_loaders(module.trainer)
    loaders = getattr(combined, "flattened", None) or ()
    samplers: list[Any] = [loader.sampler for loader in loaders if isinstance(loader, DataLoader)]
    samplers += [getattr(loader.batch_sampler, "sampler", None) for loader in loaders if isinstance(loader, DataLoader)]
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def deals_equally(module: pl.LightningModule) -> bool:
    """Whether the batches of training are known to have as many samples on each replica: torch's own batches of what
    one of its distributed samplers has dealt out.
    """
    combined, _ = fetched_loaders(module.trainer)
    loaders = getattr(combined, "flattened", None) or ()
    batches = [loader.batch_sampler if isinstance(loader, DataLoader) else None for loader in loaders]
    return all(type(each) is BatchSampler and isinstance(each.sampler, DistributedSampler) for each in batches)


class DealtSampler(DistributedSamplerWrapper):
    """Another sampler's entries in turn to each replica; all of them draw the order that the first draws.

    Args:
        sampler: of known length.
        mesh: the grid.

    Attributes:
        dealt: the sampler.
    """

    def __init__(self, sampler: Any, mesh: ParallelMesh) -> None:
        super().__init__(sampler, num_replicas=mesh.layout.data, rank=mesh.coordinates.data, shuffle=False)
        self.dealt = sampler
        self._replicas = HeldGroup(mesh.group("data_parallel"))
        self._parts = SimpleNamespace(sampler=sampler, dataset=None, collate_fn=None)

    def __iter__(self) -> Iterator[Any]:
        group = self._replicas.group
        if group is not None:  # it is in the run that dealt it, not unpickled elsewhere
            first = dist.get_global_rank(group, 0)
            restore_order(self._parts, objects.broadcast(order_state(self._parts), first, group))
        return super().__iter__()
