"""A rehearsal of a launch: one rank of thousands, in one process, without a GPU and without memory for weights.

Read ``run`` (what is run), then ``paper`` (the process group), ``weightless`` (the tensors), ``neighbours`` (what other
ranks would have said), ``meter`` (bytes) and ``report``.
"""

from lightning_megatron.strategy.rehearsed import Communication, Rehearsal
from lightning_megatron.tools.rehearsal.one_rank import rehearse

__all__ = ["Communication", "Rehearsal", "rehearse"]
