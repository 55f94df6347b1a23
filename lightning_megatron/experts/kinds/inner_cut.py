"""Experts cut along their inner width, so that several ranks hold a part of each (``expert_tensor_parallel_size``).

Every rank of those computes its part of an expert for all rows of that expert, and what the parts give is added up.
Two ranks, an expert ``down(silu(gate(x)) · up(x)) + bias`` whose gate and up are one matrix ``[2 f, h]``::

    gate_up [2f, h]   gate ┌ rank 0      up ┌ rank 0        of each half the same rows
                           └ rank 1         └ rank 1
    down    [h, f]    │ rank 0 │ rank 1 │                   the columns that belong to them
    bias    [h]       │ rank 0 │ rank 1 │                   a part of its numbers, among zeros when the expert runs

Which dim of which parameter that is, is not known but tried: on a copy, with random numbers. Cuts are taken if the
parts' outputs add up to the whole one's, and so do the gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_megatron.layers.whole.step_kinds import as_they_are
from lightning_megatron.mesh.parts.boxes import Range, ShardSpec
from lightning_megatron.mesh.parts.names import owner_and_leaf
from lightning_megatron.mesh.replaced import Replacements

_MOST_TRIALS = 4096
_NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 5e-2


@dataclass(frozen=True)
class Along:
    """How one parameter is cut.

    Attributes:
        dim: the dim that is cut.
        segments: of how many pieces, one after the other, each rank has a part (2 for a gate above its up).
        completed: whether zeros take the place of the other ranks' numbers when the expert runs (a bias of the output).
    """

    dim: int
    segments: int = 1
    completed: bool = False

    def ranges(self, size: int, part: int, parts: int) -> list[Range]:
        """Indices of part ``part`` of a dim of ``size``."""
        length = size // self.segments
        start, stop = part * length // parts, (part + 1) * length // parts
        return [(segment * length + start, segment * length + stop) for segment in range(self.segments)]

    def of(self, whole: Tensor, part: int, parts: int) -> Tensor:
        """A part of a parameter, in its graph; as it is when the expert runs."""
        ranges = self.ranges(whole.shape[self.dim], part, parts)
        own = torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in ranges], self.dim)
        return self.complete(own, whole.shape[self.dim], part, parts) if self.completed else own

    def complete(self, own: Tensor, size: int, part: int, parts: int) -> Tensor:
        """A part among zeros, in the size of the whole."""
        [(start, stop)] = self.ranges(size, part, parts)
        after = own.dim() - 1 - self.dim
        zeros = (0, 0) * after + (start, size - stop)
        return cast(Tensor, as_they_are(F.pad, (own, zeros), {}))  # the step's own code would see all of a parameter


@dataclass(frozen=True)
class InnerCut:
    """How all parameters of an expert, or of a stack of them, are cut, and which part is meant.

    Attributes:
        parts: over how many ranks.
        part: which of them; 0 to ``parts - 1``.
        along: by parameter name.
        sizes: of the dims that are cut, by parameter name.
        counted: names of the module's attributes that say how wide it is inside.
    """

    parts: int
    part: int = 0
    along: dict[str, Along] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    counted: tuple[str, ...] = ()

    def at(self, part: int) -> InnerCut:
        """The same, of another part."""
        return replace(self, part=part)

    def spec(self, name: str, shape: tuple[int, ...]) -> ShardSpec:
        """The part of parameter ``name`` that is here."""
        along = self.along[name]
        return ShardSpec.along(shape, along.dim, along.ranges(shape[along.dim], self.part, self.parts))

    @contextmanager
    def runs(self, module: nn.Module) -> Iterator[None]:
        """Lets the module's own code run on the parts that are here."""
        with ExitStack() as stack, Replacements() as replaced:
            for name in self.counted:
                owner, leaf = owner_and_leaf(module, name)
                replaced.put(owner, leaf, getattr(owner, leaf) // self.parts)
            for name, along in self.along.items():
                if along.completed:
                    stack.enter_context(self._completed(module, name, along))
            yield

    @contextmanager
    def _completed(self, module: nn.Module, name: str, along: Along) -> Iterator[None]:
        """A tensor of whole size in the place of a parameter, for the module's code only."""
        owner, leaf = owner_and_leaf(module, name)
        own = owner.get_parameter(leaf)
        owner.__dict__[leaf] = along.complete(own, self.sizes[name], self.part, self.parts)  # is looked up first
        try:
            yield
        finally:
            del owner.__dict__[leaf]


def with_block(spec: ShardSpec, experts: int, first: int) -> ShardSpec:
    """Of a stack of ``experts``, the part of those from ``first`` on, whose own spec within their block is known."""
    boxes = tuple(replace(box, offset=(first, *box.offset[1:])) for box in spec.boxes)
    return ShardSpec((experts, *spec.global_shape[1:]), spec.local_shape, boxes)


def find_inner_cut(module: nn.Module, parts: int, run: Callable[[], Tensor], *, stacked: bool) -> InnerCut | str:
    """How an expert can be cut along its inner width; or why it cannot be.

    Args:
        module: a copy, with real parameters on the CPU and drawn values.
        parts: over how many ranks.
        run: calls ``module`` on rows that take part in no graph.
        stacked: whether the first dim of all parameters counts experts.
    """
    own, before = dict(module.named_parameters()), int(stacked)
    whole, indivisible = run(), []
    trained = [parameter for parameter in own.values() if parameter.requires_grad]
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1)).to(whole.dtype)
    wanted = torch.autograd.grad((whole * weights).sum(), trained, allow_unused=True) if trained else ()
    widths = {n for p in own.values() for n in p.shape[before:]}
    for width in sorted(widths | {n // 2 for n in widths if n % 2 == 0}, reverse=True):
        choices = [_choices(parameter, width, before) for parameter in own.values()]
        tries = itertools.islice(itertools.product(*choices), _MOST_TRIALS) if width > 1 else ()
        for chosen in tries:
            if sum(not along.completed for along in chosen) < 2:
                continue
            if width % parts:
                indivisible.append(width)
                break
            for counted in _counted(module, width):
                along = dict(zip(own, chosen, strict=True))
                sizes = {name: p.shape[along[name].dim] for name, p in own.items()}
                cut = InnerCut(parts, 0, along, sizes, counted)
                found = _sum_of_parts(module, cut, own, run)
                if found is None or not alike(whole, found):
                    continue
                grads = torch.autograd.grad((found * weights).sum(), trained, allow_unused=True) if trained else ()
                if all(alike(one, other) for one, other in zip(wanted, grads, strict=True)):
                    return cut
    if indivisible:
        return f"its inner width ({' or '.join(map(str, sorted(indivisible)))}) is not divisible by {parts}"
    return "no cut was found whose parts add up to it (there may be a norm inside, or a factor that all parts need)"


def _choices(parameter: Tensor, width: int, before: int) -> list[Along]:
    """How a parameter may be cut if experts are ``width`` wide inside."""
    found = []
    for dim in range(before, parameter.dim()):
        if parameter.shape[dim] == width:
            found.append(Along(dim))
        if parameter.shape[dim] == 2 * width:
            found += [Along(dim, segments=2), Along(dim)]  # one above the other, or in turns
    if parameter.dim() == before + 1:
        found.append(Along(before, completed=True))
    return found


def _counted(module: nn.Module, width: int) -> list[tuple[str, ...]]:
    """Names of attributes that may say how wide experts are inside: none, or all that have its value."""
    names = tuple(
        f"{name}.{key}" if name else key
        for name, child in module.named_modules()
        for key, value in vars(child).items()
        if type(value) is int and value in (width, 2 * width) and "hidden" not in key and "num" not in key
    )
    return [(), names] if names else [()]


def _sum_of_parts(
    module: nn.Module, cut: InnerCut, own: dict[str, nn.Parameter], run: Callable[[], Tensor]
) -> Tensor | None:
    """Sum of the results of an expert's parts; ``None`` if one does not run."""
    total: Tensor | None = None
    for part in range(cut.parts):
        values = {name: cut.along[name].of(parameter, part, cut.parts) for name, parameter in own.items()}
        try:
            with Replacements() as replaced:
                for name in cut.counted:
                    owner, leaf = owner_and_leaf(module, name)
                    replaced.put(owner, leaf, getattr(owner, leaf) // cut.parts)
                found = functional_call(_Runs(module, run), {f"module.{name}": v for name, v in values.items()}, ())
        except Exception:
            return None
        if total is not None and found.shape != total.shape:
            return None
        total = found if total is None else total + found
    return total


class _Runs(nn.Module):
    """Calls a module as somebody else has it."""

    def __init__(self, module: nn.Module, run: Callable[[], Tensor]) -> None:
        super().__init__()
        self.module, self._run = module, run

    def forward(self) -> Tensor:
        return self._run()


def alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two results are equal but for rounding, which goes by the largest entry."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    narrow = torch.is_autocast_enabled(one.device.type)  # whatever the type, sums of narrow numbers
    near = (_COARSE if narrow else _NEAR.get(one.dtype, _COARSE)) * max(
        1.0, float(one.detach().abs().max()) if one.numel() else 1.0
    )
    return torch.allclose(one, other, rtol=0.0, atol=near)
