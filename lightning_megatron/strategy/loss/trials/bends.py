"""Bends of a loss at numbers of the batch, on one side of which all pieces that were tried may lie.

The loss of a batch may be the mean of those of its micro-batches in all steps that are tried, and not in others::

    (loss - b).abs() + b                flooding: with the batch above b, and one of its micro-batches below
    kl.mean().clamp(min=free)           free bits
    a if a > b else b.detach()          a condition on the batch's losses

So what bends is looked for, rather than what was bent: functions with a corner, and comparisons that decide, whose
argument is not one for each sample. Those of samples are as many for two pieces at once as for both by themselves::

    relu(1 - score)     3 samples   2 samples   at once 5        by sample
    loss.clamp(max=9)   1           1           1      < 1 + 1   of the batch

And pairs of samples, which are more for two pieces at once: a loss of those that belong together looks like a mean over
samples, as long as no two of a pair meet in what is tried::

    z @ z.T             9           4           25     > 9 + 4   of pairs
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatron.mesh.autograd import graph_behind, in_graph
from lightning_megatron.mesh.batches import tensors_of
from lightning_megatron.mesh.nested import on_filler
from lightning_megatron.mesh.torch_functions import METADATA, frame_of_caller
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step
from lightning_megatron.strategy.carried.frozen_elsewhere import line_of_freezing
from lightning_megatron.strategy.loss.trials.calls_seen import called_at, functions_called, number_of, tensors_among
from lightning_megatron.strategy.loss.trials.counting import DECIDES, ORDERS, Counting
from lightning_megatron.strategy.loss.trials.decisions import Decided, decided_at
from lightning_megatron.strategy.loss.trials.masks import Asked, Mask

_BEND = functions_called(
    *("abs", "absolute", "abs_", "clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_", "clamp_max"),
    *("clamp_max_", "relu", "relu_", "maximum", "minimum", "fmax", "fmin", "where", "masked_fill", "masked_fill_"),
    *("leaky_relu", "leaky_relu_", "threshold", "threshold_", "hardtanh", "relu6", "elu", "selu", "celu", "hardshrink"),
    *("hardswish", "hardsigmoid", "softshrink", "l1_loss", "smooth_l1_loss", "huber_loss", "hinge_embedding_loss"),
    *("margin_ranking_loss", "max", "min"),
)
_OF_TWO = functions_called("max", "min")
_SAID = {
    "corner": "the loss of `training_step` bends at a number of the batch",
    "decision": "`training_step` decides something by a number of the batch",
    "choice": "`training_step` decides something by a number of the batch",
    "count": "the loss of `training_step` counts what it finds in the batch by comparing numbers",
    "filter": "the loss of `training_step` counts what it finds in the batch by comparing numbers",
    "pairs": "the loss of `training_step` is made of pairs of samples",
}
_PRODUCTS = functions_called(
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "einsum", "cdist", "tensordot", "inner"
)


class Bend(NamedTuple):
    """A place at which a loss may bend at a number of the batch.

    Attributes:
        line: of the user's code.
        kind: a corner; a choice of what is returned; a decision that may be about what the step keeps instead; a count;
            a choice of samples in a loop, which count; pairs of samples.
        of_masks: whether it is met where masks of integers have another side than in what was tried.
    """

    line: str
    kind: Literal["corner", "choice", "decision", "count", "filter", "pairs"]
    of_masks: bool = False

    @property
    def counts(self) -> bool:
        """Whether it is about how many samples the loss is a mean of."""
        return self.kind in ("count", "filter")

    def __str__(self) -> str:
        return f"{_SAID[self.kind]} ({self.line})"


@dataclass
class _Met:
    """One bend in a piece."""

    entries: int = 0
    values: list[float] = field(default_factory=list)
    masks: frozenset[Mask] = frozenset()


class Bends(TorchFunctionMode):
    """Notes those that a step meets in a piece of a batch; around its run.

    Args:
        module: the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._nodes: list[tuple[Any, Bend, int, float]] = []
        self._compared: list[tuple[Tensor, Asked]] = []
        self._pieces: dict[int, dict[Bend, _Met]] = {}
        self._met: dict[Bend, _Met] = {}
        self._counting = Counting(module, self._note_decision)

    @functools.cached_property
    def _freezes(self) -> bool:
        """Whether code of the step sets which parameters are trained."""
        return bool(line_of_freezing(functions_of_step(self._module)))

    @property
    def constants(self) -> set[int]:
        """Integers that the step compares those of a batch with, in all pieces so far."""
        return self._counting.constants

    @property
    def tables(self) -> list[Tensor]:
        """Tensors of the module by which it weighs classes, or looks them up."""
        return self._counting.tables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if on_filler:
            return found
        if func in _BEND and isinstance(found, Tensor) and in_graph(found):
            self._note(func, found, [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)])
        elif isinstance(found, Tensor) and in_graph(found) and found.ndim > 1 and func not in METADATA:
            self._note_pairs(func, found, args)
        elif func in ORDERS and isinstance(found, Tensor) and found.numel() == 1:
            self._note_compared(func, found, args)
        elif func in DECIDES and self._compared:
            self._note_decided(args[0])
        with torch._C.DisableTorchFunction():
            return self._counting.note(func, found, args, kwargs)

    def begin(self, piece: int) -> Self:
        """Before the run of a piece, of which a rank with several stages has several.

        Args:
            piece: its number.
        """
        self._met = self._pieces.setdefault(piece, {})
        return self

    def __enter__(self) -> Any:
        self._nodes, self._compared = [], []
        self._counting.begin()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is not None:  # where a stage ends its run; the graph goes
            self.end()

    def end(self, output: Any = None) -> None:
        """After it: of what bends, that remains from which the loss was computed.

        A stage that ends before the loss tells all: it does not know what of it goes on to the loss.

        Args:
            output: of the step, with its graph; ``None`` where a stage has ended its run.
        """
        loss = output.get("loss") if isinstance(output, Mapping) else output
        nodes: dict[Any, list[tuple[Bend, Asked]]] = {}
        for node, bend, entries, value in self._nodes:
            nodes.setdefault(node, []).append((bend, Asked(bend.line, entries, value)))
        for node, asked in self._counting.met():
            nodes.setdefault(node, []).append((Bend(asked.line, "count", bool(asked.masks)), asked))
            nodes[node].append((Bend(asked.line, "pairs"), Asked(asked.line, asked.size, asked.value)))
        behind = graph_behind([loss.grad_fn] if nodes else ()) if isinstance(loss, Tensor) else list(nodes)
        for node in behind:
            for each in nodes.get(node, ()):
                self._add(*each)
        self._nodes, self._compared = [], []
        self._counting.end()

    def take_batch(self, batch: Any) -> None:
        """Take note of what a run is given.

        Args:
            batch: as the step gets it.
        """
        with torch._C.DisableTorchFunction():
            self._counting.take_batch(tensors_of(batch))

    @property
    def told_masks(self) -> frozenset[str]:
        """Masks that were met both ways."""
        return frozenset(self._counting.seen.told)

    def of_batch(self, both: int, parts: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[Bend, frozenset[Mask]]]:
        """Those that the pieces have once together, and not each its own, and the masks that they are made of.

        Args:
            both: number of a piece.
            parts: of those that it consists of.
            sizes: samples of every piece.
        """
        if not all(piece in self._pieces for piece in (both, *parts)):
            return
        for bend, met in self._pieces[both].items():
            each = [self._pieces[part].get(bend, _Met()) for part in parts]
            masks = met.masks.union(*(one.masks for one in each))
            if bend.kind == "filter":  # a loop over experts that are met has turns as well
                shares = {len(one.values) / sizes[at] for one, at in zip((met, *each), (both, *parts), strict=True)}
                if len(shares) == 1 and shares.pop() % 1 == 0:
                    yield bend, masks
                continue
            if bend.kind == "pairs":
                if _grows_as_pairs(met.entries, [one.entries for one in each], [sizes[part] for part in parts]):
                    yield bend, masks
                continue
            fewer = 0 < met.entries < sum(one.entries for one in each)
            if fewer and (any(one.values != met.values for one in each) or not any(met.values)):
                yield bend, masks  # numbers that are zero may be of few samples

    def _note(self, func: Any, found: Tensor, tensors: Sequence[Tensor]) -> None:
        if func in _OF_TWO and len(tensors) < 2:  # over entries
            return
        with torch._C.DisableTorchFunction():
            value = sum(number_of(tensor) for tensor in tensors)
        entries = max(tensor.numel() for tensor in (found, *tensors))
        self._nodes.append((found.grad_fn, Bend(called_at(func), "corner"), entries, value))

    def _note_pairs(self, func: Any, found: Tensor, args: Sequence[Any]) -> None:
        """Note how many numbers are made of two tensors."""
        given = [each for each in tensors_among(args) if not _is_weight(each)]
        if len(given) < 2 and func not in _PRODUCTS:
            return
        if func in _PRODUCTS or found.numel() >= max(each.numel() for each in given):
            self._nodes.append((found.grad_fn, Bend(called_at(func), "pairs"), found.numel(), 0.0))

    def _note_compared(self, func: Any, found: Tensor, args: Sequence[Any]) -> None:
        """Note a comparison, but for those of counts with whole numbers, and of weights alone."""
        numbers = [each for each in args if isinstance(each, Tensor) and each.is_floating_point()]
        if all(isinstance(each, nn.Parameter) for each in numbers):
            return
        with torch._C.DisableTorchFunction():
            values = [number_of(tensor) for tensor in numbers]
            limits = [float(each) for each in args if isinstance(each, (int, float))]
            counts = all(value.is_integer() for value in (*values, *limits))
            if any(each.requires_grad for each in numbers) or not counts:
                self._compared.append((found, Asked(called_at(func), 1, sum(values))))

    def _note_decided(self, asked: Any) -> None:
        for found, number in self._compared:
            if found is asked:
                self._note_decision(number, decided_at(frame_of_caller()))

    def _note_decision(self, asked: Asked, kind: Decided) -> None:
        if kind == "decision" and self._freezes:
            kind = "choice"
        if kind:
            self._add(Bend(asked.line, kind, bool(asked.masks)), asked)

    def _add(self, bend: Bend, asked: Asked) -> None:
        met = self._met.setdefault(bend, _Met())
        met.entries = max(met.entries, asked.entries) if bend.kind == "pairs" else met.entries + asked.entries
        met.values.append(asked.value)
        met.masks |= asked.masks


def _grows_as_pairs(both: int, parts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether numbers of two parts at once are rather those of pairs of samples than those of samples.

    Rows that experts were sent do not add up to the same either, as they are dealt out to several ranks.

    Args:
        both: numbers of them at once.
        parts: of each.
        sizes: samples of each.
    """
    pairs = sum(sizes) ** 2 / sum(size**2 for size in sizes)  # times those of the parts
    return all(parts) and both > sum(parts) * (1 + (pairs - 1) * 0.7)


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter, or a part of one."""
    with torch._C.DisableTorchFunction():
        return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
