"""Rehearses a launch: runs one rank of thousands in one process, without a GPU and without memory for weights.

Read ``one_rank`` (the run), then ``paper`` (the process group), ``weightless`` (the tensors), ``neighbours`` (messages
of other stages) and ``meter`` (bytes).
"""

from lightning_megatron.strategy.rehearsed import Communication, Rehearsal
from lightning_megatron.tools.rehearsal.one_rank import rehearse

__all__ = ["Communication", "Rehearsal", "rehearse"]
