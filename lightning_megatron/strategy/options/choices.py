"""The user's choices that steps follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron.data_parallel.gradient_options import GradientOptions
from lightning_megatron.experts.balance.added import AddedBalance
from lightning_megatron.pipeline.schedules.by_name import ScheduleShape, make_schedule, schedule_shape
from lightning_megatron.pipeline.schedules.instructions import Schedule

LossWeight = Callable[[Any], float]


@dataclass(frozen=True)
class EngineOptions:
    """Choices of the user that the engine follows; see ``MegatronStrategy``."""

    micro_batch_size: int | str
    evaluation_micro_batch_size: int | str
    schedule: str | Callable[..., Any]
    chunks: int | None
    schedule_options: Mapping[str, Any]
    loss_weight: LossWeight | None
    whole_batch_loss: bool | str
    variable_shapes: bool
    record_timeline: bool
    sequence_parallel: bool
    gradients: GradientOptions
    expert_balance: str | None = None
    added_balance: AddedBalance | None = None
    random_streams: str = "torch"
    pipeline_layers: str = "auto"

    @property
    def schedule_shape(self) -> ScheduleShape:
        """Chunks per stage, and where they lie."""
        return schedule_shape(self.schedule, self.chunks, self.schedule_options.get("placement"))

    def make_schedule(self, stages: int, micro_batches: int, *, forward_only: bool = False) -> Schedule:
        """The schedule of a step of ``micro_batches``."""
        return make_schedule(
            self.schedule,
            stages,
            micro_batches,
            chunks=self.chunks,
            forward_only=forward_only,
            **self.schedule_options,
        )
