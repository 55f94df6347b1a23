"""The weights of a bucket in one flat buffer, so that one all-gather distributes the updated shards."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.data_parallel.buckets.host_memory import HostMemory
from lightning_megatron.data_parallel.buckets.shards import FlatPlacement, ShardPart


@dataclass
class FlatWeights:
    """Weights of a bucket, moved into a flat buffer as this rank's optimizer updates only a shard of them.

    Attributes:
        flat: [placement.total], the weights that the layers compute with.
        own: [placement.shard], this rank's shard of ``flat``: a view, or, where ``flat`` is not always there, a tensor
            of its own.
        master: [placement.shard], the weights that the optimizer updates: ``own`` itself, or a float32 copy of it.
        views: per parameter, the view of ``flat`` that is its ``parameter.data``, while ``flat`` is there.
        hosted: whether the master weights lie in host memory.
        low: where ``own`` begins in ``flat``, if it is a tensor of its own; ``None`` for a view.
    """

    flat: Tensor
    own: Tensor
    master: Tensor
    views: list[Tensor] = field(default_factory=list)
    low: int | None = None
    hosted: bool = False

    def __post_init__(self) -> None:
        self.nothing = self.flat.new_full((), float("nan"))  # parameters while hidden
        self._hidden: list[Tensor] = []
        self._covered = False

    @property
    def shown(self) -> bool:
        """Whether ``flat`` holds the weights now."""
        return self.flat.untyped_storage().nbytes() > 0

    def show(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make room for the whole weights, which a gather fills, and point the parameters there.

        Raises:
            RuntimeError: code has given a parameter another value meanwhile.
        """
        replaced = [p for p in parameters if p.numel() and p.data_ptr() != self.nothing.data_ptr()]
        if replaced:
            raise RuntimeError(
                f"a parameter of shape {tuple(replaced[0].shape)} was given another value between two steps, while "
                "this rank held its shard of it only; write weights in a hook of the module or of a callback, or pass "
                "`weight_sharding=False`."
            )
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        for parameter, view in zip(parameters, self.views, strict=True):
            parameter.data = view

    def hide(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take over what code wrote into this rank's shard, and free the rest; parameters read as NaN from now on."""
        self.recover(parameters)
        if not self.flat.untyped_storage().resizable():  # code holds it as a NumPy array, which stays as it is
            self.flat = torch.empty_like(self.flat)
            self.views = [self.flat.as_strided(v.shape, v.stride(), v.storage_offset()) for v in self.views]
        self.flat.untyped_storage().resize_(0)
        self._point_nowhere(parameters)

    def cover(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let parameters read as NaN, while ``flat`` holds some new weights and some old ones."""
        self._covered = True
        self._point_nowhere(parameters)

    def uncover(self, parameters: Sequence[nn.Parameter]) -> None:
        """Point parameters that were covered at the weights again."""
        if self._covered:
            self._covered = False
            for parameter, view in zip(parameters, self.views, strict=True):
                parameter.data = view

    def _point_nowhere(self, parameters: Sequence[nn.Parameter]) -> None:
        if len(self._hidden) != len(parameters):
            self._hidden = [self.nothing.expand(parameter.shape) for parameter in parameters]
        for parameter, hidden in zip(parameters, self._hidden, strict=True):
            parameter.data = hidden

    def _take_over(self, parameters: Sequence[nn.Parameter]) -> None:
        there, own = map(Tensor.data_ptr, parameters), map(Tensor.data_ptr, self.views)
        for parameter, view, is_own in zip(parameters, self.views, map(eq, there, own), strict=True):
            if not is_own:
                view.copy_(parameter.data)
                parameter.data = view
        if self.low is not None:
            self.own.copy_(self.flat[self.low : self.low + self.own.numel()])

    def put(self, part: ShardPart, values: Tensor) -> None:
        """Write elements of a parameter into this rank's shard.

        Args:
            part: which they are.
            values: [part.stop - part.start], on any device.
        """
        part.of(self.own).copy_(values)
        if self.master is not self.own:
            part.of(self.master).copy_(values)

    @property
    def lowered(self) -> bool:
        """Whether the layers compute with a narrower dtype than the optimizer updates."""
        return self.master.dtype != self.flat.dtype

    @property
    def separate(self) -> bool:
        """Whether an update of the master weights leaves ``own`` as it was."""
        return self.lowered or self.hosted

    def recover(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take over weights that user code has changed: ``parameter.data = ...``, or writes to lowered weights."""
        if self.shown:
            self._take_over(parameters)
        if self.separate:
            own, master = self.own.to(self.master.device), self.master
            master.copy_(torch.where(own != master.to(own.dtype), own.to(master.dtype), master))


class _WithoutBucket:
    """Pickles one parameter; torch would pickle the whole flat buffer with every parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)

    def __call__(self, protocol: Any) -> Any:
        parameter: Any = self._parameter()
        parameter.detach()  # waits for values that are under way
        kind: Any = type(parameter)
        if kind is not nn.Parameter:  # a hook sees it whole, and it is pickled as it is seen
            return kind.__reduce_ex__(parameter, protocol)
        alone: Any = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        alone.__dict__.update({name: value for name, value in parameter.__dict__.items() if value is not self})
        return alone.__reduce_ex__(protocol)


def take_weights(
    parameters: Sequence[nn.Parameter],
    placement: FlatPlacement,
    rank: int,
    dtype: torch.dtype,
    master: torch.dtype,
    *,
    gradients: torch.dtype,
    apart: bool = False,
    memory: HostMemory | None = None,
    hidden: Collection[int] = (),
) -> FlatWeights:
    """Move the weights of ``parameters`` into one buffer, and this rank's shard of them into the master weights.

    Args:
        parameters: in the order of ``placement``; afterwards their data are views of the buffer, and ``.grad`` is None.
        placement: layout of the buffer.
        rank: index of this rank's shard.
        dtype: dtype of the weights that the layers compute with.
        master: dtype of the weights that the optimizer updates.
        gradients: dtype of the main gradients; parameters of another dtype get it as their ``grad_dtype``.
        apart: whether this rank's shard is to lie apart, so that the buffer can be freed.
        memory: of the host, for the master weights; ``None`` to keep them on the device.
        hidden: indices of parameters without values, which are filled later, the shard alone. The buffer has no memory
            then, as between steps.
    """
    with torch._C.DisableTorchFunctionSubclass():  # a plain tensor, or one without memory in a rehearsal
        flat = (parameters[0].new_empty if hidden else parameters[0].new_zeros)(placement.total, dtype=dtype)
        low, high = placement.bounds(rank)
        own = parameters[0].new_zeros(placement.shard, dtype=dtype) if hidden else flat[low:high]
    if apart and not hidden:
        own = own.clone()
    kept = own if dtype == master else own.to(master)
    if memory is not None:
        kept = memory.empty(own.numel(), master).copy_(kept)
    weights = FlatWeights(flat, own, kept, low=low if apart else None, hosted=memory is not None)
    for part in placement.parts(rank):
        if part.member not in hidden:
            source = parameters[part.member].data.reshape(-1)[part.start : part.stop]
            weights.put(part, source)
    for parameter, offset in zip(parameters, placement.offsets, strict=True):
        view = flat[offset : offset + parameter.numel()].view(parameter.shape)
        if not hidden:
            view.copy_(parameter.data)
            parameter.data = view
        parameter.grad = None
        parameter.__dict__["__reduce_ex__"] = _WithoutBucket(parameter)
        if dtype != gradients:
            parameter.grad_dtype = gradients
        weights.views.append(view)
    if hidden:
        flat.untyped_storage().resize_(0)  # nothing has touched it
        weights.hide(parameters)
    elif apart:
        own.copy_(flat[low:high])
    return weights
