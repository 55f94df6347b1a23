"""Callbacks for what only this strategy can tell."""

from lightning_megatron.callbacks.timeline import PipelineTimeline
from lightning_megatron.layer_profile import PipelineProfile

__all__ = ["PipelineProfile", "PipelineTimeline"]
