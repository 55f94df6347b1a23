"""Lists on the module that a step appends to: one entry per batch, although it ran once per micro-batch.

``self.outputs.append(loss)``, averaged in ``on_train_epoch_end``, would leave an entry per micro-batch, of which the
mean is not that of batches of unlike sizes. So the entries of one batch are put together as what a step returns is. A
list that the code also extends, by an entry per sample for instance, is left as it is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_megatron.mesh.batches import merge_outputs

_APPENDED = re.compile(r"\b\w+\.(\w+)(?:\[[^\]\n]*\])?\.append\(")
_EXTENDED = re.compile(r"\b\w+\.(\w+)(?:\[[^\]\n]*\])?(?:\.extend\(|\.insert\(|\s*\+=)")


class AppendedLists:
    """Follows the lists that a module's own code appends to.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = _appended_names(type(module))
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


def _appended_names(kind: type) -> list[str]:
    """Attributes that the code of a class and of its bases, apart from libraries, appends to and never extends."""
    appended: set[str] = set()
    extended: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.split(".")[0] in ("builtins", "torch", "lightning", "lightning_fabric"):
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        appended |= set(_APPENDED.findall(source))
        extended |= set(_EXTENDED.findall(source))
    return sorted(appended - extended)
