"""Collators that mix the samples of a batch, of which each replica has its own.

One process mixes those of the whole batch: ``x - x.mean(0)``, mixup of each sample with another. A replica's loader has
no others. So a user's collator is tried once, on some samples and on half of them: where the rows of the half come out
otherwise among the rest, it mixes, and is warned of::

    collate([0 1 2 3])   ──▶   rows 0 1 2 3          rows 0 1 of both alike: each sample is by itself
    collate([0 1])       ──▶   rows 0 1

Collators that draw random numbers are left alone, as hooks that do are, and so are those that pad to other lengths.
"""

from __future__ import annotations

import inspect
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron.mesh.batches import map_rows
from lightning_megatron.mesh.parts.packages import HUGGING_FACE, is_users
from lightning_megatron.strategy.carried.batch_hooks import alike, drawing_again, positions, shapes
from lightning_megatron.strategy.data.joined_batches import in_order
from lightning_megatron.strategy.data.walk import fetch_state, restore_fetch

_MOST = 4  # samples that are tried


def warn_of_mixing(loader: Any, replicas: int) -> None:
    """Warn of a training loader whose collator mixes samples.

    Args:
        loader: of one replica; others than torch's are left alone.
        replicas: how many there are.
    """
    collate = getattr(loader, "collate_fn", None)
    if replicas == 1 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    function = collate if inspect.isroutine(collate) else type(collate)
    if not is_users(function, "builtins", *HUGGING_FACE) or not _mixes(loader, collate):
        return
    rank_zero_warn(
        f"`{getattr(collate, '__qualname__', type(collate).__name__)}`, `collate_fn` of a training loader, makes of "
        f"each sample of a batch what depends on the others in it. Each of the {replicas} replicas gives it its own "
        "samples, as under DDP, where one process gives it all. Do it in `on_after_batch_transfer` of the module or "
        "data module, which is given the samples of all replicas."
    )


def _rows_of(batch: Any) -> list[Any]:
    """Values of a batch with a row for each sample; numbers beside those, which count, are not mixed."""
    found: list[Any] = []
    map_rows(batch, lambda each: found.append(each) or each)  # type: ignore[func-returns-value]
    return found


def _mixes(loader: DataLoader[Any], collate: Any) -> bool:
    """Whether half of some samples come out otherwise among the rest; leaves generators where they were."""
    before = fetch_state(loader)
    try:
        with drawing_again():
            count = min(_MOST, len(loader.dataset))  # type: ignore[arg-type]
            samples = [loader.dataset[at] for at in range(count)]
            drawn = positions()
            half, rows = collate(samples[: count // 2]), collate(list(samples))
            if positions() != drawn or count < 2:
                return False
            half, kept = _rows_of(half), _rows_of(in_order(rows, range(count // 2)))
            return shapes(half) == shapes(kept) and not alike(half, kept)
    except Exception:  # such samples, or such a batch, cannot be cut; the run that counts raises its own
        return False
    finally:
        restore_fetch(loader, before)
