"""Rank arithmetic of the grid: the tensor, context, data and pipeline coordinates of each rank.

The order of the axes is decided in this module only; all other code asks it for coordinates and ranks. It is pure
Python and needs no process group: a layout of 16,384 ranks is four integers.
"""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("tensor", "context", "data", "pipeline")
"""Axis names, innermost (fastest varying with the global rank) first."""


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of one rank in the grid; ``pipeline`` is the stage, 0 for the one that runs first."""

    tensor: int
    context: int
    data: int
    pipeline: int

    def __str__(self) -> str:
        return f"pipeline {self.pipeline}, data {self.data}, tensor {self.tensor}"


@dataclass(frozen=True)
class Layout:
    """Sizes of the four parallel axes, innermost first (Megatron's order ``tp-cp-dp-pp``).

    Tensor-parallel ranks are neighbours, so they share a node; the pipeline crosses nodes. Stages run against the rank
    order, so that **global rank 0 is on the last stage**, which has the logits, the loss and the loggers.

    Eight ranks as ``Layout(tensor=2, context=1, data=2, pipeline=2)``::

                      data 0      data 1
        stage 0      [4, 5]      [6, 7]      <- the embedding; each pair is one tensor group
        stage 1      [0, 1]      [2, 3]      <- the loss; global rank 0 logs

        pipeline groups (stage 0 .. 1): [4, 0] [5, 1] [6, 2] [7, 3]
        data groups:                    [0, 2] [1, 3] [4, 6] [5, 7]

    Args:
        tensor: ranks over which each layer's matrices are split.
        context: ranks over which each sequence is split.
        data: replicas over which each global batch is split.
        pipeline: stages over which the layers are split.
        last_stage_first: whether the stage order runs against the rank order. V schedules, which put the first and the
            last virtual stage on one rank, set it to ``False``, so that global rank 0 computes the loss there too.

    Raises:
        ValueError: a size is below 1.
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    last_stage_first: bool = True

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"`{axis}_parallel_size={size!r}` must be an integer of at least 1.")

    @property
    def world_size(self) -> int:
        """Number of ranks in the grid."""
        return self.tensor * self.context * self.data * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of global rank ``rank``.

        Raises:
            ValueError: ``rank`` lies outside the grid.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the grid of {self.world_size} ranks ({self}).")
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        block, data = divmod(rank, self.data)
        return Coordinates(tensor, context, data, self._flip(block))

    def rank(self, *, tensor: int = 0, context: int = 0, data: int = 0, pipeline: int = 0) -> int:
        """Global rank at the given coordinates; the inverse of :meth:`coordinates`."""
        block = self._flip(pipeline)
        return ((block * self.data + data) * self.context + context) * self.tensor + tensor

    def pipeline_ranks(self, rank: int) -> list[int]:
        """Global ranks of the pipeline that ``rank`` belongs to, first stage first."""
        at = self.coordinates(rank)
        return [
            self.rank(tensor=at.tensor, context=at.context, data=at.data, pipeline=stage)
            for stage in range(self.pipeline)
        ]

    def describe(self, rank: int) -> str:
        """Describe a rank for error messages: ``"rank 5 (pipeline 1, data 0, tensor 1)"``."""
        at = self.coordinates(rank)
        context = f", context {at.context}" if self.context > 1 else ""
        return f"rank {rank} ({at}{context})"

    def _flip(self, block_or_stage: int) -> int:
        return self.pipeline - 1 - block_or_stage if self.last_stage_first else block_or_stage


def resolve_layout(
    world_size: int,
    *,
    tensor: int = 1,
    context: int = 1,
    data: int | str = "auto",
    pipeline: int = 1,
    last_stage_first: bool = True,
) -> Layout:
    """Turn the user's axis sizes into a layout of ``world_size`` ranks.

    Args:
        world_size: number of ranks.
        tensor: size of the tensor axis.
        context: size of the context axis.
        data: size of the data axis; ``"auto"`` uses the ranks that the other axes leave.
        pipeline: size of the pipeline axis.
        last_stage_first: see :class:`Layout`.

    Raises:
        ValueError: the sizes do not multiply to ``world_size``; the message says which device counts would work.
    """
    fixed = Layout(tensor, context, 1, pipeline).world_size
    model = f"tensor_parallel_size={tensor} × pipeline_parallel_size={pipeline}"
    if context > 1:
        model += f" × context_parallel_size={context}"
    if data == "auto":
        if world_size % fixed:
            lower, upper = world_size // fixed * fixed, (world_size // fixed + 1) * fixed
            fits = f"{lower} or {upper}" if lower else f"{upper}"
            devices = "1 device" if world_size == 1 else f"{world_size} devices"
            raise ValueError(
                f"{devices} cannot be divided into replicas of {fixed} ranks ({model}); "
                f"use `devices={fits}` or change `pipeline_parallel_size`."
            )
        data = world_size // fixed
    if not isinstance(data, int) or isinstance(data, bool):
        raise ValueError(f"`data_parallel_size={data!r}` must be 'auto' or an integer of at least 1.")
    layout = Layout(tensor, context, data, pipeline, last_stage_first)
    if layout.world_size != world_size:
        raise ValueError(
            f"{model} × data_parallel_size={data} needs {layout.world_size} devices but the Trainer has {world_size}; "
            f"use `devices={layout.world_size}` or `data_parallel_size='auto'`."
        )
    return layout
