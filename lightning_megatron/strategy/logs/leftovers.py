"""Leftovers of a step on the module besides its result: attributes, buffers, lists it appends to.

``self.outputs.append(loss)`` to be averaged in ``on_validation_epoch_end``, a counter, a running mean in a buffer. Two
things have to be put right:

- Only the last stage gets that far in the step, while the hooks that read the attributes run on every rank. After each
  step the last stage therefore sends what changed; buffers that another stage fills are in :mod:`.shared_buffers`.
- A step of several micro-batches appends an entry per micro-batch, of which the mean is not that of batches of unlike
  sizes. So the entries of one batch are merged as what a step returns is. A list that the code also extends, by an
  entry per sample for instance, is left as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_megatron.mesh.autograd import version_of
from lightning_megatron.mesh.batches import merge_outputs
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.parts.packages import module_of
from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.stage.side_effects import SideEffects
from lightning_megatron.strategy.logs.shared_buffers import SharedBuffers
from lightning_megatron.strategy.logs.written_beside import WrittenBeside
from lightning_megatron.strategy.loss.tables import PerClass, appended_names, tables_of_optimizers

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONSTANT = frozenset(_PLAIN)
_CONTAINERS = (dict, list, tuple, set, deque)
_DEPTH = 4
_SMALL = 1 << 16  # bytes of an array


def _follows(kind: type) -> bool | None:
    """Whether values of a class are followed; ``None`` where it depends on the value."""
    depends = issubclass(kind, _CONTAINERS) or module_of(kind) == "numpy"
    return issubclass(kind, (*_PLAIN, Tensor)) or (None if depends else False)


_KINDS: PerClass[bool | None] = PerClass(_follows)


class _Look:
    """Values by name, and a trace of each; what cannot change is not traced again."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Any, Any]] = {}

    def take(self, values: Mapping[Any, Any]) -> None:
        """Remember values as they are."""
        earlier = self._found
        self._found = {
            name: known
            if (known := earlier.get(name)) is not None and known[0] is value and value.__class__ in _CONSTANT
            else (value, _fingerprint(value))
            for name, value in values.items()
        }

    def changed(self, values: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Values other than they were, with the traces before and now; ``None`` before what was not there."""
        for name, value in values.items():
            known, before = self._found.get(name, (MISSING, None))
            if known is value and value.__class__ in _CONSTANT:
                continue
            now = _fingerprint(value)
            if now != before:
                yield name, value, before, now


@dataclass(frozen=True)
class _Name:
    """Stands for a module among the keys of a dictionary."""

    name: str


class Leftovers:
    """Finds and applies changes to the plain attributes of a LightningModule.

    Numbers, strings, tensors, NumPy's arrays, and lists, dicts, sets, deques and tuples of those are followed; other
    objects are not.

    Args:
        module: the user's module.
        presence: says which buffers several stages have, and which layers there are.
        mesh: the grid.
        device: where tensors live.
        side_effects: of the trunk's layers.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        presence: Presence,
        mesh: ParallelMesh,
        device: torch.device,
        side_effects: SideEffects,
    ) -> None:
        self._module = module
        self._mesh, self._device = mesh, device
        self._side_effects = side_effects
        self._buffers = SharedBuffers(module, presence, mesh, device)
        self._ignored = set(pl.LightningModule().__dict__) | {"log"}
        self._before, self._options = _Look(), _Look()
        self._beside = WrittenBeside(module, presence.layer_names(), partial(_followed, depth=_DEPTH))
        self._is_last = mesh.rank == mesh.loss_rank
        self._metrics = {name: child for name, child in module.named_modules() if isinstance(child, Metric)}
        self._updates: dict[str, int] = {}

    def looks(self, call: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
        """The user's step; see :class:`.WrittenBeside`."""
        return self._beside.looks(call, name) if self._is_last else call

    def snapshot(self) -> None:
        """Remember the attributes as they are before a step."""
        self._before.take(self._candidates())
        self._buffers.snapshot()
        if self._is_last:
            self._updates = {name: metric.update_count for name, metric in self._metrics.items()}
            self._beside.snapshot()
            self._options.take(self._of_optimizers())

    def _of_optimizers(self) -> dict[tuple[str, str], Any]:
        """Plain options of optimizers and schedulers, by table and key."""
        return {
            (table.name, key): value
            for table in tables_of_optimizers(self._module)
            for key in table.keys
            if key != "params"
            and (
                (known := _KINDS[(value := table.values.get(key)).__class__]) or (known is None and _followed(value, 2))
            )
        }

    def changes(self) -> list[tuple[str, str, Any, Any]]:
        """Changes since the snapshot: ``(kind, attribute, length before, value)``; kind is ``set`` or ``extend``, or
        ``buffer`` for a buffer, ``metric`` for how often a metric was updated, ``layers`` for what layers have left
        behind, as bytes, ``option`` for one of an optimizer or scheduler, by its key, or ``beside`` for an entry of a
        table that is none of the module's own attributes, by its address.
        """
        found: list[tuple[str, str, Any, Any]] = []
        left_behind = self._side_effects.take_step()
        if left_behind is not None:
            found.append(("layers", "", None, left_behind))
        found += [("buffer", name, None, buffer) for name, buffer in self._buffers.changed()]
        counts = ((name, metric.update_count) for name, metric in self._metrics.items())
        found += [("metric", name, None, count) for name, count in counts if self._updates.get(name) != count]
        for name, value, before, now in self._before.changed(self._candidates()):
            if isinstance(value, list) and before is not None and _extends(now, before):
                found.append(("extend", name, len(before[2]), value[len(before[2]) :]))
            else:
                found.append(("set", name, None, self._by_name(value)))
        changed = self._options.changed(self._of_optimizers())
        found += [("option", name, key, value) for (name, key), value, *_ in changed]
        return found + [("beside", "", place, value) for place, value in self._beside.changes()]

    def _by_name(self, value: Any) -> Any:
        """``value``; a dictionary with modules for keys, which are divided, with :class:`_Name` in their place."""
        if type(value) is not dict or not any(isinstance(key, nn.Module) for key in value):
            return value
        names = {module: _Name(name) for name, module in self._module.named_modules()}
        return {names.get(key, key): entry for key, entry in value.items()}

    def apply(self, changes: list[tuple[str, str, Any, Any]]) -> None:
        """Make the changes that another rank found.

        Raises:
            RuntimeError: a buffer was filled here, of which the others do not know.
        """
        self._buffers.check([name for kind, name, *_ in changes if kind == "buffer"])
        for kind, name, length, value in changes:
            if kind == "buffer":
                self._buffers.set(name, value)
                continue
            if kind == "metric":  # `if metric.update_called:` in a hook
                self._metrics[name]._update_count = value
                continue
            if kind == "option":
                for table in tables_of_optimizers(self._module):
                    if table.name == name:
                        table.values[length] = value
                continue
            if kind == "beside":
                self._beside.set(length, value)
                continue
            if kind == "layers":
                self._side_effects.repeat_step(value)
                continue
            current = self._module.__dict__.get(name)
            if kind == "extend" and isinstance(current, list):
                del current[length:]
                current.extend(value)
            elif isinstance(current, dict) and isinstance(value, dict):  # as it is: hooks may hold on to it
                modules = {k: self._module.get_submodule(k.name) if isinstance(k, _Name) else k for k in value}
                current.clear()
                current.update({modules[key]: entry for key, entry in value.items()})
            else:
                self._module.__dict__[name] = value

    def share_buffers(self) -> None:
        """Hand round the buffers that another stage than the last fills from real values. Collective over the pipeline.

        Raises:
            RuntimeError: several stages fill one of them.
        """
        self._buffers.share()

    def _candidates(self) -> dict[str, Any]:
        values, ignored = self._module.__dict__, self._ignored
        return {
            name: value
            for name, value in values.items()
            if name not in ignored
            and ((known := _KINDS[value.__class__]) or (known is None and _followed(value, _DEPTH)))
        }


def _followed(value: Any, depth: int) -> bool:
    known = _KINDS[value.__class__]
    if known is not None:
        return known
    if _is_numbers(value):
        return True
    if depth == 0:
        return False
    if isinstance(value, dict):
        return all(_followed(item, depth - 1) for item in value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return all(_followed(item, depth - 1) for item in value)
    return False


def _is_numbers(value: Any) -> bool:
    """Whether a value is an array or a number of NumPy's, which need not be installed."""
    return module_of(type(value)) == "numpy" and getattr(getattr(value, "dtype", None), "kind", "O") in "biufc"


def _fingerprint(value: Any) -> Any:
    """Comparable trace of a value: equal before and after exactly if nothing was assigned, added or written in
    place.
    """
    if isinstance(value, _PLAIN):
        return ("plain", value if value == value else "nan")
    if isinstance(value, Tensor):
        return ("tensor", id(value), version_of(value))
    if _is_numbers(value):  # NumPy counts no writes: of a small array the numbers tell of them
        return ("array", id(value), value.tobytes() if value.nbytes <= _SMALL else None)
    if isinstance(value, dict):
        return ("dict", id(value), {key: _fingerprint(item) for key, item in value.items()})
    if isinstance(value, set):
        return ("set", id(value), frozenset(value))
    return (type(value).__name__, id(value), [_fingerprint(item) for item in value])


def _extends(now: Any, before: Any) -> bool:
    if now[0] != "list" or before[0] != "list" or now[1] != before[1]:
        return False
    return bool(now[2][: len(before[2])] == before[2])


class AppendedLists:
    """Follows the lists that a module's own code appends to.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = appended_names(type(module))
        self._lengths: dict[int, int] = {}

    def snapshot(self) -> None:
        """Remember the lists as they are before a step."""
        self._lengths = {id(entries): len(entries) for entries in self._lists()}

    def merge(self, weights: Sequence[float], sizes: Sequence[int]) -> None:
        """Put the entries of the step's micro-batches together, in lists that grew by one entry for each.

        Args:
            weights: weight of each micro-batch in means.
            sizes: samples of each micro-batch.
        """
        for entries in self._lists():
            start = self._lengths.get(id(entries), 0)
            if len(sizes) == 1 or len(entries) != start + len(sizes):
                continue
            try:
                with torch.no_grad():
                    merged = merge_outputs(entries[start:], weights, sizes, "training_step")
            except (ValueError, KeyError):  # entries that are not alike stay apart
                continue
            entries[start:] = [merged]

    def _lists(self) -> Iterator[list[Any]]:
        for name in self._names:
            value = self._module.__dict__.get(name)
            for entries in value.values() if isinstance(value, dict) else (value,):
                if isinstance(entries, list):
                    yield entries
