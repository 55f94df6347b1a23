"""Loops over batches end on all ranks after the same number, or the run is refused.

Ranks whose loaders differ in length do not fail by themselves: the one that is through goes on to validation or to the
next epoch, and its messages meet those of another batch, or nobody's. So a rank whose loop has ended waits, beside all
collectives, until everyone's has; and one that wants another batch while a rank has none says so::

    rank 1   batch 1 ─ ends after 1 ─▶ store        waits ─────────── refused: "rank 1's loader ended after 1 batch,
    rank 0   batch 1 ─ wants a second   │ look ─ 2 > 1 ─ report ─────           rank 0's after 4"

In evaluation a replica may have fewer batches than another, as long as nothing is exchanged in the steps: there the
rank that wants more is only refused if it waits for the one that has ended.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lightning_megatron.mesh.watch import waits

TRAINING = "training"


@dataclass(frozen=True)
class End:
    """The end of a loop on one rank.

    Attributes:
        rank: global rank.
        count: batches that it had.
    """

    rank: int
    count: int


class Turns:
    """Loops of one run, by kind (``training``, ``validation``) and number.

    Args:
        store: reachable from all ranks.
        rank: this rank.
        world_size: number of ranks.
        waiting_for: ranks that this one waits for at the moment.
    """

    def __init__(self, store: Any, rank: int, world_size: int, waiting_for: Callable[[], tuple[int, ...]]) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._waiting_for = waiting_for
        self._ended: Counter[str] = Counter()
        self._wanted: Counter[str] = Counter()
        self._length = math.inf
        self._latest = TRAINING

    def wants(self, kind: str, batch: int | None = None, length: float = math.inf) -> None:
        """This rank has a next batch.

        Args:
            kind: of loop.
            batch: number of the batch, from 1; by default one more than the last.
            length: of the loader, where it is known.
        """
        self._wanted[kind] = self._wanted[kind] + 1 if batch is None else batch
        self._length, self._latest = length, kind

    def end(self, kind: str, count: int | None = None) -> str:
        """This rank's loop has ended; the key under which ranks whose loop has ended are counted.

        Args:
            kind: of loop.
            count: batches that it had; by default as many as it wanted.

        Raises:
            RuntimeError: the store is gone.
        """
        key = self._key(kind)
        mine = End(self._rank, self._wanted[kind] if count is None else count)
        self._ended[kind] += 1
        self._wanted[kind] = 0
        self._store.compare_set(f"{key}/first", "", json.dumps(asdict(mine)))
        self._store.set(f"{key}/{self._rank}", json.dumps(asdict(mine)))
        self._store.add(key, 1)
        return key

    def all_ended(self, key: str) -> bool:
        """Whether everyone's loop has ended.

        Raises:
            RuntimeError: the store is gone.
        """
        return bool(self._store.add(key, 0) >= self._world_size)

    def differ(self, key: str) -> tuple[int, str] | None:
        """A rank that ended a training epoch after another number of batches than this one, and what is to be said."""
        mine, first = self._read(f"{key}/{self._rank}"), self._read(f"{key}/first")
        if not key.startswith(f"turn/{TRAINING}/") or mine is None or first is None or mine.count == first.count:
            return None
        less, more = sorted((mine, first), key=lambda end: end.count)
        return less.rank, _told(TRAINING, less, f"rank {more.rank}'s after {more.count}")

    def look(self) -> tuple[int, str] | None:
        """A rank whose loop has ended although this one has a next batch, and what is to be said about it.

        Raises:
            RuntimeError: the store is gone.
        """
        kind = self._latest
        wanted = self._wanted[kind]
        first = self._read(f"{self._key(kind)}/first") if wanted else None
        if first is None or wanted <= first.count or wanted != self._wanted[kind]:
            return None
        if kind != TRAINING and first.rank not in self._waiting_for():
            return None
        known = math.isfinite(self._length)
        mine = f"after {int(self._length)}" if known else f"has more than {wanted - 1}"
        return first.rank, _told(kind, first, f"rank {self._rank}'s {mine}")

    def _key(self, kind: str) -> str:
        return f"turn/{kind}/{self._ended[kind]}"

    def _read(self, key: str) -> End | None:
        return End(**json.loads(self._store.get(key))) if self._store.check([key]) else None


def _told(kind: str, end: End, other: str) -> str:
    short = {TRAINING: "train", "validation": "val"}.get(kind, kind)
    limit = f"limit_{short}_batches"
    batches = "batch" if end.count == 1 else "batches"
    return (
        f"the ranks have different numbers of batches in {kind}: rank {end.rank}'s loader ended after {end.count} "
        f"{batches}, {other}. All ranks take part in every step, so all need equally many: let Lightning add its "
        "sampler (`Trainer(use_distributed_sampler=True)`), shard the data by "
        f"`trainer.strategy.distributed_sampler_kwargs` into equal parts, or set `Trainer({limit}={end.count})`."
    )


def ranks_waited_for() -> tuple[int, ...]:
    """Ranks that have to take part in what this process waits for; empty where it does not wait, or does not know."""
    waiting = waits.waiting()
    return () if waiting is None else waiting.ranks
