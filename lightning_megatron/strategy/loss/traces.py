"""What a run of the user's step writes on the module: noted, put back, and compared.

A step may count its calls, keep a running mean, append to a list. A trial of the step must leave none of it behind; and
what the steps of the parts of a batch write must add up to what the step of the whole batch writes, or be put back
between them::

    self.calls += 1                   the same for every part      put back before each micro-batch: once per batch
    self.right += (p == y).sum()      adds up                      left to add up
    self.ema = 0.9 * ema + 0.1 * x    neither                      the batch has to stay whole
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_megatron.mesh.parts.names import Parts, outwards, parent
from lightning_megatron.pipeline.elsewhere.away import STATE, source_of
from lightning_megatron.pipeline.elsewhere.undo import Kept, is_equal

_NUMBERS = (bool, int, float, complex, str)
_LIBRARIES = ("builtins", "torch", "lightning", "lightning_fabric", "lightning_megatron", "torchmetrics", "functools")
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_LIGHTNINGS = frozenset(pl.LightningModule().__dict__) | {"log"}
_DEPTH = 3

Table = dict[Any, Any]
Name = tuple[str, Any]
Changes = dict[Name, tuple[Any, Any]]


class Traces:
    """The state of a module's plain attributes and buffers at one moment.

    Args:
        module: the user's module, with all modules in it.
        only: names of those modules in it that count; all by default.

    Attributes:
        buffers: names of what is a buffer.
    """

    def __init__(self, module: nn.Module, only: Collection[str] | None = None) -> None:
        names = [name for name, _ in module.named_modules()] if only is None else only
        modules = [(name, module.get_submodule(name)) for name in names]
        named = [name for name, child in modules if isinstance(child, Metric)]
        metrics: Parts | tuple[()] = Parts(named) if named else ()
        self._kept = [(name, Kept(table, keys)) for name, table, keys in _tables(modules)]
        self._compared = [(name, kept) for name, kept in self._kept if name not in metrics]
        self.buffers = {(name, key) for name, module in modules for key in module._buffers}

    def changes(self) -> Changes:
        """Numbers and tensors written since: name of the table and key -> value before and now."""
        found: Changes = {}
        for name, kept in self._compared:
            for key in list(kept.table):
                if key not in kept.values and not _is_users(key):
                    continue
                now, before = kept.table[key], kept.earlier(key)
                if source_of((kept.values.get(key, (None,))[0], now)) is not None:
                    continue  # another stage judges it
                if isinstance(now, (*_NUMBERS, Tensor)) and not is_equal(before, now):
                    found[name, key] = (before, now.detach().clone() if type(now) is Tensor else now)
        return found

    def put_back(self) -> None:
        """Leave everything as it was."""
        for _, kept in self._kept:
            kept.put_back(_is_users)

    def slots(self, names: Sequence[Name]) -> list[tuple[Table, Any]]:
        """Where the values called ``names`` are kept."""
        found = []
        for name, key in names:
            tables = [kept for at, kept in self._kept if at == name]
            found.append((next((kept.table for kept in tables if key in kept.values), tables[0].table), key))
        return found


class LastStageWrites:
    """Lets one of several runs of a step on a micro-batch write what the step writes.

    A rank of several virtual stages runs the step's code before the layers once for each of them, and the last of these
    runs gets furthest. What the others write outside the layers is put back; into buffers of which the last one makes
    stand-ins, it goes after all.

    Args:
        module: the user's module.
        layers: names of the trunk's layers, which run on one virtual stage each.
        also: which modules outside the layers are followed, besides their owners and metrics.
    """

    def __init__(
        self, module: nn.Module, layers: Sequence[str], also: Callable[[nn.Module], bool] = lambda _: False
    ) -> None:
        self._module = module
        inside = Parts(layers)
        around = {above for layer in layers for above in outwards(parent(layer))}
        others = (name for name, child in module.named_modules() if isinstance(child, Metric) or also(child))
        self._names = sorted({"", *around, *(name for name in others if name not in inside)})

    @contextmanager
    def undone(self, *, passes_on: bool = True) -> Iterator[None]:
        """Around a run on any but the last virtual stage of this rank.

        Args:
            passes_on: whether what it writes of real values goes into buffers of which the last makes stand-ins.
        """
        traces = Traces(self._module, self._names)
        try:
            yield
        finally:
            with torch._C.DisableTorchFunction():  # a step that is watched must not read what other stages have
                for (name, key), (_, now) in traces.changes().items() if passes_on else ():
                    if (name, key) in traces.buffers and isinstance(now, Tensor):
                        STATE.undone[f"{name}.{key}" if name else key] = now
                traces.put_back()


class Counters:
    """Values that a step writes alike whatever its batch: each micro-batch finds them as the first one did.

    Args:
        slots: where they are.
        turns: for each of them, in which run of a micro-batch it is written; ``None`` for each. A rank of several
            virtual stages runs the step once for each, and what a layer counts in one of them stays for the others.
    """

    def __init__(self, slots: Sequence[tuple[Table, Any]] = (), turns: Sequence[int | None] = ()) -> None:
        self._slots, self._turns = list(slots), list(turns)
        self._start: list[Kept] = []

    def __len__(self) -> int:
        return len(self._slots)

    def of_layers(self) -> Counters:
        """Those that layers write."""
        mine = [(slot, own) for slot, own in zip(self._slots, self._turns, strict=True) if own is not None]
        return Counters([slot for slot, _ in mine], [own for _, own in mine])

    def begin(self) -> None:
        """Remember them at the start of a batch."""
        self._start = [Kept(table, (key,)) for table, key in self._slots]

    def put_back(self, turn: int) -> None:
        """Set those that are written in this run of a micro-batch as they were then."""
        for kept, own in zip(self._start, self._turns, strict=True):
            if own in (turn, None):
                kept.put_back()


def judge(
    joins: Sequence[tuple[Sequence[Changes], Changes]], layers: Sequence[str] = (), lasting: Collection[Name] = ()
) -> tuple[list[Name], str]:
    """What the steps of the parts of a batch have written, against the step of all of it.

    Args:
        joins: changes by some parts, and by all of these at once; each from one and the same state.
        layers: names of modules that may write what depends on their micro-batch.
        lasting: what even these may not: buffers, which are part of the module's state.

    Returns:
        Names of what is the same for all, and the name of one value that has to be written by the whole batch, or "";
        one that layers write before any other.
    """
    counters: dict[Name, None] = {}
    adding: set[Name] = set()
    others: list[Name] = []
    for parts, whole in joins:
        for name in dict.fromkeys(name for found in (*parts, whole) for name in found):
            before = next(found[name] for found in (*parts, whole) if name in found)[0]
            *apart, together = (found[name][1] if name in found else before for found in (*parts, whole))
            if all(is_equal(now, together) for now in apart):
                counters[name] = None
            elif _adds_up(before, apart, together):
                adding.add(name)
            else:
                others.append(name)
    others += [name for name in counters if name in adding]
    inside = Parts(layers)
    outside = [name for name in others if name in lasting or name[0] not in inside]
    outside.sort(key=lambda name: name[0] not in inside)
    return list(counters), ".".join(str(part) for part in outside[0] if part) if outside else ""


def _adds_up(before: Any, apart: Sequence[Any], together: Any) -> bool:
    """Whether the parts change a number by what the whole changes it, or append to a tensor what the whole appends."""
    if not all(isinstance(value, (int, float, Tensor)) for value in (before, together, *apart)):
        return False
    start, end = torch.as_tensor(before), torch.as_tensor(together)
    ends = [torch.as_tensor(value) for value in apart]
    if any(value.shape != start.shape for value in (end, *ends)):
        alike = all(value.ndim == start.ndim > 0 for value in (end, *ends))
        grown = sum(len(value) - len(start) for value in ends) if alike else -1
        return alike and len(end) - len(start) == grown and is_equal(end[: len(start)], start)
    change, changes = (end - start).double(), sum((value - start).double() for value in ends)
    return bool(torch.allclose(change, torch.as_tensor(changes), rtol=1e-4, atol=1e-7))


def _tables(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Table, list[Any]]]:
    seen: set[int] = set()
    for name, child in modules:
        if isinstance(child, Metric):  # its states are lists, numbers and tensors, whatever they are called
            keys = [key for key in child.__dict__ if key not in _OWN]
        else:
            ignored = _LIGHTNINGS if isinstance(child, pl.LightningModule) else _OWN
            keys = [key for key in child.__dict__ if key not in ignored]
        yield name, child.__dict__, keys
        if child._buffers:
            yield name, child._buffers, list(child._buffers)
        for key in keys:
            yield from _inner(f"{name}.{key}" if name else str(key), child.__dict__[key], seen, _DEPTH)


def _inner(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Table, list[Any]]]:
    """Tables of dictionaries, and of objects of the user's own classes, inside a value."""
    if depth == 0 or id(value) in seen or isinstance(value, (*_NUMBERS, Tensor, nn.Module, type, type(None))):
        return
    if isinstance(value, dict):
        table = value
    elif hasattr(value, "__dict__") and not callable(value) and type(value).__module__.split(".")[0] not in _LIBRARIES:
        table = value.__dict__
    else:
        return
    seen.add(id(value))
    keys = list(table)
    yield name, table, keys
    for key in keys:
        yield from _inner(f"{name}.{key}", table[key], seen, depth - 1)


def _is_users(key: Any) -> bool:
    """Whether an attribute that is new belongs to the user, rather than to torch or to this package."""
    return not isinstance(key, str) or not (key in _OWN or key in _LIGHTNINGS or key == "forward")
