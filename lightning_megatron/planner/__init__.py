"""Foresight: what a run will cost in time and memory, before it is started. Pure Python, without torch.

Read ``shape``, ``cluster`` and ``recipe`` (what is run, where, how), then ``compute``, ``communication``, ``stages``
and ``makespan`` (where time goes), ``memory``, and ``prediction`` (all of it together); ``search`` ranks layouts.
"""

from lightning_megatron.planner.cluster import CLUSTERS, Cluster, Gpu
from lightning_megatron.planner.constants import DEFAULT_CONSTANTS, Constants
from lightning_megatron.planner.memory import Memory
from lightning_megatron.planner.prediction import Breakdown, Prediction, predict
from lightning_megatron.planner.recipe import Recipe, Software
from lightning_megatron.planner.search import Limits, Plan, plan
from lightning_megatron.planner.shape import ModelShape

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
