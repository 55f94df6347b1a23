"""Forward hooks of the user between regions, where each rank has a part of the tokens.

What a hook keeps of a layer's output (its norm, its largest entry, a list of features) is of all tokens in one process,
and elsewhere than on the layer no trial of the layer sees it. So the hook is given all tokens, and what it returns is
split again::

    layer ──▶ part ── gather ──▶ whole ──▶ hook ──▶ None: the part goes on, as it is
                                             └────▶ whole ── split ──▶ part

Backwards run the other way: the gradient of what a hook keeps is that of all tokens on every rank, of which each takes
its part. Where gradients are summed over the ranks, those of the layers' parameters and of what is gathered in front of
a region, each rank adds a share of it; what the hook returns in front of a region has a share of its gradient already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.layers.all_here import all_tokens_here
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.messages.collectives import gather_from_group, split_to_group
from lightning_megatron.mesh.parts.packages import LIGHTNING, PACKAGE, comes_from, module_of
from lightning_megatron.mesh.pickling import AroundHook
from lightning_megatron.mesh.torch_functions import METADATA


class TokenHooks:
    """Shows hooks of the user the tokens of all ranks.

    Args:
        dim: of the sequence in hidden states.
        group: the tensor ranks.
        summed: whether the gradient of a parameter of the module is summed over them, by its name.
        module: the module.

    Attributes:
        refuses_gradients: whether what hooks keep must not get a gradient, as where it goes to another pipeline stage.
    """

    def __init__(self, dim: int, group: dist.ProcessGroup, summed: Callable[[str], bool], module: nn.Module) -> None:
        self._dim, self._group, self._length = dim, group, 0
        self._summed, self._module, self._layers = summed, module, set[int]()

        self.refuses_gradients = False

    def open(self, hidden: Tensor, *, whole: bool) -> None:
        """Say what a layer is given, of which all tokens are here, or a part."""
        self._length = hidden.shape[self._dim] // (self._group.size() if whole else 1)

    def put(self, layer: nn.Module, whole: Sequence[nn.Module] = ()) -> None:
        """Take the place of the hooks in a layer, but for those of modules that get all tokens."""
        self._layers.add(id(layer))
        apart = {id(part) for module in whole for part in module.modules()}
        for part in (part for part in layer.modules() if id(part) not in apart):
            for hooks, forward in ((part._forward_pre_hooks, False), (part._forward_hooks, True)):
                for key, hook in hooks.items():
                    if not comes_from(hook, *LIGHTNING, PACKAGE):
                        hooks[key] = OnTokens(hook, self, forward=forward)

    def run(self, hook: Callable[..., Any], part: nn.Module, values: tuple[Any, ...], *, forward: bool) -> Any:
        """Run a hook on the tokens of all ranks, if it is given some of them.

        Args:
            hook: the user's.
            part: the module that it is on.
            values: what it is given.
            forward: whether it runs after the module, whose output comes last.
        """
        pairs, ranks = list[tuple[Tensor, int]](), self._group.size()
        if all_tokens_here():
            return hook(part, *values)
        inside, part_of = id(part) not in self._layers, list[Tensor]()

        def seen(value: Any) -> Any:
            if self._has_length(value, self._length):
                whole = gather_from_group(value, self._dim, self._group)
            elif inside and self._has_length(value, self._length * ranks):
                whole = _scaled(value, 1 / ranks)
            else:
                return value
            pairs.append((whole, whole._version))
            part_of.append(value)
            return whole

        def given_back(value: Any) -> Any:
            if not self._has_length(value, self._length * ranks):
                return value
            return split_to_group(value, self._dim, self._group) if gathers else _scaled(value, ranks)

        arguments = tree_map(seen, values[:-1]) if forward else ()
        before = len(pairs)
        given = (*arguments, *tree_map(seen, values[len(arguments) :]))
        last = tree_leaves(values[-1] if forward else values)
        gathers = any(self._has_length(value, self._length) for value in last)
        if not pairs:
            return hook(part, *values)
        with _Shares(self._parameters(), self._group.size()):
            returned = hook(part, *given)
        touched = [index for index, (whole, version) in enumerate(pairs) if self._is_touched(whole, version)]
        for index in touched[: bisect_left(touched, before)]:  # into what the module has been given
            with torch.no_grad():
                part_of[index].copy_(given_back(pairs[index][0]))
        if self.refuses_gradients and returned is None and not touched:
            for whole, _ in pairs:
                if whole.requires_grad:
                    whole.register_hook(_refusing(hook))
        if returned is None and touched and touched[-1] >= before:
            returned = given[-1] if forward else (given if len(given) > 1 else given[0])
        return tree_map(given_back, returned)

    def _has_length(self, value: Any, length: int) -> bool:
        plain = isinstance(value, Tensor) and not isinstance(value, WholeTensor) and value.is_floating_point()
        return plain and value.dim() == 3 and value.shape[self._dim] == length

    @staticmethod
    def _is_touched(whole: Tensor, version: int) -> bool:
        """Whether a hook has written into a tensor, or waits for its gradient."""
        return whole._version != version or bool(whole._backward_hooks) or whole.retains_grad

    def _parameters(self) -> set[int]:
        if not torch.is_grad_enabled():
            return set()
        return {id(value) for name, value in self._module.named_parameters() if self._summed(name)}


def refuse_gradients(module: nn.Module) -> None:
    """Refuse gradients of what the user's hooks keep of the tokens of all ranks.

    Args:
        module: whose layers are on several pipeline stages.
    """
    for part in module.modules():
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            if isinstance(hook, OnTokens):
                hook.hooks.refuses_gradients = True


def _refusing(hook: Callable[..., Any]) -> Callable[[Tensor], None]:
    def refuse(gradient: Tensor) -> None:
        code = getattr(hook, "__code__", None)
        where = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
        raise RuntimeError(
            f"the loss takes a gradient of what the forward hook `{getattr(hook, '__name__', type(hook).__name__)}`"
            f"{where} keeps of a layer. Under `sequence_parallel=True` with several pipeline stages it would not be "
            "that of one process: keep `x.detach()`, or set `sequence_parallel=False`."
        )

    return refuse


class OnTokens(AroundHook):
    """A hook of the user that is given the tokens of all ranks.

    Args:
        hook: the user's.
        hooks: of the module.
        forward: see :meth:`TokenHooks.run`.

    Attributes:
        given: the user's hook.
        hooks: as given.
    """

    def __init__(self, hook: Callable[..., Any], hooks: TokenHooks, *, forward: bool) -> None:
        self.given, self.hooks, self._forward = hook, hooks, forward
        self.__module__ = module_of(hook)
        self.__wrapped__ = hook
        if hasattr(hook, "__code__"):
            self.__code__ = hook.__code__  # tells its line

    def __call__(self, part: nn.Module, *values: Any) -> Any:
        return self.hooks.run(self.given, part, values, forward=self._forward)


class _Shares(TorchFunctionMode):
    """Lets the gradient of some parameters be a share of what it is, in what runs inside.

    Args:
        parameters: their ids.
        shares: how many there are.
    """

    def __init__(self, parameters: set[int], shares: int) -> None:
        super().__init__()
        self._parameters, self._shares = parameters, shares

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA or not self._parameters:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(self._share, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _share(self, value: Any) -> Any:
        if id(value) not in self._parameters or not torch.is_grad_enabled():
            return value
        with torch._C.DisableTorchFunction():
            return _scaled(value, 1 / self._shares)


def _scaled(value: Tensor, factor: float) -> Tensor:
    """The same value, whose gradient is multiplied."""
    return _Scaled.apply(value, factor)  # type: ignore[no-any-return, no-untyped-call]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None
