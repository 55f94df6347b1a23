"""Experts stacked in one module that is given their rows one expert after the other, and how many each has.

``forward(rows [n, h], sizes) -> [n, h']`` with ``sizes`` a list or tensor of ``experts`` integers, as JetMoe's and
ScatterMoE's linear layers are written. An expert is a single product there, so that a mixture has several such modules,
and the rows of each are sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_megatron.experts.exchange.sending import Owners
from lightning_megatron.experts.exchange.taking_part import Told
from lightning_megatron.experts.kinds.inner_cut import alike
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

Sizes = Sequence[int] | Tensor


def sized_experts(module: nn.Module) -> int:
    """How many experts a module looks to have stacked that takes their rows and numbers of rows; 0 if it does not."""
    foreign = not comes_from(type(module), "torch")
    return has_stacks(module) if foreign and len(forward_arguments(module)) == 2 else 0


class SizedExperts(LedExperts):
    """Of stacked experts that take rows and how many of them each expert has.

    Args:
        name: of the module, for messages.
        owners: who has which experts.
        width: of what they give.
    """

    def __init__(self, name: str, owners: Owners, width: int) -> None:
        super().__init__(name, owners)
        self._width = width

    def run(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call: send the rows to their experts.

        Raises:
            ValueError: it is not called with rows and as many numbers as there are experts.
        """
        if self._answers:
            return own(*args, **kwargs)
        given, sizes = (*args, *kwargs.values(), None, None)[:2]
        counts = sizes if isinstance(sizes, Tensor) else torch.tensor(sizes if isinstance(sizes, list | tuple) else [])
        if not isinstance(given, Tensor) or given.dim() != 2 or counts.shape != (self.count,):
            raise ValueError(
                f"`{self._name}` looks like stacked experts that take rows and how many of them each expert has, but "
                f"is not called with rows and {self.count} numbers; use `expert_parallel_size=1`."
            )
        if is_elsewhere(module, given):
            return given.new_zeros(len(given), self._width)
        rows = given.full() if isinstance(given, WholeTensor) else given
        numbers = torch.arange(self.count, device=rows.device)
        expert = numbers.repeat_interleave(counts.to(rows.device), output_size=len(rows))

        def made(forward: Callable[..., Any], arrived: Tensor, local: Tensor, told: Told) -> Tensor:
            return by_sizes(forward, arrived, local, told.of_experts, like=sizes)

        folding = self._owners.folding
        return folding.whole(self._sent(module, own, folding.own(rows), folding.own(expert), made), len(rows))


def by_sizes(own: Callable[..., Tensor], rows: Tensor, expert: Tensor, sizes: Sequence[int], like: Sizes) -> Tensor:
    """Results of the experts' own forward for rows, ``[n, h], [n] -> [n, h']``; n may be 0.

    Args:
        own: the forward.
        rows: in any order.
        expert: numbers of their experts.
        sizes: how many rows each expert has.
        like: what the forward is given in its module: a list or tensor.
    """

    def told(numbers: Sequence[int]) -> Sizes:
        return like.new_tensor(numbers) if isinstance(like, Tensor) else list(numbers)

    if not len(rows):
        one = rows.new_zeros(1, rows.shape[1]) + rows.sum()  # gradients of the parameters are zeros then, and not None
        with on_filler:
            return own(one, told([1, *[0] * (len(sizes) - 1)]))[:0]
    order = torch.argsort(expert, stable=True)
    found = own(rows[order], told(sizes))
    return found.new_empty(found.shape).index_copy(0, order, found)


def try_sized(module: nn.Module, experts: int, parts: int) -> tuple[str, int]:
    """Why a module does not treat its experts' rows one by one, "" if it does; and the width of what it gives.

    Args:
        module: a copy, with real parameters on the CPU; it is changed.
        experts: how many it looks to have.
        parts: over how many ranks they are to be shared out.
    """
    generator = torch.Generator().manual_seed(0)
    fill(module, generator)
    why, sizes = "its forward does not take rows and how many each expert has", [2 + n % 3 for n in range(experts)]
    own = list(module.parameters())
    for width in {n: None for p in own for n in p.shape[1:]}:
        rows = torch.randn(sum(sizes), width, generator=generator).to(own[0].dtype)
        for like in (sizes, torch.tensor(sizes)):
            try:
                whole = module(rows, like)
                if isinstance(whole, Tensor) and whole.dim() == 2 and len(whole) == len(rows):
                    return _compare(module, rows, whole, sizes, like, parts), whole.shape[1]
            except Exception as error:
                why = f"its forward does not run on rows and how many each expert has ({error})"
    return why, 0


def _compare(module: nn.Module, rows: Tensor, whole: Tensor, sizes: list[int], like: Sizes, parts: int) -> str:
    local, found, places = len(sizes) // parts, list[Tensor](), list[Tensor]()
    expert = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    for part in range(parts):
        block = slice(part * local, (part + 1) * local)
        values = {name: parameter[block] for name, parameter in module.named_parameters()}
        forward = functools.partial(_with, module, values, len(sizes), local)
        for place in in_turns(((expert // local) == part).nonzero().view(-1)):
            places.append(place)
            mine = expert[place] - part * local
            try:
                found.append(by_sizes(forward, rows[place], mine, mine.bincount(minlength=local).tolist(), like))
            except Exception as error:
                return f"its forward does not run on a part of its experts ({error})"
    split = torch.cat(found)[torch.cat(places).argsort()]
    near = 1e-9 if whole.dtype == torch.float64 else 5e-2 if whole.dtype.itemsize == 2 else 1e-4
    if split.shape != whole.shape or not torch.allclose(split, whole, rtol=0.0, atol=near):
        return "its output is not what each expert makes of each row by itself"
    trained, weighed = [p for p in module.parameters() if p.requires_grad], torch.randn_like(whole)
    pairs = [torch.autograd.grad((each * weighed).sum(), trained) for each in (whole, split)] if trained else [(), ()]
    if not all(alike(one, other) for one, other in zip(*pairs, strict=True)):
        return "the gradients of its parameters are not those of each expert by itself"
    return ""


def _with(module: nn.Module, values: dict[str, Tensor], before: int, now: int, rows: Tensor, sizes: Sizes) -> Tensor:
    with with_experts(module, before, now):
        return functional_call(module, values, (rows, sizes))  # type: ignore[no-any-return]
