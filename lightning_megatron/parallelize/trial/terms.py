"""Tries a region with the slices of every rank, in this process, and compares with the unsplit module.

The row-parallel sum is linear, so a trial needs no communication. The code between the column- and row-parallel layers
runs once per rank with that rank's slices and attributes, each run gives one term of the sum from the input of the
row-parallel layer, and the terms are added. The trial uses random weights, because freshly initialised attention hardly
depends on its queries and keys, so that a head paired with the wrong one would not be noticed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.parts.boxes import block_range
from lightning_megatron.mesh.parts.names import lies_in, parent
from lightning_megatron.parallelize.plan.blueprint import Region, ViewsInside
from lightning_megatron.parallelize.reading.copy import copy_of
from lightning_megatron.parallelize.reading.divisible import divisible, keep_features, tensors_of
from lightning_megatron.parallelize.reading.heads import slice_arguments, tensor_arguments
from lightning_megatron.parallelize.reading.kinds import is_linear, is_transposed
from lightning_megatron.parallelize.reading.low_rank import base_of, keep_outputs, linears_of, sizes_of, take
from lightning_megatron.parallelize.reading.replay import Replay
from lightning_megatron.parallelize.reading.trace import Trace, relative
from lightning_megatron.parallelize.trial.afterwards import Afterwards
from lightning_megatron.parallelize.trial.branches import LinesRun
from lightning_megatron.parallelize.trial.local_sizes import LocalSizes, by_owner, note_methods
from lightning_megatron.parallelize.trial.narrowing import Narrowing
from lightning_megatron.parallelize.trial.split_views import VIEWS, OtherViews, SplitViews
from lightning_megatron.parallelize.trial.training import (
    TOLERANCE,
    NoDropout,
    compare,
    has_numbers,
    reproducible,
    term_and_gradients,
)


@dataclass(frozen=True)
class _Share:
    """One rank's share of a proposed region."""

    region: Region
    parts: int
    rank: int


class _Reached(Exception):
    """Ends a run when the row-parallel layer is called; carries its input."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x.as_subclass(Tensor)


class Bench:
    """Runs the scope of a region with random weights, whole or with the slices of one rank.

    Args:
        region: columns and row.
        trace: a trace that ran the scope of the region.

    Attributes:
        arguments: positional and keyword arguments of the recorded call of the scope.
        whole: product of the unsplit row-parallel layer, without its bias: [.., out].
        methods: by the name of a module with columns, its methods on the way to their calls.

    Raises:
        LookupError: the scope or its row-parallel layer did not run.
        Exception: any exception of the user's code when it runs again.
    """

    def __init__(self, region: Region, trace: Trace) -> None:
        self._region = region
        self._cuts = {name: divisible(trace.calls[name].module) for name in region.members}
        kept = trace.replay(region.scope)
        self.arguments = kept.args, kept.kwargs
        self._replay = Replay(self._with_random_weights(kept.part), kept.args, kept.kwargs)
        self._weight = self._row_weight()
        self.methods: dict[str, set[str]] = {parent(name): set() for name in region.columns}
        self.whole = self._evaluated(None)
        self._trained = self._whole_training()
        self._afterwards: Afterwards | None = None

    def objection(self, candidate: Region, parts: int) -> str:
        """Why the terms of the ranks or their gradients in training do not add up to the whole; empty if they do.

        Args:
            candidate: the region with the proposed cuts, attributes and arguments.
            parts: size of the tensor group.
        """
        deviation = self._deviation(candidate, parts) or self._training_deviation(candidate, parts)
        local = candidate.attributes or candidate.narrowed is not None
        return deviation or (self._deviation_behind(candidate, parts) if local else "")

    def by_views(self, candidates: Iterable[Region], parts: int) -> Region | None:
        """The first region whose terms add up to the whole if views of the code in it are given sizes of one rank.

        Args:
            candidates: the region with each of the proposed cuts; attributes and arguments have their own values.
            parts: size of the tensor group.
        """
        for candidate, inner in itertools.product(candidates, (False, True)):
            with contextlib.suppress(Exception):  # with a wrong proposal, the user's code may fail in any way
                shown = replace(candidate, views=self._views_of(candidate, parts, inner))
                if not self.objection(shown, parts):
                    return replace(shown, tried=tensor_arguments(*self.arguments))
        return None

    def _views_of(self, candidate: Region, parts: int, inner: bool) -> SplitViews:
        """The sizes that views are given.

        Raises:
            OtherViews: the code cannot be followed.
            Exception: any exception of the user's code with the slices of one rank.
        """
        views = SplitViews(parts, max(len(cut.segments) for cut in candidate.cuts.values()), inner)
        share, lines = _Share(replace(candidate, views=views), parts, 0), LinesRun()
        for training in (False, True) if self._trained is not None else (False,):
            with torch.no_grad(), NoDropout():
                with lines:
                    self._replay.run(training=training)
                whole = functools.partial(self._term, None, lambda copied: self._show(copied, views))
                views.learn(lambda: whole(training=training), lambda: self._term(share, training=training))  # noqa: B023
        if not lines.is_complete(views.codes, VIEWS):
            raise OtherViews
        return views

    def _show(self, copied: nn.Module, views: ViewsInside) -> None:
        columns = [self._inside(copied, name) for name in self._region.columns]
        views.install(columns, self._inside(copied, self._region.row))

    def _deviation_behind(self, candidate: Region, parts: int) -> str:
        if self._afterwards is None:
            row = relative(self._region.row, self._region.scope)
            methods = {relative(owner, self._region.scope): names for owner, names in self.methods.items()}
            self._afterwards = Afterwards(self._replay, row, self._tolerance, methods)
        share = _Share(candidate, parts, 0)
        return self._afterwards.objection(lambda copied: self._localise(copied, share), *self._arguments_of(share))

    def _deviation(self, candidate: Region, parts: int) -> str:
        total = torch.zeros_like(self.whole)
        for rank in range(parts):
            try:
                term = self._evaluated(_Share(candidate, parts, rank))
            except Exception as error:  # the module's code may fail in any way with a wrong proposal
                return f"{type(error).__name__}: {error}".splitlines()[0]
            if term.shape != self.whole.shape:
                return f"the input of {candidate.row!r} has shape {tuple(term.shape)}, not {tuple(self.whole.shape)}"
            total += term
        if not has_numbers(total):
            return ""
        difference = float((total - self.whole).abs().max() / self.whole.abs().max().clamp_min(1e-30))
        if difference <= TOLERANCE.get(self.whole.dtype, 1e-4):
            return ""
        return f"{candidate.row!r} deviates from the unsharded module by {difference:.1e} (relative)"

    def _training_deviation(self, candidate: Region, parts: int) -> str:
        if self._trained is None:
            return ""
        total = [torch.zeros_like(x) for x in self._trained]
        for rank in range(parts):
            try:
                terms = self._with_gradients(_Share(candidate, parts, rank), seed=1)
                total = [sum_ + x for sum_, x in zip(total, terms, strict=True)]
            except Exception as error:
                return f"in training, {type(error).__name__}: {error}".splitlines()[0]
        worst = compare(total, self._trained, self._tolerance)
        if worst is None:
            return ""
        return f"in training, {candidate.row!r} or its gradients deviate from the unsharded module by {worst:.1e}"

    def _whole_training(self) -> list[Tensor] | None:
        """Term and gradients of the unsplit region in training; None if they cannot be compared."""
        if not has_numbers(self.whole):
            return None
        return reproducible(lambda seed: self._with_gradients(None, seed), self._tolerance)

    @property
    def _tolerance(self) -> float:
        kind, dtype = self._weight.device.type, self._weight.dtype
        lower = torch.is_autocast_enabled(kind) and dtype == torch.float32
        return TOLERANCE.get(torch.get_autocast_dtype(kind) if lower else dtype, 1e-4)

    def _inside(self, scope: nn.Module, name: str) -> nn.Module:
        """The layer ``name`` in the scope or in a copy of it."""
        return scope.get_submodule(relative(name, self._region.scope))

    def _with_random_weights(self, part: nn.Module) -> nn.Module:
        part, generator = copy_of(part), torch.Generator().manual_seed(20)
        drawn: dict[int, nn.Parameter] = {}
        members = [self._inside(part, name) for name in self._region.members]
        layers = [layer for member in members for layer in linears_of(member) if is_linear(layer)]
        for layer in [*layers, *(self._inside(part, name) for name in self._tables(self._region))]:
            for key, parameter in layer.named_parameters(recurse=False):
                fan = math.prod(parameter.shape) / max(1, _outputs(layer))
                scale = 1.5 / math.sqrt(fan) if key == "weight" else 0.5
                values = torch.randn(parameter.shape, generator=generator) * scale
                values = values.to(parameter.dtype).to(parameter.device)
                drawn[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        for layer in part.modules():
            layer._parameters.update({k: drawn[id(p)] for k, p in layer._parameters.items() if id(p) in drawn})
        for member in (self._inside(part, name) for name, cut in self._cuts.items() if cut is not None):
            for x in filter(torch.is_floating_point, tensors_of(member).values()):
                values = torch.randn(x.shape, generator=generator) / math.sqrt(x.shape[-1])
                x.data = values.to(x.device, x.dtype)
        return part

    def _row_weight(self) -> Tensor:
        """The matrix of the row-parallel layer, or one in its place: what is asked is whether its input is right."""
        row, cut = base_of(self._inside(self._replay.part, self._region.row)), self._cuts[self._region.row]
        if cut is None:
            weight = row.get_parameter("weight").detach()
            return weight.t() if is_transposed(row) else weight
        like = next(x for x in tensors_of(row).values() if x.is_floating_point())
        weight = torch.randn(cut.sizes[::-1], generator=torch.Generator().manual_seed(22)) / math.sqrt(cut.sizes[0])
        return weight.to(like.device, like.dtype)

    def _tables(self, region: Region) -> list[str]:
        """Tables inside the scope; entries of other tables reach it as an argument."""
        return [name for name in region.tables if lies_in(name, region.scope)]

    def _evaluated(self, share: _Share | None) -> Tensor:
        """Product of the row-parallel layer in evaluation, whole or the term of one rank: [.., out]."""
        with torch.no_grad():
            return self._term(share)

    def _with_gradients(self, share: _Share | None, seed: int) -> list[Tensor]:
        """The term in training, and the gradients of the columns' inputs and of the parameters inside the region."""
        leaves: list[Tensor] = []

        def watch(copied: nn.Module) -> None:
            for name in self._region.columns:
                self._inside(copied, name).register_forward_pre_hook(_begin_graph(leaves))
            inner = [relative(n, self._region.scope) for n in self._region.inner if lies_in(n, self._region.scope)]
            parameters.extend(p for p in map(copied.get_parameter, inner) if p.requires_grad)

        parameters: list[Tensor] = []
        with torch.enable_grad(), NoDropout():
            term = self._term(share, watch, training=True, seed=seed)
            return term_and_gradients(term, [*leaves, *parameters])

    def _term(
        self,
        share: _Share | None,
        watch: Callable[[nn.Module], None] | None = None,
        training: bool = False,
        seed: int = 0,
    ) -> Tensor:
        (args, kwargs), weight = self._arguments_of(share), self._weight
        if share is not None:
            start, stop = block_range(weight.shape[1], share.parts, share.rank)
            weight = weight[:, start:stop]

        def prepare(copied: nn.Module) -> None:
            if share is not None:
                self._localise(copied, share)
            else:
                self._note_methods(copied)
            if watch is not None:
                watch(copied)
            self._inside(copied, self._region.row).register_forward_pre_hook(_stop, with_kwargs=True)

        try:
            self._replay.run(prepare, args=args, kwargs=kwargs, training=training, seed=seed)
        except _Reached as reached:
            return reached.x.matmul(weight.t())
        raise LookupError(f"running {self._region.scope!r} again never called {self._region.row!r}")

    def _note_methods(self, copied: nn.Module) -> None:
        for owner, found in self.methods.items():
            columns = [self._inside(copied, name) for name in self._region.columns if parent(name) == owner]
            note_methods(self._inside(copied, owner), columns, found)

    def _arguments_of(self, share: _Share | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self.arguments
        if share is None or share.region.sizes is None:
            return args, kwargs
        heads = share.region.sizes.heads
        return slice_arguments(args, kwargs, share.region.arguments, heads, share.parts, share.rank)

    def _localise(self, copied: nn.Module, share: _Share) -> None:
        """Give a copy the slices, sizes and attributes of one rank."""
        region = share.region
        for name in region.columns:
            ranges, cut = region.cuts[name].ranges(share.parts, share.rank), self._cuts[name]
            if cut is None:
                keep_outputs(self._inside(copied, name), ranges)
            else:
                keep_features(self._inside(copied, name), cut, ranges, by_input=False)
        for name in self._tables(region):
            table = self._inside(copied, name).get_parameter("weight")
            table.data = take(table.data, 1, [block_range(table.shape[1], share.parts, share.rank)])
        for name, local in by_owner(region.attributes).items():
            LocalSizes(self._inside(copied, name), local).install([copied])
        if region.narrowed is not None:
            columns = [self._inside(copied, name) for name in region.columns]
            Narrowing(region.narrowed[1], share.parts).install(self._inside(copied, region.narrowed[0]), columns)
        if region.views is not None:
            self._show(copied, region.views)


def _stop(module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
    raise _Reached(inputs[0] if inputs else next(iter(named.values())))


def _begin_graph(leaves: list[Tensor]) -> Callable[..., Any]:
    """A hook that replaces the input of a layer by a leaf that requires a gradient, and collects it in ``leaves``."""

    def watch(module: nn.Module, args: tuple[Any, ...]) -> Any:
        leaves.append(args[0].detach().requires_grad_())
        return (leaves[-1], *args[1:])

    return watch


def _outputs(module: nn.Module) -> int:
    """Number of output features; the size of the weight divided by it is the fan-in."""
    return module.embedding_dim if isinstance(module, nn.Embedding) else sizes_of(module)[1]
