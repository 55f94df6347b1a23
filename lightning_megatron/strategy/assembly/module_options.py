"""How the user wants a module divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_megatron.pipeline.forwards.compiled import CompileOptions
from lightning_megatron.pipeline.forwards.recompute import Recompute
from lightning_megatron.strategy.activations.install import ActivationOptions
from lightning_megatron.strategy.generation.streaming import Streaming


@dataclass(frozen=True)
class ModuleOptions:
    """How the user wants the module divided; see ``MegatronStrategy``. ``stage_speeds`` follow from its topology."""

    pipeline_layers: str
    pipeline_split: str | Sequence[int]
    pipeline_placement: Mapping[str, str] | None
    activation_recompute: Recompute
    compile_layers: CompileOptions
    tensor_plan: str | Mapping[str, str]
    context: Mapping[str, Any]
    activations: ActivationOptions
    loss_chunks: int | str | None = None
    experts: int = 1
    expert_parts: int = 1
    expert_dispatch: str = "all_to_all"
    expert_plan: str | Mapping[str, str | int] = "auto"
    stage_speeds: tuple[float, ...] | None = None
    streaming: Streaming | None = None
