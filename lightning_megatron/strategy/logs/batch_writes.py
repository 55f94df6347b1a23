"""Writes of the user's step into its batch: each run of the step finds the batch as it came, and hooks what one
process would have left.

A stage runs the step once for each of its chunks of layers, and once for each micro-batch, where one process runs it
once; and only the last stage runs it to its end. ``batch["tokens"].add_(1)`` and ``batch["step"] += 1`` would be done
as often, and a tensor that all samples share would be written by each micro-batch. So a run is given a copy::

    part ──copy──▶ step, chunk 0          what it writes is thrown away
    part ──copy──▶ step, last chunk       what it writes reaches the batch, when all micro-batches are done,
                                          and with the outcome of the step the batches of the other stages

Large tensors are copied in evaluation, and once a step was seen to write into one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.batches import map_tensors, merge_outputs
from lightning_megatron.mesh.messages import objects
from lightning_megatron.pipeline.elsewhere.away import Away, mark
from lightning_megatron.strategy.logs.batch_copies import (
    BatchCopy,
    Path,
    Rebound,
    contents,
    fill,
    share_memory,
    shares_memory,
    tensors_of,
)

_SMALL = 1 << 16  # numbers in a tensor


@dataclass
class BatchChanges:
    """Changes of a step to its batch; the same on all stages.

    Attributes:
        tensors: by place among the batch's tensors, the numbers of those that were written.
        bound: by path of a container, what was bound anew in it, and the keys that were taken away.
    """

    tensors: dict[int, Any] = field(default_factory=dict)
    bound: dict[Path, tuple[dict[Hashable, Any], list[Hashable]]] = field(default_factory=dict)


class BatchWrites:
    """Copies batches for runs of the step, and knows what they write into them."""

    def __init__(self) -> None:
        self._writes = self._shared = False
        self._written: list[tuple[Tensor, Tensor]] = []
        self._rebound: dict[int, list[Rebound]] = {}

    def begin(self, batch: Any) -> None:
        """Called before a step is run on a batch."""
        self._written, self._rebound = [], {}
        self._shared = shares_memory(batch)

    def copied(self, part: Any) -> BatchCopy:
        """A batch for one run."""
        evaluates = torch.is_inference_mode_enabled()  # where writes are not counted

        def own(tensor: Tensor) -> bool:
            return self._writes or evaluates or tensor.is_inference() or tensor.numel() <= _SMALL

        return BatchCopy(part, own, shared=self._shared)

    def note(self, copy: BatchCopy, index: int, *, last: bool, alone: Callable[[Tensor], bool]) -> None:
        """Called after a run.

        Args:
            copy: what :meth:`copied` gave for it.
            index: of the micro-batch.
            last: whether it was the last on this batch.
            alone: whether nothing else is run on a tensor.

        Raises:
            RuntimeError: it has written into a large tensor that it is run on again.
        """
        for pair in copy.written():
            if last:
                self._written.append((pair.tensor, pair.given))
            if not pair.is_copy and not alone(pair.tensor):
                raise RuntimeError(
                    f"the step writes into a tensor of its batch, of shape {tuple(pair.tensor.shape)}, which it is run "
                    "on again for other layers or micro-batches. Write into a copy of it (`tensor.clone()`), or let "
                    "`collate_fn` do it."
                )
            self._writes |= pair.tensor.numel() > _SMALL
        if last and (found := copy.rebound()):
            self._rebound[index] = found

    def finish(self, batch: Any, sizes: Sequence[int], weights: Sequence[float], name: str) -> BatchChanges | None:
        """Called when all micro-batches are done, where the step was run to its end: what it has left in the batch.

        Args:
            batch: the user's.
            sizes: samples of each micro-batch.
            weights: of each in means.
            name: of the user's step.

        Raises:
            RuntimeError: what cannot be put together, or sent.
        """
        written, rebound = self._written, self._rebound
        self._written, self._rebound = [], {}
        if not written and not rebound:
            return None
        changes = BatchChanges()
        with torch.no_grad():
            for tensor, copy in written:
                if type(copy) is not Away:
                    tensor.copy_(copy)
            for index, whole in enumerate(tensors_of(batch)):
                for tensor, copy in written:
                    if share_memory(tensor, whole):
                        changes.tensors[index] = copy if type(copy) is Away else whole
        places = {id(each.original): each.path for each in BatchCopy(batch, lambda _: False, shared=False).containers}
        found: dict[Path, dict[int, Rebound]] = {}
        for index, parts in rebound.items():
            for each in parts:
                path = places.get(id(each.container.original), each.container.path)
                found.setdefault(path, {})[index] = each
        for path, by_part in found.items():
            first = next(iter(by_part.values())).container.original
            if len(by_part) == 1 and (len(sizes) == 1 or places.get(id(first)) == path):
                (only,) = by_part.values()
                changes.bound[path] = {k: _bare(v, path, k, name) for k, v in only.values.items()}, only.removed
            elif isinstance(first, list) and len(contents(_at(batch, path))) != len(first):
                changes.bound[path] = _joined(by_part, sizes, path, name)
            else:
                changes.bound[path] = _merged(by_part, sizes, weights, path, name)
        return changes

    def apply(self, batch: Any, changes: BatchChanges | None) -> None:
        """Leave in a batch what :meth:`finish` found, on any rank."""
        if changes is None:
            return
        tensors = tensors_of(batch)
        with torch.no_grad():
            for index, value in changes.tensors.items():
                if type(value) is Away:
                    mark(tensors[index], value.source)
                elif value is not tensors[index]:
                    tensors[index].copy_(value)
        for path, (values, removed) in changes.bound.items():
            container = _at(batch, path)
            held = {key: value for key, value in contents(container).items() if key not in removed}
            fill(container, held | values)


def _at(batch: Any, path: Path) -> Any:
    """The container at the end of a path."""
    for key in path:
        batch = batch[key] if isinstance(batch, tuple) else contents(batch)[key]
    return batch


def _joined(
    by_part: Mapping[int, Rebound], sizes: Sequence[int], path: Path, name: str
) -> tuple[dict[Hashable, Any], list[Hashable]]:
    """Entries bound anew in a list with an entry per sample, of which each micro-batch has some."""
    if any(part.removed or len(part.container.copy) != len(part.container.held) for part in by_part.values()):
        raise RuntimeError(_apart(path, name))
    values: dict[Hashable, Any] = {}
    for index, part in by_part.items():
        start = sum(sizes[:index])
        values |= {start + int(str(k)): _bare(value, path, k, name) for k, value in part.values.items()}
    return values, []


def _merged(
    by_part: Mapping[int, Rebound], sizes: Sequence[int], weights: Sequence[float], path: Path, name: str
) -> tuple[dict[Hashable, Any], list[Hashable]]:
    """Entries bound anew in a container that each micro-batch has, by the values of all of them."""
    parts = [by_part[index] for index in sorted(by_part)]
    removed = parts[0].removed
    if len(parts) < len(sizes) or any(part.removed != removed for part in parts):
        raise RuntimeError(_apart(path, name))
    merged = {}
    for k in parts[0].values:
        try:
            merged[k] = _bare(merge_outputs([part.values[k] for part in parts], weights, sizes, name), path, k, name)
        except (KeyError, ValueError) as error:
            raise RuntimeError(_apart((*path, k), name)) from error
    return merged, removed


def _apart(path: Path, name: str) -> str:
    return (
        f"`{name}` binds `{_words(path)}` anew in some of its micro-batches, or to values that cannot be put together "
        "as one batch's. Give it a tensor whose dimension 0 is the batch, or bind a local variable."
    )


def _words(path: Path) -> str:
    return "batch" + "".join(f"[{each!r}]" for each in path)


def _bare(value: Any, path: Path, key: Hashable, name: str) -> Any:
    """A value without its graph.

    Raises:
        RuntimeError: it cannot be sent.
    """
    value = map_tensors(value, torch.detach)
    if not isinstance(value, (Tensor, bool, int, float, str, type(None))):
        try:
            objects.encode(map_tensors(value, lambda _: None))  # type: ignore[arg-type, return-value]
        except Exception as error:
            raise RuntimeError(
                f"`{name}` binds `{_words((*path, key))}` to a {type(value).__name__} that cannot be sent to the other "
                f"pipeline stages, whose hooks are given the batch too ({error}). Bind a local variable instead."
            ) from error
    return value
