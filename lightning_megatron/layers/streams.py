"""Random numbers inside split regions: one stream per tensor rank, replayed exactly by recomputation.

Dropout on a replicated activation must draw the same mask on all ranks of the tensor group; dropout on a split
activation (attention probabilities of the local heads) must draw a different mask on each. The rank's stream is derived
from the shared one: on entering a region, the generator of the device is seeded from a digest of its state, the name of
the region and the tensor rank. On leaving, the shared state is restored, and advanced by one draw if the region drew
any numbers.

    shared stream   --- s0 ---------------- s1 -------
                         \\ digest, rank    /  one draw, only if the region drew
    rank stream           r0 --- masks ---

With ``random_streams="layout"`` nothing is switched: all ranks draw alike, and a rank has its part of what one process
draws, which the region tells from the shape.

No state is kept between regions. Activation checkpointing, which restores the shared stream before it recomputes,
therefore replays the regions as well, and a region without dropout does not change the shared stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.draws.global_rows import Slice
from lightning_megatron.mesh.draws.mode import Cutter, LayoutDraws, active_draws


class RankStream:
    """Switches the default generator of a device to a stream of this tensor rank, and back.

    Args:
        name: the name of the region; regions with different names get different streams from the same shared state.
        rank: rank in the tensor group.
        size: of the tensor group.
        heads: whether heads are split in the region, and not only features.
        switches: whether torch's generators are switched; a stream around this one does it else.

    Attributes:
        features: of each rank, where the region ends.
    """

    def __init__(self, name: str, rank: int, size: int = 0, *, heads: bool = False, switches: bool = True) -> None:
        self.name = name
        self.rank, self.size, self.heads = rank, size, heads
        self.features, self._switches = 0, switches
        self._draws: LayoutDraws | None = None
        self._outer: Cutter | None = None
        self._lead: tuple[int, ...] = ()
        self._tokens: tuple[int, tuple[int, ...]] | None = None
        self._device: torch.device | None = None
        self._shared: Tensor | None = None
        self._start: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RankStream:
        copied: RankStream = memo.setdefault(
            id(self), RankStream(self.name, self.rank, self.size, heads=self.heads, switches=self._switches)
        )
        copied.features = self.features
        return copied

    @property
    def is_open(self) -> bool:
        """Whether the rank's stream is in use."""
        return self._shared is not None or self._draws is not None

    def open(
        self,
        device: torch.device,
        lead: Sequence[int] = (),
        tokens: tuple[int, tuple[int, ...]] | None = None,
        *,
        training: bool = True,
    ) -> None:
        """Switch the generator of ``device`` to the rank's stream; does nothing if it is open already.

        Args:
            device: whose generator.
            lead: shape of the region's input without its features.
            tokens: where tokens are split: their dim, and the shape of a rank's hidden state.
            training: whether dropout is on; torch's generators are not switched else.
        """
        if not (training and self._switches) and active_draws() is None:
            return
        if torch.compiler.is_compiling():
            return _eagerly(self.open, device)
        if self.is_open or device.type == "meta" or type(torch.empty(0)) is not Tensor:
            return  # the last condition: on fake tensors, which have shapes only, there is no state to read
        self._draws = active_draws()
        if self._draws is not None:
            self._outer, self._draws.cut = self._draws.cut, self._part_of
            self._lead, self._tokens = tuple(lead), tokens
            return
        shared = _state(device)
        digest = hashlib.blake2b(shared.numpy().tobytes(), digest_size=8, key=f"{self.rank}/{self.name}".encode()[-64:])
        _seed(device, int.from_bytes(digest.digest(), "little") >> 1)
        self._device, self._shared, self._start = device, shared, _state(device)

    def close(self) -> None:
        """Return to the shared stream; does nothing if the rank's stream is not open."""
        if self._draws is not None:
            return self.forget()
        if torch.compiler.is_compiling():
            return _eagerly(self.close)
        if self._device is None or self._shared is None or self._start is None:
            return
        drew = not torch.equal(_state(self._device), self._start)
        _set_state(self._device, self._shared)
        if drew:
            with torch._C._DisableTorchDispatch():  # those who watch draws have seen the one that counts
                torch.rand((), device=self._device)
        self._device = self._shared = self._start = None

    def forget(self) -> None:
        """Close without changing the generator, after a forward that was aborted and whose state others restored."""
        self._device = self._shared = self._start = None
        if self._draws is not None:
            self._draws.cut, self._draws, self._outer = self._outer, None, None

    def _part_of(self, function: str, shape: Sequence[int]) -> Slice | str:
        """The part of one process's draw that this rank has: of tokens, features at the region's end, or heads."""
        lead = self._lead
        if self._tokens is not None and tuple(shape) == self._tokens[1]:
            return self._slice(self._tokens[0], shape[self._tokens[0]])
        if self.features and lead and tuple(shape) == (*lead, self.features):
            return self._slice(len(lead), self.features)
        of_queries = len(shape) == 4 and len(lead) == 2 and (shape[0], shape[2]) == lead
        if self.heads and of_queries:  # keys are whole, or no softmax over them would be
            return self._slice(1, shape[1])
        return (
            f"tensor-parallel ranks have parts of it ({self.name!r}), and its shape {tuple(shape)} does not tell which"
        )

    def _slice(self, dim: int, local: int) -> Slice:
        return Slice(dim, self.rank * local, self.size * local)


def _call(function: Callable[..., None], *args: Any) -> None:
    function(*args)


_eagerly: Callable[..., None] = torch.compiler.disable(_call)
"""Calls a function outside the graph of a compiled layer."""


def _state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _seed(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
