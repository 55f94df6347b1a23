"""Callbacks for what only this strategy can tell."""

from lightning_megatron.callbacks.timeline import PipelineTimeline

__all__ = ["PipelineTimeline"]
