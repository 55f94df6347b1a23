"""Megatron-style 3D parallelism for ordinary LightningModules.

Names are imported on first use: planning a run or drawing a schedule needs neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_megatron.registration import register_when_lightning_is_imported

if TYPE_CHECKING:
    from lightning_megatron.initial_weights import load_hf_weights as load_hf_weights
    from lightning_megatron.plugins.checkpoint import MegatronCheckpointIO as MegatronCheckpointIO
    from lightning_megatron.strategy import MegatronStrategy as MegatronStrategy

__version__ = "0.1.0"
__all__ = ["MegatronCheckpointIO", "MegatronStrategy", "load_hf_weights"]

_HOMES = {
    "MegatronCheckpointIO": "lightning_megatron.plugins.checkpoint",
    "load_hf_weights": "lightning_megatron.initial_weights",
    "MegatronStrategy": "lightning_megatron.strategy",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register_when_lightning_is_imported()
