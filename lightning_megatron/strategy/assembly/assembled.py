"""A module that has been divided over the ranks, with everything that a run needs of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.context_parallel.region import TokenRegion
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.mesh import Holders
from lightning_megatron.pipeline.forwards.lazy_heads import LazyHeads
from lightning_megatron.strategy.activations.host_copies import Traffic
from lightning_megatron.strategy.activations.mlp_pieces import MlpPieces
from lightning_megatron.strategy.assembly.late_weights import LateWeights
from lightning_megatron.strategy.generation.streaming import StreamedWeights
from lightning_megatron.strategy.step.engine import StepEngine

if TYPE_CHECKING:
    from lightning_megatron.parallelize import ParallelReport


@dataclass(frozen=True)
class Assembled:
    """A divided module, with everything that a run needs of it.

    Attributes:
        module: this rank's part.
        engine: runs its steps.
        tensor_state: how its tensors are split.
        report: the tensor-parallel plan, where layers were split.
        streams: random numbers of micro-batches and layers.
        groups: process group of every kind of holders that this rank belongs to, besides replicas of one stage.
        tokens: where tokens are split over context ranks; ``None`` without them.
        heads: whose logits are computed in pieces; ``None`` where they are whole.
        traffic: counts what layers keep in host memory; ``None`` where they keep nothing there.
        pieces: modules that run in pieces of the tokens; ``None`` where all run whole.
        streamed: weights that are read when a layer needs them; ``None`` where all are in memory.
        late: weights that get memory as shards, once these are known; ``None`` where all have values.
    """

    module: pl.LightningModule
    engine: StepEngine
    tensor_state: TensorState
    report: ParallelReport | None
    streams: SegmentStreams
    groups: dict[Holders, Any]
    tokens: TokenRegion | None = None
    heads: LazyHeads | None = None
    traffic: Traffic | None = None
    pieces: MlpPieces | None = None
    streamed: StreamedWeights | None = None
    late: LateWeights | None = None

    def open(self) -> None:
        """Let layers and heads of the module take part in what steps do."""
        for part in (self.tokens, self.heads, self.pieces, self.streamed):
            if part is not None:
                part.open()

    def close(self) -> None:
        """Leave them as they were."""
        for part in (self.tokens, self.heads, self.pieces, self.streamed):
            if part is not None:
                part.close()

    def in_step(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A step of the user's with split tokens, logits in pieces and streamed weights, where there are such."""
        for part in (self.heads, self.tokens, self.pieces, self.streamed):
            if part is not None:
                step = functools.partial(part.run, step)

        return step

    @property
    def needs_gradients(self) -> bool:
        """Whether gradients have to be summed over ranks or micro-batches, so that there must be buckets."""
        return self.engine.sums_gradients and not self.engine.splits_itself
