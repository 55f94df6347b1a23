"""The tensors that a call of a layer keeps, of which some tokens are computed again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightning_megatron.strategy.activations.host_budget import CallSizes
from lightning_megatron.strategy.activations.host_copies import HostCopy, KeptCall, View, form_of, memory_of
from lightning_megatron.strategy.activations.stopwatch import Stopwatch
from lightning_megatron.strategy.activations.token_places import TokenPlace, unrepeated


@dataclass
class HostPart:
    """A saved tensor of which the first tokens are on the host."""

    copy: HostCopy | None
    form: tuple[torch.dtype, torch.Size, tuple[int, ...]]
    size: torch.Size
    place: TokenPlace
    source: Any


@dataclass
class UnplacedTensor:
    """A saved tensor of a call from which it is learned where the tokens are: kept whole until that is known.

    Attributes:
        kept: all of it, then a part.
        source: which tensor it is.
        place: of the tokens, where that is known before.
        kind: as `Traffic` counts it.
    """

    kept: View | HostPart
    source: Any
    place: TokenPlace | None
    kind: str

    @property
    def whole(self) -> View:
        """All of it, before `kept` is a part."""
        return cast(View, self.kept)


@dataclass
class Core:
    """One call of attention, or a part of one.

    Attributes:
        output: what it gives, if the layer goes on with that.
        memory: of the output.
        split: which operands have tokens.
        after: the random state after it, where it drew.
    """

    output: View | None
    memory: int = 0
    split: tuple[bool, ...] = ()
    after: Any = None


def sizes_of(
    call: KeptCall, moving: Sequence[tuple[UnplacedTensor, Tensor]], again: Sequence[View], clock: Stopwatch | None
) -> CallSizes:
    """Sizes of the tensors that a call saves, from one that is kept whole.

    Args:
        call: with its copies.
        moving: tensors of which it is to keep some tokens.
        again: what else the other tokens are computed from.
        clock: of its forward, if that was timed.
    """
    seconds = math.inf if clock is None else clock.seconds
    parts = {key_of(tensor): unrepeated(tensor, box.place.dim).nbytes for box, tensor in moving if box.place}
    uses = Counter(id(box.whole.copy) for box, _ in moving)
    stay = {id(view.copy) for view in again}
    gone = {id(box.whole.copy): box.whole.copy for box, _ in moving}
    freed = sum(copy.bytes for which, copy in gone.items() if copy.uses == uses[which] and which not in stay)
    whole = sum(call.kinds.values())
    return CallSizes(whole - freed, sum(parts.values()), seconds, whole)


def key_of(tensor: Tensor) -> Any:
    """Key of a tensor: equal for tensors that share a copy."""
    return memory_of(tensor), tensor._version, *form_of(tensor)
