"""What does a rank wait for? Read off the stack of its main thread, so that nothing is noted while it works.

From the call that blocks outwards, whoever knows more adds to the answer: torch's functions and ours by their ``group``
and tensor, objects by a method ``waits_for``::

    Exchange.wait           messages of 4096 float32 with ranks 2, 3 (data_parallel)
    Bucket.finish_sum       gradients of layers.3.weight and 5 more
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

_PARTS = 3
_NO_COLLECTIVES = ("_", "forward", "backward")
_TORCH = os.path.join("torch", "distributed", "")
_OURS = os.path.join("lightning_megatron", "")


@dataclass(frozen=True)
class Waiting:
    """An answer.

    Attributes:
        what: in words; empty where nobody knows.
        ranks: global ranks that have to take part.
    """

    what: str = ""
    ranks: tuple[int, ...] = ()


def waiting_for(frames: Sequence[Any]) -> Waiting:
    """What the thread with these frames, innermost first, waits for.

    Another thread may ask: local variables are read only.
    """
    told: list[str] = []
    ranks: tuple[int, ...] = ()
    blocking = ""
    for frame in frames:
        seen = frame.f_locals
        found = _by_owner(seen) or _by_group(frame.f_code, seen)
        if found is None or found.what in told:
            continue
        if _TORCH in frame.f_code.co_filename:  # torch's functions call each other: the outermost is the one meant
            blocking, ranks = found.what, found.ranks
            continue
        told.append(found.what)
        ranks = ranks or found.ranks
        if len(told) == _PARTS:
            break
    return Waiting(": ".join([*reversed(told), *([blocking] if blocking else [])]), ranks)


def _by_owner(seen: Mapping[str, Any]) -> Waiting | None:
    tell = getattr(type(seen.get("self")), "waits_for", None)
    return None if tell is None else tell(seen["self"], seen)


def _by_group(code: Any, seen: Mapping[str, Any]) -> Waiting | None:
    """A function that has a ``group`` among its variables."""
    if not (_TORCH in code.co_filename or _OURS in code.co_filename) or "group" not in seen:
        return None
    group = seen["group"]
    if code.co_name.startswith(_NO_COLLECTIVES) or not (group is None or isinstance(group, dist.ProcessGroup)):
        return None
    operands = (value for value in seen.values() if isinstance(value, Tensor))
    operand = next(operands, None)
    of = f" of {numbers(operand)}" if operand is not None else ""
    return Waiting(f"`{code.co_name.removeprefix('raw_')}`{of} over {members(group)}", ranks_of(group))


def ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks of a group; of all for ``None``."""
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def members(group: Any) -> str:
    """``ranks 0, 1 (data_parallel)``."""
    ranks = ranks_of(group)
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    axis = getattr(group, "group_desc", "").removeprefix("mesh_")
    return f"ranks {shown}" + (f" ({axis})" if axis.endswith("_parallel") else "")


def numbers(tensor: Tensor) -> str:
    """``3×4 float32``."""
    return f"{'×'.join(map(str, tensor.shape)) or '1'} {str(tensor.dtype).removeprefix('torch.')}"
