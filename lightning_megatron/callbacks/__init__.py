"""Public names of the callbacks that users add to a Trainer."""

from lightning_megatron.strategy.callbacks.layer_profile import PipelineProfile
from lightning_megatron.strategy.callbacks.timeline_picture import PipelineTimeline

__all__ = ["PipelineProfile", "PipelineTimeline"]
