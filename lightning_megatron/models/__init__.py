"""A reference decoder built from the drop-in layers, for runs that start without a model of their own.

Nothing in the strategy knows it: it is trained, split and cut as anybody's module is.
"""

from lightning_megatron.models.config import DecoderConfig
from lightning_megatron.models.decoder import Decoder, DecoderLayer
from lightning_megatron.models.huggingface import from_huggingface
from lightning_megatron.models.task import CausalLanguageModel

__all__ = ["CausalLanguageModel", "Decoder", "DecoderConfig", "DecoderLayer", "from_huggingface"]
