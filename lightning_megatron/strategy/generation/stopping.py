"""Ranks of a model end a generation together, and choose from the same scores.

``max_time`` asks the clock of each process, and a criterion or a processor of the user's may ask anything, such as
random numbers without a seed. Where one rank ends and another goes on, the latter waits for ever in the collectives of
its next token; where they choose other tokens, what they compute together is of neither. So what the first rank of a
model says holds for all of them::

    rank 0   3.01 s of 3 s: end      ──▶ end
    rank 1   2.99 s of 3 s: go on    ──▶ end
    rank 2   knows of no limit       ──▶ end

Hugging Face's own criteria look at tokens and scores only, which are equal, and need no message, except for that one.
Under a pipeline the answers take the way of what layers give, so that stages whose code goes different ways are refused
here as they are there.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.layers.all_here import all_tokens
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages.collectives import start_broadcast, wait_for
from lightning_megatron.mesh.parts.packages import comes_from
from lightning_megatron.mesh.replaced import Replacement, Replacements
from lightning_megatron.pipeline.repeated.model_calls import ModelCalls
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.hooks.served_calls import serving

_LIBRARY = "transformers.generation"
_LAYERS = "lightning_megatron.layers"
_TAG = (1 << 20) + 11
_ENDS, _SCORES = 1, 2


def agree_on_stops(module: nn.Module, mesh: ParallelMesh) -> None:
    """Let the Hugging Face models in ``module`` end their generations on all ranks together; also after the run.

    Args:
        module: the user's, before anything else is put around its models' ``generate``; it may be divided later.
        mesh: the grid.
    """
    layout = mesh.layout
    if layout.tensor * layout.context * layout.pipeline == 1:
        return
    group = mesh.sharing_a_batch
    for model in module.modules():
        users = not isinstance(vars(model).get("generate"), (_Generate, NoneType))  # its own way to generate
        if any(kind.__name__ == "GenerationMixin" for kind in type(model).__mro__) and not users:
            Replacements().put(model, "generate", _Generate(model, module, group, layout.context > 1))


class _Generate(Replacement):
    """Stands for ``generate`` of a model.

    Args:
        model: Hugging Face's.
        module: the user's, which contains it.
        group: of tensor and context ranks; ``None`` for one.
        always: whether they generate together also where tensor ranks split nothing of the model.
    """

    def __init__(self, model: Any, module: nn.Module, group: dist.ProcessGroup | None, always: bool) -> None:
        super().__init__(model, "generate")
        self._model, self._module, self._group, self._always = model, module, group, always
        self.__name__, self.__wrapped__ = "generate", type(model).generate

    def __deepcopy__(self, memo: dict[int, Any]) -> _Generate:
        return _Generate(copy.deepcopy(self._model, memo), self._module, self._group, self._always)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See ``generate`` of the model."""
        own = type(self._model).generate
        names = list(inspect.signature(own).parameters)[1 : 1 + len(args)]
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        ranks = _Ranks(self._model, self._module, self._group, self._always)
        with all_tokens(), ranks.meeting():
            return own(self._model, **_agreeing(self._model, given, ranks))


class _Ranks:
    """The ranks that compute a model together: those of a pipeline, of a tensor group, and of a context group.

    Args:
        model: Hugging Face's. Where every rank has all of it, each generates for itself.
        module: the user's.
        group: of tensor and context ranks; ``None`` for one.
        always: whether they generate together also where tensor ranks split nothing of the model.
    """

    def __init__(self, model: nn.Module, module: nn.Module, group: dist.ProcessGroup | None, always: bool) -> None:
        stage, parts = Stage.of(module), list(model.modules())
        trunk = None if stage is None else module.get_submodule(stage.partition.trunk.name)
        self._calls = None if stage is None or trunk not in parts else ModelCalls.of(module, stage)
        of_tensor = any(comes_from(type(part), _LAYERS) for part in parts)
        self._group = group if of_tensor or always else None

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around a generation."""
        if self._calls is None:
            yield
            return
        with self._calls.together_with_others("generate"):
            yield

    def first_says(self, said: int) -> tuple[int, bool]:
        """The first rank's answer about its generation, and whether all of these ranks generate together.

        Tasks of several batches at once are equal on all ranks, and need not ask. In a hook whose calls are served,
        some ranks may generate alone.
        """
        if self._calls is None and self._group is None:
            return said, False
        if self._calls is not None and self._calls.side_by_side:
            return said, True
        if self._calls is None and self._group is not None and (hook := serving()) is not None:
            first = hook.all_generate(said, dist.get_process_group_ranks(self._group))
            return (said, False) if first is None else (first, True)
        return int(self.agreed(torch.tensor([said], dtype=torch.uint8, device=self._device())).item()), True

    def agreed(self, answer: Tensor) -> Tensor:
        """The answer of the first rank."""
        if self._group is not None:
            answer = answer.clone(memory_format=torch.contiguous_format)
            wait_for(start_broadcast(answer, 0, self._group, _TAG), "broadcast", answer, self._group)
        return answer if self._calls is None else self._calls.agreed(answer, "generate")

    def _device(self) -> torch.device:
        if self._calls is not None:
            return self._calls.stage.device
        cuda = dist.get_backend(self._group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


class _Agreed:
    """A processor of scores that gives those of the first rank.

    Args:
        ranks: that agree.
    """

    def __init__(self, ranks: _Ranks) -> None:
        self._ranks = ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> _Agreed:
        return _Agreed(self._ranks)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores, ``[rows, vocabulary]``."""
        return self._ranks.agreed(scores.detach())


class _AnyOf:
    """Whether any of the user's criteria ends a row, as the first rank says; all are asked, as each may count.

    Args:
        criteria: Hugging Face's form of them.
        ranks: that agree.
    """

    def __init__(self, criteria: list[Any], ranks: _Ranks) -> None:
        self._criteria, self._ranks = criteria, ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> _AnyOf:
        return _AnyOf(copy.deepcopy(self._criteria, memo), self._ranks)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See the criteria, ``[rows]``."""
        ends = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for criterion in self._criteria:
            ends = ends | torch.as_tensor(criterion(input_ids, scores, **kwargs), device=ends.device)
        return self._ranks.agreed(ends.to(torch.uint8)).bool()


def _agreeing(model: Any, given: dict[str, Any], ranks: _Ranks) -> dict[str, Any]:
    """The arguments of a generation, with criteria and processors that agree."""
    from transformers import LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList

    criteria, processors = list(given.get("stopping_criteria") or ()), list(given.get("logits_processor") or ())
    mine = [criterion for criterion in criteria if not _looks_at_tokens_only(criterion)]
    known = [processor for processor in processors if comes_from(type(processor), _LIBRARY)]
    most = _time_of(model, given)
    said = _ENDS * bool(mine or most is not None) | _SCORES * (len(known) < len(processors))
    first, together = ranks.first_says(said)
    if not together or not (said or first):
        return given
    given = dict(given)
    if most is not None:
        given["max_time"] = math.inf
        mine.append(MaxTimeCriteria(most))
    common: list[Any] = [criterion for criterion in criteria if _looks_at_tokens_only(criterion)]
    if first & _ENDS:
        common.append(_AnyOf(mine, ranks))
    given["stopping_criteria"] = StoppingCriteriaList(common)
    agreeing: list[Any] = [*processors, _Agreed(ranks)] if first & _SCORES else known
    given["logits_processor"] = LogitsProcessorList(agreeing)
    return given


def _looks_at_tokens_only(criterion: Any) -> bool:
    kind = type(criterion)
    return comes_from(kind, _LIBRARY) and "Time" not in kind.__name__


def _time_of(model: Any, given: dict[str, Any]) -> float | None:
    """Seconds that a generation may take, as its arguments or a configuration say."""
    configs = (given.get("generation_config"), getattr(model, "generation_config", None))
    times = (given.get("max_time"), *(getattr(config, "max_time", None) for config in configs))
    return next((time for time in times if time is not None), None)
