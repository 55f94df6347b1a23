"""Experts whose weights are distributed, and gathered for each call of the module that computes with them.

Where rows cannot be sent, as one product of all tokens with all experts is written in the module itself, or nothing is
known about it, the weights travel instead of the rows (``expert_parallel_plan={...: "gathered"}``)::

    forward of the module    every rank    weights of all ranks gathered, its own tokens computed as they are written
    backward                 every rank    gradients summed over the ranks, each keeps those of its own part

=======================  ==============================  ========================
function                 forward                         backward
=======================  ==============================  ========================
``_WholeWeights``        all-gather of each parameter    sum, this rank's part
=======================  ==============================  ========================

Nothing is assumed about what the module computes, so that nothing has to be tried.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.experts.exchange.taking_part import Calls, Told
from lightning_megatron.experts.kinds.leaving import apply_to_group
from lightning_megatron.experts.kinds.twin import is_elsewhere, lead
from lightning_megatron.layers.table import ParameterSharding, ShardTable
from lightning_megatron.layers.whole.parameter_parts import ParameterParts
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.mesh.parts.names import owner_and_leaf


class GatheredExperts:
    """Leads the calls of a module of whose weights this rank has a part.

    Args:
        name: of the module, for messages.
        parts: what each rank has of its parameters, by their names in it.
        calls: of all mixtures of the whole module.

    Attributes:
        name: the same.
        parts: the same.
        shows_whole: what is called inside sees whole weights.
    """

    shows_whole = True

    def __init__(self, name: str, parts: Mapping[str, ParameterParts], calls: Calls) -> None:
        self.name, self.parts, self._calls = name, dict(parts), calls
        self._number, self._is_copy, self._runs = calls.add(name, 1), False, False
        self._called: Callable[[], nn.Module | None] = lambda: None

    def __deepcopy__(self, memo: Any) -> GatheredExperts:
        """That of a copy of the module, in the same group."""
        copied = copy.copy(self)
        copied._is_copy = True
        return copied

    def run(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call: the module's own forward, on all weights; collective over the group, in the backward too.

        Raises:
            TypeError: gradients are wanted, and it returns no tensor that they could come from.
        """
        if self._runs:
            return own(*args, **kwargs)
        if is_elsewhere(module, (args, kwargs)):
            like = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            shapes = {name: each.shape for name, each in self.parts.items()}
            whole = {n: like.new_zeros(shape, dtype=module.get_parameter(n).dtype) for n, shape in shapes.items()}
            with self._running(module, whole):
                return own(*args, **kwargs)
        if self._is_copy:
            self._number, self._is_copy = self._calls.add_copy(self._number), False
        self._called = weakref.ref(module)
        device = module.get_parameter(next(iter(self.parts))).device
        none = torch.zeros(self._calls.group.size(), 1, dtype=torch.long, device=device)
        self._calls.call(self._number, none, none, self)
        message = self._calls, self._number
        *found, anchor, root = _WholeWeights.apply(tuple(self.parts.values()), message, *self._held(module))
        self._calls.joint.note(root)
        with self._running(module, dict(zip(self.parts, found, strict=True))):
            output = own(*args, **kwargs)
        return self._joined(output, anchor) if anchor.requires_grad else output

    def answer(self, told: Told) -> None:
        """Take part in a call of the others without one of this rank's own."""
        module = self._called()
        if module is not None:
            _WholeWeights.apply(tuple(self.parts.values()), (self._calls, self._number), *self._held(module))

    def _held(self, module: nn.Module) -> list[Tensor]:
        return [module.get_parameter(name) for name in self.parts]

    @contextmanager
    def _running(self, module: nn.Module, whole: Mapping[str, Tensor]) -> Iterator[None]:
        """Whole weights in the place of parts, for the module's code, which may add to them (``parametrize``)."""
        places = []
        for name, value in whole.items():
            owner, leaf = owner_and_leaf(module, name)
            places.append((owner, leaf, owner._parameters[leaf]))
            owner._parameters[leaf] = cast(nn.Parameter, value)
        self._runs = True
        try:
            yield
        finally:
            self._runs = False
            for owner, leaf, held in places:
                owner._buffers.pop(leaf, None)  # what was a parametrization's for some time
                owner._parameters[leaf] = held

    def _joined(self, output: Any, anchor: Tensor) -> Any:
        """``output`` with the weights in its graph, also on a rank whose tokens use none of them."""
        leaves, spec = pytree.tree_flatten(output)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaves[place] = leaf + anchor.to(leaf.dtype)
                return pytree.tree_unflatten(leaves, spec)
        raise TypeError(
            f"`{self.name}`, whose weights `expert_parallel_plan` gathers, returns {type(output).__name__}, in which "
            "there is no tensor; return one, or call it 'whole' in the plan."
        )


class _WholeWeights(torch.autograd.Function):
    """Whole parameters from their parts, a zero that stands for all of them, and a number that nothing is made of.

    A parameter whose gradient no rank of the group has, has none. A layer that is recomputed is so before its messages,
    which is why something is saved.
    """

    @staticmethod
    def forward(
        ctx: Any, parts: tuple[ParameterParts, ...], of: tuple[Calls, int], *held: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.parts, ctx.of, ctx.kinds = parts, of, [(each.dtype, each.device) for each in held]
        ctx.set_materialize_grads(False)
        found = tuple(part.gather(each) for part, each in zip(parts, held, strict=True))
        ctx.mark_non_differentiable(*(w for w, each in zip(found, held, strict=True) if not each.requires_grad))
        ctx.save_for_backward(held[0].new_zeros(()))
        return *found, held[0].new_zeros(()), held[0].new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        group, found = ctx.parts[0].group, list[Tensor | None]()
        ctx.of[0].differentiate(ctx.of[1], ctx.saved_tensors[0].device)
        here = torch.tensor([grad is not None for grad in grads[:-2]], dtype=torch.long, device=ctx.kinds[0][1])
        touched = raw_all_reduce(here, group).tolist()
        for part, (dtype, device), grad, count in zip(ctx.parts, ctx.kinds, grads, touched, strict=False):
            if not count:
                found.append(None)
                continue
            wide = torch.promote_types(dtype, torch.float32)
            own = torch.zeros(part.shape, dtype=wide, device=device) if grad is None else grad.to(wide)
            found.append((part.cut(raw_all_reduce(own, group)) / part.same_loss).to(dtype))
        return None, None, *found


def gathered_dims(
    name: str, module: nn.Module, named: Mapping[str, int], size: int, why: str, parts: int
) -> dict[str, int]:
    """Along which dims the weights of a module are shared out, by their names in it: those that the plan names, or
    else the first one of all with three or more dims.

    Args:
        name: of the module.
        module: whole.
        named: what the plan says.
        size: over how many ranks.
        why: it cannot be, if it cannot.
        parts: over how many further ranks each expert is to be cut.

    Raises:
        ValueError: there are none, or one cannot be.
    """
    if parts > 1:
        why = f"`expert_tensor_parallel_size={parts}` cuts experts, which are not known in it"
    parameters = dict(module.named_parameters())
    dims = dict(named) or {leaf: 0 for leaf, parameter in parameters.items() if parameter.dim() > 2}
    attention = [each for each in module.modules() if isinstance(each, nn.MultiheadAttention)]
    reads = {id(parameter) for each in attention for parameter in each.parameters()}  # past what stands in their place
    for leaf, dim in dims.items():
        if id(parameters[leaf]) in reads and not why:
            why = f"`{leaf}` belongs to `torch.nn.MultiheadAttention`, which is no expert"
        if parameters[leaf].shape[dim] % size and not why:
            why = (
                f"dim {dim} of `{leaf}` has size {parameters[leaf].shape[dim]}, not divisible by "
                f"`expert_parallel_size={size}`"
            )
    if not dims and not why:
        why = "it has no parameter with three or more dims: name those that are to be distributed, with a dim"
    if why:
        raise ValueError(
            f"`expert_parallel_plan` wants the weights of `{name}` distributed, and gathered for each call, but {why}."
        )
    return dims


def leave_gathered(
    module: nn.Module, name: str, dims: Mapping[str, int], calls: Calls, alike: int, table: ShardTable
) -> None:
    """Leave this rank its part of a module's weights, and let them be gathered when it is called.

    Args:
        module: the module.
        name: of it.
        dims: see :func:`gathered_dims`.
        calls: of all mixtures.
        alike: how many neighbouring ranks compute the same for the same tokens.
        table: filled.
    """
    group, held, parts = calls.group, {}, {}
    for leaf, dim in dims.items():
        shape = module.get_parameter(leaf).shape
        each = shape[dim] // group.size()
        specs = [ShardSpec.along(shape, dim, [(rank * each, (rank + 1) * each)]) for rank in range(group.size())]
        held[leaf] = ParameterSharding(specs[group.rank()], of_experts=True)
        parts[leaf] = ParameterParts(f"{name}.{leaf}", tuple(specs), group, alike)
    apply_to_group(module, name, held, group, table)
    lead(module, GatheredExperts(name, parts, calls))
