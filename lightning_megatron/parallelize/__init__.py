"""Replace the layers of an existing module by parallel ones, by plan.

Names are imported on first use, because a run with one tensor rank replaces nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_megatron.mesh.lazy import names_of

if TYPE_CHECKING:
    from lightning_megatron.parallelize.api import explain as explain
    from lightning_megatron.parallelize.api import parallelize as parallelize
    from lightning_megatron.parallelize.plan.styles import Style as Style
    from lightning_megatron.parallelize.report import ModuleRow as ModuleRow
    from lightning_megatron.parallelize.report import ParallelReport as ParallelReport
else:
    # Hidden from type checkers, for which every name would exist otherwise.
    __getattr__ = names_of(
        __name__,
        {
            "ModuleRow": "report",
            "ParallelReport": "report",
            "Style": "plan.styles",
            "explain": "api",
            "parallelize": "api",
        },
    )

__all__ = ["ModuleRow", "ParallelReport", "Style", "explain", "parallelize"]
