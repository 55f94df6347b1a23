"""Predicts the time and memory of a run before it starts, and ranks layouts. Pure Python, without torch.

Read ``shape``, ``cluster`` and ``recipe`` (the model, the machine, the layout), then ``compute``, ``communication``,
``stages`` and ``makespan`` (time), ``memory``, and ``prediction`` (all together); ``search`` ranks layouts.

Names are imported on first use, as a run with a given layout does not need the planner.
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
    from lightning_megatron.planner.model.shape import ModelShape as ModelShape
    from lightning_megatron.planner.model.software import Software as Software
    from lightning_megatron.planner.search.search import Limits as Limits
    from lightning_megatron.planner.search.search import Plan as Plan
    from lightning_megatron.planner.search.search import plan as plan
else:
    # Type checkers must not see this `__getattr__`: for them any name would exist.
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
            "Software": "model.software",
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
