"""Random streams that do not depend on the pipeline's layout.

One process draws all random numbers of a step from one stream. Stages cannot, as each would have to wait for the one
before. When a step is split into micro-batches or stages, every *segment* (the code before the trunk, each layer, the
code after it) of every micro-batch therefore draws from a stream of its own, seeded from the run's seed and the step's
number. The global stream stays unchanged, and so equal on all stages of a replica: shuffling and augmentation in the
main process draw the same numbers as in one process.

::

    global stream   ───────────────────────────────────────────▶   samplers, augmentation, the user's hooks
    step k          ┬─ micro-batch 0: before │ layer 0 │ layer 1 │ ... │ after
                    └─ micro-batch 1: before │ layer 0 │ layer 1 │ ... │ after
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_megatron.mesh.autograd import in_backward

_MASK = (1 << 63) - 1
_START = 0x9E3779B97F4A7C15
_CALL_BITS = 20


def mix(*values: int) -> int:
    """Hash integers into a seed of 63 bits (splitmix64's finaliser, applied value by value)."""
    return absorb(_START, *values) & _MASK


def absorb(state: int, *values: int) -> int:
    """Hash more integers into a state; a common prefix of many seeds is thus hashed once."""
    for value in values:
        state = (state ^ (value & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


class SegmentStreams:
    """Reseeds the random generators for each segment of a step.

    Python's and NumPy's generators are reseeded per micro-batch, torch's per segment.

    Args:
        device: device whose generator is reseeded besides the CPU's.
        replica: data-parallel coordinate, so that replicas draw different numbers.
        seed: equal on all stages of a replica.
    """

    def __init__(self, device: torch.device, replica: int, seed: int) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._replica = replica
        self._seed = seed
        self._steps = {True: 0, False: 0}
        self.step_state = _START
        self._alike = False

    def state_dict(self) -> dict[str, int]:
        """The seed, and the number of training and evaluation steps so far; equal on all ranks."""
        return {"seed": self._seed, "training": self._steps[True], "evaluation": self._steps[False]}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the last step of the saved run."""
        self._seed = state["seed"]
        self._steps = {True: state["training"], False: state["evaluation"]}

    @property
    def tries(self) -> bool:
        """Whether a step runs that does not count."""
        return self._alike

    @contextmanager
    def step(self, *, training: bool) -> Iterator[None]:
        """Run one step on its own streams, and restore the state of the global generators afterwards.

        Training and evaluation steps are counted separately: a run on one stage evaluates without streams, and its
        training steps must draw the same dropout masks.
        """
        self._steps[training] += 1
        step_seed = mix(self._seed, self._steps[training], training)
        self.step_state = absorb(_START, step_seed, self._replica)
        state = _current_rng_state(self._device)
        try:
            yield
        finally:
            restore_rng_state(state, self._device)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Run a step that does not count, in which all micro-batches draw from the same streams."""
        before, state = self.step_state, _current_rng_state(self._device)
        self.step_state, self._alike = absorb(_START, mix(self._seed, self._steps[True], -1), self._replica), True
        try:
            yield
        finally:
            self.step_state, self._alike = before, False
            restore_rng_state(state, self._device)

    def enter(self, micro_batch: int, segment: int, call: int = 0) -> None:
        """Reseed torch's generators for a segment.

        Args:
            micro_batch: index of the micro-batch in the step.
            segment: 0 before the trunk, ``1 + i`` in layer i, one past the last layer after the trunk.
            call: how often this segment of this micro-batch has been entered before.
        """
        self.enter_known(self._seed_of(self._state_of(micro_batch), segment, call))

    def enter_micro_batch(self, micro_batch: int, segments: Iterable[int] = ()) -> dict[int, int]:
        """Enter segment 0 of a micro-batch; reseeds Python's and NumPy's generators too.

        Args:
            micro_batch: index of the micro-batch in the step.
            segments: segments whose seeds for the first call are wanted.

        Returns:
            Segment -> seed for :meth:`enter_known`. Hashing all seeds in a row takes a third of the time of hashing
            them one by one between layers.
        """
        state = self._state_of(micro_batch)
        seed = self._seed_of(state, 0)
        self.enter_known(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
        return {segment: self._seed_of(state, segment) for segment in segments}

    def enter_known(self, seed: int) -> None:
        """Reseed torch's generators with a known seed."""
        torch.default_generator.manual_seed(seed)
        if self._on_gpu:
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)

    def _state_of(self, micro_batch: int) -> int:
        return absorb(self.step_state, 0 if self._alike else micro_batch)

    @staticmethod
    def _seed_of(state: int, segment: int, call: int = 0) -> int:
        return absorb(state, (segment << _CALL_BITS) + call) & _MASK

    def position(self) -> tuple[Tensor, Tensor | None]:
        """States of torch's generators: the CPU's, and the GPU's if there is one."""
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), cuda

    def go_to(self, position: tuple[Tensor, Tensor | None]) -> None:
        """Restore the states that :meth:`position` returned."""
        torch.set_rng_state(position[0])
        if position[1] is not None:
            torch.cuda.set_rng_state(position[1], self._device)


class SegmentHooks:
    """Enters the segment streams of a trunk that is not cut, so that one process draws the same numbers as a pipeline.

    Args:
        layers: the trunk's layers.
        streams: the streams.
        parts: modules outside the trunk that hold parameters.
    """

    def __init__(self, layers: Sequence[nn.Module], streams: SegmentStreams, parts: Sequence[nn.Module] = ()) -> None:
        self._streams = streams
        self._layers = len(layers)
        self._micro_batch: int | None = None
        self._calls: dict[int, int] = {}
        self._parts = PartHooks(parts, streams, lambda: None if self._calls else self._micro_batch)
        self._handles = [
            layer.register_forward_pre_hook(functools.partial(self._enter, 1 + index))
            for index, layer in enumerate(layers)
        ]
        self._handles.append(layers[-1].register_forward_hook(functools.partial(self._enter, 1 + self._layers)))

    def begin(self, micro_batch: int) -> None:
        """Enter the segment before the trunk of a micro-batch."""
        self._micro_batch = micro_batch
        self._calls = {}
        self._streams.enter_micro_batch(micro_batch)

    def end(self) -> None:
        """Disable the hooks until the next :meth:`begin`."""
        self._micro_batch = None

    def remove(self) -> None:
        """Remove the hooks."""
        self._parts.remove()
        for handle in self._handles:
            handle.remove()

    def _enter(self, segment: int, *_: Any) -> None:
        if self._micro_batch is None:
            return
        call = self._calls.get(segment, 0)
        if in_backward():  # the user's activation checkpointing recomputes, and must draw the same numbers
            self._streams.enter(self._micro_batch, segment, max(0, call - 1))
            return
        self._calls[segment] = call + 1
        self._streams.enter(self._micro_batch, segment, call)


class PartHooks:
    """Makes each part that runs before the layers draw from a stream of its own.

    A stage without the part does not run it, and so draws nothing for it. The numbers that the step itself draws after
    the part (a diffusion model's time steps, noise) must still be equal on all stages.

    Args:
        parts: modules outside the trunk; those that cannot draw random numbers get no hooks.
        streams: the streams.
        before_trunk: returns the current micro-batch, or ``None`` if no step runs or its layers have begun.
    """

    def __init__(
        self, parts: Sequence[nn.Module], streams: SegmentStreams, before_trunk: Callable[[], int | None]
    ) -> None:
        self._streams = streams
        self._before_trunk = before_trunk
        self._saved: dict[int, Any] = {}
        self._calls: dict[int, tuple[tuple[int, int], int]] = {}
        self._handles = []
        for index, part in enumerate(parts):
            if _may_draw(part):
                self._handles.append(part.register_forward_pre_hook(functools.partial(self._enter, index)))
                self._handles.append(part.register_forward_hook(functools.partial(self._leave, index)))

    def use_streams(self, streams: SegmentStreams) -> None:
        """Draw from other streams from now on."""
        self._streams = streams

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, index: int, *_: Any) -> None:
        micro_batch = self._before_trunk()
        self._saved.pop(index, None)
        if micro_batch is None or in_backward():
            return
        self._saved[index] = self._streams.position()
        now = (self._streams.step_state, micro_batch)
        last, call = self._calls.get(index, (None, 0))
        call = call + 1 if last == now else 0
        self._calls[index] = (now, call)
        self._streams.enter(micro_batch, -1 - index, call)

    def _leave(self, index: int, *_: Any) -> None:
        if index in self._saved:
            self._streams.go_to(self._saved.pop(index))


def _may_draw(module: nn.Module) -> bool:
    """Whether ``module`` may draw random numbers: it contains a dropout, or a module that is not torch's."""
    children = list(module.modules())
    foreign = any(not type(child).__module__.startswith("torch.nn.modules.") for child in children)
    return foreign or any(isinstance(child, _DropoutNd) and child.p > 0 for child in children)


def state_digest() -> int:
    """Hash of the state of torch's global CPU generator, which it leaves unchanged."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK


def collect_rng_state(device: torch.device) -> dict[str, Any]:
    """States of Python's, NumPy's (if it is imported) and torch's global generators, as plain data."""
    state = _current_rng_state(device)
    if "numpy" in state:
        kind, keys, *rest = state["numpy"]
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def _current_rng_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states that :func:`collect_rng_state` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
