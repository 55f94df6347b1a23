"""State of optimizers as hooks see it: that of all parameters, whole.

A rank's optimizer keeps moments of what the rank updates: a stage's parameters, their slices, or a shard of those, by
keys of its own. A hook that reads ``optimizer.state[p]["exp_avg"]`` or ``optimizer.state_dict()`` finds what one
process keeps. While it runs, another table stands in the optimizer::

    kept here                       in the hook                                        afterwards
    piece of p: 6 elements    ──▶   p: a moment of p's shape, gathered when read  ──▶  the piece, with what was written
    nothing of q              ──▶   q: likewise                                        nothing

Gathering is announced (:mod:`lightning_megatron.layers.whole.rounds`), as hooks may do it on one rank alone.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoints.state.stored import GroupNames, StatePlace, load_optimizer
from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.data_parallel.update.step_hooks import SeenStates
from lightning_megatron.layers.whole.parameter_parts import HeldParts, ParameterParts
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.mesh.torch_functions import line_of_user
from lightning_megatron.pipeline.elsewhere.presence import tensor_of
from lightning_megatron.strategy.going_over import hooks_on_states, speaks_of_states
from lightning_megatron.strategy.hooks.whole_hooks import Doors
from lightning_megatron.strategy.lightning.hooks import names_used
from lightning_megatron.strategy.optimizers.states_view import StatesView

Named = tuple[Optimizer, GroupNames]
_Entries = dict[Any, Any]
_PLAIN = (bool, int, float, str, type(None))


class _Told(NamedTuple):
    """One entry of a rank's state: a tensor's part, type and kind of device, or another value."""

    spec: ShardSpec | None
    dtype: torch.dtype | None = None
    device: str = ""
    value: Any = None


class _Unmet(HeldParts):
    """A state that may be changed where it is, element by element, and not be read, where ranks do not meet: in a step,
    or in a hook that sees those of its own stage.
    """

    def gather(self, part: Tensor) -> Tensor:
        """Refused.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"`{self.name}` is read in a step, or in a hook that lists one pipeline stage's parameters "
            f"({line_of_user()}), and each rank keeps the state of what it updates: a stage's parameters, slices or "
            "shards of them. Read it in a hook such as `on_train_batch_start` or `on_train_batch_end`, which finds all "
            "of it; or save a checkpoint."
        )


class WholeStates:
    """Shows the state of the optimizers whole to hooks that speak of it.

    Args:
        module: the user's, divided.
        trainer: of the run, whose strategy's methods lead back into this package.
        gradients: of the module; know where states are.
        group: all ranks.
        precision: the strategy's plugin, which clips.
        named_groups: gives the optimizers, each with the names of its groups' parameters on all stages.
        lists_all: whether the hook that runs is given the parameters of all stages.
        on_parts: gives what makes a function see this rank's parts of parameters.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        trainer: pl.Trainer,
        gradients: ModelGradients,
        group: dist.ProcessGroup,
        precision: Any,
        named_groups: Callable[[], Iterable[Named]],
        lists_all: Callable[[], bool],
        on_parts: Callable[[], Callable[..., Any]],
    ) -> None:
        self._module, self._gradients, self._group, self._named_groups = module, gradients, group, named_groups
        self._step_speaks = speaks_of_states(names_used(module, "training_step"))
        self._view = StatesView(group)
        self._lists_all, self._on_parts = lists_all, on_parts
        self._doors = Doors(trainer.strategy, precision)
        self._replaced, self._tables, self._opens = Replacements(), list[_Table](), list[Callable[[], None]]()
        self._own: Any = None
        self._everyone: list[Any] = [None] * group.size()
        self._absent: dict[Any, Tensor] = {}
        self._plans: dict[tuple[int, bool], dict[str, dict[Any, tuple[HeldParts | None, _Told]]]] = {}
        self.found = hooks_on_states(module, trainer)

    def entered(self, owner: Any, hook: str) -> Callable[..., Any]:
        """A hook, which sees whole states if it speaks of them."""
        own: Callable[..., Any] = getattr(owner, hook)
        return self.seeing(own, hook) if any(o is owner and h == hook for o, h in self.found) else own

    def install(self, taken: Callable[[Any, str], bool]) -> None:
        """Take the place of the hooks, but of those that something else calls by way of :meth:`entered`."""
        for owner, hook in self.found:
            if not taken(owner, hook):
                self._replaced.call(owner, hook, self.seeing(getattr(owner, hook), hook))

    def seeing(self, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A function of the user's that runs between steps, called ``name`` in messages."""

        @functools.wraps(hook)
        def seeing(*args: Any, **kwargs: Any) -> Any:
            if self._tables:  # another hook has called this one
                return hook(*args, **kwargs)
            with self._shown(name):
                return hook(*args, **kwargs)

        return seeing

    def in_step(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A training step, which may change states element by element, if it speaks of any, and read none that are
        divided.
        """
        if not self._step_speaks:
            return step

        def running(batch: Any) -> Any:
            with self._during(self._open_held), self._view.held():
                return step(batch)

        return running

    @contextmanager
    def _shown(self, name: str) -> Iterator[None]:
        """Show whole states; collective over all ranks."""
        with self._during(self._open), self._view.seen(name, serves=True):
            yield

    @contextmanager
    def _during(self, opens: Callable[[], None]) -> Iterator[None]:
        self._opens.append(opens)
        try:
            opens()
            with Replacements() as doors:
                self._open_doors(doors)
                yield
        finally:
            self._close()
            self._opens.pop()

    def _open_doors(self, doors: Replacements) -> None:
        self._doors.open(doors, self.local)
        for optimizer, groups in self._named_groups():
            doors.put(optimizer, "step", types.MethodType(_stepping(self.local(optimizer.step)), optimizer))
            load = functools.partial(self._load, optimizer, groups)
            doors.call(optimizer, "load_state_dict", self.local(load))

    def local(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that hooks may call and that works on the states of this rank; collective over all ranks."""

        @functools.wraps(function)
        def on_own(*args: Any, **kwargs: Any) -> Any:
            if not self._tables:
                return function(*args, **kwargs)
            with self._view.local():
                self._close()
                result = function(*args, **kwargs)
                self._opens[-1]()
            return result

        return on_own

    def _load(self, optimizer: Optimizer, names: GroupNames, state_dict: dict[str, Any]) -> None:
        """``optimizer.load_state_dict``: this rank's part of a whole state."""
        with Replacements() as plain:
            plain.put(optimizer, "load_state_dict", functools.partial(type(optimizer).load_state_dict, optimizer))
            load_optimizer(optimizer, names, self._places(optimizer), state_dict)

    def _places(self, optimizer: Optimizer) -> list[StatePlace]:
        """Locations of what is kept here, by the shapes of this rank's parts."""
        return self._on_parts()(self._gradients.state_places)(optimizer)  # type: ignore[no-any-return]

    def _open(self) -> None:
        """Put whole tables into the optimizers; collective over all ranks."""
        named = list(self._named_groups())
        places = [self._places(optimizer) for optimizer, _ in named]
        everyone = self._exchange([_told(o, each) for (o, _), each in zip(named, places, strict=True)])
        listed = self._gradients.presence.stages == 1 or self._lists_all()
        shown: list[tuple[ParameterParts, Tensor]] = []
        absent, here = self._absent, dict(type(self._module).named_parameters(self._module, remove_duplicate=False))
        self._absent = {}
        for number, ((optimizer, names), own) in enumerate(zip(named, places, strict=True)):
            members: dict[str, Tensor] = {
                place.name: place.key if place.member is None else place.member for place in own
            }
            kept = {place.name: optimizer.state.get(place.key) or {} for place in own}
            given: dict[str, _Entries] = {}
            for name, entries in self._plan([each[number] for each in everyone], number, names, listed).items():
                if not (listed or name in here):
                    continue
                if name not in members:
                    members[name] = here[name] if name in here else tensor_of(self._module, name)
                given[name] = {}
                for key, (parts, first) in entries.items():
                    value = kept.get(name, {}).get(key, _NONE)
                    if value is _NONE:
                        value = first.value if parts is None else _empty(absent, (number, name, key), first)
                        if parts is not None:
                            self._absent[number, name, key] = value
                    if parts is not None:
                        shown.append((parts, value))
                    given[name][key] = value
            self._tables.append(_Table(optimizer, own, given, members))
        self._view.show_others(shown)

    def _plan(
        self, told: Sequence[Mapping[str, Mapping[Any, _Told]]], number: int, names: GroupNames, listed: bool
    ) -> dict[str, dict[Any, tuple[HeldParts | None, _Told]]]:
        """By name of each parameter with a state and by entry, in the order of one process: how all ranks hold it.

        Args:
            told: by each rank, of one optimizer.
            number: of that.
            names: of the parameters in its groups.
            listed: whether all of it is shown.
        """
        if (number, listed) not in self._plans:
            found: dict[str, dict[Any, tuple[HeldParts | None, _Told]]] = {}
            for name in dict.fromkeys(name for group in (*names, *map(list, told)) for name in group):
                ranks = {rank: each[name] for rank, each in enumerate(told) if name in each}
                for key in dict.fromkeys(key for each in ranks.values() for key in each):
                    holders = {rank: each[key] for rank, each in ranks.items() if key in each}
                    parts = self._parts(f"optimizer.state[{name}][{key!r}]", holders, listed)
                    found.setdefault(name, {})[key] = parts, next(iter(holders.values()))
            self._plans[number, listed] = found
        return self._plans[number, listed]

    def _open_held(self) -> None:
        """Put tables of what is here into the optimizers, by the parameters, for a step."""
        shown: list[tuple[ParameterParts, Tensor]] = []
        for optimizer, _ in self._named_groups():
            places = self._places(optimizer)
            members = {place.name: place.key if place.member is None else place.member for place in places}
            kept = {place.name: optimizer.state[place.key] for place in places if optimizer.state.get(place.key)}
            for name, told in _told(optimizer, places).items():
                for key, (spec, *_) in told.items():
                    if spec is not None and not (spec.is_whole and self._gradients.presence.stages == 1):
                        parts = _Unmet(f"optimizer.state[{name}][{key!r}]", (), self._group, None, (), spec)
                        shown.append((parts, kept[name][key]))
            self._tables.append(_Table(optimizer, places, kept, members))
        self._view.show_others(shown, held=True)

    def _parts(self, name: str, holders: Mapping[int, _Told], listed: bool) -> HeldParts | None:
        """How a tensor is held by all ranks; ``None`` for other values, and for tensors that every rank has whole."""
        specs = {rank: told.spec for rank, told in holders.items() if told.spec is not None}
        if not specs:
            return None
        whole = next((rank for rank, spec in specs.items() if spec.is_whole), None)
        if whole is not None and len(specs) == self._group.size() and all(spec.is_whole for spec in specs.values()):
            return None
        sent = {spec: rank for rank, spec in reversed(specs.items())} if whole is None else {specs[whole]: whole}
        shape = next(iter(specs.values())).global_shape
        own = specs.get(self._group.rank(), ShardSpec(shape, (0,), ()))
        kind = HeldParts if listed else _Unmet
        return kind(name, tuple(sent), self._group, None, tuple(sent.values()), own)

    def _exchange(self, own: Any) -> list[Any]:
        """Tell all ranks of this one's states, or that they are as they were; gives those of all."""
        told = objects.gather((None,) if own == self._own else (own,), self._group)
        self._own = own
        if any(new is not None for (new,) in told):
            self._plans.clear()
        self._everyone = [new if new is not None else old for (new,), old in zip(told, self._everyone, strict=True)]
        return self._everyone

    def _close(self) -> None:
        """Give the optimizers their tables back, with what was written into the others."""
        tables, self._tables = self._tables, []
        for table in tables:
            table.take_back()

    def remove(self) -> None:
        """Give hooks back."""
        self._replaced.take_back()


_NONE: Any = object()


class _Table:
    """The state of one optimizer, replaced by a whole one.

    Args:
        optimizer: of the run.
        places: of what is kept here.
        given: entries of the whole state, by name of the parameter.
        members: parameters, by name.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        places: list[StatePlace],
        given: Mapping[str, _Entries],
        members: Mapping[str, Tensor],
    ) -> None:
        self._optimizer, self._own, self._places, self._given, self._members = (
            optimizer,
            optimizer.state,
            places,
            given,
            members,
        )
        known = {id(place.key) for place in places} | {id(member) for member in members.values()}
        beside = {key: value for key, value in self._own.items() if id(key) not in known}
        self._beside = set(beside)
        self._tables = {name: dict(entries) for name, entries in given.items()}
        self._table = SeenStates(dict, {members[name]: entries for name, entries in self._tables.items()} | beside)
        optimizer.state = self._table

    def take_back(self) -> None:
        """Put this rank's state back, with what was written."""
        now, self._optimizer.state = self._optimizer.state, self._own
        of_members = {id(member) for member in self._members.values()}
        others = {key: value for key, value in now.items() if id(key) not in of_members and value != {}}
        for key in self._beside.difference(others):
            del self._own[key]
        self._own.update(others)
        for place in self._places:
            entries = now.get(self._members[place.name])
            if not entries:
                self._own.pop(place.key, None)
                continue
            given = self._given.get(place.name, {})
            if entries.keys() != given.keys() or any(entries[key] is not value for key, value in given.items()):
                cut = {k: v if v is given.get(k, _NONE) else _cut(v, place) for k, v in entries.items()}
                self._own.setdefault(place.key, {}).clear()
                self._own[place.key].update(cut)


def _stepping(step: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is a method of an optimizer, as schedulers of torch expect ``step`` to be."""

    @functools.wraps(step)
    def stepping(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return stepping


def _told(optimizer: Optimizer, places: Iterable[StatePlace]) -> dict[str, dict[Any, _Told]]:
    """State that this rank keeps, by name of the parameter and of the entry."""
    found = {}
    for place in places:
        entries = optimizer.state.get(place.key)
        if entries:
            found[place.name] = {key: _entry(value, place.spec) for key, value in entries.items()}
    return found


def _entry(value: Any, spec: ShardSpec) -> _Told:
    if not isinstance(value, Tensor):
        return _Told(None, value=value if isinstance(value, _PLAIN) else None)
    shape = tuple(value.shape)
    return _Told(spec if shape == spec.local_shape else ShardSpec.whole(shape), value.dtype, value.device.type)


def _empty(known: Mapping[Any, Tensor], key: Any, told: _Told) -> Tensor:
    """Stands for a tensor of which this rank has nothing: the same object from one hook to the next."""
    found = known.get(key)
    if found is not None and found.dtype == told.dtype:
        return found
    return torch.empty(0, dtype=told.dtype, device=told.device)


def _cut(value: Any, place: StatePlace) -> Any:
    """A value that a hook has put into the table: this rank's part of a tensor of the parameter's shape."""
    if isinstance(value, Tensor) and value.ndim and tuple(value.shape) == place.spec.global_shape:
        return place.spec.slice_full(value).to(place.key.device)
    return value
