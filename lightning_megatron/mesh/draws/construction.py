"""Records the operations that build a module on the meta device, to repeat them with memory for a part of it.

On the meta device constructors compute shapes only, and draw nothing. Their calls are noted in order, and done again
later: each tensor gets the values that the same code gives it on the CPU, from the same random numbers, though only one
tensor need be in memory at a time. ::

    noted    a = empty(4, 3)   a.uniform_()   b = empty(9, 3)   b.uniform_()   a.normal_()
    wanted: a                  draws          –                 draws          values of a
    wanted: b                  draws          –                 values of b    draws

Numbers that are overwritten, or that nobody here wants, are drawn and dropped, so that those after them are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatron.mesh.draws.meta_calls import MetaFunctions, MetaOperators, draws
from lightning_megatron.mesh.replaced import Replacements

_COVERING = frozenset(
    f"aten::{name}_"
    for name in ("uniform", "normal", "fill", "zero", "copy", "random", "exponential", "log_normal", "cauchy")
)
"""Functions after which nothing is left of what their first argument was."""

_RESHAPING = ("aten::set_", "aten::resize_")


@dataclass(frozen=True)
class MetaPlace:
    """Position of a tensor of the meta device.

    Attributes:
        memory: number of its storage.
        form: shape, stride and offset in it.
        dtype: of its elements.
    """

    memory: int
    form: tuple[Any, Any, Any]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Call:
    """One call of torch.

    Attributes:
        function: an operator.
        args: and keywords, as a tree; places instead of tensors of the meta device.
        made: by number of a flat output, the place of what it made.
        reads: memories whose content matters to it.
        writes: memories that it changes or makes.
        covers: those of them whose content before does not matter.
        stream: which random numbers it draws; ``None`` for none.
        floats: torch's default dtype.
    """

    function: Any
    args: tuple[tuple[Any, ...], dict[str, Any]]
    made: Mapping[int, MetaPlace]
    reads: frozenset[int]
    writes: frozenset[int]
    covers: frozenset[int]
    stream: int | None
    floats: torch.dtype


class Construction:
    """Records operations on the meta device and replays them. A copy is the object itself; a pickle is empty."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._watches: Callable[[], bool] | None = None
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept, so that no other one gets its address
        self._known = set[int]()  # memories whose values the calls tell
        self._starts: list[Tensor] = []  # of streams of random numbers: states of torch's generator
        self._begins = False

    def __deepcopy__(self, memo: Any) -> Construction:
        return self

    def __reduce__(self) -> Any:
        return Construction, ()

    @contextmanager
    def noting(self, watch: Callable[[Replacements], bool] | None = None) -> Iterator[None]:
        """Note what runs inside.

        Args:
            watch: called before each call on the meta device; may replace what keeps code from drawing there. Says
                whether the call is to be noted.
        """
        with Replacements() as replaced, MetaFunctions(self), MetaOperators(self):
            self._watches = None if watch is None else partial(watch, replaced)
            for name in ("manual_seed", "seed"):
                replaced.put(torch, name, self._seeding(getattr(torch, name)))
            yield

    @property
    def starts(self) -> list[Tensor]:
        """State of torch's generator at the start of each stream of random numbers; may be replaced in place."""
        return self._starts

    def place_of(self, tensor: Tensor) -> MetaPlace | None:
        """Position of a tensor of the meta device, if its values can be told."""
        place = self._place(tensor) if self._number(tensor) is not None else None
        return place if place is not None and place.memory in self._known else None

    def _seeding(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def seeded(*args: Any) -> Any:
            self._begins = True  # a stream, even if the seed is an earlier one's
            return function(*args)

        return seeded

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note a call that has run."""
        if self._watches is not None and not self._watches():
            return
        schema, outputs = function._schema, pytree.tree_leaves(output)
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
        changed = _on_meta([given.get(argument.name) for argument in written])
        filled = _on_meta([given.get(argument.name) for argument in written if argument.is_out])
        inputs = _on_meta((args, kwargs))
        if schema.name in _COVERING:
            filled = changed[:1]
        read = [tensor for tensor in inputs if not any(tensor is other for other in filled)]
        reads = set[int]() if schema.name.endswith("_like") else {self._place(tensor).memory for tensor in read}
        for tensor in inputs:
            self._place(tensor)
        made = {
            index: self._place(tensor)
            for index, tensor in enumerate(outputs)
            if isinstance(tensor, Tensor) and tensor.is_meta and self._number(tensor) is None
        }
        new = {place.memory for place in made.values()}
        writes = {self._place(tensor).memory for tensor in changed} | new
        if not writes or (schema.name == "aten::set_" and reads == writes):
            return  # a view
        covers = new | {self._place(tensor).memory for tensor in filled if _is_all(tensor)}
        stream = self._drawn_from() if draws(function) else None
        told = (
            given.get("generator") is None
            and schema.name not in _RESHAPING
            and reads | (writes - covers) <= self._known
        )
        if told and not schema.name.startswith(("aten::empty", "aten::new_empty")):  # which something else fills
            self._known |= writes
        else:
            self._known -= writes
        tree = pytree.tree_map(self._without_memory, (args, kwargs))
        memories = frozenset(reads | (writes - covers)), frozenset(writes), frozenset(covers)
        self._calls.append(_Call(function, tree, made, *memories, stream, torch.get_default_dtype()))

    def note_whole(self, function: Any, options: Sequence[str], given: Mapping[str, Any]) -> None:
        """Note a call of one of torch's initialisers, which has left out what it does.

        Args:
            function: the initialiser.
            options: names of its arguments after the tensor.
            given: its arguments by name.
        """
        if self._watches is not None and not self._watches():
            return
        tensor, kwargs = given["tensor"], {name: given[name] for name in options}
        place = self._place(tensor)
        if not _is_all(tensor) or kwargs.get("generator") is not None:
            self._known.discard(place.memory)
            return
        self._known.add(place.memory)
        own = frozenset({place.memory})
        tree: Any = (place,), kwargs
        stream = self._drawn_from()
        self._calls.append(_Call(function, tree, {}, frozenset(), own, own, stream, torch.get_default_dtype()))

    def catch_up(self) -> None:
        """Draw what was noted on the meta device from torch's generator, before another call draws from it."""
        stream = None if self._begins else self._stream_of(torch.get_rng_state())
        for call in self._calls if stream is not None else ():
            if call.stream == stream:
                _Replay(self).drop(call)

    def replay(
        self,
        wanted: Mapping[int, Callable[[torch.UntypedStorage], None]],
        seed: int | None = None,
        undrawn: Set[int] = frozenset(),
    ) -> None:
        """Replay the operations that the values of some memories depend on, in order.

        Args:
            wanted: by memory, what takes its content once nothing changes it any more; freed after it.
            seed: draw each call's numbers from a seed of its own made of this one, and leave out all others; ``None``
                for the numbers that one process draws.
            undrawn: memories, none of them wanted, that one process draws nothing for, as it reads them from files.
        """
        needed, last, alive = [False] * len(self._calls), dict[int, int](), set(wanted)
        calls = [call if call.stream is None or not call.writes <= undrawn else None for call in self._calls]
        for index in range(len(calls) - 1, -1, -1):
            call = calls[index]
            if call is None:
                continue
            others = seed is None and call.stream is not None and call.reads - call.writes
            if call.writes & alive or others:
                needed[index] = True
                for memory in call.reads | call.writes:
                    last.setdefault(memory, index)
                alive = (alive - call.covers) | call.reads
        before, states = torch.get_rng_state(), [start.clone() for start in self._starts]
        stream, run = self._stream_of(before), _Replay(self)
        current: int | None = None
        for index, call in enumerate(calls):
            if call is None:
                continue
            if call.stream is not None and seed is not None:
                torch.manual_seed((seed + index * 0x9E3779B97F4A7C15) % 2**63)
            elif call.stream is not None and call.stream != current:
                if current is not None:
                    states[current] = torch.get_rng_state()
                current = call.stream
                torch.set_rng_state(states[current])
            if needed[index]:
                run.do(call)
                for memory in call.reads | call.writes:
                    if last[memory] == index:
                        content = run.content.pop(memory)
                        if memory in wanted:
                            wanted[memory](content)
            elif call.stream is not None and seed is None:
                run.drop(call)
        if current is not None:
            states[current] = torch.get_rng_state()
        torch.set_rng_state(before if stream is None or seed is not None else states[stream])

    def sources(self) -> dict[int, frozenset[int]]:
        """By memory, which others its content is computed from, directly or by way of others."""
        found: dict[int, frozenset[int]] = {}
        for call in self._calls:
            behind = call.reads.union(*(found.get(memory, frozenset()) for memory in call.reads))
            for memory in call.writes:
                before = frozenset() if memory in call.covers else found.get(memory, frozenset())
                found[memory] = (before | behind) - {memory}
        return found

    def left(self, used: Set[int]) -> Set[int]:
        """Memories that random numbers were drawn for, and from which nothing in ``used`` is made: given up since."""
        before = self.sources()
        behind = set(used).union(*(before.get(memory, frozenset()) for memory in used))
        return {memory for call in self._calls if call.stream is not None for memory in call.writes} - behind

    def size(self, memory: int) -> int:
        """Bytes of a memory."""
        return self._storages[memory].nbytes()

    def _stream_of(self, state: Tensor) -> int | None:
        """The stream that goes on from this state of torch's generator, which has not drawn its numbers."""
        found = [index for index, start in enumerate(self._starts) if torch.equal(start, state)]
        return found[-1] if found else None

    def _drawn_from(self) -> int:
        state = torch.get_rng_state()
        stream = None if self._begins else self._stream_of(state)
        self._begins = False
        if stream is None:
            self._starts.append(state)
            stream = len(self._starts) - 1
        return stream

    def _number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def _place(self, tensor: Tensor) -> MetaPlace:
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
        return MetaPlace(number, (tensor.shape, tensor.stride(), tensor.storage_offset()), tensor.dtype)

    def _without_memory(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._place(leaf) if leaf.is_meta else leaf.detach().clone()
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf


class _Replay:
    """Does calls again, with memory.

    Args:
        construction: has noted them.

    Attributes:
        content: by memory, what is in it.
    """

    def __init__(self, construction: Construction) -> None:
        self._construction = construction
        self.content: dict[int, torch.UntypedStorage] = {}

    def do(self, call: _Call) -> None:
        """Run a call on the contents."""
        for memory in call.reads | call.writes:
            if memory not in self.content:
                self.content[memory] = torch.UntypedStorage(self._construction.size(memory))
        outputs = pytree.tree_leaves(self._run(call, self._tensor))
        for index, place in call.made.items():
            made, (_, stride, offset) = outputs[index], place.form
            if (made.stride(), made.storage_offset()) != (stride, offset):  # a kernel of the CPU lays it out otherwise
                made = seen_at(torch.UntypedStorage(self._construction.size(place.memory)), place).copy_(made)
            self.content[place.memory] = made.untyped_storage()

    def drop(self, call: _Call) -> None:
        """Draw a call's random numbers, and forget them."""
        self._run(call, _room)

    def _run(self, call: _Call, tensor_of: Callable[[MetaPlace], Tensor]) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(call.floats)
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                tree = pytree.tree_map(lambda leaf: tensor_of(leaf) if isinstance(leaf, MetaPlace) else leaf, call.args)
                args, kwargs = tree
                return call.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    def _tensor(self, place: MetaPlace) -> Tensor:
        content = self.content.get(place.memory)  # none where only its shape matters
        return _room(place) if content is None else seen_at(content, place)


def _room(place: MetaPlace) -> Tensor:
    return torch.empty_strided(*place.form[:2], dtype=place.dtype, device="cpu")


def seen_at(content: torch.UntypedStorage, place: MetaPlace) -> Tensor:
    """The tensor of a place."""
    shape, stride, offset = place.form
    return torch.empty(0, dtype=place.dtype, device="cpu").set_(content, offset, shape, stride)


def _on_meta(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_meta]


def _is_all(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory."""
    several = (stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and all(several)
