"""Compiled layers over a layout, and how often torch compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import counters

from tests.harness import RankInfo
from tests.models.scenarios import train


def compiled(info: RankInfo, config: str, sizes: dict[str, Any]) -> tuple[list[float], int, int]:
    """Losses of four steps, the graphs compiled during them, and the graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    losses, _ = train(info, config, sizes)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    torch._dynamo.reset()
    return losses, graphs, breaks
