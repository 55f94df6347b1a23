"""Finds out whether an optimizer can step on pieces of parameters, by running a copy of it on small matrices.

AdamW updates every element by itself, Muon every matrix, LBFGS all parameters together. An optimizer of the first kind
can step on any piece of a parameter, one of the second kind only on whole parameters. The class of an optimizer does
not tell its kind: optimizers come from any library, and subclasses may change the update. A copy of the user's
optimizer, with its options, therefore steps on small matrices and on pieces of the same matrices, and the results are
compared.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.data_parallel.update.step_hooks import marks_of
from lightning_megatron.data_parallel.update.substeps import SubSteps
from lightning_megatron.mesh.messages.collectives import world_maximum

_SHAPE = (4, 6)
_CUTS = (5, 12)
_STEPS = 3
_RATE = 1e-2
_KINDS = 8  # of attributes in a group, that are tried


class Independence(Enum):
    """The smallest thing that an optimizer updates by itself."""

    ELEMENT = "every element"
    PARAMETER = "every parameter"
    NONE = "all parameters together"


def smallest_independence(
    optimizers: Sequence[Optimizer], device: torch.device, elementwise: bool | None = None
) -> Independence:
    """The coarsest unit that any of the optimizers updates by itself; equal on all ranks.

    Collective over the world unless ``elementwise`` is ``True``: a rank whose optimizers hold no parameters cannot find
    out by itself.

    Args:
        optimizers: of the module.
        device: where their parameters are.
        elementwise: what the user declares: ``True`` skips the trial, ``False`` excludes ``ELEMENT``.
    """
    if elementwise:
        return Independence.ELEMENT
    order = list(Independence)
    found = max((order.index(independence_of(optimizer, device)) for optimizer in optimizers), default=0)
    found = max(found, 0 if elementwise is None else order.index(Independence.PARAMETER))
    return order[int(world_maximum(torch.tensor(found, device=device)))]


def independence_of(optimizer: Optimizer, device: torch.device) -> Independence:
    """Run a copy of ``optimizer`` on small float32 matrices; the optimizer and its state stay unchanged.

    Args:
        optimizer: the trial uses the options of each of its parameter groups.
        device: where its parameters are.

    Returns:
        The smallest unit that it updates by itself; ``ELEMENT`` for an optimizer without parameters on this rank.
    """
    if not any(group["params"] for group in optimizer.param_groups):
        return Independence.ELEMENT
    tried = _Matrices.of(optimizer, device)
    try:
        together = _train(optimizer, tried)
        halves = [_train(optimizer, tried.side(side)) for side in (0, 1)]
    except Exception:  # it needs a closure, or something else that only the user's training loop provides
        return Independence.NONE
    apart = {index: value for half in halves for index, value in half.items()}
    moved = any(not torch.equal(together[index], tried.start[index].flatten()) for index in together)
    if not (moved and _alike(together, apart)):  # one that moves nothing has its parameters from elsewhere (LBFGS)
        return Independence.NONE
    try:
        pieces = _train(optimizer, tried, cut=True)
    except Exception:  # it does not accept 1-d parameters
        return Independence.PARAMETER
    return Independence.ELEMENT if _alike(together, pieces) else Independence.PARAMETER


def steps_in_parts(optimizer: Optimizer) -> bool:
    """Whether a step on some of the parameters, and then on the others, equals one step; tried on a copy."""
    tried = _Matrices.of(optimizer, torch.device("cpu"))
    try:
        whole, parts = (_train(optimizer, tried, by_halves=halves) for halves in (False, True))
    except Exception:  # as above
        return False
    return all(torch.equal(whole[index], parts[index]) for index in whole)


def state_bytes(optimizer: Optimizer) -> float:
    """Bytes of state that an optimizer keeps of a float32 parameter, per number of it; tried on a copy."""
    matrix = nn.Parameter(torch.ones(_SHAPE))
    matrix.grad = torch.ones(_SHAPE)
    groups: list[list[nn.Parameter]] = [[matrix], *([] for _ in optimizer.param_groups[1:])]
    trial = _copy(optimizer, groups)
    _step(optimizer, trial)
    kept = [value for value in trial.state[matrix].values() if isinstance(value, Tensor) and value.dim() > 0]
    return sum(value.numel() * value.element_size() for value in kept) / matrix.numel()


def seconds_of(optimizer: Optimizer, elements: int, rounds: int = 3) -> float:
    """Shortest time of a step of an optimizer on ``elements`` float32 numbers on the processor; tried on a copy."""
    flat = nn.Parameter(torch.ones(elements))
    flat.grad = torch.ones(elements)
    trial = _copy(optimizer, [[flat], *([] for _ in optimizer.param_groups[1:])])
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        _step(optimizer, trial)
        best = min(best, time.perf_counter() - begun)
    return best


class _Matrices(NamedTuple):
    """Matrices that a copy of an optimizer is tried on.

    Attributes:
        members: per parameter group, indices of its matrices.
        start: initial values of the matrices.
        grads: per step, gradients of the matrices.
        marks: attributes of the matrices, as the user has set them on parameters.
    """

    members: list[list[int]]
    start: list[Tensor]
    grads: list[list[Tensor]]
    marks: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer, device: torch.device) -> _Matrices:
        """Two for each group of an optimizer and each kind of attributes that parameters in it have."""
        members: list[list[int]] = []
        marks: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            kinds = {repr(sorted(found.items())): found for found in map(marks_of, group["params"])}
            chosen = [*kinds.values()][:_KINDS] or [{}]
            members.append(list(range(len(marks), len(marks) + 2 * len(chosen))))
            marks += [kind for kind in chosen for _ in range(2)]
        generator = torch.Generator().manual_seed(0)
        start = [_numbers(generator, device) for _ in marks]
        return cls(members, start, [[_numbers(generator, device) for _ in marks] for _ in range(_STEPS)], marks)

    def side(self, side: int) -> _Matrices:
        """Every second matrix of each group."""
        return self._replace(members=[group[side::2] for group in self.members])


def _numbers(generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(_SHAPE, generator=generator).to(device)


def _train(optimizer: Optimizer, tried: _Matrices, *, cut: bool = False, by_halves: bool = False) -> dict[int, Tensor]:
    """Train matrices for a few steps with a copy of the optimizer.

    Args:
        optimizer: the one to copy.
        tried: the matrices.
        cut: whether to train each matrix as several flat pieces.
        by_halves: whether to step on the first matrix of each group, and then on the others.

    Returns:
        Index -> flattened values after the last step.
    """
    members, start, grads, marks = tried
    pieces: dict[int, list[nn.Parameter]] = {}
    for index in (index for group in members for index in group):
        parts = _cut(start[index]) if cut else [start[index]]
        pieces[index] = [nn.Parameter(part.clone()) for part in parts]
        for piece in pieces[index]:
            piece.__dict__.update(marks[index])
    trial = _copy(optimizer, [[piece for index in group for piece in pieces[index]] for group in members])
    for step in grads:
        for index, parameters in pieces.items():
            parts = _cut(step[index]) if cut else [step[index]]
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.clone()
        if not by_halves:
            _step(optimizer, trial)
            continue
        substeps, groups = SubSteps(trial), [group["params"] for group in trial.param_groups]
        for group, some in zip(trial.param_groups, groups, strict=True):
            group["params"] = some[:1]
        _step(optimizer, trial)
        substeps.run([some[1:] for some in groups])
        for group, some in zip(trial.param_groups, groups, strict=True):
            group["params"] = some
    return {index: torch.cat([p.detach().flatten() for p in parameters]) for index, parameters in pieces.items()}


def _cut(matrix: Tensor) -> list[Tensor]:
    return list(matrix.flatten().tensor_split(_CUTS))


def _step(optimizer: Optimizer, trial: Any) -> None:
    """Step the copy as Lightning does: with a closure, which some optimizers insist on.

    Raises:
        RuntimeError: it calls the closure again, which needs the weights of all ranks.
    """
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("the closure is called again")
        return torch.ones(())

    step: Any = type(optimizer).step
    takes = [p for p in inspect.signature(step).parameters.values() if p.name == "closure" or p.kind is p.VAR_KEYWORD]
    step(trial, closure=closure) if takes else step(trial)


def _copy(optimizer: Optimizer, parameters: list[list[nn.Parameter]]) -> Any:
    """Copy an optimizer for other parameters, without its state and without the user's step hooks.

    The learning rate is replaced: with a rate of zero, as at the start of a warm-up, all results would be equal.
    """
    trial: Any = copy.copy(optimizer)
    trial.__dict__ = {name: copy.copy(value) for name, value in optimizer.__dict__.items() if name != "step"}
    trial.state = defaultdict(dict)
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    trial.param_groups = []
    for group, members in zip(optimizer.param_groups, parameters, strict=True):
        rate = torch.full_like(group["lr"], _RATE) if isinstance(group.get("lr"), Tensor) else _RATE
        trial.param_groups.append({**group, "params": members} | ({"lr": rate} if "lr" in group else {}))
    _make_first_state(optimizer, trial)
    return trial


def _make_first_state(optimizer: Optimizer, trial: Any) -> None:
    """Give the copy the state that the optimizer's constructor makes for every parameter (Adagrad's sums)."""
    known = [[p for p in group["params"] if p in optimizer.state] for group in optimizer.param_groups]
    everywhere = [p for group in known for p in group]
    for group, new in zip(known, trial.param_groups, strict=True):
        # Prefer a parameter with dims: the shape of a scalar's state does not tell which values are per element.
        first = max([*group, *everywhere], key=lambda p: p.dim() > 0, default=None)
        if first is not None:
            for parameter in new["params"]:
                made = optimizer.state[first].items()
                trial.state[parameter] = {key: _first_value(value, first, parameter) for key, value in made}


def _first_value(value: Any, of: nn.Parameter, parameter: nn.Parameter) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape == of.shape and value.dim() > 0 and value.numel() > 0:
        return torch.full_like(parameter, float(value.flatten()[0]))
    return torch.zeros_like(value)


def _alike(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    return all(torch.allclose(one[index], other[index], rtol=1e-5, atol=1e-6) for index in one)
