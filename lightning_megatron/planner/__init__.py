"""Foresight: what a run will cost in time and memory, before it is started. Pure Python, without torch.

Read ``shape``, ``cluster`` and ``recipe`` (what is run, where, how), then ``compute``, ``communication``, ``stages``
and ``makespan`` (where time goes), ``memory``, and ``prediction`` (all of it together); ``search`` ranks layouts.

Names are imported on first use: a run that was told its layout plans nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_megatron.lazy import names_of

if TYPE_CHECKING:
    from lightning_megatron.planner.cluster import CLUSTERS as CLUSTERS
    from lightning_megatron.planner.cluster import Cluster as Cluster
    from lightning_megatron.planner.cluster import Gpu as Gpu
    from lightning_megatron.planner.constants import DEFAULT_CONSTANTS as DEFAULT_CONSTANTS
    from lightning_megatron.planner.constants import Constants as Constants
    from lightning_megatron.planner.memory import Memory as Memory
    from lightning_megatron.planner.prediction import Breakdown as Breakdown
    from lightning_megatron.planner.prediction import Prediction as Prediction
    from lightning_megatron.planner.prediction import predict as predict
    from lightning_megatron.planner.recipe import Recipe as Recipe
    from lightning_megatron.planner.recipe import Software as Software
    from lightning_megatron.planner.search import Limits as Limits
    from lightning_megatron.planner.search import Plan as Plan
    from lightning_megatron.planner.search import plan as plan
    from lightning_megatron.planner.shape import ModelShape as ModelShape

_HOMES = {
    "CLUSTERS": "cluster",
    "DEFAULT_CONSTANTS": "constants",
    "Breakdown": "prediction",
    "Cluster": "cluster",
    "Constants": "constants",
    "Gpu": "cluster",
    "Limits": "search",
    "Memory": "memory",
    "ModelShape": "shape",
    "Plan": "search",
    "Prediction": "prediction",
    "Recipe": "recipe",
    "Software": "recipe",
    "plan": "search",
    "predict": "prediction",
}
__all__ = sorted(_HOMES)
__getattr__ = names_of(__name__, _HOMES)
