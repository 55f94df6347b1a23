"""How what layers leave behind travels with a boundary, and what cannot travel.

::

    numbers, strings, small tensors, nests and objects of these     as they are; gradients come back
    large tensors                                                    only their shape (:mod:`.away`)
    modules                                                          their names
    objects that Python cannot send                                  a :class:`Lost` in their place, which says so
    objects of libraries, such as caches                             nothing: each stage has its own
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.mesh.parts.packages import is_library, module_of
from lightning_megatron.pipeline.elsewhere.away import Away, StageSource, mark
from lightning_megatron.pipeline.elsewhere.effects import LARGEST, Effect

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BY_VALUE = (torch.Size, torch.dtype, torch.device, range, slice, enum.Enum)


@dataclass(frozen=True)
class _Slice:
    """Stands for a tensor with a gradient: its numbers are in a flat tensor of its dtype."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Lacking:
    """Stands for a tensor that stays where it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    source: StageSource


@dataclass(frozen=True)
class _Object:
    """Stands for an object of the user's own class."""

    kind: type
    state: dict[str, Any]


class _Unknown:
    """Stands for what cannot travel: the other stages keep what they have."""


@dataclass(frozen=True)
class _Name:
    """Stands for a module of the user's."""

    name: str


@dataclass(frozen=True)
class _Unsendable:
    """Stands for an object that Python cannot send: see :class:`Lost`."""

    source: StageSource
    kind: str


class Lost:
    """In the place of an object of another stage that Python cannot send.

    Args:
        source: the layer that left it behind.
        kind: name of its class.
    """

    def __init__(self, source: StageSource, kind: str) -> None:
        self.__dict__["_lost"] = (source, kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        source, kind = self.__dict__["_lost"]
        raise RuntimeError(
            f"the step reads what `{source.name}` has left behind on another pipeline stage, an object of `{kind}`, "
            "which Python cannot send. Define its class at the top of a file and keep numbers and tensors in it, "
            "return the value and pass it through the layers, or use `pipeline_parallel_size=1`."
        )

    __call__ = __iter__ = __len__ = __getitem__ = __bool__ = __float__ = __int__ = __enter__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __contains__ = _refuse


class Luggage:
    """Effects on their way to the next stage.

    Args:
        effects: of layers so far.
        names: of the layers.
        modules: names of the user's modules, by id.
        gradients: whether they come back.

    Attributes:
        effects: with descriptions for values.
        tensors: numbers of the tensors that have gradients, flat, one tensor per dtype.
    """

    def __init__(
        self, effects: Iterable[Effect], names: Sequence[str], modules: Mapping[int, str], gradients: bool = True
    ) -> None:
        self._groups: dict[torch.dtype, list[Tensor]] = {}
        self._sizes: dict[torch.dtype, int] = {}
        self._modules, self._gradients = modules, gradients
        packed = []
        for effect in effects:
            source = StageSource(names[effect.layer], is_layer=True)
            value = self._pack(effect.value, source)
            if not _has(value, _Unknown):
                key = _Name(modules[id(effect.key)]) if id(effect.key) in modules else effect.key
                before = effect.before.cpu().clone() if isinstance(effect.before, Tensor) else effect.before
                packed.append(self._sendable(replace(effect, key=key, value=value, before=before), source))
        self.effects = tuple(effect for effect in packed if effect is not None)
        self.tensors = [torch.cat([tensor.reshape(-1) for tensor in group]) for group in self._groups.values()]

    def _sendable(self, effect: Effect, source: StageSource) -> Effect | None:
        """The effect, or one that says that its value is lost; ``None`` for entries under what cannot be sent."""
        if isinstance(effect.key, (*_PLAIN, _Name)) and isinstance(effect.value, (*_PLAIN, Tensor, _Slice, _Lacking)):
            return effect
        if not _is_sendable(effect.key):
            return None
        lost: Any = _Unsendable(source, type(effect.value).__name__)
        lost = [lost] * len(effect.value) if effect.kind in ("append", "fill") else lost
        return effect if _is_sendable(effect.value) else replace(effect, value=lost)

    def _pack(self, value: Any, source: StageSource) -> Any:
        return pytree.tree_map(lambda leaf: self._pack_leaf(leaf, source), value)

    def _pack_leaf(self, leaf: Any, source: StageSource) -> Any:
        if isinstance(leaf, _PLAIN):
            return leaf
        if isinstance(leaf, Tensor):
            return self._pack_tensor(leaf, source)
        if isinstance(leaf, nn.Module):
            return _Name(self._modules[id(leaf)]) if id(leaf) in self._modules else _Unknown()
        if isinstance(leaf, _BY_VALUE):
            return leaf
        if isinstance(leaf, (set, frozenset)):
            return leaf if all(isinstance(entry, _PLAIN) for entry in leaf) else _Unknown()
        if module_of(type(leaf)) == "numpy":
            return leaf if getattr(leaf, "size", 0) <= LARGEST else _Unknown()
        if is_library(type(leaf)) and type(leaf).__name__ != "SimpleNamespace":
            return _Unknown()
        if not hasattr(leaf, "__dict__") or not _is_sendable(type(leaf)):
            return _Unsendable(source, type(leaf).__name__)
        state = {name: self._pack(entry, source) for name, entry in vars(leaf).items()}
        return _Unsendable(source, type(leaf).__name__) if _has(state, _Unknown) else _Object(type(leaf), state)

    def _pack_tensor(self, tensor: Tensor, source: StageSource) -> Any:
        shape = tuple(tensor.shape)
        if type(tensor) is Away:
            return _Lacking(tensor.dtype, shape, tensor.source)
        if tensor.numel() > LARGEST:
            return _Lacking(tensor.dtype, shape, source)
        if not (tensor.requires_grad and self._gradients):
            return tensor.detach().cpu().clone()
        start = self._sizes.get(tensor.dtype, 0)
        self._groups.setdefault(tensor.dtype, []).append(tensor)
        self._sizes[tensor.dtype] = start + tensor.numel()
        return _Slice(tensor.dtype, start, shape)


def unpack(effects: Iterable[Effect], tensors: Sequence[Tensor], device: torch.device, root: nn.Module) -> list[Effect]:
    """Inverse of :class:`Luggage`.

    Args:
        effects: with descriptions for values.
        tensors: the flat tensors.
        device: where tensors are to live.
        root: the user's module.
    """
    flat = {tensor.dtype: tensor for tensor in tensors}

    def leaf_of(leaf: Any) -> Any:
        if isinstance(leaf, _Slice):
            size = torch.Size(leaf.shape).numel()
            return flat[leaf.dtype][leaf.start : leaf.start + size].clone().view(leaf.shape)
        if isinstance(leaf, _Lacking):
            return mark(torch.zeros((), dtype=leaf.dtype, device=device).expand(leaf.shape), leaf.source)
        if isinstance(leaf, _Object):
            made: Any = object.__new__(leaf.kind)
            made.__dict__.update({name: pytree.tree_map(leaf_of, entry) for name, entry in leaf.state.items()})
            return made
        if isinstance(leaf, _Name):
            return root.get_submodule(leaf.name)
        if isinstance(leaf, _Unsendable):
            return Lost(leaf.source, leaf.kind)
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return [
        replace(effect, key=leaf_of(effect.key), value=pytree.tree_map(leaf_of, effect.value)) for effect in effects
    ]


def to_bytes(effects: Iterable[Effect], names: Sequence[str], modules: Mapping[int, str]) -> bytes:
    """Effects without gradients, for :func:`from_bytes` on other ranks."""
    return pickle.dumps(Luggage(effects, names, modules, gradients=False).effects)


def from_bytes(data: bytes, device: torch.device, root: nn.Module) -> list[Effect]:
    """The effects that :func:`to_bytes` wrote down."""
    return unpack(pickle.loads(data), (), device, root)


def has_away(value: Any) -> bool:
    """Whether a large tensor is in ``value``, of which only the shape has come."""
    return _has(value, Away)


def _has(value: Any, kind: type) -> bool:
    return any(isinstance(leaf, kind) for leaf in pytree.tree_leaves(value))


def _is_sendable(value: Any) -> bool:
    try:
        return bool(pickle.dumps(value))
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
