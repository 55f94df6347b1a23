"""Messages by which one stage tells all others of its pipeline what a layer or part gave.

Every stage takes part in every message, in one order, since all of them run the same code. So a message says which call
it answers and how many came before; where that is not the call that a stage is waiting in, the ranks have gone
different ways (code that looks at the rank, for instance), and the run is refused instead of waiting for ever::

    header   kind, unit, turn, dtype, shape      a single tensor: its numbers follow
             kind, unit, turn, bytes             a nest: its description follows, then each tensor
             kind, -, -                          this stage's code has ended

Loops call the same again and again. So a message has room after its header for what came with the message that
followed that stage's last unit before, which all stages have heard: a token's hidden state is one message, and not two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatron.mesh.key_value_caches import is_cache
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import Started, start_broadcast, wait_for
from lightning_megatron.mesh.pickling import HeldGroup

_HEADER = 14
_SHAPE = 5  # where it begins
_HEADER_BYTES = 8 * _HEADER
_MOST_ROOM = 1 << 20  # bytes that a message may have too many of where it brings less than the one before
_TENSOR, _NEST, _END = 1, 2, 3
_TAG = (1 << 20) + 7
_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a nest."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Given:
    """Stands for a cache that the call was given."""

    place: int


class _Rooms:
    """By stage, the bytes after the header of its next message; the same at all stages, which hear all messages.

    >>> rooms = _Rooms()
    >>> for unit, brought in ((0, 64), (1, 8), (0, 64), (1, 8)):
    ...     room = rooms.behind(stage=0)
    ...     rooms.note(0, unit, brought)
    >>> rooms.behind(stage=0), rooms.behind(stage=1)
    (64, 0)
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._brought: dict[tuple[int, int], int] = {}

    def behind(self, stage: int) -> int:
        """Bytes that what followed this stage's last unit the time before has brought; 0 if it is not known."""
        return self._brought.get((stage, self._last.get(stage, -1)), 0)

    def note(self, stage: int, unit: int, brought: int) -> None:
        """A message of a stage has been told, or heard.

        Args:
            stage: whose.
            unit: it was about.
            brought: bytes of its tensor, or of the description of its nest.
        """
        self._brought[stage, self._last.get(stage, -1)] = brought if brought <= _MOST_ROOM else 0
        self._last[stage] = unit


class Wire:
    """Messages between one rank's stage and all stages of its pipeline.

    Args:
        group: the pipeline's process group.
        ranks: by stage, its global rank.
        stage: this rank's.
        device: where tensors live.
        ahead: whether the stage goes on before the others have fetched what it told.

    Attributes:
        ranks: by stage, its global rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        stage: int,
        device: torch.device,
        *,
        ahead: bool = False,
    ) -> None:
        self._group, self.ranks, self._stage, self._device = HeldGroup(group), ranks, stage, device
        self._turn, self._ahead = 0, ahead
        self._told: list[tuple[Started, Tensor]] = []
        self._rooms = _Rooms()

    @property
    def group(self) -> dist.ProcessGroup:
        """The pipeline's process group."""
        return cast("dist.ProcessGroup", self._group.group)

    def begin(self) -> None:
        """Start counting."""
        self._turn, self._rooms = 0, _Rooms()

    def tell(self, unit: int, value: Any, note: Any, caches: list[Any]) -> None:
        """Tell all other stages what a layer or part gave.

        Args:
            unit: its number.
            value: a tensor or a nest.
            note: what else there is to know about the call; pickled.
            caches: that the call was given; where they are in ``value`` again, the others find their own.
        """
        self._turn += 1
        plain = type(value) is Tensor and note is None and value.ndim <= _HEADER - _SHAPE
        if plain:
            header = _TENSOR, unit, self._turn, _DTYPES.index(value.dtype), value.ndim, *value.shape
            self._send_message(value, *header)
            return
        leaves, spec = pytree.tree_flatten(value, is_leaf=is_cache)
        slots = [_described(leaf, caches) for leaf in leaves]
        blob = objects.encode((pytree.tree_unflatten(slots, spec), note))
        self._send_message(blob.to(self._device), _NEST, unit, self._turn, blob.numel())
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._send(leaf)

    def answer(self, unit: int, value: Tensor) -> None:
        """Tell all other stages something without waiting until they have fetched it.

        So a stage whose code goes another way is met in what this one hears next, and refused there.

        Args:
            unit: its number.
            value: that does not change any more.
        """
        ahead, self._ahead = self._ahead, True
        if not ahead:  # else the turn's end does, and nothing in a turn waits for others
            self.settle()
        try:
            self.tell(unit, value, None, [])
        finally:
            self._ahead = ahead

    def hear(self, stage: int, unit: int, name: str, caches: list[Any]) -> tuple[Any, Any]:
        """Output of a layer or part of another stage, and the note.

        Args:
            stage: the one that has it.
            unit: its number.
            name: the same in words.
            caches: as in :meth:`tell`, here.

        Raises:
            RuntimeError: that stage's code calls something else, or has ended.
        """
        self._turn += 1
        (kind, told, turn, first, *rest), behind = self._message(stage)
        if kind == _END or (told, turn) != (unit, self._turn):
            _refuse(name, stage, ended=kind == _END)
        if kind == _TENSOR:
            return self._brought(stage, unit, behind, tuple(rest[1 : 1 + rest[0]]), _DTYPES[first]), None
        blob = self._brought(stage, unit, behind, (first,), torch.uint8)
        nest, note = objects.decode(blob)
        is_leaf = lambda leaf: isinstance(leaf, (_Slot, _Given))  # noqa: E731
        slots, spec = pytree.tree_flatten(nest, is_leaf=is_leaf)
        return pytree.tree_unflatten(list(self._filled(stage, slots, caches)), spec), note

    def _filled(self, stage: int, slots: list[Any], caches: list[Any]) -> Iterator[Any]:
        for slot in slots:
            if isinstance(slot, _Slot):
                yield self._receive(stage, slot.shape, slot.dtype)
            else:
                yield caches[slot.place] if isinstance(slot, _Given) else slot

    def settle(self) -> None:
        """Wait until the other stages have received what was sent ahead."""
        told, self._told = self._told, []
        for work, data in told:
            self._wait(work, data)

    def finish(self) -> None:
        """Tell the others that this stage's code has ended, and hear it of them.

        Raises:
            RuntimeError: one goes on calling the model.
        """
        for stage in range(len(self.ranks)):
            if stage == self._stage:
                self._send_message(torch.empty(0), _END, -1, -1, 0)
            elif self._message(stage)[0][0] != _END:
                _refuse("", stage, ended=False)
        self.settle()

    def _send_message(self, brought: Tensor, *entries: int) -> None:
        """Send a header, and what it brings in the room after it, or else in a message of its own."""
        size, room = brought.numel() * brought.element_size(), self._rooms.behind(self._stage)
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[: len(entries)] = torch.tensor(entries, dtype=torch.int64)
        message = torch.zeros(_HEADER_BYTES + room, dtype=torch.uint8, device=self._device)
        message[:_HEADER_BYTES] = header.view(torch.uint8).to(self._device)
        fits = 0 < size <= room
        if fits:
            numbers = _as_numbers(brought.detach().contiguous()).reshape(-1).view(torch.uint8)
            message[_HEADER_BYTES : _HEADER_BYTES + size] = numbers
        self._launch(message)
        if not fits:
            self._send(brought)
        self._rooms.note(self._stage, entries[1], size)

    def _message(self, stage: int) -> tuple[list[int], Tensor]:
        """Entries of a stage's next header, and what has come after it."""
        message = self._receive(stage, (_HEADER_BYTES + self._rooms.behind(stage),), torch.uint8)
        with _no_inference():
            entries: list[int] = message[:_HEADER_BYTES].view(torch.int64).tolist()
            return entries, message[_HEADER_BYTES:]

    def _brought(self, stage: int, unit: int, behind: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor of a message: from after its header if it has fitted there, or else the message that follows."""
        size = math.prod(shape) * dtype.itemsize
        self._rooms.note(stage, unit, size)
        if not 0 < size <= behind.numel():
            return self._receive(stage, shape, dtype)
        with _no_inference():
            tensor = torch.empty(0, dtype=dtype, device=self._device)  # no view: code may write into what it was given
            stride = torch.empty(shape, device="meta").stride()
            return tensor.set_(behind.untyped_storage(), _HEADER_BYTES // dtype.itemsize, shape, stride)

    def _send(self, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        data = _as_numbers(tensor.detach().contiguous())
        if self._ahead and data.data_ptr() == tensor.data_ptr():
            data = data.clone()  # it may be written into meanwhile
        self._launch(data)

    def _launch(self, data: Tensor) -> None:
        started = self._start(data, self._stage)
        if self._ahead:
            self._told.append((started, data))
        else:
            self._wait(started, data)

    def _receive(self, stage: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with _no_inference():
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if math.prod(shape):
            data = _as_numbers(tensor)
            self._wait(self._start(data, stage), data)
        return tensor

    def _start(self, data: Tensor, stage: int) -> Started:
        with torch.no_grad():
            return start_broadcast(data, dist.get_group_rank(self.group, self.ranks[stage]), self.group, _TAG)

    def _wait(self, work: Started, data: Tensor) -> None:
        wait_for(work, "broadcast", data, self._group.group)


def _no_inference() -> Any:
    """Around what makes tensors that code may keep for a step with gradients."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _as_numbers(tensor: Tensor) -> Tensor:
    """The same memory in a type that every backend sends."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _described(leaf: Any, caches: list[Any]) -> Any:
    if isinstance(leaf, Tensor):
        return _Slot(tuple(leaf.shape), leaf.dtype)
    if is_cache(leaf):
        return _Given(next((at for at, cache in enumerate(caches) if cache is leaf), 0)) if caches else None
    return leaf


def _refuse(name: str, stage: int, *, ended: bool) -> NoReturn:
    if not name:
        what = f"pipeline stage {stage} still calls the model where the code of this rank has ended"
    elif ended:
        what = (
            f"`{name}` was called here, but the code of pipeline stage {stage}, which has it, ended without calling it"
        )
    else:
        what = f"`{name}` was called here, but pipeline stage {stage}, which has it, calls something else"
    raise RuntimeError(
        f"{what}. All ranks have to call a model that is spread over pipeline stages alike: take conditions such as "
        "`trainer.is_global_zero` off the call of `generate` (or of the model), and put them around what is done with "
        "the result."
    )
