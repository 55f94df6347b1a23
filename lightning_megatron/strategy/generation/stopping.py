"""Criteria that end a generation say the same on all ranks of a model.

``max_time`` asks the clock of each process, and a criterion of the user's may ask anything. Where one rank ends and
another goes on, the latter waits for ever in the collectives of its next token. So what the first rank of a model says
holds for all of them::

    rank 0   3.01 s of 3 s: end      ──▶ end
    rank 1   2.99 s of 3 s: go on    ──▶ end

Hugging Face's own criteria look at tokens and scores only, which are equal, and need no message, except for that one.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages.collectives import start_broadcast, wait_for
from lightning_megatron.mesh.replaced import Replacement, Replacements
from lightning_megatron.pipeline.repeated.model_calls import ModelCalls
from lightning_megatron.pipeline.stage.stage import Stage

_LIBRARY = "transformers.generation.stopping_criteria"
_TAG = (1 << 20) + 11


def agree_on_stops(module: nn.Module, mesh: ParallelMesh) -> None:
    """Let the models of Hugging Face's in ``module`` end their generations on all ranks together; also after the run.

    Args:
        module: the user's, divided.
        mesh: the grid.
    """
    groups = [mesh.group(f"{axis}_parallel") for axis in ("tensor", "pipeline") if getattr(mesh.layout, axis) > 1]
    for model in module.modules() if groups else ():
        users = not isinstance(vars(model).get("generate"), (_Generate, NoneType))  # its own way to generate
        if any(kind.__name__ == "GenerationMixin" for kind in type(model).__mro__) and not users:
            Replacements().put(model, "generate", _Generate(model, groups, _side_by_side(module)))


def _side_by_side(module: nn.Module) -> Callable[[], bool]:
    """Whether several batches are under way at once now: their ranks pass a criterion at different times."""
    stage = Stage.of(module)
    calls = None if stage is None else ModelCalls.of(module, stage)
    return lambda: calls is not None and calls.side_by_side


class _Generate(Replacement):
    """Stands for ``generate`` of a model.

    Args:
        model: Hugging Face's.
        groups: the tensor group, then the pipeline's, as far as they are larger than one.
        alone: whether ranks cannot meet at a criterion now.
    """

    def __init__(self, model: Any, groups: list[dist.ProcessGroup], alone: Callable[[], bool]) -> None:
        super().__init__(model, "generate")
        self._model, self._groups, self._alone = model, groups, alone
        self.__name__, self.__wrapped__ = "generate", type(model).generate

    def __deepcopy__(self, memo: dict[int, Any]) -> _Generate:
        return _Generate(copy.deepcopy(self._model, memo), self._groups, self._alone)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See ``generate`` of the model."""
        own = type(self._model).generate
        if self._alone():
            return own(self._model, *args, **kwargs)
        names = list(inspect.signature(own).parameters)[1 : 1 + len(args)]
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        found = [self._agreed(criterion) for criterion in given.get("stopping_criteria") or ()]
        most = _time_of(self._model, given)
        if most is not None:
            from transformers import MaxTimeCriteria

            given["max_time"] = math.inf
            found.append(_Agreed(MaxTimeCriteria(most), self._groups))
        if found:
            from transformers import StoppingCriteriaList

            given["stopping_criteria"] = StoppingCriteriaList(found)
        return own(self._model, **given)

    def _agreed(self, criterion: Any) -> Any:
        kind = type(criterion)
        return criterion if kind.__module__ == _LIBRARY and "Time" not in kind.__name__ else self._wrapped(criterion)

    def _wrapped(self, criterion: Any) -> _Agreed:
        return criterion if isinstance(criterion, _Agreed) else _Agreed(criterion, self._groups)


class _Agreed:
    """A criterion whose answer is that of the first rank.

    Args:
        criterion: the user's; called on every rank.
        groups: to agree in, one after the other.
    """

    def __init__(self, criterion: Callable[..., Any], groups: list[dist.ProcessGroup]) -> None:
        self._criterion, self._groups = criterion, groups

    def __deepcopy__(self, memo: dict[int, Any]) -> _Agreed:
        return _Agreed(copy.deepcopy(self._criterion, memo), self._groups)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each row ends, ``[rows]``."""
        answer = torch.as_tensor(self._criterion(input_ids, scores, **kwargs), device=input_ids.device)
        ends = answer.expand(len(input_ids)).to(torch.uint8).contiguous()
        for group in self._groups:
            wait_for(start_broadcast(ends, 0, group, _TAG), "broadcast", ends, group)
        return ends.bool()


def _time_of(model: Any, given: dict[str, Any]) -> float | None:
    """Seconds that a generation may take, as its arguments or a configuration say."""
    configs = (given.get("generation_config"), getattr(model, "generation_config", None))
    times = (given.get("max_time"), *(getattr(config, "max_time", None) for config in configs))
    return next((time for time in times if time is not None), None)
