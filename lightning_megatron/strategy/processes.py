"""Processes of the grid, as Lightning sees them: launching, the mesh, collectives, and failures.

Nothing here knows of modules or steps; :class:`~lightning_megatron.strategy.strategy.MegatronStrategy` adds those.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.mesh.layout import Layout, resolve_layout
from lightning_megatron.mesh.mesh import ParallelMesh, build_mesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.watch import waits
from lightning_megatron.mesh.watch.failure import AgreedFailure, FailureWatch, RemoteFailure, is_echo
from lightning_megatron.strategy.lightning import trainer_access as lightning_state
from lightning_megatron.strategy.logs.replay import ALREADY_REDUCED


class GridStrategy(ParallelStrategy):
    """A Lightning strategy whose processes form a grid.

    Args:
        sizes: axis sizes for :func:`~lightning_megatron.mesh.layout.resolve_layout`.
        process_group_backend: backend of the process groups, or ``None`` for what fits the device.
        timeout: of collectives.
        hang_timeout: until a rank that others wait for is named and the run ended; ``None`` for never.
        **kwargs: Lightning's own.
    """

    def __init__(
        self,
        sizes: dict[str, Any],
        process_group_backend: str | None,
        timeout: timedelta | None,
        hang_timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._sizes = sizes
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._hang_timeout = hang_timeout
        self._layout: Layout | None = None
        self._mesh: ParallelMesh | None = None
        self._watch: FailureWatch | None = None
        self._runs = 0
        self._numbers: list[int] | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self._layout is None or self._layout.world_size > 1

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the process groups."""
        return self._process_group_backend

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._layout = resolve_layout(self.num_nodes * self.num_processes, **self._sizes)
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connect the processes and build the mesh."""
        super().setup_environment()
        self._settle_layout()
        self._set_world_ranks()
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        self._process_group_backend = backend
        assert self.cluster_environment is not None
        device_id = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(
            self.cluster_environment, backend, self.global_rank, timeout=self._timeout, device_id=device_id
        )
        if self._mesh is None or self._mesh.device_mesh.size() != dist.get_world_size():
            self._layout = resolve_layout(self.world_size, **self._sizes)
            self._mesh = build_mesh(self._layout, self.root_device.type)
        self._start_watch()
        assert self.lightning_module is not None
        if self._layout.data == 1:  # all ranks load the same batches, so the sampler draws what it draws in one process
            lightning_state.keep_samplers(self.lightning_module.trainer)
        self.lightning_module._device_mesh = self._mesh.device_mesh

    def _settle_layout(self) -> None:
        """Decide what is left to the planner, before the processes connect."""

    @property
    def global_rank(self) -> int:
        """This process's rank: as launched, or as a topology numbers the processes."""
        launched = super().global_rank
        return launched if self._numbers is None else self._numbers[launched]

    def _set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for function in (rank_zero_only, fabric_rank_zero_only):
            function.rank = self.global_rank  # type: ignore[attr-defined]

    def _start_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        assert self._layout is not None
        self._runs += 1
        store = dist.distributed_c10d._get_default_store()
        hang_s = None if self._hang_timeout is None else self._hang_timeout.total_seconds()
        self._watch = FailureWatch(store, self._layout, self.global_rank, self._runs, hang_s=hang_s)
        if self.world_size > 1:
            self._watch.start()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As Lightning's; tells that this rank takes part."""
        if self._watch is not None:
            self._watch.beat()
        return super().batch_to_device(batch, device, dataloader_idx)

    @property
    def mesh(self) -> ParallelMesh:
        """Process groups and coordinates of this rank.

        Raises:
            RuntimeError: processes are not connected yet.
        """
        if self._mesh is None:
            raise RuntimeError(
                "the mesh exists only once the Trainer has started; use it in `configure_model` or later."
            )
        return self._mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as torch's ``DeviceMesh``, as in Lightning's ModelParallelStrategy."""
        return self.mesh.device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers shard over data-parallel replicas: all stages of one replica load the same samples."""
        return {"num_replicas": self.mesh.layout.data, "rank": self.mesh.coordinates.data}

    def process_dataloader(self, dataloader: object) -> object:
        """Seed loader workers by replica instead of by rank, so that all stages of a replica augment alike."""
        lightning_state.seed_workers(dataloader, self.mesh.coordinates.data)
        return dataloader

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over data-parallel replicas unless another group is given."""
        if not isinstance(tensor, Tensor) or not _distributed_is_initialized() or group is ALREADY_REDUCED:
            return tensor
        return _sync_ddp_if_available(tensor, group or self.mesh.group("data_parallel"), reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree on a decision over the world."""
        votes = torch.tensor(int(decision), device=self.root_device)
        with waits.on(waits.collective, "all_reduce", votes, None):
            dist.all_reduce(votes)
        return bool(votes.item() == self.world_size) if all else bool(votes.item() > 0)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if _distributed_is_initialized():
            with self._naming_failures(), waits.on(waits.collective, "barrier", None, None):
                dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send ``obj`` from rank ``src`` to all."""
        with self._naming_failures():
            return objects.broadcast(obj, src)

    @contextmanager
    def _naming_failures(self) -> Generator[None, None, None]:
        """Report an exception raised here, or say which other rank it came from."""
        try:
            yield
        except Exception as error:
            remote = self._watch.remote(wait_s=3.0 if is_echo(error) else 0.0) if self._watch is not None else None
            if remote is not None and not isinstance(error, (RemoteFailure, AgreedFailure)):
                assert self._watch is not None
                self._watch.stop()
                raise RemoteFailure(str(remote)) from error
            self._report(error)
            raise

    def _report(self, exception: BaseException) -> None:
        if self._watch is not None and isinstance(exception, SIGTERMException):
            self._watch.stop()  # no failure: all ranks have agreed to stop
            return
        if self._watch is not None and not isinstance(exception, RemoteFailure):
            self._watch.report(exception)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, and stay long enough for them to hear."""
        if self._watch is None:
            return
        remote = self._watch.remote(wait_s=2.0 if is_echo(exception) else 0.0)
        self._report(exception)
        if remote is not None and not isinstance(exception, (RemoteFailure, AgreedFailure)):
            exception.add_note(str(remote))
        self._watch.stop()
        first = self._watch.reported and remote is None
        if self.world_size > 1 and (first or self.global_rank == 0):  # rank 0 may host the store that the others ask
            self._watch.linger()
