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

With ``random_streams="layout"`` all micro-batches of all replicas enter the same streams, each draw takes one number of
them, its key, and what it gives comes from that key and the place of the samples in the global batch
(:mod:`~lightning_megatron.mesh.draws.mode`). What is drawn between two layers has streams of its own then.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lightning_megatron.mesh.draws.batch_draws import BatchDraws, Place
from lightning_megatron.mesh.draws.global_rows import Rows
from lightning_megatron.mesh.draws.mode import LayoutDraws
from lightning_megatron.mesh.draws.same_draws import Drawn
from lightning_megatron.mesh.other_generators import all_of_others, set_others, states_of_others

_MASK = (1 << 63) - 1
_START = 0x9E3779B97F4A7C15
_CALL_BITS = 20
_BEHIND = 1 << 30  # segments after layers, counted from here
_WHOLE = Rows(0, 1, 1)


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


@functools.lru_cache(maxsize=256)
def _state_in(step: int, micro_batch: int) -> int:
    """State of a micro-batch, from which each of its segments starts."""
    return absorb(step, micro_batch)


class SegmentStreams:
    """Reseeds the random generators for each segment of a step.

    Python's and NumPy's generators are reseeded per micro-batch, torch's per segment. Where micro-batches are to be one
    batch, the former begin alike in each: ``if random.random() < 0.5:`` falls alike in all of them. Layers, which other
    stages do not run, have streams of their own; code between layers goes on with the micro-batch's.

    Args:
        device: device whose generator is reseeded besides the CPU's.
        replica: data-parallel coordinate, so that replicas draw different numbers.
        seed: equal on all stages of a replica.
        draws: answers draws from counters, so that they are those of one process in any layout; ``None`` where
            torch's generators do.
        apart: whether each micro-batch is one of its own.

    Attributes:
        segmented: whether segments of a step draw from streams of their own; see :class:`.one_stream.OneStream`.
        of_batch: draws that are for a batch, which its micro-batches share.
        others_in_layers: whether layers may draw from Python's or NumPy's generator, as far as trials have seen.
    """

    segmented = True

    def __init__(
        self, device: torch.device, replica: int, seed: int, draws: LayoutDraws | None = None, *, apart: bool = False
    ) -> None:
        self._device, self._on_gpu, self._apart = device, device.type == "cuda", apart
        self._replica, self.draws = replica if draws is None else 0, draws
        self._rows, self._ahead = [_WHOLE], dict[int, int]()
        self._now, self._drawn = 0, False
        self._others: tuple[Any, Any] | None = None
        self.others_in_layers, self._others_seen = True, False
        self._between: dict[str, Any] | None = None
        self._seed = seed
        self._steps = {True: 0, False: 0}
        self.step_state = _START
        self.of_batch = BatchDraws(device, self._seed_for_batch)
        self._entered, self._alike, self._before = set[int](), False, False

    def learn(self, told: Sequence[Drawn], *, training: bool = True) -> list[Place]:
        """Take note of what a trial of a step has seen, told by all ranks; nothing where its batch runs uncut.

        Gives what :meth:`.BatchDraws.learn` gives.
        """
        shared = [place for one in told for place in self.of_batch.learn(one.places, one.of_batch)]
        self._others_seen |= any(one.others for one in told)
        if told and training:
            self.others_in_layers = self._others_seen or self.of_batch.others_may_come
        return shared

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
        return self._alike or self._before

    @contextmanager
    def step(self, *, training: bool, name: str = "", rows: Sequence[Rows] = (_WHOLE,)) -> Iterator[None]:
        """Run one step on its own streams, and restore the state of the global generators afterwards.

        Training and evaluation steps are counted separately: a run on one stage evaluates without streams, and its
        training steps must draw the same dropout masks.

        Args:
            training: whether it counts as a training step.
            name: of the user's step.
            rows: the samples of each micro-batch.
        """
        self._steps[training] += 1
        step_seed = mix(self._seed, self._steps[training], training)
        self.step_state = absorb(_START, step_seed, self._replica)
        state = current_rng_state(self._device)
        try:
            may = self.of_batch.may_draw(training=training) and not self._apart and self.draws is None
            with self._drawing(name, rows), self.of_batch.step(training=training) if may else nullcontext():
                yield
        finally:
            restore_rng_state(state, self._device)

    @contextmanager
    def trial(self, name: str = "training_step", rows: Sequence[Rows] = (_WHOLE,)) -> Iterator[None]:
        """Run a step that does not count, in which all micro-batches draw from the same streams.

        Args:
            name: of the user's step.
            rows: the samples of each micro-batch.
        """
        before, state = self.step_state, current_rng_state(self._device)
        self._entered = set()
        self.step_state, self._alike = absorb(_START, mix(self._seed, self._steps[True], -1), self._replica), True
        try:
            with self._drawing(name, rows):
                yield
        finally:
            self.step_state, self._alike = before, False
            restore_rng_state(state, self._device)

    @contextmanager
    def before_step(self, rows: Sequence[Rows]) -> Iterator[None]:
        """Run a pass that does not count, with the draws of the training step that comes next.

        Args:
            rows: the samples of each micro-batch.
        """
        steps, state, self._before = dict(self._steps), self.step_state, True
        try:
            with self.step(training=True, name="training_step", rows=rows):
                yield
        finally:
            self._steps, self.step_state, self._before = steps, state, False

    @contextmanager
    def _drawing(self, name: str, rows: Sequence[Rows]) -> Iterator[None]:
        """Answer what the code inside draws, as far as counters do."""
        if self.draws is None:
            yield
            return
        before, outer = self._rows, self._drawn
        self._rows, self._drawn = list(rows), True
        self.draws.begin(name)
        try:
            with nullcontext() if outer else self.draws:
                yield
            self._check_others()
        finally:
            self._drawn, self._others = outer, None
            if outer:  # a trial, in a step that goes on
                self._rows = before
                self.draws.begin(name)

    def use_rows(self, rows: Sequence[Rows]) -> None:
        """Say which samples the micro-batches of a trial have from now on."""
        self._rows = list(rows)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the backward of the latest step, in which layers that are computed again draw again."""
        if self._drawn or self.draws is None:
            yield
            return
        state, self._drawn = current_rng_state(self._device), True
        try:
            with self.draws:
                yield
        finally:
            self._drawn = False
            restore_rng_state(state, self._device)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """In the middle of a micro-batch, around code of others; the generators are given back by whoever runs it."""
        now, others, draws = self._now, self._others, self.draws
        if draws is None:
            yield
            return
        position, self._others = draws.position, None
        try:
            yield
        finally:
            self._others, draws.position = others, position
            self._go_to_rows(now)

    def enter(self, micro_batch: int, segment: int, call: int = 0) -> None:
        """Reseed torch's generators for a segment.

        Args:
            micro_batch: index of the micro-batch in the step.
            segment: 0 before the trunk, ``1 + i`` in layer i, one past the last layer after the trunk.
            call: how often this segment of this micro-batch has been entered before.
        """
        if self.draws is not None:
            self._go_to_rows(micro_batch)
            self.draws.enter(segment, call)
        self._enter_known(self._seed_of(self._state_of(micro_batch), segment, call), segment, call)

    def enter_micro_batch(self, micro_batch: int, segments: Iterable[int] = (), *, whole: bool = False) -> None:
        """Enter segment 0 of a micro-batch; reseeds Python's and NumPy's generators too.

        Args:
            micro_batch: index of the micro-batch in the step.
            segments: segments that :meth:`enter_ahead` will enter. Hashing all seeds in a row takes a third of the
                time of hashing them one by one between layers.
            whole: whether code runs that sees the whole batch, of which layers see micro-batches.
        """
        state = self._state_of(micro_batch)
        seed = self._seed_of(state, 0)
        if self.draws is not None:
            self._check_others()
            self._go_to_rows(micro_batch, whole=whole)
            self.draws.enter(0, 0)
        self._enter_known(seed, 0)
        self._between = None
        self._seed_others(seed, 0, 0)
        self._others = states_of_others() if self.draws is not None and self.draws.splits else None
        self._ahead = {segment: self._seed_of(state, segment) for segment in segments}

    def _seed_others(self, seed: int, segment: int, call: int) -> None:
        """Reseed Python's and NumPy's generators."""
        others = seed if self._apart else self._seed_of(self._state_of(0), segment, call)
        random.seed(others)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(others & 0xFFFFFFFF)

    def _check_others(self) -> None:
        """Refuse numbers of Python's and NumPy's generators, of which nobody can tell what they are drawn for."""
        if self.draws is None or self._others is None:
            return
        for name, before, now in zip(("random", "numpy.random"), self._others, states_of_others(), strict=True):
            if before != now:
                self._others = None
                self.draws.refuse(name, "it may draw for every sample, and has no counters", "in the step")

    def _go_to_rows(self, micro_batch: int, *, whole: bool = False) -> None:
        """Say whose samples are drawn for from now on."""
        if self.draws is None:
            return
        self._now = micro_batch
        rows = self._rows[micro_batch if micro_batch < len(self._rows) else 0]
        if whole and len(self._rows) > 1:
            rows = self._rows[0]._replace(size=sum(part.size for part in self._rows))
        self.draws.rows = rows

    def resume(self, micro_batch: int) -> None:
        """Draw for the samples of a micro-batch whose backward, with its recomputations, comes now."""
        self._go_to_rows(micro_batch)

    def enter_ahead(self, segment: int) -> None:
        """Enter, for the first time in this micro-batch, one of the segments that were named."""
        if self.draws is not None:
            self.draws.enter(segment, 0)
        self._enter_known(self._ahead[segment], segment)

    def leave(self, layer: int, call: int = 0) -> None:
        """Enter what is after a layer, where that has a stream of its own."""
        if self._between is not None:
            set_others(self._between)
            self._between = None
        if self.draws is not None:
            self.enter(self._now, _BEHIND + layer, call)

    def _enter_known(self, seed: int, segment: int, call: int = 0) -> None:
        """Reseed torch's generators with a known seed."""
        if self.of_batch.is_on or self.of_batch.mentioned:  # as `may_draw`, at each layer
            self.of_batch.enter(seed, segment, call)
        if segment > 0 and self.others_in_layers and self.draws is None and not self._alike:
            self._between = self._between or all_of_others()
            self._seed_others(seed, segment, call)
        if self._alike:
            self._entered.add(seed)
        torch.default_generator.manual_seed(seed)
        if self._on_gpu:
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)

    def is_foreign(self, seed: int) -> bool:
        """Whether a generator with this seed was seeded by somebody else, in the trial that runs."""
        return self._alike and bool(self._entered) and seed not in self._entered

    def _state_of(self, micro_batch: int) -> int:
        return _state_in(self.step_state, 0 if self._alike or self.draws is not None else micro_batch)

    def _seed_for_batch(self, *place: int) -> int:
        return absorb(self._state_of(0), *place) & _MASK

    @staticmethod
    def _seed_of(state: int, segment: int, call: int = 0) -> int:
        return absorb(state, (segment << _CALL_BITS) + call) & _MASK

    def position(self) -> tuple[Any, ...]:
        """States of torch's generators (CPU, and GPU if there is one), which draw is next, and the others' states."""
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        others = (all_of_others(), self._between) if self.others_in_layers and self.draws is None else None
        return torch.get_rng_state(), cuda, None if self.draws is None else self.draws.position, others

    def drawn_since(self, position: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The present position, if anything was drawn since another one; else ``None``."""
        now = self.position()
        torch_alike = all(old is new or torch.equal(old, new) for old, new in zip(position[:2], now[:2], strict=True))
        return None if torch_alike and position[2] is now[2] else now

    def go_to(self, position: tuple[Any, ...]) -> None:
        """Restore the states that :meth:`position` returned."""
        torch.set_rng_state(position[0])
        if position[1] is not None:
            torch.cuda.set_rng_state(position[1], self._device)
        if self.draws is not None:
            self.draws.position = position[2]
        if position[3] is not None:
            others, self._between = position[3]
            set_others(others)


def state_digest() -> int:
    """Hash of the state of torch's global CPU generator, which it leaves unchanged."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK


def collect_rng_state(device: torch.device) -> dict[str, Any]:
    """States of Python's, NumPy's (if it is imported) and torch's global generators, as plain data."""
    state = current_rng_state(device)
    if "numpy" in state:
        kind, keys, *rest = state["numpy"]
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def current_rng_state(device: torch.device) -> dict[str, Any]:
    """States of Python's, NumPy's (if it is imported) and torch's global generators."""
    state = {**all_of_others(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states that :func:`collect_rng_state` returned."""
    set_others(state)
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
