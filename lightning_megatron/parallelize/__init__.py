"""Swap the layers of an existing module for parallel ones, by plan."""

from lightning_megatron.parallelize.api import explain, parallelize
from lightning_megatron.parallelize.report import ModuleRow, ParallelReport
from lightning_megatron.parallelize.styles import Style

__all__ = ["ModuleRow", "ParallelReport", "Style", "explain", "parallelize"]
