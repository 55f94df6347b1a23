"""Lightning's own code for process groups and launching, which it keeps to itself, under names of this package."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_megatron.mesh.messages.collectives import gather_for_shards

_SAID_BY_ALL = ("lightning.fabric.utilities.distributed", "lightning.pytorch.trainer.connectors.checkpoint_connector")
_said: set[str] = set()


class CollectivesAsked:
    """The collectives that user code asks the strategy for.

    Attributes:
        count: of them.
        listeners: hear of each tensor that is gathered or reduced, before it is.
    """

    def __init__(self) -> None:
        self.count = 0
        self.listeners: list[Callable[[Tensor], None]] = []

    def note(self, tensor: Tensor) -> None:
        """Take note of one.

        Args:
            tensor: that is gathered or reduced.
        """
        self.count += 1
        for hear in self.listeners:
            hear(tensor)


asked = CollectivesAsked()


def _said_once(record: logging.LogRecord) -> bool:
    """Whether a message of Lightning is to be printed: once, by rank 0, instead of by every rank in every save."""
    text = record.getMessage()
    if record.levelno > logging.INFO:
        return True
    if getattr(rank_zero_only, "rank", 0) != 0 or text in _said:
        return False
    _said.add(text)
    return True


def default_backend(device: torch.device) -> str:
    """Backend of process groups whose tensors live on ``device``."""
    return _get_default_process_group_backend_for_device(device)


def connect(
    environment: ClusterEnvironment, backend: str, rank: int, timeout: timedelta | None, device: torch.device
) -> None:
    """Make the default process group, unless there is one already.

    A GPU is not bound to it. Of a bound one, NCCL would split all groups off the default one, for which all ranks of
    the world must meet, while some groups here are of those ranks alone that need them; and it would put the messages
    between stages in line with all else that their group does.

    Args:
        environment: knows where rank 0 listens, and the size of the world.
        backend: of the group.
        rank: global rank of this process.
        timeout: of collectives.
        device: this rank's.
    """
    if environment.world_size() > 1:  # Lightning's own use of torch, said by every process and for nobody to change
        warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", category=FutureWarning)
    for name in _SAID_BY_ALL:
        logging.getLogger(name).addFilter(_said_once)  # adding it again changes nothing
    _init_dist_connection(environment, backend, rank, timeout=timeout)
    if device.type == "cuda":
        _begin_backwards(device)


def _begin_backwards(device: torch.device) -> None:
    """Start torch's thread for backwards on a GPU. One whose first operation is a product, as a stage's may be, would
    find no CUDA context there, and warn.
    """
    with torch.enable_grad():
        torch.ones((), device=device, requires_grad=True).mul(2).backward()


def reduce(tensor: Tensor, group: ProcessGroup, operation: Any) -> Tensor:
    """``tensor`` reduced over a group, as Lightning's strategies reduce what is logged.

    Lightning's own has a barrier before, which is not needed, and in which torch guesses this rank's GPU.

    Args:
        tensor: equal in shape on all ranks; changed in place.
        group: of ranks.
        operation: ``"mean"``, ``"sum"`` or one of torch's; ``None`` for the sum.
    """
    asked.note(tensor)
    named = operation.lower() if isinstance(operation, str) else operation
    means = named in ("mean", "avg") or named == dist.ReduceOp.AVG  # which gloo does not know
    total = dist.ReduceOp.SUM if means or named is None else named
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, total.upper()) if isinstance(total, str) else total, group=group)
    if not means:
        return tensor
    return tensor.div_(group.size()) if tensor.is_floating_point() else tensor.copy_(tensor / group.size())


def all_gather(tensor: Tensor, group: ProcessGroup, sync_grads: bool) -> Tensor:
    """``tensor`` of every rank of a group, stacked: ``[ranks, ...]``.

    Args:
        tensor: equal in shape on all ranks.
        group: of ranks.
        sync_grads: whether gradients flow back, those of all ranks summed. torch's own way back names ranks of the
            world over gloo, which other groups lack.
    """
    asked.note(tensor)
    if sync_grads:
        return gather_for_shards(tensor.unsqueeze(0), 0, group)
    with torch.no_grad():  # Lightning's own goes through a function that torch has deprecated
        gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(gathered, tensor.contiguous(), group=group)
    return torch.stack(gathered)


def move_optimizers(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move the tensors of optimizers' states to a device; those of parameters in host memory stay there."""
    for optimizer in optimizers:
        keys = [key for key in optimizer.state if isinstance(key, Tensor) and key.device.type == "cpu"]
        hosted = {key: optimizer.state.pop(key) for key in keys}
        _optimizers_to_device([optimizer], device)
        optimizer.state.update(hosted)


@contextmanager
def leaving_meta_tensors(module: nn.Module | None) -> Iterator[None]:
    """Around Lightning's teardown, which moves the module: one that was refused before its weights came has no numbers
    to move, and the error of that would hide the refusal. Nor are there any of streamed weights.
    """
    tensors = () if module is None else (*module.parameters(), *module.buffers())
    if module is None or not any(tensor.is_meta or (tensor.ndim and not any(tensor.stride())) for tensor in tensors):
        yield
        return
    vars(module)["cpu"] = lambda: module
    try:
        yield
    finally:
        del vars(module)["cpu"]
