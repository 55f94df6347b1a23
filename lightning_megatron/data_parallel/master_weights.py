"""Parts that this rank updates of weights that it does not have as they are: float32 of 16 bits, shards of spread ones.

::

    layers compute with     w0 w0 w0 w1 w1 w1      16 bits, or freed between steps
    this rank updates                w1 w1 w1      float32, or of the same type: stored in checkpoints, and filled
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.buckets.flat_weights import FlatWeights
from lightning_megatron.data_parallel.update.kept_state import KeptState
from lightning_megatron.mesh.messages.collectives import start_flat_gather, wait_for
from lightning_megatron.mesh.parts.pieces import PiecedTensor

SpreadPlace = Callable[[nn.Parameter], tuple[Bucket, int] | None]
"""Parameter of which this rank has its shard alone now -> its bucket and its index there; ``None`` for others."""


class MasterWeights:
    """Finds them, and fills them.

    Args:
        module: the user's.
        kept: where the optimizers' state is.
        spread_place: finds spread parameters.
        buckets: those of the trained parameters.
    """

    def __init__(
        self, module: nn.Module, kept: KeptState, spread_place: SpreadPlace, buckets: Callable[[], Sequence[Bucket]]
    ) -> None:
        self._module, self._kept = module, kept
        self._spread_place, self._buckets = spread_place, buckets

    def pieces(self, *, spread: bool = False) -> dict[str, PiecedTensor | None]:
        """By name, what this rank updates of weights in 16 bits, and of ``spread`` ones; ``None`` if nothing."""
        found: dict[str, PiecedTensor | None] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            apart = self._spread_place(parameter) if spread else None
            bucket, index = apart or self._kept.place_of(parameter)
            if bucket is not None and bucket.weights is not None and (apart or bucket.weights.lowered):
                piece = bucket.pieces.get(index)
                found[name] = None
                if piece is not None:
                    spec = self._kept.spec_of(bucket.names[index], parameter, piece.stepped, piece)
                    found[name] = PiecedTensor(spec, piece.stepped.detach())
        return found

    def load(self, state: Mapping[str, Any], *, spread: bool = False) -> None:
        """Take over loaded weights, whole or in pieces; collective over replicas.

        Args:
            state: by name; values that lie where they belong already may be among them.
            spread: whether shards of spread weights are taken as well. Layers get these when they next need them, and
                16-bit weights that are whole at once.
        """
        for name, own in self.pieces(spread=spread).items():
            value = state.get(name)
            if own is not None and value is not None:
                own.local.copy_(value.local if isinstance(value, PiecedTensor) else own.spec.slice_full(value))
        for bucket, _ in self._lowered():
            bucket.start_gather()
            bucket.finish_gather()

    def whole(self) -> dict[str, Tensor]:
        """The float32 weights of this rank's layers by name; collective over replicas."""
        whole: dict[int, Tensor] = {}
        for bucket, weights in self._lowered():
            own = flat = weights.master.to(weights.own.device)
            if bucket.sharing.shards > 1:
                flat, group = own.new_empty(bucket.placement.total), bucket.sharing.shard_group
                wait_for(start_flat_gather(flat, own, group), "all_gather", flat, group)
            for parameter, offset in zip(bucket.parameters, bucket.placement.offsets, strict=True):
                whole[id(parameter)] = flat[offset : offset + parameter.numel()].view(parameter.shape)
        named = self._module.named_parameters(remove_duplicate=False)
        return {name: whole[id(parameter)] for name, parameter in named if id(parameter) in whole}

    def takers(self, names: Iterable[str]) -> dict[str, Callable[[Tensor], None]]:
        """By name of a spread parameter, what keeps this rank's shard of its values; nothing where it has none.

        Args:
            names: of parameters.

        Raises:
            RuntimeError: one of them is not spread now.
        """
        found: dict[str, Callable[[Tensor], None]] = {}
        for name in names:
            place = self._spread_place(self._module.get_parameter(name))
            weights = None if place is None else place[0].weights
            if place is None or weights is None:
                raise RuntimeError(f"`{name}` is not spread over the replicas")
            bucket, index = place
            for part in bucket.placement.parts(bucket.sharing.rank):
                if part.member == index:
                    found[name] = partial(_put, weights, part)
        return found

    def _lowered(self) -> list[tuple[Bucket, FlatWeights]]:
        found = [(bucket, bucket.weights) for bucket in self._buckets()]
        return [(bucket, weights) for bucket, weights in found if weights is not None and weights.lowered]


def _put(weights: FlatWeights, part: Any, values: Tensor) -> None:
    weights.put(part, values.reshape(-1)[part.start : part.stop])
