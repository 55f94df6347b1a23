"""Answers calls of layers and parts so that every stage gets what they give.

In an ordinary step a stage ends its run after its last layer. Code that decodes token by token needs what the model
gives on every stage, to call it again. So here every stage runs all of the user's code on real numbers, and whoever has
a layer or a part computes it and tells the others::

    stage 0   embed ─▶ 0 1 ─▶│          │─▶ norm (heard) ─▶ head (heard) ─▶ next token
    stage 1   (heard)  - -   │─▶ 2 3 ──▶│   norm             head          ─▶ next token

Between two layers of one stage nothing is told: the others go on with a stand-in (:mod:`~..elsewhere.away`) until the
last of them. That takes knowing what a layer gives, which its first call tells.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.layers.whole.base import WholeTensor
from lightning_megatron.mesh.key_value_caches import in_caches, is_cache
from lightning_megatron.pipeline.elsewhere.away import Away, StageSource, mark, refuse_away
from lightning_megatron.pipeline.elsewhere.effects import Effect
from lightning_megatron.pipeline.elsewhere.luggage import from_bytes
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.elsewhere.undo import Snapshot
from lightning_megatron.pipeline.repeated.caches import Caches, Grown
from lightning_megatron.pipeline.repeated.groups import Groups
from lightning_megatron.pipeline.repeated.wire import Wire
from lightning_megatron.pipeline.stage.calls import FirstCall, InnerCall, LayerCall, PartCall
from lightning_megatron.pipeline.stage.side_effects import SideEffects

_FLAGS = (bool, type(None), str)
_AGREED = -2  # as the number of a unit: an answer that holds for all stages


@dataclass(frozen=True)
class _Input:
    """Stands, in what a layer gives, for a tensor like the hidden state that it was given."""


class _Form(NamedTuple):
    """Form of a layer's output and side effects, as its first call has shown it.

    Attributes:
        output: with :class:`_Input` for a tensor like the hidden state.
        grown: caches that it adds the tokens of its hidden state to.
        talks: whether it gives more than that, or leaves something behind, so that each call has to be told.
    """

    output: Any
    grown: tuple[Grown, ...]
    talks: bool


class Note(NamedTuple):
    """Facts about a call, besides its output, that the other stages need.

    Attributes:
        grown: what it added to caches.
        left: what it left behind, as bytes.
        form: of the layer, where this is its first call.
        wants: places of the tensors it gave to which gradients go back, in a training step.
        position: of the random generators, where it has drawn from the stream of the code around it.
    """

    grown: tuple[Grown, ...]
    left: bytes | None
    form: _Form | None = None
    wants: tuple[int, ...] = ()
    position: Any = None


class CallFollower:
    """Stands in for a stage's cursor while code calls the model repeatedly; see :class:`~..stage.calls.Follower`.

    Args:
        module: the user's.
        presence: who has what.
        effects: of the layers.
        device: where tensors live.

    Attributes:
        wire: to the other stages; set before the first call.
        stage: number of this one.
        inside: name of the layer or part that computes now; ``""`` for none.
        groups: runs several pieces of code that call the model, each over a wire of its own; ``None`` for one.
        computes_parts: never: each call is asked about.
        recomputes: whether the step is one of training.
    """

    computes_parts = recomputes = False
    wire: Wire

    def __init__(self, module: nn.Module, presence: Presence, effects: SideEffects, device: torch.device) -> None:
        self._module, self.stage, self._effects, self._device = module, presence.stage, effects, device
        parts = presence.parts
        self._names = [name for name, part in parts.items() if part.is_layer]
        self._units = {name: part.stages for name, part in parts.items() if not part.is_layer}
        self._owners = presence.layer_owners()
        self._numbers = {name: at for at, name in enumerate((*self._names, *sorted(self._units)))}
        self._forms: dict[Any, _Form] = {}
        self.inside = ""
        self.groups: Groups | None = None

    def is_inside(self, index: int) -> bool:
        """Always true: modules inside of a layer that is a container are sent one by one."""
        return True

    def call_inside(self, index: int, call: InnerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`~..stage.calls.Follower`."""
        return self._everywhere(call.sentinel.name, index, self._owners[index], call.runs, args, kwargs)

    def call_part(self, call: PartCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`~..stage.calls.Follower`."""
        return self.call_unit(call.sentinel.name, call.runs, args, kwargs)

    def call_first_part(self, call: FirstCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`~..stage.calls.Follower`."""
        return self.call_unit(call.sentinel.name, call.runs, args, kwargs)

    def call_unit(self, name: str, runs: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a part that some stages have: the first of them computes it."""
        return self._everywhere(name, self._numbers[name], min(self._units[name]), runs, args, kwargs)

    def call_layer(self, index: int, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`~..stage.calls.Follower`."""
        name, owner = call.sentinel.name, self._owners[index]
        x = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        if self.inside or x is None:
            return self._everywhere(name, index, owner, call.runs, args, kwargs)
        self.reach(owner)
        caches = Caches(args, kwargs, name)
        kinds = tuple(map(_kind, args)), tuple((key, _kind(value)) for key, value in kwargs.items())
        key = (index, kinds, len(caches.found), call.module.training, _collected())
        form = self._forms.get(key)
        ends = index + 1 == len(self._owners) or self._owners[index + 1] != owner
        if owner == self.stage:
            output, left, grown = self._compute(name, index, call.runs, args, kwargs, caches)
            first = form is None
            form = form or _form_of(output, x, left, grown)
            self._forms[key] = form
            if first or form.talks:
                self.wire.tell(index, output, Note(grown, left, form if first else None), caches.found)
                return output
            if left is not None or grown != _grown(form, x) or _form_of(output, x, None, grown) != form:
                _refuse_change(name)
            if ends:
                self.wire.tell(index, output, None, caches.found)
            return output
        if form is not None and not form.talks and not ends:
            self._grow(caches, _grown(form, x), x)
            return pytree.tree_map(lambda leaf: self._stand_in(leaf, x, call.sentinel.source), form.output)
        output, note = self.wire.hear(owner, index, name, caches.found)
        if note is None:
            self._grow(caches, _grown(self._forms[key], x), x)
            return output
        self._forms[key] = note.form or self._forms[key]
        self._follow(note, caches, x, args, kwargs)
        return output

    def agreed(self, answer: Tensor, name: str) -> Tensor:
        """The answer of the pipeline's first rank, which holds for all stages; all of them ask now.

        Args:
            answer: this rank's.
            name: of what asks, in words.
        """
        first = min(range(len(self.wire.ranks)), key=self.wire.ranks.__getitem__)
        self.reach(first)
        if first == self.stage:
            self.wire.answer(_AGREED, answer)
            return answer
        heard: Tensor = self.wire.hear(first, _AGREED, name, [])[0]
        return heard

    def reach(self, owner: int) -> None:
        """Let other groups of requests run before another stage than before computes."""
        if self.groups is not None:
            self.groups.reach(owner)
            self.wire = self.groups.wire

    def _stand_in(self, leaf: Any, x: Tensor, source: StageSource) -> Any:
        if not isinstance(leaf, _Input):
            return leaf
        return x if type(x) is Away else mark(torch.zeros_like(x), source)

    def _everywhere(
        self,
        name: str,
        unit: int,
        owner: int,
        runs: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute a call where it can be, and tell the others; inside of another, it is that stage's own affair."""
        if self.inside:
            if owner != self.stage and self.stage not in self._units.get(name, ()):
                _refuse_inside(name, self.inside)
            return runs(*args, **kwargs)
        self.reach(owner)
        caches = Caches(args, kwargs, name)
        if owner == self.stage:
            output, left, grown = self._compute(name, unit, runs, args, kwargs, caches)
            note = Note(grown, left) if grown or left is not None else None
            self.wire.tell(unit, output, note, caches.found)
            return output
        output, note = self.wire.hear(owner, unit, name, caches.found)
        if note is not None:
            x = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), torch.empty(1))
            self._follow(note, caches, x, args, kwargs)
        return output

    def _compute(
        self,
        name: str,
        unit: int,
        runs: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caches: Caches,
    ) -> tuple[Any, bytes | None, tuple[Grown, ...]]:
        """Result of a call here, its side effects, and what it added to caches."""
        refuse_away((args, kwargs, in_caches(args, kwargs)), f"an argument of `{name}`")
        containers = self._effects.containers(unit, name, *caches.bare(args, kwargs))
        before, lengths = Snapshot(containers), caches.lengths()
        drawn = self._drawn()
        self.inside = name
        try:
            output = runs(*args, **kwargs)
        finally:
            self.inside = ""
        if not all(map(torch.equal, drawn, self._drawn())):
            _refuse_draws(name)
        left = self._effects.packed([Effect.of(unit, change) for change in before.compare()])
        is_leaf = lambda leaf: isinstance(leaf, Tensor) or is_cache(leaf)  # noqa: E731
        output = _plain(output) if isinstance(output, Tensor) else pytree.tree_map(_plain, output, is_leaf=is_leaf)
        return output, left, caches.grown(lengths)

    def _drawn(self) -> list[Tensor]:
        """States of the random generators."""
        found = [torch.default_generator.get_state()]
        if self._device.type == "cuda":
            found.append(torch.cuda.get_rng_state(self._device))
        return found

    def _grow(self, caches: Caches, grown: tuple[Grown, ...], x: Tensor) -> None:
        if grown:
            caches.grow(grown, self._device, x.dtype)

    def _follow(self, note: Note, caches: Caches, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do here what a call on another stage did besides giving something."""
        self._grow(caches, note.grown, x)
        if note.left is not None:
            args, kwargs = caches.bare(args, kwargs)
            for effect in from_bytes(note.left, self._device, self._module):
                effect.repeat(self._module, (*args, *kwargs.values()))


def _kind(value: Any) -> Any:
    """The properties of an argument that may decide what a layer does, alike on all stages: flags, types, presence."""
    if isinstance(value, _FLAGS):
        return value
    if isinstance(value, Tensor):
        return Tensor
    return type(value), bool(value) if isinstance(value, (tuple, list, dict)) else True


def _collected() -> tuple[Any, ...]:
    """The names of what hooks collect now: Hugging Face's put hidden states into dictionaries in context variables."""
    held = ((var.name, *map(str, value)) for var, value in copy_context().items() if isinstance(value, dict))
    return tuple(sorted(held))


def _plain(leaf: Any) -> Any:
    """A whole, ordinary tensor without a graph; other values as they are."""
    if isinstance(leaf, WholeTensor):
        leaf = leaf.full()
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _form_of(output: Any, x: Tensor, left: bytes | None, grown: tuple[Grown, ...]) -> _Form:
    leaves, spec = pytree.tree_flatten(output, is_leaf=is_cache)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    like = len(tensors) == 1 and tensors[0].shape == x.shape and tensors[0].dtype == x.dtype
    like = like and all(isinstance(leaf, (Tensor, *_FLAGS)) for leaf in leaves)
    rows, tokens = x.shape[:2] if x.ndim > 1 else (0, 0)
    talks = not like or left is not None or any((note.rows, note.positions) != (rows, tokens) for note in grown)
    if talks:
        return _Form(None, (), True)
    without = [_Input() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return _Form(
        pytree.tree_unflatten(without, spec), tuple(note._replace(positions=0, rows=0) for note in grown), False
    )


def _grown(form: _Form, x: Tensor) -> tuple[Grown, ...]:
    return tuple(note._replace(positions=x.shape[1], rows=x.shape[0]) for note in form.grown)


def _refuse_change(name: str) -> None:
    raise RuntimeError(
        f"layer `{name}` gave something else, wrote somewhere, or added other positions to a cache than in its first "
        "call, where pipeline stages agree on what to tell each other about it. Let it do the same in every call of a "
        "step that calls the model repeatedly, or use `pipeline_parallel_size=1`."
    )


def _refuse_draws(name: str) -> None:
    raise RuntimeError(
        f"`{name}` draws random numbers in a step that calls the model repeatedly, which other pipeline stages do not "
        "draw: what the step draws afterwards, such as tokens, would differ between them. Call `self.eval()` before it "
        "(dropout), draw in the step and pass the numbers on, or use `pipeline_parallel_size=1`."
    )


def _refuse_inside(name: str, outer: str) -> None:
    raise RuntimeError(
        f"`{name}` is called inside `{outer}`, but it is on another pipeline stage. Keep it on every stage with "
        f'`MegatronStrategy(pipeline_placement={{"{name}": "all"}})`, or use `pipeline_parallel_size=1`.'
    )
