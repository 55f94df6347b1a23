"""Activation recomputation: a layer keeps its inputs, and recomputes its other activations in the backward.

A recomputed module keeps only its inputs between forward and backward (SC21, section 3.5; 2sbh bytes per layer instead
of sbh(34 + 5as/h)). Recomputation wraps the module's own ``forward`` in torch's non-reentrant checkpoint, so it works
for any module, with frozen inputs and several outputs too. The states of random generators are restored, so dropout
draws the same masks. A split backward recomputes once: in ``I``, which keeps the factors for ``W``.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_megatron.mesh.autograd import innermost_hooks, version_of
from lightning_megatron.mesh.key_value_caches import caches_in, has_caches, with_own_caches
from lightning_megatron.mesh.parts.names import Parts, parent
from lightning_megatron.pipeline.cut.trunk import LayersHere, Trunk
from lightning_megatron.pipeline.forwards.seen_state import SeenState, StatefulForward
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack, Wrapper

Recompute = str | Mapping[str, int] | Sequence[str] | None
_CHOICES = "None, 'full', 'selective', {'every': n}, or a list of names or patterns such as ['*.layers.0', '*.mlp']"


def check_recompute(recompute: Any) -> None:
    """Refuse invalid values of ``activation_recompute``.

    Raises:
        ValueError: lists the choices.
    """
    if recompute is None or recompute in ("full", "selective"):
        return
    if isinstance(recompute, Mapping):
        every = recompute.get("every")
        if set(recompute) == {"every"} and isinstance(every, int) and not isinstance(every, bool) and every >= 1:
            return
    elif not isinstance(recompute, str) and _is_list_of_names(recompute):
        return
    raise ValueError(f"`activation_recompute={recompute!r}` must be {_CHOICES}.")


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(entry, str) for entry in value)


def recompute_layers(here: LayersHere, recompute: Recompute) -> list[str]:
    """Make layers recompute their activations; call it once the module is cut and sharded.

    Args:
        here: this rank's layers.
        recompute: ``"full"``: every layer; ``{"every": n}``: layers 0, n, 2n, ...; ``"selective"``: only the attention
            core ``softmax(q kᵀ) v`` of every layer (arXiv 2205.05198); patterns: the layers, or modules in them, whose
            dotted names match; ``None``: remove the wrappers of an earlier run.

    Returns:
        Names of the modules that are recomputed, in whole or in part.

    Raises:
        ValueError: no trunk is found, or a pattern matches nothing.
    """
    module, trunk = here.module, here.trunk
    for layer in trunk.layers(module):
        for inner in layer.modules():
            ForwardStack.of(inner).remove(ForwardSlot.RECOMPUTE)
    if recompute is None:
        return []
    layers = list(here.names)
    if recompute == "selective":
        cores = AttentionCores(layers)
        for name in layers:
            SelectiveCall(module.get_submodule(name), name, cores).install()
        return layers
    owned = Parts(layers)
    chosen = [name for name in _chosen(module, trunk, recompute) if name in owned]
    for name in chosen:
        RecomputedCall(module.get_submodule(name)).install()
    return chosen


def _chosen(module: nn.Module, trunk: Trunk, recompute: str | Mapping[str, int] | Sequence[str]) -> Sequence[str]:
    if recompute == "full":
        return trunk.layer_names
    if isinstance(recompute, Mapping):
        return trunk.layer_names[:: recompute["every"]]
    return _matching(module, trunk, recompute)


def _matching(module: nn.Module, trunk: Trunk, patterns: Sequence[str]) -> list[str]:
    """Names in the trunk that match a pattern, without those inside another match.

    Raises:
        ValueError: a pattern matches nothing.
    """
    candidates = [
        f"{layer}.{inner}" if inner else layer
        for layer in trunk.layer_names
        for inner, _ in module.get_submodule(layer).named_modules()
    ]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in candidates):
            example = ", ".join(candidates[:6])
            raise ValueError(
                f"`activation_recompute` names {pattern!r}, which matches no module of `{trunk.name}`; names there are "
                f"{example}, ..."
            )
    chosen: list[str] = []
    for name in candidates:
        if name not in Parts(chosen) and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append(name)
    return chosen


class RecomputedCall(Wrapper):
    """Checkpoints a module's ``forward``: only its inputs are kept for the backward.

    Tensors that the forward writes into in place, as ``nn.ReLU(inplace=True)`` does, are cloned before it runs. Sharded
    modules are recomputed to the end, without early stop, so that regions they open in a forward are closed again.
    The recomputation finds counters and buffers as the forward did, and changes none of them. What a forward appends to
    lists, or keeps with its gradient, is taken off again: a step that sums up its layers' losses has read them before,
    and the next one must not find them.

    Args:
        module: the module to recompute.
    """

    slot = ForwardSlot.RECOMPUTE

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._sharded = any(getattr(child, "_sharding", None) is not None for child in module.modules())
        self._writes: bool | None = None  # whether it writes into its arguments; unknown before the first call
        self._state = StatefulForward(module)
        self._writes_weights: bool | None = None  # unknown before the first call
        self._not_filled: WeakSet[Any] = WeakSet()  # caches that it was given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self._writes_weights is None:
            return self._first(*args, **kwargs)
        return self._checkpointed(*args, **kwargs)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        weights = [(name, weight) for name, weight in self.module.named_parameters() if not weight.is_meta]
        before = [version_of(weight) for _, weight in weights]
        output = self._checkpointed(*args, **kwargs)
        for (name, weight), version in zip(weights, before, strict=True):
            owner = self.module.get_submodule(parent(name))
            if version_of(weight) != version and getattr(owner, "max_norm", None) is None:
                raise RuntimeError(
                    f"a forward of `{type(self.module).__name__}` writes its weight `{name}`, and with "
                    "`activation_recompute` would again in the backward. Write it in a hook (`on_train_batch_start`), "
                    "or leave this module out of `activation_recompute`."
                )
        self._writes_weights = False
        return output

    def _checkpointed(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run_on_copies if self._writes is not False else self.forward
        if has_caches(args, kwargs):
            self._refuse_caches_read(args, kwargs)
            run = functools.partial(self._run_on_caches, run)
        run = functools.partial(self._state.run, SeenState(), run)
        with set_checkpoint_early_stop(False) if self._sharded else nullcontext():
            return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def _refuse_caches_read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a cache that comes back to look up what the call before should have put there."""
        for cache in caches_in(args, kwargs):
            if cache in self._not_filled:
                raise RuntimeError(
                    f"a `{type(self.module).__name__}` is called again with the key-value cache of an earlier call, "
                    "which `activation_recompute` leaves empty: what layers compute twice they cannot put there. Run "
                    "what comes first under `torch.no_grad()`, pass the whole text in one call, or leave "
                    "`activation_recompute` out."
                )
            self._not_filled.add(cache)

    def _run_on_caches(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run on key-value caches of its own, which the recomputation would append to once more."""
        args, kwargs = with_own_caches(args, kwargs)
        return run(*args, **kwargs)

    def _run_on_copies(self, *args: Any, **kwargs: Any) -> Any:
        """Run on clones of the arguments, which the forward may change; the recomputation needs the originals."""
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = [tensor._version for tensor in tensors]
        output = self.forward(*args, **kwargs)
        if self._writes is None:
            self._writes = before != [tensor._version for tensor in tensors]
        return output


class AttentionCores(TorchFunctionMode):
    """Recomputes every call of ``scaled_dot_product_attention`` made while it is active.

    But those that a checkpoint in the layer recomputes, which does so when this mode is not active.

    Args:
        layers: names of the layers that run under it.

    Attributes:
        hooks: on saved tensors, around the layer that runs.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__()
        self._untried = set(layers)
        self.found = 0
        self.hooks: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.found += 1
        if innermost_hooks() != self.hooks:
            return func(*args, **(kwargs or {}))
        return checkpoint(func, *args, use_reentrant=False, **(kwargs or {}))

    def tried(self, layer: str) -> None:
        """Note that a layer has run.

        Raises:
            RuntimeError: all layers have run, and none of them has made the call.
        """
        self._untried.discard(layer)
        if not self._untried and not self.found:
            raise RuntimeError(
                f"`activation_recompute='selective'` recomputes the attention core, and looked in layers such as "
                f"`{layer}` for calls of `torch.nn.functional.scaled_dot_product_attention`; there are none. Use "
                "'full', {'every': n} or a list of module names such as ['*.attention']; Hugging Face models make that "
                "call with `attn_implementation='sdpa'`."
            )


class SelectiveCall(Wrapper):
    """Runs a layer's ``forward`` with its attention core recomputed."""

    slot = ForwardSlot.RECOMPUTE

    def __init__(self, module: nn.Module, name: str, cores: AttentionCores) -> None:
        super().__init__(module)
        self._name = name
        self._cores = cores

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        self._cores.hooks = innermost_hooks()
        with self._cores:
            output = self.forward(*args, **kwargs)
        self._cores.tried(self._name)
        return output
