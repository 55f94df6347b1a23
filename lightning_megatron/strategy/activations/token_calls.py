"""Layers that keep the activations of some of their tokens in host memory, and recompute those of the others.

MEMO (arXiv 2407.12117): of what a layer saves, its input and the outputs of attention are kept for all tokens, in host
memory. Of the rest, a share of the *tokens* is kept there; the backward recomputes the other tokens, for which
attention returns the outputs kept. So attention, whose work grows with the square of the length, runs once::

    tokens      0 ... k-1                k ... n-1
    forward     run                      run
    kept        input, attention's o, everything else    input, attention's o
    backward    fetched                  run again by themselves: norms, linears, activations; o is given

The layer's own forward is what runs again, on a tensor of all tokens' shape that stores some rows (`.token_rows`). The
first call of each kind runs it so and compares each saved tensor's numbers: a layer that does not treat its tokens
alike is refused there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.context_parallel.rules.token_views import split_of
from lightning_megatron.context_parallel.token_shards import TokenShards
from lightning_megatron.layers.whole import NeedsWhole, WholeTensor
from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.key_value_caches import with_own_caches
from lightning_megatron.pipeline.elsewhere.abstract import is_ordinary
from lightning_megatron.pipeline.forwards.seen_state import SeenState, StatefulForward
from lightning_megatron.pipeline.forwards.weight_gradients import puts_off
from lightning_megatron.strategy.activations.generator_states import differs, random_as, random_state, set_random_state
from lightning_megatron.strategy.activations.host_budget import HostBudget
from lightning_megatron.strategy.activations.host_copies import KeptCall, Traffic, View, form_of, memory_of
from lightning_megatron.strategy.activations.layer_calls import HostCall, tensors_in
from lightning_megatron.strategy.activations.scores import GivenScores, KeptScores
from lightning_megatron.strategy.activations.stopwatch import Stopwatch
from lightning_megatron.strategy.activations.token_parts import Core, HostPart, UnplacedTensor, key_of, sizes_of
from lightning_megatron.strategy.activations.token_places import (
    TokenPlace,
    dense,
    empty_like,
    flat_as,
    is_flat,
    place_in,
    unrepeated,
)
from lightning_megatron.strategy.activations.token_rows import LayerScope, RowShards, later_runs, rows_of_input


class TokenCall(HostCall):
    """Runs a layer's forward, and again on some of its tokens.

    Args:
        module: the layer.
        name: its name.
        traffic: counts, and copies.
        budget: says how many of the tokens are kept.
    """

    def __init__(self, module: nn.Module, name: str, traffic: Traffic, budget: HostBudget) -> None:
        super().__init__(module, name, traffic, budget)
        self.name, self.traffic, self.budget = name, traffic, budget
        self.state = StatefulForward(module)
        self.learned: dict[Any, list[TokenPlace | None]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or in_backward():
            return self.forward(*args, **kwargs)
        args, kwargs = with_own_caches(args, kwargs)
        x = next(iter(tensors_in(args, kwargs)), None)
        scope = LayerScope(self.name, f"activation_offload={self.budget.option}")
        if x is None or not x.is_floating_point() or x.ndim != 3 or not (is_ordinary(x) or type(x) is TokenShards):
            told = None if x is None else f"{type(x).__name__} {tuple(x.shape)}"
            scope.refuse(f"the first of what it is given is {told}, not [batch, tokens, features]")
        run = _Run(self, args, kwargs, x, scope)
        whole = run.first >= run.rows and not run.measures
        return super().__call__(*args, **kwargs) if whole else run.forward()


class _Run:
    """One call of a layer."""

    def __init__(self, owner: TokenCall, args: Any, kwargs: Any, x: Any, scope: LayerScope) -> None:
        self.owner, self.given, self.x, self.own_scope = owner, (args, kwargs), x, scope
        self.scope: Any = scope
        inner = [part.batch_first for part in owner.module.modules() if isinstance(part, nn.MultiheadAttention)]
        self.dim, local = int(not inner or inner[0]), x
        if isinstance(x, TokenShards):
            self.dim, local, self.scope = x.along, x.local(), split_of(x).scope
        self.length, self.rows = x.shape[self.dim], local.shape[self.dim]
        self.runs = split_of(x).mine if isinstance(x, TokenShards) else ((0, self.rows),)
        self.measures = self.rows > 2 and owner.budget.wants(owner.name, local.nbytes)
        self.cores: list[Core] = []
        self.inside: tuple[int, tuple[Any, ...]] | None = None
        self.count = self.waiting = 0  # tensors saved outside of attention; those with tokens not asked for yet
        self.parts: dict[Any, HostPart] = {}
        self.boxes: list[UnplacedTensor] = []
        times = self.measures and owner.budget.bytes_per_second != math.inf
        self.clock = Stopwatch(local.device) if times else None
        self.saved: dict[Any, Tensor] = {}
        self.again: dict[Any, Tensor] | None = None
        self.seen, self.drew = SeenState(), False
        kind = local.device.type
        self.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.local, self.device, self.needs_gradient = local, local.device, local.requires_grad

    @property
    def first(self) -> int:
        """The tokens before this one are kept. A single one is never run by itself: layers drop its dim in places."""
        count = math.ceil(self.owner.budget.share * self.rows - 1e-9)
        return self.rows if self.rows < 3 else self.rows - 2 if count == self.rows - 1 else count

    def forward(self) -> Any:
        owner, (args, kwargs) = self.owner, self.given
        inputs = [x.local() if isinstance(x, WholeTensor) else x for x in tensors_in(args, kwargs)]
        self.call = KeptCall(owner.name, owner.traffic, owner.staying(inputs))
        self.input, self.memory = self.call.whole(self.local, "input"), memory_of(self.local)
        key, shown, before = self._kind(), self.x, self.scope.attention
        self.places = None if self.measures else owner.learned.get(key)
        self.input.copy.uses += self.places is not None
        if not isinstance(shown, WholeTensor):
            shown = rows_of_input(shown, self.dim, self.length, self.runs, self.scope)
        args, kwargs = tree_map(lambda value: shown if value is self.x else value, self.given)
        self.given = tree_map(lambda value: _INPUT if value is self.x else value, self.given)
        self.start, self.scope.attention = random_state(self.device), self._attend
        clock: Any = self.clock or nullcontext()
        try:
            with saved_tensors_hooks(self._pack, self._unpack), KeptScores(self._inside, self._keep), clock:
                found = owner.state.run(self.seen, owner.forward, *args, **kwargs)
        finally:
            self.scope.attention = before
        self.drew = differs(self.start, random_state(self.device))
        if self.places is None:
            owner.learned[key] = places = self._learn()
            self._shorten(places)
        del self.x, self.local, self.saved
        return tree_map(lambda value: value.local() if isinstance(value, RowShards) else value, found)

    def _kind(self) -> Any:
        """Key of a call: equal for calls that save tensors alike."""
        told = [_told(leaf) for leaf in tree_leaves(self.given)]
        split, module = isinstance(self.x, TokenShards), self.owner.module
        return (*told, module.training, self.autocast._enabled, split, puts_off(module))

    # -- forward

    def _attend(self, rule: Callable[..., Any], func: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
        """Attention of all tokens, whose output is kept."""
        operands = query, key, value
        split = tuple(isinstance(x, WholeTensor) and x.along == x.ndim - 2 for x in operands)
        if any(isinstance(x, WholeTensor) and not tokens for x, tokens in zip(operands, split, strict=True)):
            self.own_scope.refuse("attention is given keys or values whose tokens are not their last dim but one")
        local = tuple(x.local() if isinstance(x, WholeTensor) else x for x in operands)
        self.scope.attention = None
        try:
            dims = [-2 if tokens else None for tokens in split]
            found = self._inside(
                lambda: self._around(rule, func, operands, local, options), *zip(local, dims, strict=True), split=split
            )
        finally:
            self.scope.attention = self._attend
        self._keep(found)
        return found

    def _inside(
        self, run: Callable[[], Any], *operands: tuple[Tensor, int | None], split: tuple[bool, ...] = ()
    ) -> Any:
        """Call ``run``, of which all that is saved belongs to attention; operands come with the dim of their tokens."""
        self.inside = len(self.cores), operands
        before = random_state(self.device)
        try:
            found = run()
        finally:
            self.inside = None
        now = random_state(self.device)
        self.cores.append(Core(None, split=split, after=now if differs(before, now) else None))
        return found

    def _keep(self, found: WholeTensor) -> None:
        """Keep what attention gives."""
        view = self.call.whole(found.local(), "attention")
        view.copy.uses += self.places is not None
        self.cores.append(Core(view, memory_of(found.local())))

    def _around(self, rule: Callable[..., Any], func: Any, operands: Any, local: Any, options: Any) -> Any:
        if isinstance(options["attn_mask"], WholeTensor):
            self.own_scope.refuse("the mask of attention is computed from the tokens")
        if isinstance(operands[0], RowShards):
            return operands[0].like(func(*local, **options))
        try:
            return rule(func, *operands, **options)
        except NeedsWhole:
            self.own_scope.refuse("attention gathers all tokens, as it does with dropout")

    def _pack(self, tensor: Tensor) -> Any:
        with nullcontext() if self.clock is None else self.clock.stopped():
            return self._packed(tensor)

    def _packed(self, tensor: Tensor) -> Any:
        index = self.count
        self.count += self.inside is None
        if self.call.stays(tensor):
            return tensor
        if self.inside is not None:
            source, place, kind = self._of_core(tensor, *self.inside)
        else:
            memory = memory_of(tensor)
            kind = "attention" if any(memory == core.memory for core in self.cores) else "other"
            kind = "input" if memory == self.memory else kind
            source, place = index, None
            if kind == "other" and self.places is not None and index < len(self.places):
                place = self.places[index]
        if place is None or self.places is None:
            view = self.call.whole(tensor, kind)
            view.copy.uses += 1
            if self.places is not None or source is None:
                return view
            self.saved[source] = tensor.detach()
            self.boxes.append(UnplacedTensor(view, source, place, kind))
            return self.boxes[-1]
        return self._part(tensor, place, source)

    def _of_core(self, tensor: Tensor, index: int, operands: tuple[Any, ...]) -> tuple[Any, TokenPlace | None, str]:
        """The operand of attention that a saved tensor is."""
        if memory_of(tensor) == self.memory:
            return None, None, "input"
        for which, (operand, dim) in enumerate(operands):
            if dim is None or memory_of(tensor) != memory_of(operand) or tensor.dtype != operand.dtype:
                continue
            if form_of(tensor) == form_of(operand) or is_flat(tensor, operand):
                return (index, which), TokenPlace(tensor.ndim + dim), "other"
        return None, None, "attention"

    def _part(self, tensor: Tensor, place: TokenPlace, source: Any) -> HostPart:
        key = key_of(tensor)
        if key not in self.parts:
            copy, once = None, unrepeated(tensor.detach(), place.dim)
            if self.first:
                copy = self.call.copied(place.rows(once, self.rows, 0, self.first).clone(), "other")
            self.call.remember(tensor)
            self.parts[key] = HostPart(copy, (once.dtype, once.shape, once.stride()), tensor.shape, place, source)
        part = self.parts[key]
        self.waiting += 1
        if part.copy is not None:
            part.copy.uses += 1
        return part

    # -- backward

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self.call.fetch()
        kept = kept.kept if isinstance(kept, UnplacedTensor) else kept
        return kept.get() if isinstance(kept, View) else self._joined(kept)

    def _joined(self, part: HostPart) -> Tensor:
        if self.again is None:
            self.again = self._run_again(self.first)
            self.owner.traffic.replayed[self.owner.name] = self.rows - self.first, self.rows
        later = self.again[part.source]
        later = later if isinstance(part.source, int) else flat_as(later, part.size)
        self.waiting -= 1
        if self.waiting <= 0:
            self.again = None
        dtype, size, stride = part.form
        if part.copy is None:
            return later
        found = empty_like(dtype, size, stride, self.device)
        host = part.copy.get()
        part.place.rows(found, self.rows, 0, self.first).copy_(host)
        part.place.fill(found, self.rows, self.first, later)
        return found.expand(part.size)

    def _run_again(self, first: int) -> dict[Any, Tensor]:
        """Run the layer on the rows from ``first`` on; returns what it saves."""
        owner, found, met = self.owner, dict[Any, Tensor](), [0, 0]
        wanted = None if self.places is None else {part.source for part in self.parts.values()}
        whole = self.input.get().detach()
        runs = later_runs(self.runs, first)

        def pack(tensor: Tensor) -> Tensor:
            if wanted is None or met[0] in wanted:
                found[met[0]] = tensor.detach()
            met[0] += 1
            return tensor.detach()  # this graph has no backward: see `saved_values`

        def record(which: int, rows: Tensor) -> None:
            found[met[1], which] = rows.detach()

        def given(model: Any) -> Any:
            if met[1] >= len(self.cores) or (self.cores[met[1]].output is None) != (model is None):
                self.own_scope.refuse("attention is called in another order than with all tokens")
            core = self.cores[met[1]]
            met[1] += 1
            if core.after is not None:
                set_random_state(core.after, self.device)
            if core.output is None:
                return None
            output = core.output.get().detach()
            rows = dense(output.narrow(model.along, first, self.rows - first))
            return model.like(rows.requires_grad_(rows.is_floating_point()))

        def answer(rule: Any, func: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
            split = self.cores[met[1]].split if met[1] < len(self.cores) else ()
            for which, operand in enumerate((query, key, value)[: len(split)]):
                if split[which]:
                    record(which, operand.local())
            given(None)
            return given(query)

        scope, hooks = LayerScope(owner.name, self.own_scope.given, answer), (pack, lambda kept: kept)
        scope.hooks, scores = hooks, GivenScores(scope, self.device, record, given)
        with (
            torch.enable_grad(),
            self.autocast,
            random_as(self.start if self.drew else None, self.device),
            saved_tensors_hooks(*hooks),
            scores,
        ):
            args, kwargs = tree_map(lambda value: self._later(value, whole, first, runs, scope), self.given)
            owner.state.again(self.seen, owner.forward, *args, **kwargs)
        if met != [self.count, len(self.cores)]:
            self.own_scope.refuse(
                f"{met[0]} tensors are saved and {met[1]} calls of attention made, where there were {self.count} and "
                f"{len(self.cores)} with all tokens"
            )
        return found

    def _later(self, value: Any, whole: Tensor, first: int, runs: Any, scope: LayerScope) -> Any:
        """An argument of the layer for a run on the rows from ``first`` on."""
        if value is _INPUT:
            rows = dense(whole.narrow(self.dim, first, self.rows - first).requires_grad_(self.needs_gradient))
            return rows_of_input(rows, self.dim, self.length, runs, scope)
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, WholeTensor):
            return value.detach().requires_grad_(value.requires_grad)
        if value.along != self.dim or value.local().shape[self.dim] != self.rows:
            self.own_scope.refuse("it is given another tensor of tokens than its input, of another length")
        rows = value.local().detach().narrow(self.dim, first, self.rows - first).requires_grad_(value.requires_grad)
        return rows_of_input(dense(rows), self.dim, self.length, runs, scope)

    def _learn(self) -> list[TokenPlace | None]:
        """Learn where the tokens are in what the layer saves; it has run on all of them."""
        tokens, count = self.rows, min(self.rows // 3 + 1, self.rows - 1)
        self.input.copy.uses += 1
        for core in self.cores:
            if core.output is not None:
                core.output.copy.uses += 1
        part = self._run_again(tokens - count)
        self.call.let_go()
        places: list[TokenPlace | None] = [None] * self.count
        for source, saved in self.saved.items():
            if source not in part:
                continue
            again = part[source] if isinstance(source, int) else flat_as(part[source], saved.shape)
            try:
                place = place_in(saved, again, tokens, count, inner=self.dim == 0)
            except ValueError as error:
                self.own_scope.refuse(str(error))
            if isinstance(source, int):
                places[source] = place
        return places

    def _shorten(self, places: list[TokenPlace | None]) -> None:
        """Say what this call has saved, all of it; and keep only as much as later calls do."""
        self.places = places
        for box in self.boxes:
            if box.kind == "other" and isinstance(box.source, int):
                box.place = places[box.source]
        moving = [box for box in self.boxes if box.kind == "other" and box.place is not None]
        again = [self.input, *(core.output for core in self.cores if core.output is not None)]
        if self.measures:
            sizes = sizes_of(self.call, [(box, self.saved[box.source]) for box in moving], again, self.clock)
            self.owner.budget.measured(self.owner.name, self.input.copy.bytes, sizes, self.owner.traffic.held)
        if self.first >= self.rows:
            return
        for view in again:
            view.copy.uses += 1
        for box in moving:
            box.whole.copy.uses -= 1
            box.kept = self._part(self.saved[box.source], box.place, box.source)  # type: ignore[arg-type]
        self.call.forget_unused()


def _told(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.ndim, leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)


_INPUT = object()
"""Stands for a layer's input among its arguments."""
