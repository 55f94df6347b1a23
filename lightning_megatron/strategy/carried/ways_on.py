"""How a value that steps go on from comes together over replicas in each step, where that is certain.

What a batch writes is compared with what its parts write. Between batches more has to be known than between
micro-batches, which see one state: a value that parts set by an index may be a sum, or a maximum, in a batch in which
two replicas meet there. So these are certain::

    self.right += (p == y).sum()           sums, of which several parts have added to the same number
    self.centre = 0.9 * c + 0.1 * mean     the mean of what the parts leave, weighed as samples or targets are
    self.losses.append(loss)               entries of lists, sets
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.strategy.loss.tables import Name
from lightning_megatron.strategy.loss.written import Join, Kinds, Weights, meet

_OF_SPREAD = 1e-4  # of the distance between the parts, which a mean of theirs may be off
_SPACINGS = 4.0
_TELLS = 1e3  # spacings that the parts have to be apart, at least


def ways_on(joins: Sequence[Join], name: Name, kinds: Kinds) -> Kinds:
    """The ways in which a value surely comes together; none if there is no such way.

    Args:
        joins: what was seen.
        name: of the value.
        kinds: how it may come together, by all of what was seen.
    """
    seen = [_of(join, name) for join in joins]
    if "set" in kinds or "once" in kinds or "same" in kinds:
        return ()
    if any(isinstance(value, deque) and value.maxlen for _, _, value, _ in seen):
        return ()  # what it has lost does not show
    if kinds:
        sets = any(isinstance(value, set) for _, _, value, _ in seen)
        return kinds if sets or any(meet(before, apart) for before, apart, _, _ in seen) else ()
    found = [set(_means(apart, whole, weights)) for _, apart, whole, weights in seen]
    return tuple(way for way in seen[0][3] if all(way in each for each in found)) if seen else ()


def _of(join: Join, name: Name) -> tuple[Any, list[Any], Any, Weights]:
    """Before, of each part, of the whole; and what the parts weigh."""
    every = [*join.parts, join.whole]
    before = next((changes[name][0] for changes in every if name in changes), None)
    *apart, whole = (changes[name][1] if name in changes else before for changes in every)
    return before, apart, whole, join.weights


def _means(apart: Sequence[Any], whole: Any, weights: Weights) -> list[Any]:
    """The ways to weigh in which a value of the whole is the mean of those of its parts, and could be no other."""
    if not all(isinstance(value, (float, Tensor)) for value in (*apart, whole)):
        return []
    parts, target = [torch.as_tensor(value).detach() for value in apart], torch.as_tensor(whole).detach()
    alike = all(part.shape == target.shape and part.dtype == target.dtype for part in parts)
    if not alike or not target.dtype.is_floating_point or not target.numel():
        return []
    eps = torch.finfo(target.dtype if isinstance(whole, Tensor) else torch.float64).eps
    wide = [part.double() for part in parts]
    spread = float((torch.stack(wide).amax(0) - torch.stack(wide).amin(0)).norm())
    rounding = eps * float(target.double().norm())
    if not spread > _TELLS * rounding:
        return []
    found = []
    for way, each in weights.items():
        mean = sum(part * (weight / sum(each)) for part, weight in zip(wide, each, strict=True))
        if float((mean - target.double()).norm()) <= _OF_SPREAD * spread * (eps > 1e-10) + _SPACINGS * rounding:
            found.append(way)
    return found
