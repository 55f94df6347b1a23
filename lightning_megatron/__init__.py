"""Megatron-style 3D parallelism for ordinary LightningModules.

Names are imported on first use: planning a run or drawing a schedule needs neither torch nor Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_megatron.lazy import names_of
from lightning_megatron.registration import register_when_lightning_is_imported

if TYPE_CHECKING:
    from lightning_megatron.initial_weights import load_hf_weights as load_hf_weights
    from lightning_megatron.plugins.checkpoint import MegatronCheckpointIO as MegatronCheckpointIO
    from lightning_megatron.strategy import MegatronStrategy as MegatronStrategy

__version__ = "0.1.0"
__all__ = ["MegatronCheckpointIO", "MegatronStrategy", "load_hf_weights"]

_HOMES = {
    "MegatronCheckpointIO": "plugins.checkpoint",
    "load_hf_weights": "initial_weights",
    "MegatronStrategy": "strategy",
}
__getattr__ = names_of(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register_when_lightning_is_imported()
