"""Listings of a module of which not all is here: ``named_parameters``, ``named_buffers`` and ``state_dict``.

On a stage these methods find its own tensors by themselves, as those of others are no parameters here. What is left
to do: in a step nobody may sum over "all" parameters where only some are here; a layer of another stage lists stand-ins
for its parameters there, lest a sum over them be zero; and of a copy that hooks update, which every stage has whole, a
hook is to meet just what this stage has the source of.

These stand on modules of the user's. A container that code makes of such modules, as by ``self.layers[:2]``, is new to
us; while a run lasts :class:`NewContainers` lets it list what those in it list.
"""

from __future__ import annotations

import copy
import functools
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.parts.names import called, lies_in, outwards, parent
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.pipeline.elsewhere.absent import Absent, Unread, without_absent
from lightning_megatron.pipeline.elsewhere.away import source_of
from lightning_megatron.pipeline.elsewhere.presence import (
    Phase,
    Presence,
    Sight,
    TensorPlace,
    Viewer,
    owner_of,
    tensor_of,
)
from lightning_megatron.pipeline.elsewhere.twins import shown_absent


class _Listing:
    """Base of listings installed on a module: a copy of the module has one of its own, which asks the same stage."""

    _viewer: Viewer

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self._viewer)] = self._viewer
        made = copy.copy(self)
        made.__dict__.update(copy.deepcopy(vars(self), memo))
        return made


class GuardedNames(_Listing):
    """Installed as ``named_parameters`` on a module with parts elsewhere.

    Reading the first few is harmless (for a dtype), and so is counting: in a step what other stages own is an
    :class:`Unread`, in its place. Using the numbers of all of them would silently leave out what other stages own: a
    weight penalty over ``self.parameters()`` would count this stage alone.

    Args:
        module: the module.
        name: its own; ``""`` for the root.
        names: of its parameters that are elsewhere, below it; tied ones once.
        viewer: its stage.
    """

    def __init__(self, module: nn.Module, name: str, names: Sequence[str], viewer: Viewer) -> None:
        self._module, self._name, self._names, self._viewer = module, name, names, viewer

    def __call__(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        if _lists_all(self._viewer):
            yield from self._of_all_stages(prefix, recurse, remove_duplicate)
            self._viewer.note_read()
            return
        in_step = self._viewer.phase(lists=True) is Phase.STEP
        absent = ((name, None) for name in self._names if in_step and (recurse or "." not in name))
        places, above = self._viewer.presence.order, f"{self._name}." if self._name else ""
        own = self._own(recurse, remove_duplicate)
        listed = heapq.merge(own, absent, key=lambda each: places.get(above + each[0], len(places)))
        for place, (name, tensor) in enumerate(listed):
            shown = self._unread(name, leads=place == 0) if tensor is None else tensor
            yield f"{prefix}.{name}" if prefix else name, shown

    def _own(self, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        yield from type(self._module).named_parameters(self._module, "", recurse, remove_duplicate)
        self._viewer.note_read()

    def _of_all_stages(self, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[Any]:
        """Those of all stages, in the order of one process; tied ones under their first name."""
        own = dict(type(self._module).named_parameters(self._module, "", recurse, remove_duplicate=False))
        places = self._viewer.presence.entries
        inside = {name: entry for name, entry in places.items() if isinstance(entry.twin, nn.Parameter)}
        listed = _of_all_stages(self._module, self._name, own, inside, once=remove_duplicate)
        yield from ((f"{prefix}.{n}" if prefix else n, tensor) for n, tensor in listed if recurse or "." not in n)

    def _unread(self, name: str, *, leads: bool) -> Unread:
        there = called(self._module, name)
        room = torch.zeros((), dtype=there.dtype, device=there.device).expand(there.shape)
        unread = room.as_subclass(Unread)
        unread.module, unread.leads = self._name or type(self._module).__name__, leads
        entry = self._viewer.presence.entries[f"{self._name}.{name}" if self._name else name]
        with torch._C.DisableTorchFunctionSubclass():
            return unread.requires_grad_(entry.twin.requires_grad)  # type: ignore[return-value]


class AbsentBuffers(_Listing):
    """Installed as ``named_buffers`` on a module with buffers elsewhere: a hook that goes over all parameters is given
    those of all stages as well.

    Args:
        module: the module.
        name: its own; ``""`` for the root.
        viewer: its stage.
    """

    def __init__(self, module: nn.Module, name: str, viewer: Viewer) -> None:
        self._module, self._name, self._viewer = module, name, viewer

    def __call__(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        own = type(self._module).named_buffers(self._module, "", recurse, remove_duplicate)
        listed: Iterator[tuple[str, Tensor]] = own
        if recurse and _lists_all(self._viewer):
            places = self._viewer.presence.entries
            inside = {name: entry for name, entry in places.items() if not isinstance(entry.twin, nn.Parameter)}
            listed = _of_all_stages(self._module, self._name, dict(own), inside, once=False)
        yield from ((f"{prefix}.{name}" if prefix else name, buffer) for name, buffer in listed)


class AbsentNames(_Listing):
    """Installed as ``named_parameters`` on a module that is elsewhere, as a whole or but for tied weights.

    In a step it lists what stands in for them, which is refused where its numbers are used; in a hook that goes over
    the parameters of all stages, what is absent.

    Args:
        module: the module.
        names: of its parameters that are elsewhere, below it; tied ones once.
        viewer: its stage.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], viewer: Viewer) -> None:
        self._module, self._names, self._viewer = module, names, viewer

    def __call__(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        yield from type(self._module).named_parameters(self._module, prefix, recurse, remove_duplicate)
        listed = self._viewer.phase(lists=True) is Phase.STEP or _lists_all(self._viewer)
        for name in self._names if listed else ():
            if recurse or not parent(name):
                yield f"{prefix}.{name}" if prefix else name, called(self._module, name)


class AbsentState(_Listing):
    """Installed as ``state_dict`` on a module that is elsewhere, or that has parts elsewhere.

    In a step it has what stands in for what is elsewhere, as :class:`AbsentNames`; after the module's own tensors. In a
    hook that goes over the parameters of all stages it has what is absent.

    Args:
        module: the module.
        name: its own; ``""`` for the root.
        names: of its parameters and persistent buffers that are elsewhere, below it.
        viewer: its stage.
    """

    def __init__(self, module: nn.Module, name: str, names: Sequence[str], viewer: Viewer) -> None:
        self._module, self._names, self._viewer = module, names, viewer
        self._above = f"{name}." if name else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _lists_all(self._viewer) and not args and kwargs.get("destination") is None:
            with shown_absent(self._module, self._names, self._order):
                return type(self._module).state_dict(self._module, **kwargs)
        listed = type(self._module).state_dict(self._module, *args, **kwargs)
        if self._viewer.phase(lists=True) is not Phase.STEP:
            if not args and kwargs.get("destination") is None and hasattr(listed, "__dict__"):  # not of the user's own
                listed.of_one_stage = True
                for name in [name for name, value in listed.items() if isinstance(value, Absent)]:
                    del listed[name]  # which a module's own `_save_to_state_dict` adds, as for quantization
            return listed
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs  # torch takes both
        prefix, keep_vars = given.get("prefix", ""), given.get("keep_vars", False)
        for name in self._names:
            tensor = called(self._module, name)
            listed[prefix + name] = tensor if keep_vars else tensor.detach()
        return listed

    @property
    def _order(self) -> dict[str, int]:
        """Of names below the module, their places in a listing of one process."""
        return {name.removeprefix(self._above): place for name, place in self._viewer.presence.order.items()}

    def loaded_here(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a state that this stage loads: all but what is elsewhere, which the stages load that have it."""
        elsewhere = {*self._names}
        if elsewhere.isdisjoint(state_dict):
            return state_dict
        here = OrderedDict((name, value) for name, value in state_dict.items() if name not in elsewhere)
        here._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]
        return here


class CopyNames(_Listing):
    """Installed as one of the listing methods on a module inside a copy."""

    def __init__(self, module: nn.Module, name: str, method: str, viewer: Viewer) -> None:
        self._module, self._name, self._method, self._viewer = module, name, method, viewer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        listed = getattr(type(self._module), self._method)(self._module, *args, **kwargs)
        if args or kwargs.get("destination") is not None:  # part of a listing of more than the copy
            return listed
        prefix = str(kwargs.get("prefix", ""))
        if self._method != "state_dict":
            return ((name, tensor) for name, tensor in listed if self.lists(name, prefix))
        for name in [name for name in listed if not self.lists(name, prefix)]:
            del listed[name]
        return listed

    def lists(self, name: str, prefix: str = "") -> bool:
        """Whether this stage has the source of what is called ``name`` in the module."""
        viewer, own = self._viewer, name.removeprefix(prefix).removeprefix(".")
        return viewer.presence.sight(f"{self._name}.{own}", viewer.phase(lists=True)) is not Sight.UNLISTED


class CopyLoad:
    """Installed as ``load_state_dict`` on a module inside a copy, which is loaded from what its source lists.

    What this stage lacks of the source the stage that has it loads and sends, so that nothing is missing here.
    """

    def __init__(self, module: nn.Module, names: CopyNames) -> None:
        self._module, self._names = module, names

    def __call__(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        own = type(self._module).state_dict(self._module, keep_vars=True) if strict else {}
        elsewhere = {name for name in own if name not in state_dict and not self._names.lists(name)}
        if elsewhere:
            kept = getattr(state_dict, "_metadata", None)
            state_dict = OrderedDict(state_dict) | {name: own[name] for name in elsewhere}
            state_dict._metadata = kept  # type: ignore[attr-defined]
        return type(self._module).load_state_dict(self._module, state_dict, strict, assign)


def _explaining(load: Callable[..., Any]) -> Callable[..., Any]:
    """``nn.Module.load_state_dict``: a stage loads what it has, and errors say so where the state is of one."""

    @functools.wraps(load)
    def load_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        state_dict = without_absent(state_dict)
        source = source_of(list(state_dict.values()))
        if source is not None:
            raise RuntimeError(
                f"the step loads a state that depends on `{source.name}`, which another pipeline stage owns. Load it "
                "in a hook, such as `on_train_batch_start` or `on_train_batch_end`, where each stage loads its part "
                "of a copy and the parts are exchanged; or use `pipeline_parallel_size=1`."
            )
        listing = vars(module).get("state_dict")
        loaded = listing.loaded_here(state_dict) if isinstance(listing, AbsentState) else state_dict
        try:
            return load(module, loaded, *args, **kwargs)
        except RuntimeError as error:
            if getattr(state_dict, "of_one_stage", False):
                error.add_note(
                    "This `state_dict()` is of a module whose parts are on several pipeline stages, and has those of "
                    "this one. A module that is a copy of it gets the others from their stages, if it is frozen where "
                    "it is built (`requires_grad_(False)`), or named like one (`target`, `teacher`, `ema`). "
                    "`strategy.full_state_dict()` has all weights."
                )
            raise

    return load_state_dict


class NewContainers:
    """Takes the place of ``nn.Module.named_parameters``, for containers that user code makes of parts of the module.

    ``self.layers[:2].parameters()`` would be nothing on a stage that has none of them, and a penalty on it zero. Errors
    of ``load_state_dict`` say what such a state lacks.
    """

    def __init__(self) -> None:
        self._replaced, self._own = Replacements(), nn.Module.named_parameters

    def start(self) -> None:
        """Take torch's place."""
        own = self._own = nn.Module.named_parameters

        @functools.wraps(own)
        def named_parameters(
            module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, nn.Parameter]]:
            if recurse and not _lists_itself(module) and any(_lists_itself(child) for child in module.modules()):
                return self._of_container(module, prefix, remove_duplicate)
            return own(module, prefix, recurse, remove_duplicate)

        self._replaced.put(nn.Module, "named_parameters", named_parameters)
        self._replaced.put(nn.Module, "load_state_dict", _explaining(nn.Module.load_state_dict))

    def stop(self) -> None:
        """Give it back."""
        self._replaced.take_back()

    def _of_container(self, module: nn.Module, prefix: str, remove_duplicate: bool) -> Iterator[Any]:
        seen: set[int] = set()
        children = module.named_children() if remove_duplicate else module._modules.items()
        listed = [self._own(module, prefix, recurse=False, remove_duplicate=remove_duplicate)]
        for name, child in children:
            above = f"{prefix}.{name}" if prefix else name
            if child is not None:
                listed.append(child.named_parameters(prefix=above, remove_duplicate=remove_duplicate))
        for name, parameter in itertools.chain.from_iterable(listed):
            if not remove_duplicate or id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def _lists_itself(module: nn.Module) -> bool:
    return isinstance(vars(module).get("named_parameters"), (GuardedNames, AbsentNames, CopyNames))


def is_in_part(module: nn.Module) -> bool:
    """Whether other stages have what is in ``module``, or some of it."""
    return isinstance(vars(module).get("named_parameters"), (GuardedNames, AbsentNames))


def _of_all_stages(
    module: nn.Module, name: str, own: Mapping[str, Tensor], entries: Mapping[str, TensorPlace], *, once: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module on all stages, in the order of one process; ``once``: tied ones under their first name.

    Args:
        module: the module.
        name: its own.
        own: what is here.
        entries: of the whole module.
    """
    above = f"{name}." if name else ""
    here = {entries[above + inner].first: tensor for inner, tensor in own.items() if above + inner in entries}
    seen: set[str] = set()
    for full, entry in entries.items():
        if full.startswith(above) and not (once and entry.first in seen):
            seen.add(entry.first)
            inner = full.removeprefix(above)
            yield inner, here[entry.first] if entry.first in here else tensor_of(module, inner)
    yield from ((inner, tensor) for inner, tensor in own.items() if above + inner not in entries)  # registered later


def _lists_all(viewer: Viewer) -> bool:
    return viewer.lists_all and viewer.phase(lists=True) is Phase.HOOK


def install_listings(module: nn.Module, viewer: Viewer) -> None:
    """Let ``module`` and what is in it list what user code may see.

    Args:
        module: the whole module, about to be cut or cut.
        viewer: its stage.
    """
    below = _below(viewer.presence)
    for name in viewer.presence.partial_modules():
        partial, inside = module.get_submodule(name), below.pop(name, [])
        partial.named_parameters = GuardedNames(partial, name, inside, viewer)  # type: ignore[method-assign, assignment]
    for name, inside in below.items():
        absent = module.get_submodule(name)
        absent.named_parameters = AbsentNames(absent, inside, viewer)  # type: ignore[method-assign, assignment]
    buffers = (name for name, entry in viewer.presence.elsewhere() if not isinstance(entry.twin, nn.Parameter))
    for name in dict.fromkeys(above for each in buffers for above in outwards(parent(each))):
        holder = module.get_submodule(name)
        holder.named_buffers = AbsentBuffers(holder, name, viewer)  # type: ignore[method-assign, assignment]
    for name, inside in _state_below(module, viewer.presence).items():
        above = module.get_submodule(name)
        above.state_dict = AbsentState(above, name, inside, viewer)  # type: ignore[method-assign, assignment]
    for kept in viewer.presence.copies.sources:
        for path, child in module.get_submodule(kept.name).named_modules(prefix=kept.name) if kept.source else ():
            for method in ("named_parameters", "named_buffers", "state_dict"):
                setattr(child, method, names := CopyNames(child, path, method, viewer))
            child.load_state_dict = CopyLoad(child, names)  # type: ignore[method-assign, assignment]


def _below(presence: Presence) -> dict[str, list[str]]:
    """By name of each module of which not all is here: names, below it, of parameters elsewhere, tied ones once."""
    partial = presence.partial_modules()
    found: dict[str, dict[int, str]] = {}
    for name, entry in presence.elsewhere():
        for above in outwards(parent(name)) if isinstance(entry.twin, nn.Parameter) else ():
            if above in partial or lies_in(above, entry.part):
                found.setdefault(above, {}).setdefault(id(entry.twin), name[len(above) + 1 :] if above else name)
    return {above: list(names.values()) for above, names in found.items()}


def _state_below(module: nn.Module, presence: Presence) -> dict[str, list[str]]:
    """By name of each module with something elsewhere: names, below it, of what ``state_dict`` has of that."""
    found: dict[str, list[str]] = {}
    for name, _ in presence.elsewhere():
        owner, leaf = owner_of(module, name)
        if owner is not None and leaf not in owner._non_persistent_buffers_set:
            for above in outwards(parent(name)):
                found.setdefault(above, []).append(name[len(above) + 1 :] if above else name)
    return found
