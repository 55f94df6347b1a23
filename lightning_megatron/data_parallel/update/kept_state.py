"""Locations of what the ranks' optimizers keep: of parameters, of pieces of them, or of whole ones put together."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.checkpoints.state.stored import StatePlace, parameter_names
from lightning_megatron.data_parallel.buckets.bucket import Bucket, Piece
from lightning_megatron.data_parallel.update.piecewise import key_of
from lightning_megatron.data_parallel.update.whole_matrices import WholeMatrices
from lightning_megatron.data_parallel.update.whole_steps import WholeSteps
from lightning_megatron.mesh.parts.boxes import ShardSpec

PlaceOf = Callable[[nn.Parameter], tuple[Bucket | None, int]]
"""Parameter -> its bucket and its index there."""


class KeptState:
    """Tells where the state of optimizers is.

    Args:
        module: the user's.
        tensor: puts together what is split over tensor-parallel ranks.
        place_of: finds the bucket of a parameter.

    Attributes:
        place_of: see above.
        wholes: matrices that are put together for their updates.
        together: id of an optimizer -> the one that lets it step on whole parameters.
    """

    def __init__(self, module: nn.Module, tensor: TensorState, place_of: PlaceOf) -> None:
        self._module, self._tensor, self.place_of = module, tensor, place_of
        self.wholes: WholeMatrices | None = None
        self.together: dict[int, WholeSteps] = {}

    def places(self, optimizer: Optimizer) -> list[StatePlace]:
        """Locations of an optimizer's state of the parameters that this rank updates.

        Args:
            optimizer: of the run.
        """
        names = parameter_names(self._module)
        members = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        together = self.together.get(id(optimizer))
        places = []
        for parameter in members:
            name, (bucket, index) = names[id(parameter)], self.place_of(parameter)
            if together is not None:
                whole = together.key_of(parameter)
                places.append(StatePlace(name, whole, ShardSpec.whole(whole.shape), parameter))
            elif bucket is None or bucket.weights is None:
                spec = self._tensor.spec_of(name, parameter.shape)
                if spec.boxes:  # else another rank has it, and knows how often it was updated
                    places.append(StatePlace(name, parameter, spec))
            elif index in bucket.pieces:
                piece = bucket.pieces[index]
                key = key_of(parameter, piece, self.wholes)
                if key is not None:
                    places.append(StatePlace(name, key, self.spec_of(name, parameter, key, piece), parameter))
        return places

    def spec_of(self, name: str, parameter: nn.Parameter, key: nn.Parameter, piece: Piece) -> ShardSpec:
        """The part of a logical parameter that the optimizer updates under a key.

        Args:
            name: of the parameter.
            parameter: of the module.
            key: what is updated.
            piece: this rank's.
        """
        if key is not piece.stepped:
            return ShardSpec.whole(key.shape)
        whole = self._tensor.spec_of(name, parameter.shape)
        if piece.update.shape == parameter.shape:
            return whole
        return whole.flat_range(piece.part.start, piece.part.stop)
