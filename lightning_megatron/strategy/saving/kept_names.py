"""Entries that hooks put into a checkpoint under the names of weights, with the entries of all stages.

``checkpoint["shadow"] = self.shadow`` in a hook and ``state_dict`` of a callback give what this stage keeps, and the
first rank writes the checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.packages import is_library
from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.strategy.carried.under_names import ByName, KeyForm, Table, digest
from lightning_megatron.strategy.saving.model_state import PartOfState
from lightning_megatron.strategy.saving.resume import gather_to_first
from lightning_megatron.strategy.saving.spelled_ways import WAYS_TO_SPELL, spelled, unfolded

_OF_LIGHTNING = {
    *("state_dict", "optimizer_states", "lightning_megatron", "loops", "lr_schedulers", "hyper_parameters"),
    *("datamodule_hyper_parameters", "MixedPrecision"),
}
_Place = tuple[Any, ...]


def with_all_stages(checkpoint: Mapping[str, Any], presence: Presence, mesh: ParallelMesh) -> dict[str, Any]:
    """A checkpoint in which what is under names of weights has the entries of all stages, on global rank 0; collective.

    Warns of other tensors in it in which the stages differ.

    Raises:
        RuntimeError: see :meth:`.ByName.forms`.
    """
    stages = mesh.layout.pipeline
    if stages == 1:
        return dict(checkpoint)
    group: dist.ProcessGroup = mesh.group("pipeline_parallel")
    own = {key: value for key, value in checkpoint.items() if key not in _OF_LIGHTNING}
    tables = {(key, *place): table for key, value in own.items() for place, table in _tables(value)}
    by_name = ByName(presence, group)

    def gather(told: Any) -> list[Any]:
        return gather_to_first(told, group, mesh, stages)

    merged: dict[_Place, Any] = {}
    taken: set[_Place] = set()
    for variant in range(WAYS_TO_SPELL):
        folded = {place: each for place, table in tables.items() if (each := spelled(table, variant))}
        forms = _outermost(by_name.forms(folded), taken)
        taken |= forms.keys()
        found = by_name.merged(folded, forms, gather)
        merged |= {place: unfolded(entries, tables[place]) for place, entries in found.items()}
    rest = {place: table for place, table in tables.items() if not _is_in(place, taken)}
    forms = by_name.forms(rest)
    merged |= by_name.merged(rest, forms, gather)
    joined = taken | forms.keys()
    mine = {place: "" for place in tables if place in joined}
    mine |= {place: digest(leaf) for place, leaf in _kept_tensors(own, (), set()) if not _is_in(place, joined)}
    _warn_of_unlike(objects.gather(mine, group))
    return {key: _replaced(value, (key,), merged) for key, value in checkpoint.items()}


def _is_in(place: _Place, places: Collection[_Place]) -> bool:
    """Whether a place is one of some, or inside of one."""
    return any(place[:length] in places for length in range(1, len(place) + 1))


def _outermost(forms: Mapping[_Place, KeyForm], taken: Collection[_Place]) -> dict[_Place, KeyForm]:
    """Those of places that are neither inside of others nor of those that are taken."""
    inside = {place for place in forms if _is_in(place[:-1], forms.keys()) or _is_in(place, taken)}
    return {place: form for place, form in forms.items() if place not in inside}


def _warn_of_unlike(told: Sequence[Mapping[_Place, str]]) -> None:
    """Warn of tensors that a checkpoint has of one stage only.

    Args:
        told: by stage, words that tell tensors apart, and none for a dictionary that is put together.
    """
    for place in dict.fromkeys(place for each in told for place in each):
        words = {each.get(place) for each in told}
        if place not in told[0] or (told[0][place] and len(words) > 1):
            name = "".join(f"[{key!r}]" for key in place)
            rank_zero_warn(
                f"`checkpoint{name}` is another tensor on each pipeline stage, or on some of them only, and that of "
                "the first is saved. What is kept of each weight is saved whole under its name, as "
                "`self.named_parameters()` gives it; or use `pipeline_parallel_size=1`."
            )
            return


def _kept_tensors(value: Any, place: _Place, seen: set[int]) -> Iterator[tuple[_Place, Tensor]]:
    """Tensors in a value, in objects of the user's classes too, each with the way to it; but for random states."""
    if isinstance(value, (PartOfState, nn.Module)) or id(value) in seen:
        return
    if isinstance(value, Tensor):
        if value.dtype != torch.uint8 and type(value) is not Absent:
            yield place, value
        return
    seen.add(id(value))
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, (list, tuple)):
        inner = enumerate(value)
    elif not is_library(type(value)):
        inner = getattr(value, "__dict__", {}).items()
    for key, each in inner:
        if isinstance(key, (str, int, tuple)) and not isinstance(each, (bool, int, float, str, type(None))):
            yield from _kept_tensors(each, (*place, key), seen)


def _tables(value: Any) -> Iterator[tuple[_Place, Table]]:
    """The dictionaries in a value, each with the way to it."""
    if isinstance(value, PartOfState):
        return
    if isinstance(value, dict):
        yield (), value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, each in inner:
        for place, table in _tables(each):
            yield (key, *place), table


def _replaced(value: Any, place: _Place, merged: Mapping[Any, Table]) -> Any:
    """The value with other dictionaries in some places."""
    if not any(each[: len(place)] == place for each in merged):
        return value
    value = merged.get(place, value)
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: _replaced(each, (*place, key), merged) for key, each in value.items()})
        return made
    items = [_replaced(each, (*place, index), merged) for index, each in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
