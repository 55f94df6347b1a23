"""Lightning's hooks mapped onto the engine: the only room that imports Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_megatron.mesh.lazy import names_of

if TYPE_CHECKING:
    from lightning_megatron.strategy.strategy import MegatronStrategy as MegatronStrategy
else:
    __getattr__ = names_of(__name__, {"MegatronStrategy": "strategy"})

__all__ = ["MegatronStrategy"]
