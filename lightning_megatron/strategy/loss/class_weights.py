"""Means over targets that are weighed by their class, as ``F.cross_entropy(z, y, weight=w)`` computes them.

One process divides by the weights of all targets, a replica by those of its own, so it counts as much as these add up
to. Which tensors of a module may be weights of classes, their shape tells; whether they are, a trial finds out::

    replica 0   targets 0 0 1   w = [1, 4]   1 + 1 + 4 = 6
    replica 1   targets 1 1 1                4 + 4 + 4 = 12
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_megatron.mesh.batches import tensors_of
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.parts.names import owner_and_leaf
from lightning_megatron.strategy.logs.combining import Mean
from lightning_megatron.strategy.loss.counted import Counted, integers_of
from lightning_megatron.strategy.loss.weighing import Reading

_CLASSES = 4096  # most of them
_MOST = 12  # ways that are tried


@dataclass(frozen=True)
class ClassWeighted(Counted):
    """Weighs by the weights of the classes that the entries of one tensor of the batch are.

    Attributes:
        name: of the weights on the module.
        weights: as they were when they were found.
        sources: gives them as they are, where this rank has them; see :meth:`bind`.
    """

    name: str = ""
    weights: tuple[float, ...] = field(default=(), compare=False)
    sources: list[Any] = field(default_factory=list, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return ClassWeighted, (self.place, self.shifted, self.ignored, self.name, self.weights)

    def bind(self, module: nn.Module, *, alone: bool) -> None:
        """Follow what the module's weights will be.

        Args:
            module: the user's.
            alone: whether one stage has all of it; other stages cannot see weights that change.
        """
        self.sources[:] = [(module, alone)]

    def __call__(self, part: Any) -> float:
        """The weights of the targets in a part of a batch.

        Raises:
            RuntimeError: they have changed, and not all stages of the pipeline know.
            ValueError: the batch has fewer tensors.
        """
        Counted(self.place, self.shifted, self.ignored)(part)  # refuses other batches
        return float(self._each(tensors_of(part), self._now()).sum())

    def telling(self, tensors: Sequence[Tensor]) -> Tensor:
        """Whether targets have unlike weights, by those that were found."""
        each = self._each(tensors, self.weights) if self.place < len(tensors) else torch.empty(0)
        return (each != each[:1]).any()

    def _each(self, tensors: Sequence[Tensor], each: Sequence[float]) -> Tensor:
        tensor = tensors[self.place]
        targets = (tensor[:, 1:] if self.shifted else tensor).flatten().long()
        weights = torch.tensor(each, dtype=torch.float64, device=targets.device)
        inside = (targets >= 0) & (targets < len(weights))
        return weights[targets.clamp(0, len(weights) - 1)] * inside

    def _now(self) -> tuple[float, ...]:
        for module, alone in self.sources:
            owner, leaf = owner_and_leaf(module, self.name)
            tensor = getattr(owner, leaf, None)
            now = tuple(tensor.tolist()) if type(tensor) is Tensor and not tensor.is_meta else self.weights
            if now != self.weights and not alone:
                raise RuntimeError(
                    f"the loss of `training_step` is weighed by the classes of its targets, by `{self.name}`, which "
                    "has changed since it was tried: other pipeline stages do not know what batches count. Say it with "
                    "`micro_batch_loss_weight=...`, or use `pipeline_parallel_size=1`."
                )
            return now
        return self.weights

    def __str__(self) -> str:
        which = "entries after the first of each sample" if self.shifted else "entries"
        return f"{which} of tensor {self.place} of the batch weighed by their class (`{self.name}`)"


def class_weights_of(module: nn.Module, seen: Sequence[Tensor] | None = None) -> Mapping[str, tuple[float, ...]]:
    """Possible weights of classes on a module, by name.

    Args:
        module: the user's.
        seen: those that a step was seen to use; ``None``: any may be.
    """
    found = ((name, x) for name, x in _candidates(module) if seen is None or any(x is each for each in seen))
    tables = {name: tuple(tensor.tolist()) for name, tensor in found}
    return {name: weights for name, weights in tables.items() if len(set(weights)) > 1}


def class_weighted(tables: Mapping[str, tuple[float, ...]], batch: Any) -> list[ClassWeighted]:
    """The ways in which the targets of a batch may be weighed by class.

    Args:
        tables: weights of classes by name.
        batch: the whole.
    """
    found = []
    for place, tensor in integers_of(batch) if tables else ():
        classes = int(tensor.max()) + 1 if tensor.numel() else 0
        shifts = (False, True) if tensor.ndim == 2 and tensor.shape[1] > 1 else (False,)
        fit = [(name, weights) for name, weights in tables.items() if len(weights) >= classes > 0]
        found += [ClassWeighted(place, shifted, -100, *each) for each in fit for shifted in shifts]
    return found[:_MOST]


def bind(reading: Reading, module: nn.Module, mesh: ParallelMesh) -> None:
    """Let ways of weighing by class follow the weights on a module.

    Args:
        reading: that has them.
        module: the user's.
        mesh: the grid.
    """
    logged = (how.weigh for ways in reading.logs.values() for how in ways if isinstance(how, Mean))
    for way in (*reading.fits, *logged):
        if isinstance(way, ClassWeighted):
            way.bind(module, alone=mesh.layout.pipeline == 1 or "." not in way.name)  # all stages have the root's


def _candidates(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Vectors of positive numbers among the buffers and attributes that are on this rank."""
    for path, child in ((path, child) for path, child in module.named_modules() if not isinstance(child, _BatchNorm)):
        for key, value in (*child._buffers.items(), *child.__dict__.items()):
            if type(value) is not Tensor or value.ndim != 1 or not value.is_floating_point() or value.is_meta:
                continue
            fits = 1 < len(value) <= _CLASSES and value.stride(0) == 1 and not value.requires_grad
            if fits and bool((value >= 0).all()):
                yield f"{path}.{key}" if path else key, value
