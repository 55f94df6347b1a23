"""Side effects of the layers of one stage: noticed where they run, repeated where they are skipped.

Looking costs time, so it depends on what was found (``bounds``: the layers of one virtual stage)::

    first run of each kind of step     before and after every call
    later, where layers had effects    likewise, in every run
    later, where they had none         each layer's attributes are compared once per step, and a change, which nobody
                                       expects, is refused
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.mesh.parts.names import lies_in, module_called
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from
from lightning_megatron.pipeline.elsewhere.away import STATE
from lightning_megatron.pipeline.elsewhere.containers import HOOKS, Container
from lightning_megatron.pipeline.elsewhere.effects import LARGEST, Effect, lasts, returned_beside
from lightning_megatron.pipeline.elsewhere.luggage import Luggage, from_bytes, has_away, to_bytes, unpack
from lightning_megatron.pipeline.elsewhere.reachable import Reach
from lightning_megatron.pipeline.elsewhere.undo import Change, Snapshot
from lightning_megatron.pipeline.stage.boundary import Boundary
from lightning_megatron.pipeline.stage.calls import has_user_hooks
from lightning_megatron.pipeline.stage.final_state import FinalState

_Kind = tuple[tuple[int, int], str]
_PLAIN = (bool, int, float, str, bytes, type(None))
_PASSIVE = (*_PLAIN, Tensor, nn.Module)


class SideEffects:
    """Follows the side effects of layers: what they write to besides their output.

    Args:
        root: the user's module.
        names: of the trunk's layers, and of the parts that run before them.
        layers: how many of them are layers.
        device: where this rank computes.

    Attributes:
        device: where this rank computes.
        tracks: whether what the layers of the present run leave behind is noted.
        looks: whether they are looked at before and after their calls at all.
    """

    def __init__(self, root: nn.Module, names: Sequence[str], layers: int, device: torch.device) -> None:
        self._root, self._names, self._last, self.device = root, names, layers, device
        self._modules = {id(module): name for name, module in root.named_modules() if name}
        self._others = frozenset(id(m) for name in names[:layers] for m in root.get_submodule(name).modules())
        uses = Counter(id(m) for name in names[:layers] for m in root.get_submodule(name).modules())
        self._shared = frozenset(module for module, layers_of_it in uses.items() if layers_of_it > 1)
        self._known: dict[int, tuple[Any, list[Container]]] = {}
        self._ran: set[int] = set()
        self._put_off: list[tuple[Effect, tuple[Any, ...]]] = []
        self._travelling: set[_Kind] = set()
        self._lasting: set[_Kind] = set()  # of these, where it is not only what layers return
        self._views: dict[int, list[tuple[Container, Any]]] = {}
        self._changes: list[tuple[int, Change]] = []
        self._lent: list[Change] = []
        self._inside: int | None = None
        self.final = FinalState(root, names)
        self.tracks = self.looks = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SideEffects:
        """Itself: a copy of a layer follows the same steps."""
        return self

    def begin(self, bounds: tuple[int, int], where: str, micro_batch: int, received: Boundary, first: bool) -> None:
        """Prepare for a run.

        Args:
            bounds: first layer of the virtual stage, and the one after its last.
            where: name of the step.
            micro_batch: its number in the step.
            received: what the stage before sent.
            first: whether it is the first run of its kind.
        """
        self._kind, self._bounds = (bounds, where), bounds
        self._lent = []
        self.final.begin(micro_batch, where)
        self._told = received.effects is not None
        self._here: list[Effect] = []
        self._put_off = []
        self._received = received
        self._by_layer: dict[int, list[Effect]] | None = None
        self._first = first
        self.tracks = first or self._kind in self._travelling
        self.looks = self.tracks or (micro_batch == 0 and bounds[1] < self._last)

    def look_again(self) -> None:
        """Forget where layers can write to: their hooks are others now."""
        self._known.clear()
        self._views.clear()

    def found_in(self, where: str) -> bool:
        """Whether layers of this stage were seen to have side effects in the step of this name."""
        return any(name == where for _, name in self._lasting)

    def end(self) -> None:
        """Finish a run: nothing of it stays referenced here, nor where layers of the next micro-batch would find it."""
        self._by_layer = None
        if self._changes:
            self._take_back()
        self._here, self._put_off, self._inside = [], [], None
        self._received = Boundary()

    def _take_back(self) -> None:
        """Take back what is of the micro-batch: a stage that goes on after this one has it.

        After the last, the step's own code has done with it what one process does; only layers that this rank runs
        itself, in another virtual stage, go on from what they left behind there.
        """
        ends = self._bounds[1] == self._last
        for layer, change in reversed(self._changes):
            repeats = layer in self._ran and not self._runs_now(layer)
            if ends and repeats and change.kind == "set" and change.is_kept:
                if change.is_of_micro_batch:
                    self._lent.append(change)
                change.take_back()
            elif not ends and (repeats or change.is_of_micro_batch):
                self.final.note_taken_back(change)
                change.take_back()
        self._changes = []

    def _runs_now(self, index: int) -> bool:
        """Whether a layer, or a part before the layers, is one that this virtual stage runs."""
        return self._bounds[0] <= index < self._bounds[1] if index < self._last else self._bounds[0] == 0

    def around(self, index: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call layer ``index`` by ``run`` and note its side effects."""
        if not self.tracks:
            return self._guarded(index, run, args, kwargs)
        self._ran.add(index)
        before = Snapshot(self._containers(index, args, kwargs))
        self._inside = index
        output = run(*args, **kwargs)
        self._inside = None
        found = [Effect.of(index, change) for change in before.compare()]
        if found:
            self._changes += [(index, change) for change in before.changes]
            self._known.pop(index, None)  # there may be new containers to look at
        if type(output) is not Tensor:
            found += returned_beside(index, output)
        self._here += found
        return output

    def repeat(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Do what layer ``index``, which is skipped, did on its own stage.

        Args:
            index: its number.
            args: what it is called with here.
            kwargs: the same, by name.
            output: stand-in for what it returns.

        Returns:
            ``output``, with the real values that the layer returned besides the hidden state.
        """
        if not self._told:
            return output
        returned = {}
        for effect in self._arrived().get(index, ()):
            if effect.kind == "return":
                returned[effect.key] = effect.value
                continue
            if effect.kind == "set" and has_away(effect.value) and not self._is_exclusive(effect):
                self._put_off.append((effect, (*args, *kwargs.values())))
                continue
            if effect.kind == "log":
                self._repeat_log(effect)
                continue
            self.final.check(effect, self._unit(index))
            change = effect.repeat(self._root, (*args, *kwargs.values()))
            if change is not None:
                self._changes.append((index, change))
        if not returned or output is None:
            return output
        leaves, spec = pytree.tree_flatten(output)
        return pytree.tree_unflatten([returned.get(place, leaf) for place, leaf in enumerate(leaves)], spec)

    def finish_trunk(self) -> None:
        """Put the stand-ins of large tensors where the code after the layers looks for them. Not before: a table that
        layers share, in a cache or a module, is for the layers of each stage to make; where they did, theirs stays.
        """
        mine = {(effect.address, effect.key) for effect in self._here}
        for effect, arguments in self._put_off:
            if (effect.address, effect.key) not in mine:
                effect.repeat(self._root, arguments)

    def _is_exclusive(self, effect: Effect) -> bool:
        """Whether only the layer that wrote it can get at the place: an attribute of its own or of a module in it."""
        kind, *at = effect.address[0]
        if kind != "module" or not lies_in(at[0], self._names[effect.layer]):
            return False
        return id(self._root.get_submodule(at[0])) not in self._shared

    def _arrived(self) -> dict[int, list[Effect]]:
        """Effects of the layers before this stage's in this micro-batch, by layer."""
        if self._by_layer is None:
            self._by_layer = {}
            flat = [t for leaf, t in zip(self._received.leaves, self._received.tensors, strict=True) if leaf.index < 0]
            for effect in unpack(self._received.effects or (), flat, self.device, self._root):
                self._by_layer.setdefault(effect.layer, []).append(effect)
        return self._by_layer

    def pack(self) -> Luggage | None:
        """The side effects to send to the next stage; ``None`` if no layer has had any so far."""
        if not self._told and not self.tracks:
            return None
        self._note_first()
        if not self._told and self._kind not in self._travelling:
            return None
        return Luggage([*self._all_received(), *self._here], self._names, self._modules)

    def note_finished(self) -> None:
        """On the stage where the step ends, keep the side effects of all layers."""
        if self._told or self.tracks:
            self._note_first()
            self.final.note([*self._all_received(), *self._here])

    def set_back(self) -> dict[tuple[str, Any], Any]:
        """See :meth:`.FinalState.set_back`."""
        return self.final.set_back([*self._all_received(), *self._here]) if self._told or self.tracks else {}

    def take_log(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Take a call of ``self.log`` that belongs to another stage's logs.

        Args:
            args: of the call.
            kwargs: the same, by name.

        Returns:
            Whether it was taken: it comes from a layer whose shapes are asked for, or which another stage repeats.

        Raises:
            RuntimeError: it cannot be told.
        """
        if STATE.paused:
            return True
        if self._inside is None or self._bounds[1] == self._last:
            return False
        if not self.tracks or not all(isinstance(v, (*_PLAIN, Tensor)) for v in (*args, *kwargs.values())):
            raise RuntimeError(
                f"layer `{self._names[self._inside]}` calls `self.log({args[0] if args else ''!r}, ...)` "
                f"{'with an object' if self.tracks else 'in a later step and not in the first'}, which its pipeline "
                "stage cannot tell the last one. Log a number in every step, keep it on the layer and log it in the "
                "step, or use `pipeline_parallel_size=1`."
            )
        given = pytree.tree_map_only(Tensor, torch.detach, (args, kwargs))
        self._here.append(Effect(self._inside, (), "log", None, given))
        return True

    def _repeat_log(self, effect: Effect) -> None:
        if self._bounds[1] == self._last:
            root: Any = self._root
            args, kwargs = effect.value
            root.log(*args, **kwargs)

    def _note_first(self) -> None:
        if self._first and (self._here or self._hooked()):
            self._travelling.add(self._kind)
            if lasts(self._here) or self._hooked():
                self._lasting.add(self._kind)

    def _all_received(self) -> list[Effect]:
        return [effect for effects in self._arrived().values() for effect in effects] if self._told else []

    def take_step(self) -> bytes | None:
        """Side effects of all layers in the whole step, for the hooks that follow it on the other stages."""
        for change in reversed(self._lent):
            change.container.change("set", change.key, change.new)
        self._lent = []
        told = [effect for effect in self.final.take() if not has_away(effect.value)]
        return to_bytes(told, self._names, self._modules) if told else None

    def repeat_step(self, data: bytes) -> None:
        """Apply the side effects that :meth:`take_step` returned on another stage."""
        for effect in from_bytes(data, self.device, self._root):
            mine = effect.layer in self._ran and self._is_exclusive(effect)
            if not mine or (self.final.is_due(effect) and not has_away(effect.value)):
                effect.repeat_later(self._root)
        self.final.forget()

    def _guarded(self, index: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a layer that left nothing behind so far, and of which the next stage expects nothing."""
        if index not in self._views:
            found = [container for container in self._containers(index, (), {}) if self._is_own(index, container)]
            self._views[index] = [(container, _view(container.value)) for container in found]
        views = [view for _, view in self._views[index]]
        before = [*map(tuple, views)]
        self._inside = index
        output = run(*args, **kwargs)
        self._inside = None
        if not _equal(before, [*map(tuple, views)]):
            self._refuse(index, before)
        return output

    def _refuse(self, index: int, before: list[tuple[Any, ...]]) -> None:
        changed = [
            (container, new)
            for (container, view), old in zip(self._views[index], before, strict=True)
            if not _equal(old, tuple(view))
            for new in view
            if not any(new is entry for entry in old)
        ]
        if changed and all(_is_table(new) for _, new in changed):
            return
        container = changed[0][0] if changed else self._views[index][0][0]
        place = Effect(index, container.address, "set", None, None).place()
        raise RuntimeError(
            f"layer `{self._names[index]}` wrote to {place} in a later `{self._kind[1]}` and not in the first, where "
            "pipeline stages agree on what to tell each other about layers. Let it write there from the first step on "
            "(a zero will do), return the value and pass it through the layers, or use `pipeline_parallel_size=1`."
        )

    def _hooked(self) -> bool:
        here = [self._unit(place) for place in self._places()]
        return any(has_user_hooks(module) for unit in here if unit is not None for module in unit.modules())

    def _places(self) -> list[int]:
        """Numbers of the layers and parts that the present run computes."""
        parts = range(self._last, len(self._names)) if self._bounds[0] == 0 else ()
        return [*range(*self._bounds), *parts]

    def _unit(self, index: int) -> nn.Module | None:
        """A layer or part; ``None`` for a parameter."""
        return module_called(self._root, self._names[index])

    def _containers(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Container]:
        arguments = (*args, *kwargs.values())
        given = () if all(map(_is_passive, arguments)) else arguments
        unit = self._unit(index)
        if unit is None:
            return []
        hooks = [key for module in unit.modules() for table in HOOKS for key in getattr(module, table)]
        if given or self._known.get(index, (None,))[0] != hooks:
            reach = Reach(self._root, unit, self._others)
            found = reach.containers(given)
            if reach.passing:
                return found
            self._known[index] = hooks, found
        return self._known[index][1]

    def containers(self, place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Container]:
        """Containers that a call of a layer or part can write to; unknown of a part that runs after the layers.

        Args:
            place: its number, or any other one.
            name: its name.
            args: of the call.
            kwargs: the same, by name.
        """
        place = place if place < self._last else next((at for at, unit in enumerate(self._names) if unit == name), -1)
        return [] if place < 0 else self._containers(place, args, kwargs)

    def packed(self, effects: Sequence[Effect]) -> bytes | None:
        """The side effects, to be sent to other ranks; ``None`` if there are none."""
        return to_bytes(effects, self._names, self._modules) if effects else None

    def _is_own(self, index: int, container: Container) -> bool:
        """Whether the step's own code, outside of the layers, does not write to it as well."""
        value, (kind, *at) = container.value, container.address[0]
        if isinstance(value, nn.Module) and comes_from(type(value), PACKAGE):
            return False
        own = kind != "module" or lies_in(at[0], self._names[index])
        return own and not isinstance(value, FunctionType) and kind != "globals"


def _is_passive(argument: Any) -> bool:
    """Whether nothing in an argument of a call can be written to that is looked for: rotary embeddings are tuples."""
    return isinstance(argument, _PASSIVE) or (
        type(argument) is tuple and all(isinstance(each, (Tensor, *_PLAIN)) for each in argument)
    )


def _is_table(value: Any) -> bool:
    """Whether it can only be something that a layer keeps for itself, such as a mask for longer sequences."""
    return isinstance(value, Tensor) and not value.requires_grad and value.numel() > LARGEST


def _view(value: Any) -> Any:
    """Something that gives the present entries of a container each time it is gone over."""
    if isinstance(value, dict):
        return value.values()
    return vars(value).values() if hasattr(value, "__dict__") else value


def _equal(before: Any, now: Any) -> bool:
    try:
        return bool(before == now)
    except (RuntimeError, ValueError, TypeError):  # tensors in place of others
        return False
