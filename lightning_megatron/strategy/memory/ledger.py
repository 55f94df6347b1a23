"""Assigns tensors of a run to kinds of memory: weights, gradients, state of the optimizer, activations, or other.

::

    weights       parameters, the flat buffers they are views of, and this rank's shard of weights that are spread
    gradients     main gradients, this rank's shard of their sums, `.grad`
    optimizer     its state, and float32 weights of which layers hold 16 bits
    activations   what a forward leaves for its backward
    buffers       buffers of modules, the batch, messages, and what an operation needs for the time it runs
    host          weights and state of an optimizer in host memory (`optimizer_offload`), wherever layers compute

The first five are those of the planner's :class:`~lightning_megatron.planner.Memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.model_gradients import ModelGradients

GIB, MIB = 2.0**30, 2.0**20

KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class Bytes:
    """Bytes by kind, on one rank.

    Attributes:
        weights, gradients, optimizer, activations, buffers: on its device.
        host: weights and state of its optimizer in host memory, or in files.
    """

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    buffers: float = 0
    host: float = 0

    @property
    def total(self) -> float:
        """On the device."""
        return sum(value for name, value in asdict(self).items() if name != "host")


BYTE_KINDS = tuple(field.name for field in fields(Bytes))


def buckets_of(gradients: ModelGradients) -> list[Bucket]:
    """All buckets of a module, those of frozen weights among them."""
    buckets = gradients.buckets or gradients.closed
    trained = buckets.buckets if buckets is not None else []
    windows = gradients.windows.windows if gradients.windows is not None else []
    frozen = [bucket for window in windows for bucket in window.buckets if bucket not in trained]
    return [*trained, *frozen]


def gradients_of(parameters: Iterable[nn.Parameter], gradients: ModelGradients) -> Iterator[Tensor]:
    """The object that holds gradients of a module's parameters now."""
    for bucket in buckets_of(gradients):
        yield from (each for each in (bucket.flat, bucket.own, bucket.sent) if each is not None)
    yield from (parameter.grad for parameter in parameters if parameter.grad is not None)


def lasting(
    module: nn.Module, gradients: ModelGradients, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[Tensor, str]]:
    """Tensors that a run keeps from step to step, each with its kind; one memory may come several times.

    Args:
        module: on this rank.
        gradients: of it.
        optimizers: with this rank's parameters.
    """
    hosted = set()
    for bucket in buckets_of(gradients):
        if bucket.weights is None:
            continue
        yield bucket.weights.flat, "weights"
        yield bucket.weights.own, "weights"
        yield bucket.weights.master, "host" if bucket.hosted else "optimizer"
        hosted |= {id(piece.stepped) for piece in bucket.pieces.values() if bucket.hosted}
    yield from ((parameter.data, "weights") for parameter in module.parameters())
    yield from ((each, "gradients") for each in gradients_of(module.parameters(), gradients))
    for optimizer in optimizers:
        for key, state in optimizer.state.items():
            kind = "host" if id(key) in hosted else "optimizer"
            yield from ((leaf, kind) for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor))
    yield from ((buffer, "buffers") for buffer in module.buffers())


def held(module: nn.Module, gradients: ModelGradients, optimizers: Sequence[Optimizer], device: torch.device) -> Bytes:
    """Bytes that a run keeps on this rank now, each memory counted once, whatever shares it.

    Args:
        module: on this rank.
        gradients: of it.
        optimizers: with this rank's parameters.
        device: of this rank.
    """
    found, sums = set[int](), dict.fromkeys(BYTE_KINDS, 0)
    for tensor, kind in lasting(module, gradients, optimizers):
        storage = storage_of(tensor, device if kind != "host" else torch.device("cpu"))
        if storage is not None and storage._cdata not in found:
            found.add(storage._cdata)
            sums[kind] += storage.nbytes()
    return Bytes(**sums)


def storage_of(tensor: Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """The memory of a tensor, if it lies on a device of this type; that of a part, where it only holds one."""
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided or tensor.device.type != device.type:
            return None
        try:
            return tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a tensor of its own kind, without memory of its own
            return None


def size_words(size: float) -> str:
    """Bytes in GiB, or in MiB where they are few."""
    return f"{size / GIB:,.3g} GiB" if abs(size) >= 0.1 * GIB else f"{size / MIB:,.3g} MiB"
