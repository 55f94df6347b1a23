"""Tries a region on every rank's part, in this process, and compares with the unsharded module.

The row-parallel sum is linear, so nothing has to be sent to try a plan: the code between the column- and the
row-parallel layers is run once per rank with that rank's weights and attributes, each run's term of the sum is
taken where it enters the row-parallel layer, and the terms are added. The weights are random for the occasion,
because freshly initialised attention hardly depends on its queries and keys, and would hide a head paired with the
wrong one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_megatron.mesh.parts.boxes import block_range
from lightning_megatron.mesh.parts.names import parent
from lightning_megatron.parallelize.pairs.regions import Region, holder_of
from lightning_megatron.parallelize.reading.attention import ColumnCut, HeadSizes, local_attributes
from lightning_megatron.parallelize.reading.inputs import BATCH
from lightning_megatron.parallelize.reading.kinds import is_transposed, linear_sizes
from lightning_megatron.parallelize.reading.trace import Call, Trace, fresh, quiet_fast_paths
from lightning_megatron.parallelize.swap.narrowing import Narrowing
from lightning_megatron.parallelize.trial.training import (
    compare,
    reproducible,
    term_and_gradients,
    training,
    watched_inputs,
)

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class _Reached(Exception):
    """The row-parallel layer was called; carries its input."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


def settle(
    module: nn.Module, region: Region, trace: Trace, parts: int, packed: bool | None
) -> tuple[Region | None, str]:
    """The region with cuts, attributes and arguments chosen so that the ranks' terms add up to the whole.

    Args:
        module: the traced module.
        region: columns and row; its cuts are a first proposal.
        trace: a trace that ran the region's scope.
        parts: size of the tensor group.
        packed: whether columns hold packed parts; None to try both.

    Returns:
        The settled region, or None and the reason why the last proposal failed.
    """
    reason, closest = "no way to cut it divides evenly", None
    if region.scope not in trace.calls or region.row not in trace.calls:
        return None, "it did not run on the tiny input"
    with _Bench(module, region, trace) as bench:
        try:
            whole = bench.output(None)
        except Exception as error:  # code that remembers something between calls, a cache for one
            return None, f"its code cannot be run again ({type(error).__name__}: {error})".splitlines()[0]
        trained = bench.trained()
        for cuts in proposals(module, region, parts, packed):
            for candidate in _candidates(module, region, cuts, parts, trace):
                worst = bench.deviation(candidate, parts, whole)
                if worst is None and trained is not None:
                    closest = worst = bench.training_deviation(candidate, parts, trained)
                if worst is None:
                    call = trace.calls[region.scope]
                    return replace(candidate, tried=tensor_arguments(call.args, call.kwargs)), ""
                reason = closest or worst
    return None, reason


def proposals(module: nn.Module, region: Region, parts: int, packed: bool | None) -> Iterator[dict[str, ColumnCut]]:
    """Ways to cut the columns, the plainest first."""
    outs = {name: linear_sizes(module.get_submodule(name))[1] for name in region.columns}
    found: list[dict[str, ColumnCut]] = []
    if not packed:
        found.append({name: ColumnCut.blocks(out) for name, out in outs.items()})
        if region.sizes is not None:
            found.insert(0, {name: _by_heads(out, region.sizes, parts) for name, out in outs.items()})
    if packed is not False:
        if region.sizes is not None and len(outs) == 1:
            found += [{n: cut} for n, out in outs.items() if (cut := _fused(out, region.sizes, parts)) is not None]
        inner = linear_sizes(module.get_submodule(region.row))[0]
        found += [{n: ColumnCut.blocks(*([out] if out == inner else [out // 2] * 2)) for n, out in outs.items()}]
        found += [
            {name: ColumnCut.blocks(*[out // n] * n) for name, out in outs.items()}
            for n in (2, 3)
            if all(out % n == 0 for out in outs.values())
        ]
    for i, cuts in enumerate(found):
        if (
            cuts not in found[:i]
            and all(sum(cuts[n].segments) == out for n, out in outs.items())
            and all(cut.fits(parts) for cut in cuts.values())
        ):
            yield cuts


def _by_heads(out: int, sizes: HeadSizes, parts: int) -> ColumnCut:
    """A projection of its own: key/value heads that do not divide are chosen, everything else is cut."""
    scarce = sizes.key_value != sizes.heads and sizes.key_value % parts != 0
    if scarce and out == sizes.key_value * sizes.size:
        return ColumnCut((out,), (True,), sizes)
    return ColumnCut.blocks(out)


def _fused(out: int, sizes: HeadSizes, parts: int) -> ColumnCut | None:
    """Query, key and value one after the other in one projection."""
    query, narrow = sizes.heads * sizes.size, sizes.key_value * sizes.size
    if out != query + 2 * narrow:
        return None
    scarce = sizes.key_value % parts != 0
    return ColumnCut((query, narrow, narrow), (False, scarce, scarce), sizes if scarce else None)


def _candidates(
    module: nn.Module, region: Region, cuts: dict[str, ColumnCut], parts: int, trace: Trace
) -> Iterator[Region]:
    call, holder = trace.calls[region.scope], holder_of(trace, region)
    arguments = {} if region.sizes is None else head_arguments(call, region.sizes.heads)
    choices = [{}, arguments, *({key: way} for key, way in arguments.items())]  # a batch may be as large as the heads
    owners = {parent(name): module.get_submodule(parent(name)) for name in region.columns}
    widths = {linear_sizes(module.get_submodule(region.row))[0]}
    for cut in cuts.values():
        widths |= {size for size, chosen in zip(cut.segments, cut.chosen, strict=True) if not chosen}
    read = len(region.sizes.read_by(parts, 0)) if region.sizes is not None else 1
    for narrowed in (None, holder) if holder is not None else (None,):
        for attributes in local_attributes(owners, region.sizes, widths, parts, read):
            for chosen in [c for i, c in enumerate(choices) if c not in choices[:i]]:
                yield replace(region, cuts=cuts, attributes=attributes, arguments=chosen, narrowed=narrowed)


class _Bench:
    """Replays a region's scope with parts of random weights."""

    def __init__(self, module: nn.Module, region: Region, trace: Trace) -> None:
        self._module = module
        self._region = region
        self._call: Call = trace.calls[region.scope]
        self._row = module.get_submodule(region.row)
        self._saved: dict[nn.Parameter, Tensor] = {}
        self._random: dict[nn.Parameter, Tensor] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Bench:
        generator = torch.Generator().manual_seed(20)
        for name in [*self._region.members, *self._region.tables]:
            for key, parameter in self._module.get_submodule(name).named_parameters(recurse=False):
                fan = math.prod(parameter.shape) / max(1, linear_fan(self._module.get_submodule(name)))
                values = torch.randn(parameter.shape, generator=generator) * (
                    1.5 / math.sqrt(fan) if key == "weight" else 0.5
                )
                self._saved[parameter] = parameter.data
                self._random[parameter] = values.to(parameter.dtype).to(parameter.device)
        self._stack.enter_context(torch.no_grad())
        self._stack.enter_context(torch.random.fork_rng(devices=[]))
        self._stack.enter_context(quiet_fast_paths())
        return self

    def __exit__(self, *error: Any) -> None:
        for parameter, data in self._saved.items():
            parameter.data = data
        self._stack.close()

    def output(self, part: tuple[Region, int, int] | None) -> Tensor:
        """Product of the row-parallel layer, whole or one rank's term (candidate, parts, rank), without its bias."""
        modes = {m: m.training for m in self._call.module.modules()}
        try:
            for m in modes:
                m.training = False
            return self._term(part, [])
        finally:
            for m, mode in modes.items():
                m.training = mode

    def trained(self) -> list[Tensor] | None:
        """The same in training, with gradients (see `_with_gradients`); None where that cannot be compared."""
        return reproducible(lambda seed: self._with_gradients(None, seed), self._tolerance)

    def training_deviation(self, candidate: Region, parts: int, whole: list[Tensor]) -> str | None:
        """None if terms and gradients of the ranks add up to ``whole`` in training, else what happened."""
        total = [torch.zeros_like(x) for x in whole]
        for rank in range(parts):
            try:
                terms = self._with_gradients((candidate, parts, rank), seed=1)
                total = [sum_ + x for sum_, x in zip(total, terms, strict=True)]
            except Exception as error:
                return f"in training, {type(error).__name__}: {error}".splitlines()[0]
        worst = compare(total, whole, self._tolerance)
        if worst is None:
            return None
        return f"in training, {candidate.row!r} or its gradients deviate from the unsharded module by {worst:.1e}"

    @property
    def _tolerance(self) -> float:
        weight = self._row.get_parameter("weight")
        kind = weight.device.type
        lower = torch.is_autocast_enabled(kind) and weight.dtype == torch.float32
        return TOLERANCE.get(torch.get_autocast_dtype(kind) if lower else weight.dtype, 1e-4)

    def _with_gradients(self, part: tuple[Region, int, int] | None, seed: int) -> list[Tensor]:
        """The term, and gradients of what the columns read and of the parameters inside the region."""
        columns = [self._module.get_submodule(name) for name in self._region.columns]
        inner = [p for p in map(self._module.get_parameter, self._region.inner) if p.requires_grad]
        with training(self._call.module, seed):
            leaves: list[Tensor] = []
            term = self._term(part, columns, leaves)
            return term_and_gradients(term, [*leaves, *inner])

    def _term(
        self, part: tuple[Region, int, int] | None, watched: Sequence[nn.Module], leaves: list[Tensor] | None = None
    ) -> Tensor:
        for parameter, values in self._random.items():
            parameter.data = values
        weight = self._random[self._row.get_parameter("weight")]  # type: ignore[index]
        weight = weight.t() if is_transposed(self._row) else weight
        with contextlib.ExitStack() as stack:
            call = self._call
            args, kwargs = call.args, call.kwargs
            if part is not None:
                region, parts, rank = part
                weight = weight[:, slice(*block_range(weight.shape[1], parts, rank))]
                stack.enter_context(self._local(region, parts, rank))
                if region.sizes is not None:
                    args, kwargs = slice_arguments(args, kwargs, region.arguments, region.sizes.heads, parts, rank)
            stack.enter_context(watched_inputs(watched, leaves if leaves is not None else []))
            return self._input_of_row(args, kwargs).matmul(weight.t())

    def deviation(self, candidate: Region, parts: int, whole: Tensor) -> str | None:
        """None if the ranks' terms add up to ``whole``, else what happened."""
        total = torch.zeros_like(whole)
        for rank in range(parts):
            try:
                term = self.output((candidate, parts, rank))
            except Exception as error:  # a wrong proposal may fail in any way inside the module's own code
                return f"{type(error).__name__}: {error}".splitlines()[0]
            if term.shape != whole.shape:
                return f"the input of {candidate.row!r} has shape {tuple(term.shape)}, not {tuple(whole.shape)}"
            total += term
        difference = float((total - whole).abs().max() / whole.abs().max().clamp_min(1e-30))
        if difference <= TOLERANCE.get(whole.dtype, 1e-4):
            return None
        return f"{candidate.row!r} deviates from the unsharded module by {difference:.1e} (relative)"

    def _input_of_row(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        def stop(module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            raise _Reached(inputs[0] if inputs else next(iter(named.values())))

        handle = self._row.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._call.module(*tree_map(fresh, args), **tree_map(fresh, kwargs))
        except _Reached as reached:
            return reached.x
        finally:
            handle.remove()
        raise RuntimeError(f"replaying {self._region.scope!r} never called {self._region.row!r}")

    @contextlib.contextmanager
    def _local(self, region: Region, parts: int, rank: int) -> Iterator[None]:
        """One rank's weights, sizes and attributes for a while."""
        kept: list[tuple[Any, str, Any]] = []
        hooks: list[Any] = []

        def put(owner: Any, name: str, value: Any) -> None:
            kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

        try:
            for name in region.columns:
                layer = self._module.get_submodule(name)
                ranges = region.cuts[name].ranges(parts, rank)
                for key, parameter in layer.named_parameters(recurse=False):
                    dim = 1 if is_transposed(layer) and key == "weight" else 0
                    parameter.data = _take(parameter.data, dim, ranges)
                if is_transposed(layer):
                    put(layer, "nf", sum(stop - start for start, stop in ranges))
            for name in region.tables:
                table = self._module.get_submodule(name).get_parameter("weight")
                table.data = _take(table.data, 1, [block_range(table.shape[1], parts, rank)])
            for (name, attribute), value in region.attributes.items():
                put(self._module.get_submodule(name), attribute, value)
            if region.narrowed is not None:
                columns = [self._module.get_submodule(name) for name in region.columns]
                hooks += Narrowing(region.narrowed[1], parts).install(
                    self._module.get_submodule(region.narrowed[0]), columns
                )
            yield
        finally:
            for handle in hooks:
                handle.remove()
            for owner, name, value in reversed(kept):
                setattr(owner, name, value)


def linear_fan(module: nn.Module) -> int:
    """Number of outputs, by which a weight's size is divided to give its fan-in."""
    return module.embedding_dim if isinstance(module, nn.Embedding) else linear_sizes(module)[1]


def head_arguments(call: Call, heads: int) -> dict[int | str, str]:
    """Arguments of a recorded call that hold one entry per head, and in which way."""
    found: dict[int | str, str] = {}
    named: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    for key, value in named:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 3:
            continue
        if value.shape[-3] == heads:
            found[key] = "heads"
        elif value.dim() == 3 and value.shape[0] == BATCH * heads:
            found[key] = "batch"
    return found


def tensor_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int | str]:
    """Positions and keywords of the arguments that are tensors."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return frozenset(key for key, value in named if isinstance(value, Tensor))


def slice_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], which: dict[int | str, str], heads: int, parts: int, rank: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with one entry per head, cut to one rank's heads; those that are local already pass.

    ``"heads"``: [.., heads, queries, keys] is cut along that dim; ``"batch"``: [batch * heads, ..] within the first.
    """
    start, stop = block_range(heads, parts, rank)

    def cut(key: int | str, value: Any) -> Any:
        if key not in which or not isinstance(value, Tensor):
            return value
        if which[key] == "batch":
            return value.unflatten(0, (-1, heads))[:, start:stop].flatten(0, 1)
        return value.narrow(-3, start, stop - start) if value.shape[-3] == heads else value

    return tuple(cut(i, v) for i, v in enumerate(args)), {k: cut(k, v) for k, v in kwargs.items()}


def _take(tensor: Tensor, dim: int, ranges: Any) -> Tensor:
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)
