"""Values that steps keep for hooks behind a condition on their batch, and whether it was seen how they come together.

The parts of a batch may come together where all of them meet the condition, and not where some do::

    if hard.any(): self.kept.append(each[hard])           the rows of those that have any: as in one process
    if loss > 2.0: self.kept.append(each.detach())        one process has all rows, or none

So both have to be seen. Before that, such a value is written by a pass on the samples of all replicas in training; in
evaluation the user is told if the replicas have written it in some of their batches and not in others.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping

import torch.distributed as dist
from torch import nn

from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.carried.step_stores import stored_behind_content
from lightning_megatron.strategy.loss.tables import Name, is_in, sendable
from lightning_megatron.strategy.loss.trials.pieces_tried import Tried
from lightning_megatron.strategy.loss.written import Kinds, was_seen


class BehindConditions:
    """The values of a run.

    Args:
        module: the user's.
        group: the replicas.
        called: gives the functions that the step calls.
        loops: whether values that are written in loops over a batch count.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        called: Callable[[], Iterable[types.FunctionType]],
        *,
        loops: bool = True,
    ) -> None:
        self._loops = loops
        self._module, self._group, self._called = module, group, called
        self._seen = dict[Name, tuple[bool, bool]]()
        self._ways = dict[Name, Kinds]()

    def unsure(self, tried: Tried, names: Iterable[Name], kinds: Mapping[Name, Kinds]) -> set[Name]:
        """Those of some values of which no replica has seen several parts of a batch write them and, of a batch, some
        and others not, to come together in one way. Collective over the replicas.

        Args:
            tried: a trial.
            names: of values that nothing but hooks reads.
            kinds: how values of a batch come of those of its parts.

        Returns:
            Names as all ranks know them.
        """
        if not self._stored:
            return set()
        joins = tried.joins()
        mine = {
            sendable(name, self._module): (was_seen(joins, name), kinds.get(name, ()))
            for name in names
            if is_in(name, self._stored)
        }
        for each in objects.gather(mine, self._group):
            for name, ((both, alone), ways) in each.items():
                before = self._seen.get(name, (False, False))
                self._seen[name] = before[0] or both, before[1] or alone
                self._ways[name] = tuple(way for way in self._ways.get(name, ways) if way in ways)
        return {name for name in mine if not (all(self._seen[name]) and self._ways[name])}

    @functools.cached_property
    def _stored(self) -> set[str]:
        return stored_behind_content(self._called(), loops=self._loops)
