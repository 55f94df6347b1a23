"""What may be cut up for an optimizer: found by trying it out on a few numbers.

AdamW updates every element by itself, Muon every matrix, LBFGS everything at once. An optimizer of the first kind can
step on any piece of a parameter, one of the second on whole parameters only. Class names do not tell (optimizers come
from anywhere, and subclasses change things), so a copy of the user's optimizer, with its options, steps on a small
matrix and on pieces of the same matrix, and the results are compared.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.mesh.messages.collectives import world_maximum

_SHAPE = (4, 6)
_CUTS = (5, 12)
_STEPS = 3
_RATE = 1e-2


class Independence(Enum):
    """The smallest thing that an optimizer updates by itself."""

    ELEMENT = "every element"
    PARAMETER = "every parameter"
    NONE = "all parameters together"


def smallest_independence(
    optimizers: Sequence[Optimizer], device: torch.device, elementwise: bool | None = None
) -> Independence:
    """The least that any of the optimizers allows, agreed over all ranks (one may hold nothing to try it with).

    Args:
        optimizers: of the module.
        device: where their parameters are.
        elementwise: what the user declares: ``True`` is taken for granted, ``False`` allows whole parameters at best.
    """
    if elementwise:
        return Independence.ELEMENT
    order = list(Independence)
    found = max((order.index(independence_of(optimizer, device)) for optimizer in optimizers), default=0)
    found = max(found, 0 if elementwise is None else order.index(Independence.PARAMETER))
    return order[int(world_maximum(torch.tensor(found, device=device)))]


def independence_of(optimizer: Optimizer, device: torch.device) -> Independence:
    """Try a copy of ``optimizer`` on small float32 matrices; it and its state are not changed.

    Args:
        optimizer: with its parameter groups; the options of each are tried.
        device: where its parameters are.

    Returns:
        What it updates by itself; ``ELEMENT`` for an optimizer that holds nothing on this rank.
    """
    if not any(group["params"] for group in optimizer.param_groups):
        return Independence.ELEMENT
    groups = len(optimizer.param_groups)
    generator = torch.Generator().manual_seed(0)
    start = [_numbers(generator, device) for _ in range(2 * groups)]
    grads = [[_numbers(generator, device) for _ in range(2 * groups)] for _ in range(_STEPS)]
    pairs = [[2 * group, 2 * group + 1] for group in range(groups)]
    try:
        together = _train(optimizer, pairs, start, grads)
        halves = [_train(optimizer, [[pair[side]] for pair in pairs], start, grads) for side in (0, 1)]
    except Exception:  # it wants a closure, or something else that only its own training loop gives it
        return Independence.NONE
    apart = {index: value for half in halves for index, value in half.items()}
    if not _alike(together, apart):
        return Independence.NONE
    try:
        pieces = _train(optimizer, pairs, start, grads, cut=True)
    except Exception:  # it refuses vectors
        return Independence.PARAMETER
    return Independence.ELEMENT if _alike(together, pieces) else Independence.PARAMETER


def _numbers(generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(_SHAPE, generator=generator).to(device)


def _train(
    optimizer: Optimizer,
    members: list[list[int]],
    start: list[Tensor],
    grads: list[list[Tensor]],
    *,
    cut: bool = False,
) -> dict[int, Tensor]:
    """Values of the matrices, by index, after a few steps of a copy of the optimizer with these in its groups."""
    pieces: dict[int, list[nn.Parameter]] = {}
    for index in (index for group in members for index in group):
        parts = _cut(start[index]) if cut else [start[index]]
        pieces[index] = [nn.Parameter(part.clone()) for part in parts]
    trial = _copy(optimizer, [[piece for index in group for piece in pieces[index]] for group in members])
    for step in grads:
        for index, parameters in pieces.items():
            parts = _cut(step[index]) if cut else [step[index]]
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.clone()
        type(optimizer).step(trial)
    return {index: torch.cat([p.detach().flatten() for p in parameters]) for index, parameters in pieces.items()}


def _cut(matrix: Tensor) -> list[Tensor]:
    return list(matrix.flatten().tensor_split(_CUTS))


def _copy(optimizer: Optimizer, parameters: list[list[nn.Parameter]]) -> Any:
    """An optimizer like the given one for other parameters, without state and without the user's hooks.

    A learning rate of zero, as at the start of a warm-up, would make everything look alike, so it is replaced.
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
    """Give the copy what the optimizer's constructor makes for every parameter (Adagrad's sums)."""
    known = [[p for p in group["params"] if p in optimizer.state] for group in optimizer.param_groups]
    everywhere = [p for group in known for p in group]
    for group, new in zip(known, trial.param_groups, strict=True):
        # Of a scalar, shapes do not tell what is per element.
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
