"""Megatron-style 3D parallelism for ordinary LightningModules."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatron.plugins.checkpoint import MegatronCheckpointIO
from lightning_megatron.strategy import MegatronStrategy

__all__ = ["MegatronCheckpointIO", "MegatronStrategy"]
__version__ = "0.1.0"

MegatronStrategy.register_strategies(StrategyRegistry)
