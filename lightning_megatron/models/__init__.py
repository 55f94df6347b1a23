"""A reference decoder built from the drop-in layers, for users without a model of their own.

The strategy has no special case for it: it is trained, split and cut like any other module.
"""

from lightning_megatron.models.config import DecoderConfig
from lightning_megatron.models.decoder import Decoder, DecoderLayer
from lightning_megatron.models.huggingface import from_huggingface
from lightning_megatron.models.task import CausalLanguageModel

__all__ = ["CausalLanguageModel", "Decoder", "DecoderConfig", "DecoderLayer", "from_huggingface"]
