"""Stand-ins on one stage for the parts that other stages own.

A *hollow* module keeps its class, name, children and plain attributes, so code that reads them goes on working, but its
parameters and buffers have become zero-stride tensors: the right shape, the bytes of one number. Called, it answers
with zeros of the shapes its forward would return, found once per input shape by running that forward on fake tensors.

Every such zero is marked (:mod:`.away`), and hangs in the autograd graph on one *sentinel*. A gradient that reaches a
sentinel means that a loss depended on numbers another stage should have computed, and raises an error instead of
training on zeros: the mark may have been lost in code that is not torch's.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.mesh.autograd import hooks_keep
from lightning_megatron.mesh.batches import signature
from lightning_megatron.mesh.parts.names import leaf_of
from lightning_megatron.mesh.pickling import OtherClass
from lightning_megatron.pipeline.elsewhere.absent import TellsPhase, make_absent
from lightning_megatron.pipeline.elsewhere.abstract import ObjectShape, OfData, TensorShape, abstract_run
from lightning_megatron.pipeline.elsewhere.away import Away, AwayNumber, StageSource, make_real, mark
from lightning_megatron.pipeline.elsewhere.presence import Presence, owner_of


class Sentinel:
    """Source of the zeros of one hollow part."""

    def __init__(self, name: str, is_layer: bool = False) -> None:
        self.name = name
        self.source = StageSource(name, is_layer)
        self._sources: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def zeros(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zero-stride zeros of ``shape``; differentiable ones raise in backward."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros((), dtype=dtype, device=device).expand(shape)
        key = (dtype, device)
        if key not in self._sources:
            with torch.inference_mode(False):
                source = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
            source.register_hook(self._refuse)
            self._sources[key] = source
        return self._sources[key].expand(shape)

    def stand_in(self, shape: torch.Size, dtype: torch.dtype, device: torch.device, first: Tensor | None) -> Tensor:
        """A tensor that stands for one of this shape: ``first``, where it is a stand-in like that."""
        if first is not None and shape_and_dtype(first) == (shape, dtype):
            return first
        return mark(self.zeros(shape, dtype, device).clone(), self.source)  # type: ignore[no-any-return]

    def _refuse(self, grad: Tensor) -> None:
        checkpointed = "For layers under `torch.utils.checkpoint`, pass `use_reentrant=False`. "
        raise RuntimeError(
            f"the loss depends on `{self.name}`, which another pipeline stage owns: its output is used not only as the "
            f"input of the layers, but also where this stage computes. {checkpointed if self.source.is_layer else ''}"
            f"{self.source.remedy()}"
        )


def hollow_out(module: nn.Module, presence: Presence, device: torch.device, phase: TellsPhase) -> dict[str, Sentinel]:
    """Let only zeros remain, in ``module``, of what other stages own.

    Tensors that this stage holds too, under another name or in a module that it shares, stay.

    Args:
        module: the whole module; changed in place.
        presence: what of it is here.
        device: where zeros live.
        phase: tells what runs, on which depends what its tensors answer; see :mod:`.absent`.

    Returns:
        By name of each part that is elsewhere, the source of its zeros.
    """
    parts = {name: part for name, part in presence.parts.items() if presence.stage not in part.stages}
    sentinels = {name: Sentinel(name, part.is_layer) for name, part in parts.items()}
    for name, entry in presence.elsewhere():
        owner, leaf = owner_of(module, name)
        if owner is not None and leaf not in owner.__dict__:  # under another name of its module, it may be
            shape = entry.twin.shape if isinstance(owner, VocabParallelEmbedding) else None
            zeros = _hide(owner, leaf, sentinels[entry.part], device, shape)
            source, twin = sentinels[entry.part].source, entry.twin
            shown = twin if isinstance(twin, nn.Parameter) else None
            owner.__dict__[leaf] = make_absent(zeros, entry.part, phase, source, twin.shape, shown)
    for name in parts:
        part = owner_of(module, name)[0]
        child = part._modules.get(leaf_of(name)) if part is not None else None
        if child is not None and not isinstance(child, _Elsewhere):
            original: Any = type(child)
            child.__class__ = _hollow_class(original)
    return sentinels


def _hide(
    owner: nn.Module, leaf: str, sentinel: Sentinel, device: torch.device, shape: torch.Size | None = None
) -> Tensor:
    """Take a parameter or buffer off its module; returns zeros like it.

    Args:
        owner: the module.
        leaf: name of the tensor there.
        sentinel: of the part.
        device: where zeros live.
        shape: of the zeros, if another: a split table's rows are looked up by the embedding alone, and the code around
            it, such as DoRA's norm, reads all of them.
    """
    table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
    tensor = table.pop(leaf)
    if isinstance(tensor, nn.Parameter):
        return sentinel.zeros(shape or tensor.shape, tensor.dtype, device)
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


class _Elsewhere(OtherClass):
    """Mixin of hollow modules: says why an attribute that a forward would have set is missing."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError as error:
            raise AttributeError(
                f"{error}. This module is on another pipeline stage, where its forward may set `{name}`; pass values "
                "between layers through their arguments and outputs, or use `pipeline_parallel_size=1`."
            ) from None


@functools.cache
def _hollow_class(original: Any) -> Any:
    """A subclass of ``original`` for its hollow instances; one per class, so that equal layers stay equal."""
    return type(original.__name__, (_Elsewhere, original), {"__module__": original.__module__})


def become(stand_in: Any, received: Tensor, training: bool) -> bool:
    """Turn the very tensor that the user's code passed into the received one, so that other uses of it see it too.

    ``x = layer(x) + x`` uses the input twice, once where no call shows it. Returns whether it could be done; not inside
    the user's own activation checkpointing, which has saved the tensor already.
    """
    if type(stand_in) is not Tensor and type(stand_in) is not Away:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        became = _fill_with(stand_in, received, training)
    if became:
        make_real(stand_in)
    return became


def _fill_with(stand_in: Tensor, received: Tensor, training: bool) -> bool:
    if stand_in.shape != received.shape or stand_in.dtype != received.dtype:
        return False
    if not torch.is_grad_enabled():
        if 0 in stand_in.stride():
            return False
        fills = not (training and received.requires_grad)  # else a later run, with gradients, needs it as it is
        if fills:
            stand_in.copy_(received)
        return fills
    if hooks_keep():
        return False
    if stand_in._is_view() or stand_in.is_inference() or stand_in.device != received.device:
        return False
    stand_in.detach_()
    if stand_in._backward_hooks:  # the stage before has them on its output, to which this gradient goes
        stand_in._backward_hooks.clear()
    stand_in.data = received.detach()
    stand_in.requires_grad_(received.requires_grad)
    return True


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
_DEEPEST = 4  # collections inside each other that are looked into


class OutputShapes:
    """Shapes of what a forward returns, learned once per input signature and shared by modules that look the same."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._plain: dict[Any, Any] = {}  # what one tensor in gives, by module and shape: most calls, so asked first
        self._looks: dict[int, tuple[nn.Module, int]] = {}

    def _look_of(self, module: nn.Module) -> int:
        """Hash of a module's class, options, shapes and what it and its children keep: two embeddings may differ in
        nothing but their width, two layers in nothing but the number by which one of them shortens the sequence.
        """
        if id(module) not in self._looks:
            kept = [
                (name, tuple(value.shape) if isinstance(value, Tensor) else _constant(value))
                for child in module.modules()
                for table in (child.__dict__, child._parameters, child._buffers)
                for name, value in table.items()
                if name not in _OF_EVERY_MODULE
            ]
            self._looks[id(module)] = (module, hash((type(module), repr(module), repr(kept))))
        return self._looks[id(module)][1]

    def forget(self, module: nn.Module) -> None:
        """Run the forward of ``module`` again when it is called next: it has changed, or may have."""
        self._looks.pop(id(module), None)
        self._plain = {key: known for key, known in self._plain.items() if key[0] != id(module)}

    def stand_in(
        self, module: nn.Module, sentinel: Sentinel, forward: Callable[..., Any], args: Any, kwargs: Any, reuse: bool
    ) -> Any:
        """Zeros shaped like ``forward(*args, **kwargs)``.

        With ``reuse``, a leaf shaped like the first tensor argument is that tensor, which saves filling a new one; the
        caller vouches that a sentinel already stands behind it.
        """
        leaves, spec = self._output_of(module, forward, args, kwargs)
        first = first_tensor(args, kwargs) if reuse else None
        if spec is None:
            return _fill(leaves[0], first, sentinel)
        filled = [_fill(leaf, first, sentinel) for leaf in leaves]
        return pytree.tree_unflatten(filled, spec)

    def keeps(self, module: nn.Module, x: Any) -> bool:
        """Whether ``module`` is known to return one tensor like its only argument."""
        form = shape_and_dtype(x)
        known = self._plain.get((id(module), module.training, *form)) if form is not None else None
        if known is None or known[1] is not None:
            return False
        leaf = known[0][0]
        return isinstance(leaf, TensorShape) and (leaf.shape, leaf.dtype) == form

    def _output_of(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[list[Any], Any]:
        form = shape_and_dtype(args[0]) if len(args) == 1 and not kwargs else None
        plain = None if form is None else (id(module), module.training, *form)
        if plain is not None and plain in self._plain:
            return self._plain[plain]  # type: ignore[no-any-return]
        key = (self._look_of(module), module.training, signature(args), signature(kwargs))
        if key not in self._known:
            self._known[key] = abstract_run(module, forward, args, kwargs)
        if plain is not None:
            self._plain[plain] = self._known[key]
        return self._known[key]  # type: ignore[no-any-return]


def _constant(value: Any, depth: int = 0) -> Any:
    """A description of a value that runs no code of its own: numbers, words and collections of them."""
    if isinstance(value, _SCALARS):
        return value
    name = type(value).__name__
    if depth == _DEEPEST:
        return name
    if isinstance(value, (list, tuple)):
        return name, [_constant(entry, depth + 1) for entry in value]
    if isinstance(value, (set, frozenset)):
        return name, sorted(repr(_constant(entry, depth + 1)) for entry in value)
    if isinstance(value, dict):
        return name, [(repr(_constant(key)), _constant(entry, depth + 1)) for key, entry in value.items()]
    if dataclasses.is_dataclass(value) or isinstance(value, (SimpleNamespace, argparse.Namespace)):
        return name, _constant(dict(getattr(value, "__dict__", {})), depth + 1)
    return name


def shape_and_dtype(x: Any) -> tuple[torch.Size, torch.dtype] | None:
    """Shape and dtype of an ordinary tensor, or of a stand-in, which keeps them where asking it has its price.

    Tensors of rehearsals, which have no numbers, are ordinary, too.
    """
    if type(x) is Tensor or type(x) is FakeTensor:
        return x.shape, x.dtype
    if type(x) is not Away:
        return None
    form = x.form
    if form is None:
        with torch._C.DisableTorchFunctionSubclass():
            form = x.form = x.shape, x.dtype
    return form


def first_tensor(args: Any, kwargs: Any) -> Tensor | None:
    """The first tensor that a call is handed."""
    if args and (type(args[0]) is Tensor or type(args[0]) is Away):
        return args[0]  # type: ignore[no-any-return]
    return next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)


def _fill(leaf: Any, first: Tensor | None, sentinel: Sentinel) -> Any:
    if isinstance(leaf, OfData):
        return AwayNumber(leaf.kind, sentinel.source)
    if isinstance(leaf, ObjectShape):
        return leaf.filled([_fill(inner, first, sentinel) for inner in leaf.leaves])
    if not isinstance(leaf, TensorShape):
        return leaf
    return sentinel.stand_in(leaf.shape, leaf.dtype, leaf.device, first)
