"""Dependence of a step of several replicas on the batches of the others, found out by trying.

In one process all samples are of one batch. Replicas have a loss each, whose gradients are averaged, which is that of
one process for a mean over samples. Where a replica's batch runs uncut, its loss is tried on parts of it as well: a
mean over targets is weighted over the replicas, a sum is added up, and of anything else the user is told::

    replica 0   30 tokens   mean 2.0 ┐  mean of means         (2.0 + 1.0) / 2           = 1.50   as under DDP
    replica 1   70 tokens   mean 1.0 ┘  mean over all tokens  (30·2.0 + 70·1.0) / 100   = 1.30   one process

A replica with one sample has no parts: two replicas' batches are tried instead, by all of them.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.experts.routers import routers_of
from lightning_megatron.mesh.batches import batch_size_of, even_tensors, map_tensors, samples_of, tensors_of
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import host_peers, objects
from lightning_megatron.mesh.messages.collectives import raw_all_gather
from lightning_megatron.mesh.messages.of_weights import messages_of_weights
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.mesh.torch_functions import OperatorWatch, Run
from lightning_megatron.strategy.carried.behind_conditions import BehindConditions
from lightning_megatron.strategy.carried.carried_values import Carried
from lightning_megatron.strategy.carried.rows_of_samples import KeptRows, RowsOfPieces
from lightning_megatron.strategy.data.joined_batches import joined_batches
from lightning_megatron.strategy.logs.combining import Narrowed
from lightning_megatron.strategy.loss.counted import NEXT_TO_NOTHING, Counted
from lightning_megatron.strategy.loss.replicas_said import warn_of_replicas, warn_of_untried
from lightning_megatron.strategy.loss.tables import NUMBERS, Name, is_in, sendable
from lightning_megatron.strategy.loss.traces import Changes, Traces
from lightning_megatron.strategy.loss.trials.joined_pieces import Joins, TriedParts, unlike_pair
from lightning_megatron.strategy.loss.trials.pieces_tried import Tried
from lightning_megatron.strategy.loss.weighing import Finding, Reading
from lightning_megatron.strategy.loss.written import Kinds, common_kinds

_MANY = 8  # samples of which four parts are tried, else two
_GROWS = ("sum", "set", "each", "total")
_ALIKE = 1e-6  # relative, of values that replicas write
_PLACES = 1009  # in a tensor that are told apart


class SeesGroup(OperatorWatch):
    """Sees whether a step itself gathers or reduces over the replicas, whose batches then are one.

    Args:
        group: the replicas; ``None`` for one.

    Attributes:
        gathers: whether it does.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self.gathers = group, False

    def seen(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operator."""
        if func.namespace == "c10d":  # a gather may be sent as messages between pairs
            for group in _groups_in(args):
                self._hear(group)
        return run(func, args, kwargs)

    def __enter__(self) -> Self:
        host_peers.listeners.append(self._hear)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        host_peers.listeners.remove(self._hear)
        super().__exit__(*error)

    def _hear(self, group: dist.ProcessGroup) -> None:
        alike = self._group is not None and group.group_name == self._group.group_name
        self.gathers |= alike and not messages_of_weights


class OverReplicas:
    """The part of a run's trials that concerns several replicas.

    Args:
        mesh: the grid.
        device: where tensors live.
        module: the user's.
        layers: names of those that stages share out, which may write on the stage that has them alone.

    Attributes:
        device: see above.
        group: the replicas.
        world: all ranks.
        unseen: whether this replica's batch looks like none before.
        kept: what the step keeps of each sample for the next.
        read: names that hooks after the loop read.
        steers: those that hooks between two steps read, which steer the next.
        collected: those that nothing else reads, where what is kept under them comes together.
        carried: what steps write from the samples of each replica, and go on from.
        hand_over: takes names of :attr:`collected` whose values a pass writes from now on, so that what replicas have
            kept so far comes together; ``None`` where nothing is kept.
        counted: a way of weighing, and what the uncut batches of all replicas count by it in this step; ``None`` where
            no message has told.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device, module: nn.Module, layers: Sequence[str] = ()) -> None:
        self._mesh, self.device, self._module = mesh, device, module
        self.group, self.world = mesh.group("data_parallel"), mesh.group("world")
        self.unseen, self.kept = False, KeptRows()
        self.counted: tuple[Callable[[Any], float], float] | None = None
        self.read: Collection[str] = ()
        self.steers: Collection[str] = ()
        self.collected: Collection[str] = ()
        self.carried = Carried(module, mesh)
        self.hand_over: Callable[[Collection[Name]], None] | None = None
        self._layers, self._ways = Parts(layers), Narrowed()
        self._behind = BehindConditions(module, self.group, lambda: self.carried.called)
        self._told, self._told_untried = set[Name](), False
        self._has_routers: bool | None = None

    def pieces_of(
        self, batch: Any, *, apart: bool = False, rather: bool = False, say: bool = True
    ) -> TriedParts | None:
        """The pieces to try of a batch that is not cut; ``None`` if nothing can be. Collective over the world.

        Args:
            batch: of this replica.
            apart: whether the parts have to be of two replicas.
            rather: whether they should be, where replicas have few samples.
            say: whether to warn if nothing can be.
        """
        found = self._pieces_of(batch, apart=True) if rather else None
        found = found or self._pieces_of(batch, apart=apart)
        if found is None and say and not self._told_untried:
            self._told_untried = True
            warn_of_untried(self.group.size())
        return found

    def unlike_weights(self, ways: Sequence[Counted], used: Callable[[Any], float], batch: Any) -> dict[Counted, float]:
        """Ways of counting that would give the replicas other weights, and by how much. Collective over them.

        The same message tells what the batches of all replicas count together, by the way that weighs now
        (:attr:`counted`, until the next step).

        Args:
            ways: of counting.
            used: what weighs now.
            batch: of this replica.

        Returns:
            Largest relative difference, by way; only where there is one; alike on all replicas.
        """
        weight = used(batch)
        known = tensors_of(batch)
        here = [way(batch) / weight if weight and way.place < len(known) else -1.0 for way in ways]
        weight = weight or (NEXT_TO_NOTHING if isinstance(used, Counted) else 0.0)
        row = torch.tensor([[weight, *here]], dtype=torch.float64, device=self.device)
        rows = raw_all_gather(row, 0, self.group).cpu()
        self.counted = used, float(rows[:, 0].sum())
        lowest, highest = rows[:, 1:].amin(0), rows[:, 1:].amax(0)
        unlike = ((highest - lowest) / highest.abs().clamp(min=1e-9)).tolist()
        return {way: by for way, by in zip(ways, unlike, strict=True) if by > 1e-9}

    def own_values(
        self, tried: Tried, kinds: Mapping[Name, Kinds], traces: Traces, *, gathers: bool, cut: bool
    ) -> tuple[list[Name], bool]:
        """Values that each replica writes from its own samples, and goes on from; collective over them.

        Args:
            tried: a trial.
            kinds: how values of a batch come of those of its parts.
            traces: of the module.
            gathers: whether the step itself gathers over the replicas.
            cut: whether the batch runs in micro-batches.

        Returns:
            Their names, and whether there are others that have a row for each sample, which this trial did not cut.
        """
        changes: Changes = {}
        for join in tried.joins():
            changes = {name: change for part in (join.whole, *join.parts) for name, change in part.items()} | changes
        lasting = traces.lasting(set(changes)) | {name for name, (kind, *_) in kinds.items() if kind in _GROWS}
        lasting |= {name for name in changes if is_in(name, self.read) or is_in(name, self.steers)}
        rows = self.learn_rows(tried, lasting)
        changes = {name: change for name, change in changes.items() if name in lasting and name not in rows}
        mine: dict[Name, list[Name]] = {}
        unsure = self._behind.unsure(tried, filter(self._is_kept, changes), kinds) if self.collected else set()
        for name in changes:
            if kinds.get(name) and self._is_kept(name) and sendable(name, self._module) not in unsure:
                continue
            mine.setdefault(sendable(name, self._module), []).append(name)
        found = unlike_values({said: [changes[name][1] for name in names] for said, names in mine.items()}, self.group)
        if not any(objects.gather(gathers, self.group)):
            found = self.carried.judge(tried, mine, [*found, *unsure], kinds, self._is_kept)
            metric = tried.mixed_metric(cut=cut)
            found = list(dict.fromkeys([*found, *traces.weights.unlike, *([metric] if metric else [])]))
        return found, bool(rows.difference(tried.kept.names))

    @property
    def ways(self) -> Mapping[Name, Any]:
        """By name of a value of :attr:`collected`, how it comes together; "" where that is unknown. Not of what a pass
        writes.
        """
        return {name: way for name, way in self._ways.chosen.items() if name not in self.carried.ways}

    def kept_kinds(self, kinds: Mapping[Name, Kinds]) -> dict[Name, Kinds]:
        """How values of :attr:`collected` come together, where the loss is computed; nothing on other ranks.

        Args:
            kinds: how those of a batch come of those of its parts.
        """
        here = self._mesh.rank == self._mesh.loss_rank
        return {sendable(name, self._module): ways for name, ways in kinds.items() if here and self._is_kept(name)}

    def learn_kept(self, told: Sequence[Mapping[Name, Kinds]], usual: Any) -> None:
        """Take note of how they come together.

        Args:
            told: what :meth:`kept_kinds` gives on each rank.
            usual: the way to weigh of the loss, which goes before the others.
        """
        for name, ways in common_kinds(told).items():
            self._ways.learn(name, ways, usual)

    def comes_together(self, name: Name) -> bool:
        """Whether a value comes together after the last batch, or has a row for each sample."""
        if name in self.kept.places:
            return True
        said = sendable(name, self._module)
        return self._is_kept(name) and said not in self.carried.ways and bool(self._ways.chosen.get(said))

    def _is_kept(self, name: Name) -> bool:
        return name[0] not in self._layers and is_in(name, self.collected)

    def kept_of(self, joins: Joins, of: TriedParts) -> RowsOfPieces:
        """State that earlier steps kept of the samples of a trial. Collective over the replicas, where it is of two.

        Args:
            joins: the pieces.
            of: the parts that they are made of.
        """
        return self.kept.of(joins.rows(), of.size, joins.first, self.group, of.borrowed)

    def learn_rows(self, tried: Tried, lasting: set[Name]) -> set[Name]:
        """Take note of values that have a row for each sample, of those that a trial has written; gives their names.

        Args:
            tried: the trial.
            lasting: values that a later step reads.
        """
        dims = {n: where for n in tried.changes(0) if n in lasting and (where := tried.sample_dims(n)) is not None}
        if dims.keys() <= set(tried.kept.names):  # else rows may be others as those of another value were not cut yet
            self.kept.note_mixed(tried.mixed_rows())
        dims = {name: where for name, where in dims.items() if name not in self.kept.mixed}
        self.kept.learn({n: (*at, dims[n]) for n, at in zip(dims, tried.traces.tables(list(dims)), strict=True)})
        self.carried.rows = (self.carried.rows | dims.keys()) - self.kept.mixed
        return set(dims)

    def say(
        self, before: Reading, found: Finding, now: Reading, own: Sequence[tuple[list[Name], bool]], *, cut: bool
    ) -> None:
        """Say what of a step is that of a replica. Collective over the world.

        Args:
            before: what was known before the trial.
            found: by it.
            now: what is known with it.
            own: what :meth:`own_values` gives on each rank.
            cut: whether the batch runs in micro-batches.
        """
        self.carried.learn(now.way if now.fits and now.way else "sizes")
        new = list(dict.fromkeys(name for names, _ in own for name in names if name not in self._told))
        new = [name for name in new if name not in self.carried.ways]
        self._told.update(new)
        if self._has_routers is None:
            self._has_routers = any(objects.gather(bool(routers_of(self._module)), self.world))
        cannot_tell = self._has_routers or any(by_sample for _, by_sample in own)
        warn_of_replicas(before, found, now, self.group.size(), self._module, new, cut, cannot_tell)

    def _pieces_of(self, batch: Any, *, apart: bool) -> TriedParts | None:
        least = min(objects.gather(samples_in(batch), self.world))
        if not least:
            return None
        count = 4 if least >= _MANY else 2
        size = least // count
        if size and not apart:
            parts = [samples_of(batch, size * place, size * (place + 1)) for place in range(count)]
            return TriedParts(samples_of(batch, 0, size * count), parts, batch_size_of(batch))
        if least > _MANY:
            return None
        told = objects.gather(map_tensors(batch, Tensor.cpu), self.group)
        first = unlike_pair(told[0], told)
        one, other = (map_tensors(each, lambda tensor: tensor.to(self.device)) for each in told[first : first + 2])
        both = joined_batches(one, other)
        found = both is not None and all(objects.gather(both is not None, self.world))
        return TriedParts(both, [one, other], batch_size_of(batch), borrowed=first) if found else None


def samples_in(batch: Any) -> int:
    """How many samples can be taken apart; 0 where whole numbers beside them may point at other samples."""
    try:
        size = batch_size_of(batch)
        samples_of(batch, 0, size)
    except ValueError:
        return 0
    for tensor in even_tensors(batch):
        if tensor.ndim and not (tensor.is_floating_point() or tensor.is_complex()):
            if len(tensor) != size:
                return 0
            fatal = tensor.device.type != "cpu"  # an index out of range, which is an error that is caught otherwise
            if (
                fatal
                and tensor.ndim == 1
                and size > 1
                and torch.equal(tensor.sort().values, torch.arange(size).to(tensor))
            ):
                return 0
    return size


def unlike_values(values: Mapping[Name, list[Any]], group: dist.ProcessGroup) -> list[Name]:
    """Names of values that a step has written otherwise on each replica. Collective over them.

    Args:
        values: of this replica, written by a step on a part of its own batch, under names that all replicas know.
        group: the replicas.
    """
    told = objects.gather({name: sums_of(written) for name, written in values.items()}, group)
    names = dict.fromkeys(name for each in told for name in each)
    return [name for name in names if any(differ_in_sums(told[0].get(name), each.get(name)) for each in told[1:])]


def sums_of(value: Any) -> tuple[float, ...] | None:
    """Sums that tell numbers and tensors apart; ``None`` for what is neither.

    Args:
        value: the value.
    """
    if isinstance(value, Tensor):
        plain = torch.view_as_real(value) if value.is_complex() else value
        plain = plain.detach().double().flatten()
        places = 1 + torch.arange(plain.numel(), device=plain.device).remainder(_PLACES).double()
        sums = torch.stack([plain.sum(), plain.abs().sum(), plain.abs() @ places])  # other places, of the same numbers
        return (float(plain.numel()), *sums.tolist())
    if isinstance(value, (bool, int, float)):
        return (1.0, float(value), abs(float(value)))
    if isinstance(value, (set, dict)) and all(isinstance(entry, (*NUMBERS, tuple)) for entry in value):
        keys = float(zlib.crc32(repr(sorted(map(repr, value))).encode()))
        held = sums_of(list(value.values())) if isinstance(value, dict) else ()
        return None if held is None else (float(len(value)), keys, *held)
    if isinstance(value, str):
        return (float(zlib.crc32(value.encode())),)
    if isinstance(value, (list, tuple, deque)):
        each = [sums_of(entry) for entry in value]
        return None if None in each else tuple(number for entry in each if entry is not None for number in entry)
    return None


def differ_in_sums(one: tuple[float, ...] | None, other: tuple[float, ...] | None) -> bool:
    """Whether values of which these are the :func:`sums_of` differ by more than rounding, or but one of them is there.

    Args:
        one: of a value; ``None`` where there is none.
        other: of another one.
    """
    if one is None or other is None:
        return (one is None) != (other is None)
    pairs = zip(one, other, strict=True) if len(one) == len(other) else [(0.0, math.inf)]
    return any(not math.isclose(a, b, rel_tol=_ALIKE) and not (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def _groups_in(args: Any) -> Iterator[dist.ProcessGroup]:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                yield dist.ProcessGroup.unbox(argument)
            except RuntimeError:
                continue
