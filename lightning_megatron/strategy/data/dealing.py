"""One order of rows for every layout: a step reads the same samples at any number of replicas, and after a resume.

With ``batch=8``, step 0 reads the rows 0 to 7 of the order, whoever computes them::

    1 replica     0 1 2 3 4 5 6 7
    2 replicas    0 2 4 6           1 3 5 7
    4 replicas    0 4     1 5       2 6     3 7
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from lightning_megatron.strategy.data.rows import is_stream


def deal(
    rows: Any,
    batch: int,
    trainer: Any,
    *,
    shuffle: bool = False,
    seed: int = 0,
    passes: int | None = 1,
    **options: Any,
) -> DataLoader[Any]:
    """A loader of this replica's part of every step, for ``train_dataloader`` and its like.

    Args:
        rows: with a length, or a stream: one of ``datasets``, a packed one, or anything that can be iterated again and
            again with the same result.
        batch: samples of a step over all replicas.
        trainer: that asks, ``self.trainer`` in a module or a data module. Any strategy will do.
        shuffle: draw a new order in every epoch, from ``seed`` and the epoch alone. A stream is shuffled by
            ``rows.shuffle(seed=..., buffer_size=...)`` before it comes here.
        seed: of the orders.
        passes: how often a stream is read in one epoch, each pass in an order of its own if it is shuffled; ``None`` is
            endless, for runs that end by ``max_steps``. Every epoch begins with the order of the first pass.
        options: for ``DataLoader``, as ``collate_fn`` or ``num_workers``. ``drop_last`` is true unless it is given;
            ``drop_last=False`` needs rows that the replicas share out evenly.

    Raises:
        ValueError: ``batch`` cannot be shared by the replicas, there are fewer rows than that, ``drop_last=False``
            would give other samples than one replica has, a stream is to be shuffled here, or to be read by several
            workers.
    """
    parts = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    replicas, replica = parts["num_replicas"], parts["rank"]
    if batch < 1 or batch % replicas:
        raise ValueError(
            f"`deal(batch={batch})` cannot be shared by {replicas} replicas; use a multiple of {replicas}."
        )
    drops = options.setdefault("drop_last", True)
    if not drops and replicas > 1 and (is_stream(rows) or len(rows) % replicas):
        rest = "a stream" if is_stream(rows) else f"{len(rows)} rows"
        raise ValueError(
            f"`drop_last=False` cannot share out {rest} over {replicas} replicas as one replica reads them: some would "
            f"be read twice, or not at all. Leave it out, or give rows whose number is a multiple of {replicas}."
        )
    if not is_stream(rows):
        if drops and len(rows) < batch:
            raise ValueError(f"{len(rows)} rows make no batch of {batch} samples; use a smaller `batch` in `deal`.")
        if passes != 1:
            raise ValueError(f"`passes={passes}` is for streams; rows with a length are read by `max_epochs`.")
        sampler: Any = DistributedSampler(rows, replicas, replica, shuffle=shuffle, seed=seed, drop_last=drops)
        return DataLoader(rows, batch // replicas, sampler=sampler, **options)
    if shuffle:
        raise ValueError(
            "`deal(shuffle=True)` needs rows with a length; a stream is shuffled before, by "
            "`rows.shuffle(seed=..., buffer_size=...)`."
        )
    if options.get("num_workers", 0) > 1:
        raise ValueError(
            f"`num_workers={options['num_workers']}` would split a stream between workers; use 1, which reads "
            "ahead, or rows with a length."
        )
    return DataLoader(DealtStream(rows, replicas, replica, passes), batch // replicas, **options)


class DealtStream(IterableDataset[Any]):
    """One replica's rows of a stream: every ``replicas``-th.

    Rows at the end that are too few for one each are left out, so all replicas have equally many.

    Args:
        rows: the stream.
        replicas: how many share it.
        replica: which of them this is.
        passes: over the stream; ``None`` is endless.
    """

    def __init__(self, rows: Any, replicas: int, replica: int, passes: int | None) -> None:
        self._rows = rows
        self._replicas = replicas
        self._replica = replica
        self._passes = passes

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise ValueError(f"A dealt stream cannot be read by {info.num_workers} workers; use `num_workers=1`.")
        mine, place = None, 0
        for row in self._all():
            mine = row if place == self._replica else mine
            place = (place + 1) % self._replicas
            if not place:
                yield mine

    def _all(self) -> Iterator[Any]:
        for number in count() if self._passes is None else range(self._passes):
            if hasattr(self._rows, "set_epoch"):
                self._rows.set_epoch(number)
            is_empty = True
            for row in self._rows:
                is_empty = False
                yield row
            if is_empty:
                return
