"""A rehearsal of a launch: one rank of thousands, in one process, without a GPU and without memory for weights.

Read ``run`` (what is run), then ``paper`` (the process group), ``weightless`` (the tensors), ``neighbours`` (what other
ranks would have said), ``meter`` (bytes) and ``report``.
"""

from lightning_megatron.tools.rehearsal.outcome import Communication, Rehearsal
from lightning_megatron.tools.rehearsal.rehearse import rehearse

__all__ = ["Communication", "Rehearsal", "rehearse"]
