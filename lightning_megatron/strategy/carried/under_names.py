"""Dictionaries under the names of weights, of which each stage has its own entries right: put together over stages.

What code keeps of weights, such as an average of each, it often keeps by name. Each stage updates what it has the
weights of, so of the others it has no entry, or an old one::

    stage 0   {"embed.weight": new, "head.weight": old}   ┐
    stage 1   {"head.weight": new}                        ┘ ── told ──▶  {"embed.weight": new, "head.weight": new}

Names may lack the start that all of them share (``self.net.named_parameters()``). The keys that the stages have tell
it, and the shapes. Where several starts fit, whose weights are on other stages each, nobody knows which entry is right:
alike ones are, and others are refused.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.mesh.messages import objects
from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.pipeline.elsewhere.presence import Presence

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))
Table = dict[str, Any]
Places = Mapping[Any, Table]


@dataclass(frozen=True)
class ToldEntry:
    """What a stage tells of one entry.

    Attributes:
        value: it, with its tensors on the CPU.
        on_device: whether they are on the accelerator where the entry is.
    """

    value: Any
    on_device: bool

    def here(self, device: torch.device) -> Any:
        """The value, with tensors where a rank with this device would have them."""
        return map_tensors(self.value, lambda tensor: tensor.to(device)) if self.on_device else self.value


class ByName:
    """Puts dictionaries together.

    Args:
        presence: of the module's weights.
        group: the stages of this replica.
    """

    def __init__(self, presence: Presence, group: dist.ProcessGroup) -> None:
        self._entries, self._copies, self._stage = presence.entries, presence.copies, presence.stage
        self._group = group
        ends = {name[: at + 1] for name in self._entries for at, letter in enumerate(name) if letter == "."}
        self._starts = ["", *sorted(ends, key=lambda start: (start.count("."), start))]
        self._order = {name: place for place, name in enumerate(self._entries)}

    def starts(self, places: Places) -> dict[Any, str]:
        """What the keys of each dictionary lack as names of weights, for those whose keys are such; collective.

        Args:
            places: the dictionaries of this stage, each where all stages have it. Stages need not have all of them.

        Raises:
            RuntimeError: several starts fit, and the stages have unlike entries.
        """
        told = dict(objects.gather((self._stage, self._about(places)), self._group))
        found: dict[Any, str] = {}
        for place in dict.fromkeys(place for each in told.values() for place in each):
            filled = {stage: each[place] for stage, each in told.items() if place in each and each[place][1]}
            common = [start for start in self._starts if filled and all(start in s for s, _ in filled.values())]
            if common:
                digests = {stage: each for stage, (_, each) in filled.items()}
                self._refuse_unlike(place, common, list(digests.values()))
                theirs = (start for start in common if self._are_with_owners(start, digests))
                found[place] = next(theirs, common[0])
        return found

    def own(self, start: str, table: Table) -> dict[str, ToldEntry]:
        """The entries of a dictionary whose weights this stage has, and no stage before it."""
        found = {}
        for key, value in table.items():
            name, leaves = f"{start}{key}", pytree.tree_leaves(value)
            told = name in self._entries and self._owner(name) == self._stage
            if told and all(map(_can_be_told, leaves)):
                on_device = any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves)
                found[key] = ToldEntry(map_tensors(value, lambda tensor: tensor.detach().cpu()), on_device)
        return found

    def is_here(self, start: str, key: str) -> bool:
        """Whether this stage has the weight of an entry."""
        entry = self._entries.get(self._source(f"{start}{key}"))
        return entry is None or self._stage in entry.stages

    def ordered(self, start: str, items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Entries in the order of the weights in one process, others after them."""
        return sorted(items, key=lambda item: self._order.get(f"{start}{item[0]}", len(self._order)))

    def merged(self, places: Places, gather: Callable[[Any], Iterable[Any]]) -> dict[Any, Table]:
        """New dictionaries with the entries of all stages, on the ranks that ``gather`` gives these; collective."""
        starts = self.starts(places)
        if not starts:
            return {}
        own = {place: self.own(starts[place], table) for place, table in places.items() if place in starts}
        found: dict[Any, Table] = {}
        for told in gather(own):
            for place, entries in told.items():
                if place in places:
                    values = {
                        key: entry.value for key, entry in entries.items() if not self.is_here(starts[place], key)
                    }
                    found.setdefault(place, dict(places[place])).update(values)
        return {place: self._like(places[place], starts[place], table) for place, table in found.items()}

    def _like(self, table: Table, start: str, entries: Table) -> Table:
        made = copy.copy(table)
        made.clear()
        made.update(self.ordered(start, entries.items()))
        return made

    def _about(self, places: Places) -> dict[Any, tuple[list[str], dict[str, str]]]:
        """The starts that fit each dictionary, and its keys, with what is under them where that may have to be known;
        nothing of one that is about other things.
        """
        found: dict[Any, tuple[list[str], dict[str, str]]] = {}
        for place, table in places.items():
            if not all(isinstance(key, str) for key in table):
                continue
            starts = [start for start in self._starts if table and self._fits(start, table)]
            alike = [start for start in starts if self._has_shapes(start, table)]
            if starts or not table:
                several = len({tuple(self._owners(start, table)) for start in alike or starts}) > 1
                found[place] = alike or starts, {key: _digest(value) if several else "" for key, value in table.items()}
        return found

    def _fits(self, start: str, table: Iterable[str]) -> bool:
        names = (f"{start}{key}" in self._entries for key in table)
        return all(names) if start else any(names)

    def _has_shapes(self, start: str, table: Table) -> bool:
        tensors = {f"{start}{key}": v for key, v in table.items() if isinstance(v, Tensor) and v.dim()}
        return all(self._entries[name].twin.shape == v.shape for name, v in tensors.items() if name in self._entries)

    def _owners(self, start: str, keys: Iterable[str]) -> list[int]:
        return [self._owner(name) for key in keys if (name := f"{start}{key}") in self._entries]

    def _are_with_owners(self, start: str, keys: Mapping[int, Iterable[str]]) -> bool:
        """Whether each of some keys is in the dictionary of the stage that has the weight."""
        everywhere = {key for each in keys.values() for key in each}
        names = {key: name for key in everywhere if (name := f"{start}{key}") in self._entries}
        return all(key in keys.get(self._owner(name), ()) for key, name in names.items())

    def _owner(self, name: str) -> int:
        return min(self._entries[self._source(name)].stages)

    def _source(self, name: str) -> str:
        """The weight that a stage has to have so as to update what is kept under ``name``."""
        source = self._copies.source_of(name)
        return name if source is None or source not in self._entries else source

    def _refuse_unlike(self, place: Any, starts: list[str], told: list[dict[str, str]]) -> None:
        keys = list(dict.fromkeys(key for each in told for key in each))
        if len({tuple(self._owners(start, keys)) for start in starts}) == 1:
            return
        unlike = [key for key in keys if len({each[key] for each in told if key in each}) > 1]
        if unlike or any(set(each) != set(keys) for each in told):
            key = unlike[0] if unlike else keys[0]
            named = " or ".join(f"`{start}{key}`" for start in starts[:3])
            where = ".".join(map(str, place)) if isinstance(place, tuple) else place
            raise RuntimeError(
                f"`{where}` has an entry `{key}`, under which something of {named} may be kept, which are on other "
                "pipeline stages each, and the stages have unlike entries: nobody knows which is right. Keep it under "
                "the names that `self.named_parameters()` of the whole module gives, or use `pipeline_parallel_size=1`."
            )


def _can_be_told(leaf: Any) -> bool:
    return type(leaf) is not Absent and (isinstance(leaf, _PLAIN) or type(leaf).__module__ == "numpy")


def _digest(value: Any) -> str:
    """Tells values apart."""
    try:
        told = objects.encode(map_tensors(value, lambda tensor: tensor.detach().cpu()))
        return hashlib.sha256(told.numpy().data).hexdigest()
    except Exception:  # of the user's own, which cannot be pickled
        return ""
