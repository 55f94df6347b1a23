"""The outcome of a step over the data-parallel replicas: the mean loss, and one value for each logged key.

The numbers of all replicas travel in one message, whose size all know beforehand. It has room for as many keys as any
replica has logged before, and says how many there are and which. Where a condition of the data lets replicas log other
keys (``if (source == 1).any(): self.log("loss/1", ...)``), a second message has their names::

    replica 0   loss 2.1   keys #a41f   loss/0 1.9  loss/1 2.3  ┐  alike: each row combines
    replica 1   loss 2.0   keys #a41f   loss/0 2.2  loss/1 1.8  ┘
    replica 0   loss 1.7   keys #a41f   loss/0 1.5  loss/1 1.9  ┐  unlike: keys, too; loss/1 is replica 0's
    replica 1   loss 1.8   keys #07c2   loss/0 1.8              ┘

So all ranks log every key that one process logs.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.watch import waits
from lightning_megatron.strategy.logs.combining import combine
from lightning_megatron.strategy.logs.step_logs import LogKey, StepLogs
from lightning_megatron.strategy.loss.said import logs_partly, warn_of_metrics
from lightning_megatron.strategy.step.step import Outcome

_HEADER = 6  # loss, three flags, how many keys, which
_ROOM = 8  # keys, at first


class ReplicaMean:
    """Averages losses and combines logged values over data-parallel replicas.

    Args:
        mesh: the grid.
        device: where tensors live.

    Attributes:
        numbers: keys that the latest outcome has of some replica, and that are no metric's value.
        partly: whether some of these are means that not all replicas have.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._device = device
        self._replicas = mesh.layout.data
        self._group = mesh.group("data_parallel") if mesh.layout.data > 1 else None
        self._pending: tuple[Any, Tensor] | None = None
        self._logged = torch.zeros(1, 0, 3)
        self._room, self._said = _ROOM, set[str]()
        self.numbers, self.partly = set[str](), False

    def start(self, outcome: Outcome, *, meets: bool) -> None:
        """Begin without waiting; :meth:`finish` must follow.

        Args:
            outcome: this replica's.
            meets: whether all replicas take this step, whatever it logs. In evaluation some may have fewer batches than
                others, and meet only where something is logged.
        """
        self._pending, self._logged = None, torch.zeros(1, 0, 3)
        self.numbers, self.partly = set(), False
        if self._group is None or not (meets or outcome.logs.keys):
            return
        loss = outcome.loss if outcome.loss is not None else torch.zeros((), dtype=torch.float64)
        keys, rows = outcome.logs.keys, outcome.logs.rows.reshape(-1)
        told = [outcome.stop, outcome.differ, outcome.unseen, len(keys), _digest(outcome.logs)]
        mine = rows.new_zeros(_HEADER + 3 * self._room)
        mine[0] = loss.to(self._device, torch.float64)
        mine[1:_HEADER] = rows.new_tensor(told)
        if len(keys) <= self._room:
            mine[_HEADER : _HEADER + rows.numel()] = rows
        everyone = torch.empty(self._replicas, mine.numel(), dtype=mine.dtype, device=self._device)
        work = dist.all_gather(list(everyone.unbind()), mine, group=self._group, async_op=True)
        self._pending = (work, everyone)

    def finish(self, outcome: Outcome) -> None:
        """Wait for what :meth:`start` began, and put the values over all replicas into ``outcome``."""
        if self._pending is None:
            return
        work, everyone = self._pending
        with waits.on(self._told):
            work.wait()
        if outcome.loss is not None:
            outcome.loss = everyone[:, 0].mean().to(outcome.loss.dtype)
        told, room = everyone[:, 1:_HEADER].tolist(), self._room
        outcome.stop, outcome.differ, outcome.unseen = (any(row[flag] for row in told) for flag in range(3))
        most = max(int(row[3]) for row in told)
        self._room = max(room, most)
        if most <= room and all(row[3:] == told[0][3:] for row in told):
            logs, gathered = outcome.logs, everyone[:, _HEADER : _HEADER + 3 * most].view(self._replicas, -1, 3)
            self.numbers = {key.name for index, key in enumerate(logs.keys) if _is_number(key, index in logs.later)}
        else:
            logs, gathered = self._of_any(outcome.logs)
            counts = (~_missing(gathered)).sum(0).tolist()
            unlike = [(key, count) for key, count in zip(logs.keys, counts, strict=True) if count < self._replicas]
            self.partly = logs_partly([key for key, _ in unlike if key.name in self.numbers], self._said)
            metrics = ((key, count) for key, count in unlike if count > 1 and key.name not in self.numbers)
            warn_of_metrics(metrics, self._replicas, self._said)
        outcome.logs, self._logged = _combined(logs, gathered), gathered

    def combined(self, index: int, how: Any, weights: Tensor) -> Tensor:
        """A row of the latest outcome, put together in another way.

        Args:
            index: of the row.
            how: see :func:`.combine`.
            weights: of the replicas.
        """
        there = ~_missing(self._logged)[:, index]
        return combine(how, self._logged[there, index, 0], weights[there])

    def unlike(self, tolerance: float) -> list[bool]:
        """Whether each row of the latest outcome has other values on some replica.

        Args:
            tolerance: relative.
        """
        if not self._logged.numel():
            return []
        values = self._logged[:, :, 0]
        apart, largest = values.amax(0) - values.amin(0), values.abs().amax(0)
        told: list[bool] = (~(apart <= tolerance * largest)).tolist()  # no number is unlike any
        return told

    def _of_any(self, logs: StepLogs) -> tuple[StepLogs, Tensor]:
        """The keys that any replica has logged, alike on all; and the rows of each, of no numbers where it has none."""
        rows = logs.rows.clone()
        for index, of_metric in logs.later.items():
            value = of_metric(None)
            if value is not None:
                rows[index, 0] = value
        behind = [index in logs.later for index in range(len(logs.keys))]
        places = _places(logs)
        mine = dict(zip(places, zip(logs.keys, rows.tolist(), behind, strict=True), strict=True))
        everyone = [theirs or {} for theirs in objects.gather(mine or None, self._group)]
        keys: dict[tuple[str, int], LogKey] = {}
        for theirs in everyone:
            keys |= {place: key for place, (key, *_) in theirs.items() if place not in keys}
        none = (None, [float("nan")] * 3, False)
        gathered = [[theirs.get(place, none)[1] for place in keys] for theirs in everyone]
        later = {
            index: logs.later[places.index(place)]
            for index, place in enumerate(keys)
            if all(theirs.get(place, none)[2] for theirs in everyone)
        }
        metrics = {
            place for theirs in everyone for place, (key, _, behind) in theirs.items() if not _is_number(key, behind)
        }
        self.numbers = {name for name, count in keys if (name, count) not in metrics}
        whole = rows.new_tensor(gathered)
        return StepLogs(list(keys.values()), whole[0].clone(), logs.own, later, logs.gather), whole

    def _told(self) -> waits.Waiting:
        """Description of the wait in :meth:`finish`."""
        what = f"loss and logged values over {waits.members(self._group)}"
        return waits.Waiting(what, waits.ranks_of(self._group))


def _combined(logs: StepLogs, gathered: Tensor) -> StepLogs:
    """Logs of the samples of all replicas.

    Args:
        logs: of this replica, with the keys of all.
        gathered: rows of all replicas, ``[replicas, keys, 3]``; no numbers where one has not logged a key.
    """
    rows, there = gathered[0].clone(), ~_missing(gathered)
    partly = not bool(there.all())
    for index, key in enumerate(logs.keys):
        here = gathered[there[:, index], index] if partly else gathered[:, index]
        whole = logs.later[index](logs.gather) if index in logs.later else None
        rows[index, 0] = combine(key.how, here[:, 0], here[:, 1]) if whole is None else whole
    given = gathered[:, :, 2] >= 0
    sizes = torch.where(given, gathered[:, :, 2], 0.0).sum(0)
    rows[:, 2] = torch.where(given.any(0), sizes, -1.0)
    return StepLogs(logs.keys, rows, logs.own)


def _missing(gathered: Tensor) -> Tensor:
    """Whether each replica has not logged each key, ``[replicas, keys]``."""
    return gathered[:, :, 1].isnan()


def _is_number(key: LogKey, behind: bool) -> bool:
    return key.metric is None and not behind


def _places(logs: StepLogs) -> list[tuple[str, int]]:
    """Each key with how often it was logged before."""
    seen: Counter[str] = Counter()
    places = []
    for key in logs.keys:
        places.append((key.name, seen[key.name]))
        seen[key.name] += 1
    return places


def _digest(logs: StepLogs) -> int:
    """A number for which keys were logged, in which order, and which of them metrics stand behind."""
    names = "\0".join(f"{key.name}\1{index in logs.later}" for index, key in enumerate(logs.keys))
    return zlib.crc32(names.encode())
