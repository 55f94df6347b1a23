"""Foresight: what a run will cost in time and memory, before it is started. Pure Python, without torch.

Read ``shape``, ``cluster`` and ``recipe`` (what is run, where, how), then ``compute``, ``communication``, ``stages``
and ``makespan`` (where time goes), ``memory``, and ``prediction`` (all of it together); ``search`` ranks layouts.

Names are imported on first use: a run that was told its layout plans nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_megatron.mesh.lazy import names_of

if TYPE_CHECKING:
    from lightning_megatron.planner.cost.memory import Memory as Memory
    from lightning_megatron.planner.cost.prediction import Breakdown as Breakdown
    from lightning_megatron.planner.cost.prediction import Prediction as Prediction
    from lightning_megatron.planner.cost.prediction import predict as predict
    from lightning_megatron.planner.model.cluster import CLUSTERS as CLUSTERS
    from lightning_megatron.planner.model.cluster import Cluster as Cluster
    from lightning_megatron.planner.model.cluster import Gpu as Gpu
    from lightning_megatron.planner.model.constants import DEFAULT_CONSTANTS as DEFAULT_CONSTANTS
    from lightning_megatron.planner.model.constants import Constants as Constants
    from lightning_megatron.planner.model.recipe import Recipe as Recipe
    from lightning_megatron.planner.model.recipe import Software as Software
    from lightning_megatron.planner.model.shape import ModelShape as ModelShape
    from lightning_megatron.planner.search.search import Limits as Limits
    from lightning_megatron.planner.search.search import Plan as Plan
    from lightning_megatron.planner.search.search import plan as plan
else:
    # Hidden from type checkers, for which every name would exist otherwise.
    __getattr__ = names_of(
        __name__,
        {
            "Breakdown": "cost.prediction",
            "CLUSTERS": "model.cluster",
            "Cluster": "model.cluster",
            "Constants": "model.constants",
            "DEFAULT_CONSTANTS": "model.constants",
            "Gpu": "model.cluster",
            "Limits": "search.search",
            "Memory": "cost.memory",
            "ModelShape": "model.shape",
            "Plan": "search.search",
            "Prediction": "cost.prediction",
            "Recipe": "model.recipe",
            "Software": "model.recipe",
            "plan": "search.search",
            "predict": "cost.prediction",
        },
    )

__all__ = [
    "CLUSTERS",
    "DEFAULT_CONSTANTS",
    "Breakdown",
    "Cluster",
    "Constants",
    "Gpu",
    "Limits",
    "Memory",
    "ModelShape",
    "Plan",
    "Prediction",
    "Recipe",
    "Software",
    "plan",
    "predict",
]
