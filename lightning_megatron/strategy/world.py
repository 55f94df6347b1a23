"""The world outside of a run's own process: other ranks, their failures, and memory for its weights.

Everything else that a strategy does is the same whether the other ranks exist or not. So it makes what reaches out of
its process through the world that it was given, and a rehearsal, in which one rank of thousands runs alone, gives it
another one::

    strategy ── watch ──────▶ World: asks the store whether a rank failed      paper: nobody can fail
             ── materialize ▶ World: memory for meta weights                   paper: takes it back
             ── links ──────▶ World: messages to the other stages              paper: they loaded the same batch
             ── executor ───▶ World: hears what the stage before will send     paper: works it out by itself
             ── compares ───▶ World: reads other ranks' batches and losses     paper: nobody has any
             ── host ───────▶ World: this machine's memory for activations     paper: as much as it is told
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from lightning_megatron.checkpoints.loading.as_built import allocate_as_built
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.watch.failure import FailureWatch
from lightning_megatron.pipeline.run.executor import PipelineExecutor
from lightning_megatron.pipeline.run.links import USUAL_LINKS, LinkOptions, StageLinks
from lightning_megatron.strategy.activations.host_budget import Host
from lightning_megatron.strategy.assembly.alike import materialize
from lightning_megatron.strategy.assembly.late_weights import JoinedValues, LateValues


class World:
    """The processes of a real launch.

    Args:
        link_options: how tensors travel between stages.
        host: memory for activations, and who shares it.
    """

    def __init__(self, link_options: LinkOptions = USUAL_LINKS, host: Host | None = None) -> None:
        self.link_options, self.host = link_options, host or Host()

    @property
    def compares(self) -> bool:
        """Whether other ranks have batches and losses, to be compared with this one's."""
        return True

    def watch(self, *args: Any, **kwargs: Any) -> FailureWatch:
        """A watch for other ranks' failures; arguments of :class:`FailureWatch`."""
        return FailureWatch(*args, **kwargs)

    def materialize(
        self,
        module: nn.Module,
        device: torch.device,
        seed: int,
        table: Any,
        settle: Any | None = None,
        hidden: Collection[str] = (),
    ) -> LateValues | None:
        """Give memory and values to what is on the meta device; arguments of :func:`materialize`.

        Args:
            hidden: names of parameters that get no memory, if their values can be told later.

        Returns:
            Values of these, and of what is beside them; ``None`` where all is filled.
        """
        built = None
        if settle is None:  # else layers get memory one after the other, and give it back
            built = allocate_as_built(module, device, seed, table, hidden)
        if built is not None:
            built.start_alike(device)
            if not built.hidden:
                built.fill({})
                built = None
        later = materialize(module, device, seed, table, settle, hidden)
        sources = [each for each in (built, later) if each is not None]
        return JoinedValues(sources) if sources else None

    def links(self, mesh: ParallelMesh, device: torch.device, replicas: Any) -> StageLinks:
        """Messages to the other stages of this rank's pipeline; collective over it.

        Args:
            mesh: the grid.
            device: where tensors live.
            replicas: group of the ranks of this stage that hold equal boundary tensors, if any.
        """
        group = mesh.group("pipeline_parallel")
        return StageLinks(group, mesh.pipeline_ranks, device, replicas, self.link_options)

    def executor(self, *args: Any) -> PipelineExecutor:
        """The executor of this rank's instructions; arguments of :class:`PipelineExecutor`."""
        return PipelineExecutor(*args)


REAL_WORLD = World()
