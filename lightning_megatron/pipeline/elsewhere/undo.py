"""Taking back what layers have left behind, where it belongs to one micro-batch alone.

A step that adds up its layers' auxiliary losses resets them, before the layers or behind them. Stages that end before
that line have run their layers on the next micro-batch long before. In one process nothing can hold on to a graph from
one step to the next, so neither may a stage: what hangs on the micro-batch's graph is put back when its run ends, and
so is what was added to lists. Numbers stay: a layer may count.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.pipeline.elsewhere.containers import HOOKS, MISSING, Container, function_of, is_library

_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"})


@dataclass(frozen=True)
class Change:
    """Something that was changed; see :class:`.effects.Effect`.

    Attributes:
        container: where.
        kind: of the effect.
        key: of the entry; ``None`` for lists.
        old: what was there; for lists that grew nothing.
        new: what is there since, or the entries that were added.
    """

    container: Container
    kind: str
    key: Any
    old: Any
    new: Any

    @property
    def is_of_micro_batch(self) -> bool:
        """Whether it must not be there any more when the next micro-batch comes."""
        return self.kind != "set" or has_graph(self.new)

    @property
    def is_kept(self) -> bool:
        """Whether an entry is still the one that was set."""
        return self.container.read(self.key) is self.new

    def take_back(self) -> None:
        """Restore the earlier value, unless other code has written to the entry since."""
        if self.kind == "set":
            if self.is_kept:
                old_is = self.old is not MISSING
                self.container.change("set" if old_is else "drop", self.key, self.old)
            return
        entries = self.container.value
        if self.kind == "fill" and len(entries) == len(self.new):
            self.container.change("fill", None, self.old)
        elif self.kind == "append":
            for entry in self.new:
                place = next((i for i in reversed(range(len(entries))) if entries[i] is entry), None)
                if place is not None:
                    del entries[place]


def has_graph(value: Any) -> bool:
    """Whether a tensor with a gradient is in a nest, or in an object."""
    leaves = pytree.tree_leaves(value)
    leaves += [entry for leaf in leaves if hasattr(leaf, "__dict__") for entry in _entries(leaf)]
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def _entries(leaf: Any) -> list[Any]:
    if isinstance(leaf, (Tensor, nn.Module, type)) or is_library(type(leaf)):
        return []
    return pytree.tree_leaves(list(vars(leaf).values()))


def may_read(unit: nn.Module, key: Any, in_table: bool = False) -> bool:
    """Whether code of a layer, or of its hooks, reads an attribute, a global or an entry called ``key``.

    Args:
        unit: the layer.
        key: a name, or what a table has for keys.
        in_table: whether it is the entry of a dictionary or a list, whose key need not stand in the code.
    """
    return any(_reads(code, key) or (in_table and _adds_to_entries(code)) for code in _codes(unit))


def _adds_to_entries(code: CodeType) -> bool:
    steps = list(dis.get_instructions(code))
    adds = any(step.opname.startswith("INPLACE_") or step.argrepr[-1:] == "=" != step.argrepr[-2:-1] for step in steps)
    return adds and {"BINARY_SUBSCR", "STORE_SUBSCR"} <= {step.opname for step in steps}


def _codes(unit: nn.Module) -> Iterator[CodeType]:
    for module in unit.modules():
        entries = [entry for table in HOOKS for entry in getattr(module, table).values()]
        for base in type(module).__mro__:
            entries += [] if is_library(base) else list(vars(base).values())
        entries = [entry.func if isinstance(entry, functools.partial) else entry for entry in entries]
        functions = [function_of(getattr(entry, "__func__", entry)) for entry in entries]
        yield from (function.__code__ for function in functions if isinstance(function, FunctionType))


def _reads(code: CodeType, key: Any) -> bool:
    steps = list(dis.get_instructions(code))
    if code.co_name == "__init__":
        return False
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(step.argval, CodeType):
            if _reads(step.argval, key):
                return True
        elif isinstance(key, str) and step.argval == key:
            only_set = following is not None and following.opname == "STORE_SUBSCR"
            if step.opname in _LOADS or (step.opname == "LOAD_CONST" and not only_set):
                return True
    return False
