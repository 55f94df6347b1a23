"""Swap the layers of an existing module for parallel ones, by plan.

Names are imported on first use: a run on one tensor-parallel rank swaps nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_megatron.parallelize.api import explain as explain
    from lightning_megatron.parallelize.api import parallelize as parallelize
    from lightning_megatron.parallelize.report import ModuleRow as ModuleRow
    from lightning_megatron.parallelize.report import ParallelReport as ParallelReport
    from lightning_megatron.parallelize.styles import Style as Style

__all__ = ["ModuleRow", "ParallelReport", "Style", "explain", "parallelize"]
_HOMES = {"ModuleRow": "report", "ParallelReport": "report", "Style": "styles", "explain": "api", "parallelize": "api"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
