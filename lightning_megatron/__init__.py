"""Megatron-style 3D parallelism for ordinary LightningModules.

Names are imported on first use: planning a run or drawing a schedule needs neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from lightning_megatron.mesh.lazy import names_of, offer
from lightning_megatron.strategy.lightning.at_import.registration import register_when_lightning_is_imported

if TYPE_CHECKING:
    from lightning_megatron.checkpoints.loading.pretrained import load_hf_weights as load_hf_weights
    from lightning_megatron.strategy import data as data
    from lightning_megatron.strategy.lightning.precision import MegatronMixedPrecision as MegatronMixedPrecision
    from lightning_megatron.strategy.saving.checkpoint_io import MegatronCheckpointIO as MegatronCheckpointIO
    from lightning_megatron.strategy.strategy import MegatronStrategy as MegatronStrategy
else:
    # Hidden from type checkers, for which every name would exist otherwise.
    __getattr__ = names_of(
        __name__,
        {
            "MegatronCheckpointIO": "strategy.saving.checkpoint_io",
            "MegatronMixedPrecision": "strategy.lightning.precision",
            "MegatronStrategy": "strategy.strategy",
            "data": "strategy.data",
            "load_hf_weights": "checkpoints.loading.pretrained",
        },
    )

__version__ = "0.2.0"
__all__ = ["MegatronCheckpointIO", "MegatronMixedPrecision", "MegatronStrategy", "data", "load_hf_weights"]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


# A module of its own to whoever writes `from lightning_megatron.data import pack`; its folder is among Lightning's.
sys.modules[f"{__name__}.data"] = importlib.import_module(f"{__name__}.strategy.data")
offer("__version__", __name__)
offer("rehearse", "lightning_megatron.tools.rehearsal")  # `MegatronStrategy.rehearse` is below the tools
register_when_lightning_is_imported()
