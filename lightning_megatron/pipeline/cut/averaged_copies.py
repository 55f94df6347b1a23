"""Copies of trained parts that hooks update: averaged weights (EMA), mean teachers, momentum encoders, target networks.

No step trains a copy, which never gets a gradient even where an optimizer has it; a hook iterates over a copy and its
source in parallel and mixes the source into the copy. Under a pipeline each stage has only its own layers of the
source. Every stage therefore keeps the whole copy, but outside of a step it lists only the parameters of the copy whose
source it has::

    source   layers.0  layers.1 │ layers.2  layers.3        stage 0 updates copies of 0 and 1, stage 1 those of 2 and 3
    copy     layers.0  layers.1   layers.2  layers.3        both keep all four; changes are broadcast

So names, ``zip`` over both and ``torch.optim.swa_utils.AveragedModel`` work, and each parameter of the copy is updated
by the stage that has its source. ``strategy.logs.copy_exchange`` broadcasts the updated values to the other stages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_megatron.mesh.parts.names import leaf_of, lies_in
from lightning_megatron.mesh.parts.packages import comes_from
from lightning_megatron.pipeline.cut.trunk import Trunk

_NAMES = re.compile(r"(ema|avg|average|averaged|teacher|target|momentum|shadow|swa|slow)(_|$)", re.IGNORECASE)
_LAYERS = "lightning_megatron.layers"
_Look = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class AveragedCopy:
    """A module that a hook updates from another module with parameters of the same names and shapes.

    Attributes:
        name: dotted name of the copy.
        source: dotted name of its source; ``""`` if several modules could be the source.
        own_prefix: common prefix of the parameter names inside the copy, such as ``"module."`` in a wrapper.
        source_prefix: common prefix of the parameter names inside the source.
    """

    name: str
    source: str = ""
    own_prefix: str = ""
    source_prefix: str = ""

    def source_of(self, name: str) -> str | None:
        """Full name of the source tensor of the copy's tensor ``name``; ``None`` if it has no known source."""
        start = f"{self.name}.{self.own_prefix}"
        if not self.source or not name.startswith(start):
            return None
        return f"{self.source}.{self.source_prefix}{name.removeprefix(start)}"


@dataclass(frozen=True)
class Copies:
    """All copies that a module keeps beside its trained weights.

    Attributes:
        sources: the submodules that are copies.
        buffers: dotted names of buffers that hold averages of parameters.
    """

    sources: tuple[AveragedCopy, ...] = ()
    buffers: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sources or self.buffers)

    def covers(self, name: str) -> bool:
        """Whether the part or parameter ``name`` belongs to a copy."""
        return any(lies_in(name, copy.name) for copy in self.sources)

    def lie_in(self, part: str) -> bool:
        """Whether ``part`` belongs to a copy, or contains one."""
        return self.covers(part) or any(lies_in(copy.name, part) for copy in self.sources)

    def source_of(self, name: str) -> str | None:
        """Full name of the source of the tensor ``name``; ``None`` if it is no copy, or its source is not known."""
        return next((found for copy in self.sources if (found := copy.source_of(name)) is not None), None)

    def without_trained(self, module: nn.Module, trained: Set[int]) -> Copies:
        """The copies without those that are trained: a part may be named like a copy and not be one.

        Args:
            module: the whole module, cut or not.
            trained: ids of the parameters that have got a gradient and that an optimizer updates.
        """
        kept = [copy for copy in self.sources if not _holds(module.get_submodule(copy.name), trained)]
        return replace(self, sources=tuple(kept))

    def in_question(self, module: nn.Module, updated: Set[int]) -> list[nn.Parameter]:
        """Parameters of copies that an optimizer has too, as by ``SGD(self.parameters())``, and may train.

        Args:
            module: the whole module, cut or not.
            updated: ids of the parameters that an optimizer has.
        """
        named = (nn.Module.named_parameters(module.get_submodule(copy.name)) for copy in self.sources)
        return [p for listed in named for _, p in listed if p.requires_grad and id(p) in updated]

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """Name -> parameter or buffer, for all tensors of copies."""
        named: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
        return {name: tensor for name, tensor in named if name in self.buffers or self.covers(name)}


def find_copies(module: nn.Module, trunk: Trunk, whole: Mapping[str, tuple[int, ...]] | None = None) -> Copies:
    """Find parts that are frozen, or named like a copy, and have the parameter names and shapes of a trained part.

    Args:
        module: the whole module, real or on the meta device.
        trunk: its layers, which are never copies.
        whole: shapes in one process, by name, of parameters of which this rank has a slice.
    """
    shapes = {id(p): whole[name] for name, p in module.named_parameters() if name in whole} if whole else {}
    looks: dict[_Look, list[str]] = {}
    for name, child in module.named_modules():
        if name and any(parameter.requires_grad for parameter in child.parameters()):
            looks.setdefault(_look(child, shapes), []).append(name)
    found = dict(_walk(module, module, "", trunk, looks, shapes))
    pairs: list[AveragedCopy] = []
    for name, candidates in found.items():
        if _is_shared(module, name):
            continue
        originals = [other for other in candidates if not any(lies_in(other, copy) for copy in found)]
        pairs.append(_pair(module, name, originals))
    return Copies(tuple(pairs), _averages(module, trunk, shapes))


def _pair(module: nn.Module, name: str, candidates: list[str]) -> AveragedCopy:
    copied = [other for other in candidates if _hold_the_same(module.get_submodule(name), module.get_submodule(other))]
    source = _source(name, copied or candidates)
    if not source:
        return AveragedCopy(name)
    return AveragedCopy(name, source, _prefix(module.get_submodule(name)), _prefix(module.get_submodule(source)))


def _hold_the_same(one: nn.Module, other: nn.Module) -> bool:
    """Whether parameters have the same numbers, as where one module was copied from the other: names need not tell."""
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    known = all(type(p.data) is Tensor and p.device.type != "meta" for pair in pairs for p in pair)
    alike = known and all(p.shape == q.shape and p.dtype == q.dtype and p.device == q.device for p, q in pairs)
    return alike and all(torch.equal(p, q) for p, q in pairs)


def _holds(module: nn.Module, trained: Set[int]) -> bool:
    return any(id(parameter) in trained for _, parameter in nn.Module.named_parameters(module))


def _walk(
    root: nn.Module,
    module: nn.Module,
    name: str,
    trunk: Trunk,
    looks: dict[_Look, list[str]],
    shapes: Mapping[int, tuple[int, ...]],
) -> Iterator[tuple[str, list[str]]]:
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if path == trunk.name or any(path == layer for layer in trunk.layer_names):
            continue
        candidates = [other for other in looks.get(_look(child, shapes), []) if not lies_in(other, path)]
        if not _is_called_copy(path, child):  # a frozen embedding looks like a head
            candidates = [other for other in candidates if _core(root.get_submodule(other)) is _core(child)]
        if candidates and not lies_in(trunk.name, path) and _is_copy(path, child):
            yield path, candidates
        else:
            yield from _walk(root, child, path, trunk, looks, shapes)


def _is_copy(path: str, module: nn.Module) -> bool:
    parameters = list(module.parameters())
    frozen = not any(parameter.requires_grad for parameter in parameters)
    return bool(parameters) and (frozen or _is_called_copy(path, module))


def _is_called_copy(path: str, module: nn.Module) -> bool:
    return isinstance(module, AveragedModel) or any(_NAMES.search(part) for part in path.split("."))


def _core(module: nn.Module) -> type[nn.Module]:
    """Class of what holds the parameters, inside of wrappers that have one child and no parameters of their own.

    Of a layer that tensor-parallel ranks share, it is the class that it was built as: ranks may share a source and not
    its copy.
    """
    children = list(module.children())
    while len(children) == 1 and not any(parameter is not None for parameter in module._parameters.values()):
        module = children[0]
        children = list(module.children())
    return next(kind for kind in type(module).__mro__ if not comes_from(kind, _LAYERS))


def _is_shared(module: nn.Module, path: str) -> bool:
    """Whether a part shares a parameter with the rest of the module, so that it is tied and not a copy."""
    named = list(module.named_parameters(remove_duplicate=False))
    inside = {id(parameter) for name, parameter in named if lies_in(name, path)}
    return any(id(parameter) in inside for name, parameter in named if not lies_in(name, path))


def _source(copy: str, candidates: list[str]) -> str:
    """The only candidate, or the only one whose name is in the name of ``copy``; otherwise empty.

    Entries of lists have numbers for names, which tell nothing: a copy may be ``[embed, *layers]``.
    """
    outer = [name for name in candidates if not any(name != other and lies_in(name, other) for other in candidates)]
    if len(outer) == 1:
        return outer[0]
    leaf = leaf_of(copy)
    outer = [name for name in outer if not leaf_of(name).isdigit()]
    named = [name for name in outer if re.search(rf"(^|_){re.escape(leaf_of(name))}(_|$)", leaf)]
    return named[0] if len(named) == 1 else ""


def _look(module: nn.Module, shapes: Mapping[int, tuple[int, ...]]) -> _Look:
    """Names and shapes of a module's parameters, with their common prefix removed."""
    start = len(_prefix(module))
    return tuple((name[start:], shapes.get(id(p), tuple(p.shape))) for name, p in module.named_parameters())


def _prefix(module: nn.Module) -> str:
    """Common prefix of the names of all parameters: ``"module."`` in a wrapper."""
    paths = [name.split(".")[:-1] for name, _ in module.named_parameters()]
    shared = [levels[0] for levels in takewhile(lambda levels: len(set(levels)) == 1, zip(*paths, strict=False))]
    return "".join(f"{level}." for level in shared)


def _averages(module: nn.Module, trunk: Trunk, shapes: Mapping[int, tuple[int, ...]]) -> tuple[str, ...]:
    """Names of buffers that hold averages: those of modules with a buffer for each shape of a layer's parameters."""
    layer = next((layer for layer in trunk.layers(module) if any(True for _ in layer.parameters())), None)
    if layer is None:
        return ()
    wanted = Counter(shapes.get(id(parameter), tuple(parameter.shape)) for parameter in layer.parameters())
    found: list[str] = []
    for name, child in module.named_modules():
        if any(lies_in(name, inner) for inner in trunk.layer_names):
            continue
        direct = [(key, buffer) for key, buffer in child._buffers.items() if buffer is not None]
        if not wanted - Counter(tuple(buffer.shape) for _, buffer in direct):
            found += [f"{name}.{key}" if name else key for key, _ in direct]
    return tuple(found)
