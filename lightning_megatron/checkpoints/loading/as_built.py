"""Weights of a module that was built on the meta device: what its constructors would have made of it on the CPU.

A model larger than a host is built in ``configure_model`` under ``torch.device("meta")``, or in
``trainer.init_module(empty_init=True)``. What its constructors do there is noted. Once the module is divided, each rank
does it again, one tensor at a time, and keeps its part, in values and random numbers of one process::

    one process   wte  h.0  h.1  h.2  h.3  head                 draws and keeps all
    stage 1 of 2   ·    ·    ·   h.2  h.3  head                 draws all, keeps three (with tensor ranks, slices)

Hugging Face models leave out their own initialisation on the meta device; here it runs as on the CPU. Parts with a
tensor whose values cannot be told (memory that nobody has written to, numbers of a generator of one's own) are left to
:func:`~lightning_megatron.strategy.assembly.alike.materialize`.

Where weights are spread over replicas, layers need no memory before each rank knows its shard of them: they are hidden
until then, and of the values each rank keeps its elements only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.checkpoints.loading.adapted import names_in_files
from lightning_megatron.layers.table import ParameterSharding
from lightning_megatron.mesh.draws.construction import Construction, MetaPlace, seen_at
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.messages.collectives import raw_broadcast
from lightning_megatron.mesh.parts.names import parent, unit_of
from lightning_megatron.mesh.replaced import Replacements

Put = Callable[[Tensor], Any]
"""Takes the values of a tensor, on the CPU, of which it keeps a copy or a part."""


@contextmanager
def noting_construction(constructions: list[Construction]) -> Iterator[None]:
    """Note what is built on the meta device inside, in a new member of ``constructions``."""
    constructions.append(Construction())
    with constructions[-1].noting(_let_draw):
        yield


@dataclass(frozen=True)
class _Built:
    """Sources of the values of a module's tensors, by name, until they are loaded.

    Attributes:
        places: in which construction, and where in it.
        in_order: whether random numbers are those of one process. Otherwise they are drawn for what is here only.
        read: names of tensors that need no values, as files have them.
    """

    places: Mapping[str, tuple[Construction, MetaPlace]]
    in_order: bool
    read: Set[str] = frozenset()


@dataclass(frozen=True)
class _Computed:
    """Sources of the values of a module built on the meta device; of names whose values can be told.

    Attributes:
        sources: by name of a tensor, names of others.
    """

    sources: Mapping[str, Sequence[str]]


def computed_from(module: nn.Module) -> Mapping[str, Sequence[str]]:
    """By name of a tensor that a constructor gave values on the meta device, the others that they are computed from."""
    noted = Marks.of(module).get(_Computed)
    return {} if noted is None else noted.sources


def note_places(module: nn.Module, constructions: list[Construction], *, in_order: bool) -> None:
    """Note by name where the values of a module's tensors come from, before it is divided; empties ``constructions``.

    Args:
        module: as its author's code has built it.
        constructions: what may have.
        in_order: whether all of them get random numbers. Otherwise files have the values, and what they lack, such as
            adapters, gets the numbers that it has in one process after ``from_pretrained``, which draws none.
    """
    places, unknown = dict[str, tuple[Construction, MetaPlace]](), set[str]()
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if not tensor.is_meta:
            continue
        found = ((each, place) for each in constructions if (place := each.place_of(tensor)) is not None)
        if (first := next(found, None)) is None:
            unknown.add(unit_of(parent(name)))
        else:
            places[name] = first
    if not in_order:
        Marks.of(module).put(_Computed(_sources(places)))
    constructions.clear()
    known = {name: place for name, place in places.items() if unit_of(parent(name)) not in unknown}
    read = set[str]() if in_order else _read_from_files(module, known)
    if known:
        Marks.of(module).put(_Built(known, in_order or 0 < len(read) < len(known), read))


def _read_from_files(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Those of some names that files of the Hugging Face models in a module have; they have no transient buffers."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return set()
    models = [f"{name}." for name, child in module.named_modules() if isinstance(child, library.PreTrainedModel)]
    transient = {f"{n}.{leaf}".lstrip(".") for n, c in module.named_modules() for leaf in c._non_persistent_buffers_set}
    starts = tuple(f".{start}" for start in models)
    return {name for name in names_in_files(names) if name not in transient and f".{name}".startswith(starts)}


def _sources(places: Mapping[str, tuple[Construction, MetaPlace]]) -> dict[str, list[str]]:
    named: dict[tuple[Construction, int], list[str]] = {}
    for name, (construction, place) in places.items():
        named.setdefault((construction, place.memory), []).append(name)
    before = {construction: construction.sources() for construction, _ in places.values()}
    earlier: dict[tuple[Construction, int], list[str]] = {}  # values that a tensor had before it was given others
    for name, (each, place) in places.items():
        for memory in before[each].get(place.memory, frozenset()) - {known for of, known in named if of is each}:
            earlier.setdefault((each, memory), []).append(name)
    named |= earlier
    return {
        name: [other for memory in before[each].get(place.memory, ()) for other in named.get((each, memory), ())]
        for name, (each, place) in places.items()
    }


class AsBuilt:
    """The values of a module's tensors that were built on the meta device, until they are asked for, once.

    Args:
        built: their sources.
        base_seed: equal on all ranks; of random numbers that are not those of one process.
        table: how each parameter is split over tensor-parallel ranks.
        allocated: tensors that are given their values, by name.
        hidden: names of parameters without memory.
    """

    def __init__(
        self,
        built: _Built,
        base_seed: int,
        table: Mapping[str, ParameterSharding],
        allocated: Mapping[str, Tensor],
        hidden: Collection[str],
    ) -> None:
        self._built, self._base_seed, self._table = built, base_seed, table
        self._allocated, self.hidden = dict(allocated), frozenset(hidden)

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors that get values from here, hidden ones among them."""
        return self.hidden.union(self._allocated)

    def start_alike(self, device: torch.device) -> None:
        """Let all ranks draw from the random state of global rank 0; collective over all ranks."""
        for construction in dict.fromkeys(construction for construction, _ in self._built.places.values()):
            for start in construction.starts if dist.is_initialized() else ():
                sent = start.to(device)
                raw_broadcast(sent, 0, None)
                start.copy_(sent)

    def fill(self, into: Mapping[str, Put]) -> None:
        """Give all allocated tensors their values, and those of hidden parameters to what takes them.

        Args:
            into: by name of a hidden parameter, what takes this rank's part of it; the values of others are not made.
        """
        built = self._built
        undrawn = _undrawn(built) if built.in_order else {}
        puts: dict[str, Put] = {name: local.copy_ for name, local in self._allocated.items()} | dict(into)
        wanted: dict[Construction, dict[int, list[Callable[[torch.UntypedStorage], None]]]] = {}
        for construction, _ in built.places.values():
            wanted.setdefault(construction, {})
        for name, put in puts.items():
            construction, place = built.places[name]
            if place.memory not in undrawn.get(construction, ()):
                take = _Taker(put, place, self._table.get(name))
                wanted[construction].setdefault(place.memory, []).append(take)
        for construction, takers in wanted.items():
            each = {memory: _All(these) for memory, these in takers.items()}
            seed = None if built.in_order else self._base_seed
            construction.replay(each, seed, undrawn.get(construction, frozenset()))


def allocate_as_built(
    module: nn.Module,
    device: torch.device,
    base_seed: int,
    table: Mapping[str, ParameterSharding],
    hidden: Collection[str] = (),
) -> AsBuilt | None:
    """Allocate what is on the meta device and has values that its constructors noted; the rest stays there.

    Args:
        module: this rank's part of the module.
        device: where to allocate.
        base_seed: equal on all ranks; of random numbers that are not those of one process.
        table: how each parameter is split over tensor-parallel ranks.
        hidden: names of parameters that get no memory: they are on ``device``, and read as NaN.

    Returns:
        The values; ``None`` if there are none.
    """
    built = Marks.of(module).take(_Built)
    if built is None:
        return None
    memo, found = dict[int, nn.Parameter](), dict[str, Tensor]()
    for name, child in module.named_modules(remove_duplicate=False):
        for leaf, tensor in (*child._parameters.items(), *child._buffers.items()):
            full = f"{name}.{leaf}" if name else leaf
            if tensor is not None and tensor.is_meta and full in built.places:
                found[full] = _allocated(child, leaf, tensor, device, memo, hides=full in hidden)
    nowhere = {name for name, tensor in found.items() if is_hidden(tensor)}
    there = {name: tensor for name, tensor in found.items() if name not in nowhere}
    return AsBuilt(built, base_seed, table, there, nowhere)


def _undrawn(built: _Built) -> dict[Construction, Set[int]]:
    """Memories that ``from_pretrained`` draws nothing for: what files have, and heads that gave way to tied ones."""
    read: dict[Construction, set[int]] = {}
    for name in built.read:
        read.setdefault(built.places[name][0], set()).add(built.places[name][1].memory)
    kept: dict[Construction, set[int]] = {each: set() for each in read}
    for each, place in built.places.values():
        if each in read and place.memory not in read[each]:
            kept[each].add(place.memory)
    return {each: memories | each.left(kept[each]) for each, memories in read.items()}


class _Taker:
    """Takes this rank's part of a tensor out of memory that has its values."""

    def __init__(self, put: Put, place: MetaPlace, entry: ParameterSharding | None) -> None:
        self._put, self._place, self._entry = put, place, entry

    def __call__(self, content: torch.UntypedStorage) -> None:
        whole, entry = seen_at(content, self._place), self._entry
        with torch.no_grad():
            self._put(whole if entry is None or entry.replicated else entry.spec.slice_full(whole))


class _All:
    def __init__(self, takers: Sequence[Callable[[torch.UntypedStorage], None]]) -> None:
        self._takers = takers

    def __call__(self, content: torch.UntypedStorage) -> None:
        for take in self._takers:
            take(content)


def _allocated(
    module: nn.Module, leaf: str, tensor: Tensor, device: torch.device, memo: dict[int, nn.Parameter], *, hides: bool
) -> Tensor:
    if leaf in module._buffers:
        module._buffers[leaf] = buffer = torch.empty_like(tensor, device=device)
        return buffer
    if id(tensor) not in memo:
        data = hidden_like(tensor, device) if hides else torch.empty_like(tensor, device=device)
        memo[id(tensor)] = nn.Parameter(data, requires_grad=tensor.requires_grad)
    module._parameters[leaf] = memo[id(tensor)]
    return memo[id(tensor)]


def hidden_like(tensor: Tensor, device: torch.device) -> Tensor:
    """NaN in the shape of a tensor, without memory for it."""
    return torch.full((), float("nan"), dtype=tensor.dtype, device=device).expand(tensor.shape)


def is_hidden(tensor: Tensor) -> bool:
    """Whether a tensor is one of these."""
    return tensor.numel() > 1 and not any(tensor.stride())


def _let_draw(replaced: Replacements) -> bool:
    """Let Hugging Face models initialise themselves on the meta device; not while they are loaded from files."""
    library = sys.modules.get("transformers.modeling_utils")
    model: Any = getattr(library, "PreTrainedModel", None)
    if model is None:
        return True
    if not isinstance(model.init_weights, _InitWeights):
        replaced.put(model, "init_weights", _InitWeights(model, model.init_weights))
    return not _runs(model.from_pretrained)


class _InitWeights:
    """Stands for ``PreTrainedModel.init_weights``, which draws nothing on the meta device."""

    def __init__(self, kind: Any, function: Any) -> None:
        self._kind, self._function = kind, function

    def __get__(self, model: Any, kind: Any = None) -> Any:
        return self if model is None else lambda: self(model)

    def __call__(self, model: Any) -> None:
        if torch.empty(0).is_meta and not _runs(self._kind.from_pretrained):
            model.initialize_weights()
        self._function(model)


def _runs(method: Any) -> bool:
    """Whether a method is among the calls that are under way."""
    code = getattr(getattr(method, "__func__", method), "__wrapped__", getattr(method, "__func__", method)).__code__
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
