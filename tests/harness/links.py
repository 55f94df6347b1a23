"""Strategies whose stages send in another way than usual: small tensors in parts, messages over the backend."""

from __future__ import annotations

from typing import Any

from lightning_megatron import MegatronStrategy
from lightning_megatron.pipeline.run.links import LinkOptions
from lightning_megatron.strategy.activations.host_budget import Host
from lightning_megatron.strategy.world import World


def linked(strategy: MegatronStrategy, host: Host | None = None, **options: Any) -> MegatronStrategy:
    """The strategy on a host, with these options of its links between stages; see ``LinkOptions``."""
    strategy._processes.world = World(LinkOptions(**options), host)
    return strategy
