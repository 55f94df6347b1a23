"""Swap the layers of an existing module for parallel ones, by plan.

Names are imported on first use: a run on one tensor-parallel rank swaps nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_megatron.lazy import names_of

if TYPE_CHECKING:
    from lightning_megatron.parallelize.api import explain as explain
    from lightning_megatron.parallelize.api import parallelize as parallelize
    from lightning_megatron.parallelize.report import ModuleRow as ModuleRow
    from lightning_megatron.parallelize.report import ParallelReport as ParallelReport
    from lightning_megatron.parallelize.styles import Style as Style

__all__ = ["ModuleRow", "ParallelReport", "Style", "explain", "parallelize"]
_HOMES = {"ModuleRow": "report", "ParallelReport": "report", "Style": "styles", "explain": "api", "parallelize": "api"}
__getattr__ = names_of(__name__, _HOMES)
