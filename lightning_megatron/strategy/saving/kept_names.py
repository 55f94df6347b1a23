"""What hooks put into a checkpoint under the names of weights, with the entries of all stages.

``checkpoint["shadow"] = self.shadow`` in a hook and ``state_dict`` of a callback give what this stage keeps, and the
first rank writes the checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.strategy.carried.under_names import ByName, Table
from lightning_megatron.strategy.saving.model_state import PartOfState
from lightning_megatron.strategy.saving.resume import gather_to_first

_OF_LIGHTNING = {
    *("state_dict", "optimizer_states", "lightning_megatron", "loops", "lr_schedulers", "hyper_parameters"),
    *("datamodule_hyper_parameters", "MixedPrecision"),
}
_Place = tuple[Any, ...]


def with_all_stages(checkpoint: Mapping[str, Any], presence: Presence, mesh: ParallelMesh) -> dict[str, Any]:
    """A checkpoint in which what is under names of weights has the entries of all stages, on global rank 0; collective.

    Raises:
        RuntimeError: see :meth:`.ByName.forms`.
    """
    stages = mesh.layout.pipeline
    if stages == 1:
        return dict(checkpoint)
    group: dist.ProcessGroup = mesh.group("pipeline_parallel")
    places = {
        (key, *place): table
        for key, value in checkpoint.items()
        if key not in _OF_LIGHTNING
        for place, table in _tables(value)
    }
    merged = ByName(presence, group).merged(places, lambda own: gather_to_first(own, group, mesh, stages))
    return {key: _replaced(value, (key,), merged) for key, value in checkpoint.items()}


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
