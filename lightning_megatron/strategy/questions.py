"""Questions of users to a strategy about its run, or about one that has not begun: methods of ``MegatronStrategy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_megatron.mesh.lazy import offered
from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.pipeline.schedules.simulation import Timeline
from lightning_megatron.strategy.options.recipes import explain_plan

if TYPE_CHECKING:
    from lightning_megatron.strategy.rehearsed import Rehearsal


def measured_timeline(strategy: Any) -> Timeline | None:
    """When each computation of the latest step ran, in seconds; ``None`` with one stage; collective."""
    return strategy.run.engine.measured_timeline()


def gradient_norm(strategy: Any, parameters: Any | None = None) -> Tensor:
    """2-norm of the gradients of all, or of some, parameters over the whole model, a 0-d tensor; collective.

    Args:
        strategy: of the run.
        parameters: those of this rank, or of all pipeline stages, as hooks list them; of those that are not here the
            stages that have them count the gradients. The parameters of all groups of the optimizers by default.
    """
    if parameters is None:
        groups = [group for optimizer in strategy.optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
    return strategy.run.engine.model_gradients.norm(p for p in parameters if type(p) is not Absent)


def explain(strategy: Any, module: torch.nn.Module | None = None) -> str:
    """The tensor-parallel plan as a table: of the module in training, or the one that a whole module would get."""
    return explain_plan(strategy.options, module, strategy.parallel_report)


def rehearse(
    strategy: Any, module: pl.LightningModule | Callable[[], Any], batch: Any = None, *, world_size: int, rank: int = 0,
    devices_per_node: int = 8, host_gib: float | None = None, **trainer: Any,
) -> Rehearsal:  # fmt: skip
    """One step as ``rank`` of ``world_size`` would; see :func:`lightning_megatron.tools.rehearsal.rehearse`."""
    launch = {"world_size": world_size, "rank": rank, "devices_per_node": devices_per_node}
    return offered("rehearse")(strategy, module, batch, host_gib=host_gib, **launch, **trainer)
