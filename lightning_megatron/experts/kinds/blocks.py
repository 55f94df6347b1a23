"""Experts stacked in one module that is given the rows of each, one block after the other.

``forward(rows [experts · n, h]) -> [experts · n, h]``, or ``[experts, n, h]`` in both places, as Llama 4 and mixtures
with a fixed number of places are written: products of all blocks at once. Rows of zeros, for tokens that are not meant
for an expert, are sent like all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_megatron.experts.exchange.taking_part import Told
from lightning_megatron.experts.kinds.inner_cut import InnerCut, alike, find_inner_cut
from lightning_megatron.experts.kinds.stacked import (
    LedExperts,
    fill,
    forward_arguments,
    has_stacks,
    in_turns,
    with_experts,
)
from lightning_megatron.experts.kinds.twin import is_elsewhere
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.nested import on_filler
from lightning_megatron.mesh.parts.packages import comes_from

_ROWS = 6


def blocked_experts(module: nn.Module) -> int:
    """How many experts a module looks to have stacked that takes their rows in blocks; 0 if it does not look so."""
    foreign = not comes_from(type(module), "torch")  # whose convolutions have stacks, too
    return has_stacks(module) if foreign and len(forward_arguments(module)) == 1 else 0


class BlockedExperts(LedExperts):
    """Of stacked experts that take a block of rows each."""

    def run(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call: send the blocks to their experts.

        Raises:
            ValueError: it is not called with as many rows for each expert.
        """
        if self._answers:
            return own(*args, **kwargs)
        given = next(iter((*args, *kwargs.values())), None)
        if len(args) + len(kwargs) != 1 or not isinstance(given, Tensor) or not _is_in_blocks(given, self.count):
            raise ValueError(
                f"`{self._name}` looks like stacked experts that take a block of rows each, but is not called with one "
                f"tensor of {self.count} blocks; use `expert_parallel_size=1`."
            )
        if is_elsewhere(module, given):
            return torch.zeros_like(given)
        given = given.full() if isinstance(given, WholeTensor) else given
        rows, lead = given.reshape(-1, given.shape[-1]), given.dim() == 3
        expert = torch.arange(self.count, device=rows.device).repeat_interleave(len(rows) // self.count)

        def made(forward: Callable[..., Any], arrived: Tensor, local: Tensor, _: Told) -> Tensor:
            return in_blocks(forward, arrived, local, self._owners.local, lead=lead)

        folding = self._owners.folding
        found = self._sent(module, own, folding.own(rows), folding.own(expert), made)
        return folding.whole(found, len(rows)).view(*given.shape[:-1], -1)


def _is_in_blocks(given: Tensor, experts: int) -> bool:
    return given.shape[0] == experts if given.dim() == 3 else given.dim() == 2 and len(given) % experts == 0


def in_blocks(own: Callable[[Tensor], Tensor], rows: Tensor, expert: Tensor, experts: int, *, lead: bool) -> Tensor:
    """Results of the experts' own forward for rows, ``[n, h], [n] -> [n, h]``; n may be 0.

    Args:
        own: the forward.
        rows: as many for each expert.
        expert: numbers of their experts.
        experts: how many there are.
        lead: whether the forward takes blocks ``[experts, n, h]``.
    """
    order = torch.argsort(expert, stable=True)
    given = rows[order] if len(rows) else rows.new_zeros(experts, rows.shape[1]) + rows.sum()
    with nullcontext() if len(rows) else on_filler:
        found = own(given.view(experts, -1, rows.shape[1]) if lead else given)
    found = found.reshape(-1, found.shape[-1])[: len(rows)]
    return found.new_empty(found.shape).index_copy(0, order, found)


def try_blocks(module: nn.Module, experts: int, parts: int) -> str:
    """Why a module does not treat its experts' rows one by one; "" if it does.

    Args:
        module: a copy, with real parameters on the CPU; it is changed.
        experts: how many it looks to have.
        parts: over how many ranks they are to be shared out.
    """
    taken = _taken(module, experts)
    return taken if isinstance(taken, str) else _compare(module, taken, experts, parts)


def cut_blocks(module: nn.Module, experts: int, parts: int) -> InnerCut | str:
    """How experts that take a block of rows each can be cut along their inner width, or why they cannot be.

    Args:
        module: see :func:`try_blocks`, which has recognised them.
        experts: how many there are.
        parts: over how many ranks each of them is to be cut.
    """
    taken = _taken(module, experts)
    if isinstance(taken, str):
        return taken
    return find_inner_cut(module, parts, functools.partial(module, taken.given), stacked=True)


class _Taken(NamedTuple):
    """Rows that a module takes, as it takes them, and what it gives for them."""

    rows: Tensor
    given: Tensor
    whole: Tensor


def _taken(module: nn.Module, experts: int) -> _Taken | str:
    """The first random rows that a module filled with random numbers takes, or why there are none."""
    generator = torch.Generator().manual_seed(0)
    own = _own(module)
    fill(module, generator)
    why = "its forward does not take a block of rows for each expert"
    for size in {n: None for p in own for n in p.shape[1:]}:
        for lead in (False, True):
            rows = torch.randn(experts * _ROWS, size, generator=generator).to(own[0].dtype)
            given = rows.view(experts, _ROWS, size) if lead else rows
            try:
                whole = module(given)
                if isinstance(whole, Tensor) and whole.shape[:-1].numel() == len(rows):
                    return _Taken(rows, given, whole)
            except Exception as error:
                why = f"its forward does not run on a block of rows for each expert ({error})"
    return why


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _compare(module: nn.Module, taken: _Taken, experts: int, parts: int) -> str:
    rows, lead, whole = taken.rows, taken.given.dim() == 3, taken.whole
    local, found, places = experts // parts, list[Tensor](), list[Tensor]()
    expert = torch.arange(experts).repeat_interleave(_ROWS)
    for part in range(parts):
        values = {name: p[part * local : (part + 1) * local] for name, p in module._parameters.items() if p is not None}
        forward = functools.partial(_with, module, values, experts, local)
        for place in in_turns(((expert // local) == part).nonzero().view(-1)):
            places.append(place)
            try:
                found.append(in_blocks(forward, rows[place], expert[place] - part * local, local, lead=lead))
            except Exception as error:
                return f"its forward does not run on a part of its experts ({error})"
    split, whole = torch.cat(found)[torch.cat(places).argsort()], whole.reshape(len(rows), -1)
    near = 1e-9 if whole.dtype == torch.float64 else 5e-2 if whole.dtype.itemsize == 2 else 1e-4
    if split.shape != whole.shape or not torch.allclose(split, whole, rtol=0.0, atol=near):
        return "its output is not what each expert makes of each row by itself"
    trained, weighed = [p for p in _own(module) if p.requires_grad], torch.randn_like(whole)
    pairs = [torch.autograd.grad((each * weighed).sum(), trained) for each in (whole, split)] if trained else [(), ()]
    if not all(alike(one, other) for one, other in zip(*pairs, strict=True)):
        return "the gradients of its parameters are not those of each expert by itself"
    return ""


def _with(module: nn.Module, values: dict[str, Tensor], before: int, now: int, rows: Tensor) -> Tensor:
    with with_experts(module, before, now):
        return functional_call(module, values, (rows,))  # type: ignore[no-any-return]
