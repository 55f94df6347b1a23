"""Calls of split layers that only some ranks make: in a hook, under ``if trainer.is_global_zero``.

Such layers compute with collectives, so the other ranks have to come. They hear of a call where they answer those who
read weights (:mod:`lightning_megatron.layers.whole.rounds`), are given its arguments, and make it too::

    rank 0   calls net(x) ── round: call, none ── x ── net(x) ── is done ── round: none, none
    rank 1   is done      ── round: call, none ── x ── net(x) ───────────── round: none, none

What a layer gives is whole in such a hook, also where all ranks call it: ``print(out.argmax(-1))`` may be for one.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.layers.whole.base import WholeTensor
from lightning_megatron.layers.whole.between_steps import WholeView, refuse_backward
from lightning_megatron.layers.whole.rounds import CALL
from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.mesh.layout import Coordinates, Layout
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.replaced import Replacements

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype)
_COPY = -1.0
_GENERATION = -16.0  # and above it, what a rank says of its own
_SERVED: ContextVar[ServedCalls | None] = ContextVar("served", default=None)


def serving() -> ServedCalls | None:
    """Server of the hook that runs, whose calls of split layers some ranks may make without the others."""
    return _SERVED.get()


class _Call(NamedTuple):
    """A call, as other ranks need it to make it too; tensors are on the CPU."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trains: list[bool]
    gradients: bool
    inference: bool
    autocast: torch.dtype | None


class ServedCalls:
    """Makes calls on ranks whose own code does not make them.

    Args:
        module: the whole module, with the same parts on all ranks of the view.
        view: what hooks see.
        layout: of the ranks; those of a tensor group are given the same arguments.
    """

    def __init__(self, module: nn.Module, view: WholeView, layout: Layout) -> None:
        self._view, self._group, self._layout = view, view.rounds.group, layout
        self._parts = {name: part for name, part in module.named_modules() if view.holds(part)}
        self._numbers = {id(part): float(number) for number, part in enumerate(self._parts.values())}
        view.rounds.serve = self._answer

    @contextmanager
    def announced(self, *, serves: bool) -> Iterator[None]:
        """Around a hook that is seen, which makes calls of the others where it ends; ``serves`` as for the view."""
        if not serves or self._group.size() == 1:
            yield
            return
        call = nn.Module.__call__

        def announcing(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not (self._view.is_whole and self._view.holds(module)):
                return call(module, *args, **kwargs)
            served = self._tell(self._numbers.get(id(module), _COPY), module, args, kwargs)
            output = map_tensors(call(module, *args, **kwargs), _made_whole)
            if served:
                reason = "code that only some of them run"
                tree_map(functools.partial(refuse_backward, self._view.hook, reason), output)
            return output

        with Replacements() as replaced:
            replaced.put(nn.Module, "__call__", announcing)
            served = _SERVED.set(self)
            try:
                yield
            finally:
                _SERVED.reset(served)

    def all_generate(self, said: int, ranks: Sequence[int]) -> int | None:
        """Tell the other ranks that this one begins to generate. Collective, as a call is.

        Args:
            said: of this rank's generation, below 8.
            ranks: global ranks that hold the model.

        Returns:
            What the first of those ranks says; ``None`` where some of them do not generate.

        Raises:
            RuntimeError: another rank calls a part of the module instead.
        """
        _, notes = self._view.rounds.ask(CALL, _GENERATION + said, self._view.device)
        self._check([(rank, called) for rank, (asked, called) in enumerate(notes) if asked == CALL])
        theirs = [notes[dist.get_group_rank(self._group, rank)] for rank in ranks]
        return int(theirs[0][1] - _GENERATION) if all(asked == CALL for asked, _ in theirs) else None

    def _tell(self, number: float, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Tell the other ranks of a call; returns whether some of them do not make it themselves. Collective.

        Raises:
            RuntimeError: not all of those that make one call the same part, or its arguments hold something that
                another rank has no equal of, such as a cache; on all ranks.
        """
        note = number if number == _COPY else number + _checksum((args, kwargs))
        while True:
            _, notes = self._view.rounds.ask(CALL, note, self._view.device)
            calls = [(rank, called) for rank, (asked, called) in enumerate(notes) if asked == CALL]
            if len(calls) == len(notes) and self._are_alike(calls):
                return False
            self._check(calls)
            if note == calls[0][1]:
                break
            self._answer(calls)  # the same part with other arguments; it is this rank's turn afterwards
        first, given = calls[0][0], None
        if self._group.rank() == first:
            strange = next(_strangers((args, kwargs)), None)
            given = _call_of(module, args, kwargs) if strange is None else self._refusal(module, strange)
        if isinstance(given := self._broadcast(given, first), str):
            raise RuntimeError(given)
        return True

    def _are_alike(self, calls: Sequence[tuple[int, float]]) -> bool:
        """Whether ranks call the same part, those of a tensor group with the same arguments."""
        groups: dict[Coordinates, set[float]] = {}
        for rank, note in calls:
            at = self._layout.coordinates(dist.get_global_rank(self._group, rank))
            groups.setdefault(replace(at, tensor=0), set()).add(note)
        return len({_kind_of(note) for _, note in calls}) == 1 and all(len(notes) == 1 for notes in groups.values())

    def _answer(self, calls: Sequence[tuple[int, float]]) -> None:
        """Make a call that other ranks have announced. Collective.

        Raises:
            RuntimeError: as for those.
        """
        self._check(calls)
        first, number = calls[0][0], _kind_of(calls[0][1])
        if number == _GENERATION:
            return  # its calls are announced one by one
        call = self._broadcast(None, first)
        if isinstance(call, str):
            raise RuntimeError(call)
        part = list(self._parts.values())[int(number)]
        device = self._view.device
        args, kwargs = map_tensors((call.args, call.kwargs), lambda tensor: tensor.to(device))
        with ExitStack() as modes:
            modes.enter_context(self._view.local())
            modes.enter_context(_training(part, call.trains))
            modes.enter_context(torch.inference_mode(call.inference))
            modes.enter_context(torch.set_grad_enabled(call.gradients))
            modes.enter_context(torch.autocast(device.type, call.autocast, enabled=call.autocast is not None))
            map_tensors(part(*args, **kwargs), _made_whole)

    def _broadcast(self, value: Any, first: int) -> Any:
        return objects.broadcast(value, dist.get_global_rank(self._group, first), self._group)

    def _check(self, calls: Sequence[tuple[int, float]]) -> None:
        numbers = {_kind_of(number) for _, number in calls}
        if len(numbers) > 1 or _COPY in numbers:
            names = {float(at): f"`{name or 'the module'}`" for at, name in enumerate(self._parts)}
            names |= {_COPY: "a copy of a layer", _GENERATION: "`generate`"}
            said = [names[number] for number in sorted(numbers)]
            ranks = " and ".join(str(dist.get_global_rank(self._group, rank)) for rank, _ in calls)
            raise RuntimeError(
                f"`{self._view.hook}` calls {' and '.join(said)} on rank {ranks}; {self._group.size()} ranks hold "
                "parts of the weights and have to compute. Call the same on every rank, and put `if "
                "trainer.is_global_zero` around what is done with the result."
            )

    def _refusal(self, module: nn.Module, strange: str) -> str:
        return (
            f"`{self._view.hook}` calls `{type(module).__name__}` on some ranks only, with a `{strange}` among its "
            f"arguments; {self._group.size()} ranks hold parts of the weights, and the others have no such object. "
            "Call it on every rank, and put `if trainer.is_global_zero` around what is done with the result."
        )


def _kind_of(note: float) -> float:
    """The number of what is called."""
    return _GENERATION if note < _COPY else math.floor(note)


def _checksum(value: Any) -> float:
    """Of the arguments of a call, below 1; objects count by their kind."""
    found = 0
    for leaf in tree_leaves(value):
        told = repr(leaf) if type(leaf) in _PLAIN else type(leaf).__name__
        if isinstance(leaf, Tensor):
            numbers = leaf.detach().cpu().contiguous()
            told = f"{numbers.dtype} {tuple(numbers.shape)}"
            found = zlib.crc32(numbers.view(-1).view(torch.uint8).numpy().tobytes(), found)
        found = zlib.crc32(told.encode(), found)
    return found / 2**32


def _made_whole(tensor: Tensor) -> Tensor:
    return tensor.full() if isinstance(tensor, WholeTensor) else tensor


def _call_of(part: nn.Module, args: Any, kwargs: Any) -> _Call:
    device = next(part.parameters()).device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    given = map_tensors((args, kwargs), lambda tensor: tensor.detach().cpu())
    trains = [child.training for child in part.modules()]
    return _Call(given[0], given[1], trains, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


def _strangers(value: Any) -> Iterator[str]:
    """Names of types, in a nest of arguments, whose objects are no longer the same once they are sent."""
    if type(value) in (list, tuple):
        for item in value:
            yield from _strangers(item)
    elif type(value) is dict:
        for key, item in value.items():
            yield from _strangers([key, item])
    elif type(value) not in (*_PLAIN, Tensor, nn.Parameter):
        yield type(value).__name__


@contextmanager
def _training(part: nn.Module, trains: Sequence[bool]) -> Iterator[None]:
    """Each module of a part in training or evaluation, as it is on the rank that calls it."""
    children = list(part.modules())
    before = [child.training for child in children]
    try:
        for child, trained in zip(children, trains, strict=True):
            child.training = trained
        yield
    finally:
        for child, trained in zip(children, before, strict=True):
            child.training = trained
