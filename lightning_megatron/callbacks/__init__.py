"""Callbacks that report what only this strategy knows."""

from lightning_megatron.strategy.callbacks.expert_bias import ExpertBias
from lightning_megatron.strategy.callbacks.expert_load import ExpertLoad
from lightning_megatron.strategy.callbacks.layer_profile import PipelineProfile
from lightning_megatron.strategy.callbacks.memory_timeline import MemoryTimeline
from lightning_megatron.strategy.callbacks.run_report import RunReport
from lightning_megatron.strategy.callbacks.timeline_picture import PipelineTimeline

__all__ = ["ExpertBias", "ExpertLoad", "MemoryTimeline", "PipelineProfile", "PipelineTimeline", "RunReport"]
