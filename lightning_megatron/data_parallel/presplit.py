"""Replicas of a module that user code has split, with ``parallelize_module`` or ``fully_shard`` in ``configure_model``.

The parameters of such a module are ``DTensor``s, and ``DTensor`` itself reduces gradients over the axes of their
meshes. The strategy handles the axes that these meshes do not have: a module split over tensor ranks alone has one
replica per data-parallel rank, and each of its plain parameters is replicated on every rank.

===========================  ==========================  ===========================
parameter                    start: copied from rank 0   gradient: averaged over
===========================  ==========================  ===========================
DTensor over tensor          of the data group           the data group
DTensor over data, tensor    --                          --
plain tensor                 of data and tensor group    the data group
===========================  ==========================  ===========================
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megatron.mesh.messages.collectives import raw_all_reduce, raw_broadcast

DATA_AXIS = "data_parallel"


def splits_itself(module: nn.Module) -> bool:
    """Whether any parameter of the module is a ``DTensor``, so that user code has split it already."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _spread_over_data(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and DATA_AXIS in (tensor.device_mesh.mesh_dim_names or ())


def agree_on_start(module: nn.Module, data_group: Any | None, tensor_group: Any | None) -> None:
    """Broadcast replicated parameters and buffers from the first rank of their group; collective over both groups.

    Args:
        module: split by user code; its meta tensors are skipped.
        data_group: group of its replicas, or None for one replica.
        tensor_group: group of its tensor-parallel ranks, or None for one.
    """
    tensors: Iterable[Tensor] = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
    with torch.no_grad():
        for tensor in tensors:
            groups = [] if _spread_over_data(tensor) else [data_group]
            groups += [] if isinstance(tensor, DTensor) else [tensor_group]
            for group in groups:
                if group is not None and not tensor.is_meta:
                    _copy_from_first(_local(tensor), group)


def _copy_from_first(tensor: Tensor, group: Any) -> None:
    values = tensor.contiguous()
    raw_broadcast(values, dist.get_global_rank(group, 0), group)
    if values is not tensor:
        tensor.copy_(values)


class ReplicaAverage:
    """Averages ``.grad`` over the replicas of a module after the last backward of a step.

    Args:
        module: split by user code.
        data_group: group of its replicas.
    """

    scatters = False

    def __init__(self, module: nn.Module, data_group: Any) -> None:
        self._group = data_group
        self._parameters = [p for p in module.parameters() if p.requires_grad and not _spread_over_data(p)]
        self._reduce = True

    def begin(
        self, *, fresh: bool | None, reduce: bool, divide_by: int = 1, scale: float = 1.0, once: bool = False
    ) -> None:
        """Prepare for a backward that Lightning runs; :meth:`finish` averages the gradients if ``reduce``."""
        self._reduce = reduce

    def withdraw(self) -> None:
        """Do nothing: the backward runs after ``zero_grad``."""

    def set_final(self, final: bool | frozenset[int]) -> None:
        """Do nothing: the reduction does not overlap with the backward."""

    def all_arrived(self) -> None:
        """Do nothing: the reduction begins in :meth:`finish`."""

    def finish(self) -> None:
        """Average the gradients if ``begin`` was called with ``reduce``; collective over the data group."""
        if self._reduce:
            self.average()

    def average(self) -> None:
        """Replace every ``.grad`` by its mean over the replicas, in place; collective over the data group.

        A replica without a gradient counts as zeros; a gradient that no replica has stays ``None``.
        """
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            self._average(parameters)

    def _average(self, parameters: list[nn.Parameter]) -> None:
        present = [p.grad is not None for p in parameters]
        pieces = [_local(p).new_zeros(_local(p).shape) if p.grad is None else _local(p.grad) for p in parameters]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        held = torch.tensor(present, dtype=torch.int32, device=flat.device)
        flat, held = (raw_all_reduce(each, self._group, keep=False) for each in (flat, held))
        flat.div_(dist.get_world_size(self._group))
        parts = flat.split([piece.numel() for piece in pieces])
        for parameter, part, piece, holders in zip(parameters, parts, pieces, held.tolist(), strict=True):
            if holders:
                _set_gradient(parameter, part.view(piece.shape))


def _set_gradient(parameter: nn.Parameter, values: Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None:
        _local(gradient).copy_(values)
    elif isinstance(parameter, DTensor):
        mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
        parameter.grad = DTensor.from_local(
            values, mesh, placements, run_check=False, shape=shape, stride=parameter.stride()
        )
    else:
        parameter.grad = values.clone()
