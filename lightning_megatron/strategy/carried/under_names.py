"""Dictionaries under the names of weights, of which each stage has its own entries right: put together over stages.

What code keeps of weights, such as an average of each, it often keeps by name. Each stage updates what it has the
weights of, so of the others it has no entry, or an old one::

    stage 0   {"embed.weight": new, "head.weight": old}   ┐
    stage 1   {"head.weight": new}                        ┘ ── told ──▶  {"embed.weight": new, "head.weight": new}

Keys may lack the start that all names share (``self.net.named_parameters()``), have one of their own (``ema.``), and
``_``, ``/`` or ``-`` where names have dots. The keys that the stages have tell it, and the shapes. Where several forms
fit, of weights that are on other stages each, nobody knows which entry is right: alike ones are, and others are
refused.
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
from lightning_megatron.mesh.parts.packages import module_of
from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.pipeline.elsewhere.presence import Presence

_DOTS = ("_", "/", "-", "__", ":")  # what keys have for dots, as those of a `ParameterDict` may not have any
_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))
Table = dict[str, Any]
Places = Mapping[Any, Table]


@dataclass(frozen=True)
class ToldEntry:
    """Message of a stage about one entry.

    Attributes:
        value: it, with its tensors on the CPU.
        on_device: whether they are on the accelerator where the entry is.
    """

    value: Any
    on_device: bool

    def here(self, device: torch.device) -> Any:
        """The value, with tensors where a rank with this device would have them."""
        return map_tensors(self.value, lambda tensor: tensor.to(device)) if self.on_device else self.value


@dataclass(frozen=True)
class KeyForm:
    """How the keys of a dictionary are made of names.

    Attributes:
        lacks: the start of the names that they lack.
        adds: the start that they have instead.
        dot: what they have for dots.
    """

    lacks: str = ""
    adds: str = ""
    dot: str = "."


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
        self._forms = [KeyForm(), *map(KeyForm, sorted(ends, key=lambda start: (start.count("."), start)))]
        self._written = {dot: {name.replace(".", dot): name for name in self._entries} for dot in (".", *_DOTS)}
        self._order = {name: place for place, name in enumerate(self._entries)}

    def forms(self, places: Places) -> dict[Any, KeyForm]:
        """How the keys of each dictionary are made of names of weights, for those whose keys are such; collective.

        Args:
            places: the dictionaries of this stage, each where all stages have it. Stages need not have all of them.

        Raises:
            RuntimeError: several forms fit, and the stages have unlike entries.
        """
        told = dict(objects.gather((self._stage, self._about(places)), self._group))
        found: dict[Any, KeyForm] = {}
        for place in dict.fromkeys(place for each in told.values() for place in each):
            filled = {stage: each[place] for stage, each in told.items() if place in each and each[place][1]}
            fitting = [forms for forms, _ in filled.values()]
            common = [form for form in (fitting or [[]])[0] if all(form in forms for forms in fitting)]
            if common:
                digests = {stage: each for stage, (_, each) in filled.items()}
                self._refuse_unlike(place, common, list(digests.values()))
                theirs = (form for form in common if self._are_with_owners(form, digests))
                found[place] = next(theirs, common[0])
        return found

    def own(self, form: KeyForm, table: Table) -> dict[str, ToldEntry]:
        """The entries of a dictionary whose weights this stage has, and no stage before it."""
        found = {}
        for key, value in table.items():
            name, leaves = self._name(form, key), pytree.tree_leaves(value)
            told = name is not None and self._owner(name) == self._stage
            if told and all(map(_can_be_told, leaves)):
                on_device = any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves)
                found[key] = ToldEntry(map_tensors(value, lambda tensor: tensor.detach().cpu()), on_device)
        return found

    def is_here(self, form: KeyForm, key: str) -> bool:
        """Whether this stage has the weight of an entry."""
        name = self._name(form, key)
        return name is None or self._stage in self._entries[self._source(name)].stages

    def ordered(self, form: KeyForm, items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Entries in the order of the weights in one process, others after them."""
        return sorted(items, key=lambda item: self._order.get(self._name(form, item[0]) or "", len(self._order)))

    def merged(
        self, places: Places, forms: Mapping[Any, KeyForm], gather: Callable[[Any], Iterable[Any]]
    ) -> dict[Any, Table]:
        """New dictionaries with the entries of all stages, on the ranks that ``gather`` gives these; collective.

        Args:
            places: the dictionaries of this stage.
            forms: theirs, as :meth:`forms` has told.
            gather: brings what all stages tell together.
        """
        if not forms:
            return {}
        own = {place: self.own(forms[place], table) for place, table in places.items() if place in forms}
        found: dict[Any, Table] = {}
        for told in gather(own):
            for place, entries in told.items():
                if place in places:
                    values = {key: entry.value for key, entry in entries.items() if not self.is_here(forms[place], key)}
                    found.setdefault(place, dict(places[place])).update(values)
        return {place: self._like(places[place], forms[place], table) for place, table in found.items()}

    def _like(self, table: Table, form: KeyForm, entries: Table) -> Table:
        made = copy.copy(table)
        made.clear()
        made.update(self.ordered(form, entries.items()))
        return made

    def _about(self, places: Places) -> dict[Any, tuple[list[KeyForm], dict[str, str]]]:
        """The forms that fit each dictionary, and its keys, with what is under them where that may have to be known;
        nothing of one that is about other things.
        """
        found: dict[Any, tuple[list[KeyForm], dict[str, str]]] = {}
        for place, table in places.items():
            if not all(isinstance(key, str) for key in table):
                continue
            forms = [form for form in self._forms if table and self._fits(form, table)]
            forms = forms or [form for form in self._other_forms(table) if self._fits(form, table)]
            alike = [form for form in forms if self._has_shapes(form, table)]
            if forms or not table:
                several = len({tuple(self._owners(form, table)) for form in alike or forms}) > 1
                here = {key: value for key, value in table.items() if not _is_elsewhere(value)}
                found[place] = alike or forms, {key: digest(value) if several else "" for key, value in here.items()}
        return found

    def _other_forms(self, table: Table) -> list[KeyForm]:
        """Forms with another start or without dots that fit a key."""
        key = next(iter(table), "")
        ends = [(name, dot) for dot, names in self._written.items() for name in names]
        found = {KeyForm("", key.removesuffix(end), dot) for end, dot in ends if key.endswith(end)}
        return sorted(found, key=lambda form: (len(form.adds), form.dot != "."))

    def _name(self, form: KeyForm, key: str) -> str | None:
        """The weight that a key means."""
        if not key.startswith(form.adds):
            return None
        return self._written[form.dot].get(f"{form.lacks}{key.removeprefix(form.adds)}")

    def _names(self, form: KeyForm, keys: Iterable[str]) -> list[str]:
        return [name for key in keys if (name := self._name(form, key)) is not None]

    def _fits(self, form: KeyForm, table: Table) -> bool:
        if form != KeyForm() and self._name(form, next(iter(table))) is None:
            return False
        fitting = len(self._names(form, table))
        return fitting == len(table) or (form == KeyForm() and fitting > 0)

    def _has_shapes(self, form: KeyForm, table: Table) -> bool:
        tensors = {self._name(form, key): v for key, v in table.items() if isinstance(v, Tensor) and v.dim()}
        return all(name is None or self._entries[name].twin.shape == v.shape for name, v in tensors.items())

    def _owners(self, form: KeyForm, keys: Iterable[str]) -> list[int]:
        return [self._owner(name) for name in self._names(form, keys)]

    def _are_with_owners(self, form: KeyForm, keys: Mapping[int, Iterable[str]]) -> bool:
        """Whether each of some keys is in the dictionary of the stage that has the weight."""
        everywhere = {key for each in keys.values() for key in each}
        names = {key: name for key in everywhere if (name := self._name(form, key)) is not None}
        return all(key in keys.get(self._owner(name), ()) for key, name in names.items())

    def _owner(self, name: str) -> int:
        return min(self._entries[self._source(name)].stages)

    def _source(self, name: str) -> str:
        """The weight that a stage has to have so as to update what is kept under ``name``."""
        source = self._copies.source_of(name)
        return name if source is None or source not in self._entries else source

    def _refuse_unlike(self, place: Any, forms: list[KeyForm], told: list[dict[str, str]]) -> None:
        keys = list(dict.fromkeys(key for each in told for key in each))
        if len({tuple(self._owners(form, keys)) for form in forms}) == 1:
            return
        unlike = [key for key in keys if len({each[key] for each in told if key in each}) > 1]
        if unlike or any(set(each) != set(keys) for each in told):
            key = unlike[0] if unlike else keys[0]
            named = " or ".join(f"`{self._name(form, key)}`" for form in forms[:3])
            where = ".".join(map(str, place)) if isinstance(place, tuple) else place
            raise RuntimeError(
                f"`{where}` has an entry `{key}`, under which something of {named} may be kept, which are on other "
                "pipeline stages each, and the stages have unlike entries: nobody knows which is right. Keep it under "
                "the names that `self.named_parameters()` of the whole module gives, or use `pipeline_parallel_size=1`."
            )


def _is_elsewhere(value: Any) -> bool:
    """Whether it stands for what another stage has."""
    return any(type(leaf) is Absent for leaf in pytree.tree_leaves(value))


def _can_be_told(leaf: Any) -> bool:
    return type(leaf) is not Absent and (isinstance(leaf, _PLAIN) or module_of(type(leaf)) == "numpy")


def digest(value: Any) -> str:
    """A word that tells values apart."""
    try:
        told = objects.encode(map_tensors(value, _word))
        return hashlib.sha256(told.numpy().data).hexdigest()
    except Exception:  # of the user's own, which cannot be pickled
        return ""


def _word(tensor: Tensor) -> Any:
    """A word for a tensor's numbers; pickled ones differ by where they lie."""
    numbers = tensor.detach().cpu().contiguous()
    data = numbers.reshape(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
