"""Interleaved 1F1B: several model chunks per stage rank, so that the pipeline fills and drains in less time.

With v chunks, the bubble is that of 1F1B divided by v, and there are v times as many transfers (Narayanan et al., SC21,
arXiv 2104.04473, section 2.2.2). Micro-batches go through the chunks in groups of at least ``stages``::

    group 0: chunk 0 of micro-batches 0 1 2, chunk 1 of 0 1 2;   group 1: chunk 0 of 3 4, chunk 1 of 3 4

The paper requires a multiple of the group size. A last group shorter than the pipeline would indeed stall it (or
deadlock), so its micro-batches are spread over the other groups, and the warm-up follows the largest group. With this,
any number of micro-batches of at least ``stages`` has the ideal bubble.
"""

from __future__ import annotations

from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind
from lightning_megatron.pipeline.schedules.plain import alternate


def interleaved(stages: int, chunks: int, micro_batches: int, group_size: int | None = None) -> list[list[Instruction]]:
    """Interleaved 1F1B for any number of micro-batches.

    Args:
        stages: Number of stage ranks, p.
        chunks: Model chunks per stage rank, v.
        micro_batches: Micro-batches per step, m.
        group_size: Micro-batches that go through a chunk before the next chunk begins, N; p by default.

    Returns:
        Per stage rank, its 2 * m * v instructions. Rank r warms up with 2(p-r-1) + (v-1)N forwards.

    Raises:
        ValueError: If ``group_size`` is below ``stages``.
    """
    group_size = stages if group_size is None else group_size
    if group_size < stages:
        raise ValueError(
            f"group_size={group_size} is below stages={stages}: the pipeline would never fill; use {stages} or more"
        )
    groups = group_sizes(stages, micro_batches, group_size)
    order = _chunk_order(groups, chunks)
    forwards = [Instruction(Kind.FORWARD, micro_batch, chunk) for micro_batch, chunk in order]
    backwards = [Instruction(Kind.BACKWARD, micro_batch, chunks - 1 - chunk) for micro_batch, chunk in order]
    # With one chunk this is 1F1B, which needs only one forward ahead per following stage.
    ahead = 2 if chunks > 1 else 1
    return [
        alternate(forwards, backwards, ahead * (stages - rank - 1) + (chunks - 1) * max(groups))
        for rank in range(stages)
    ]


def forward_only(stages: int, chunks: int, micro_batches: int) -> list[list[Instruction]]:
    """Evaluation with any number of chunks: only the forwards of :func:`interleaved`.

    Args:
        stages: Number of stage ranks, p.
        chunks: Model chunks per stage rank, v.
        micro_batches: Micro-batches per step, m.

    Returns:
        Per stage rank, its m * v instructions; the same on every rank.
    """
    order = _chunk_order(group_sizes(stages, micro_batches, stages), chunks)
    return [[Instruction(Kind.FORWARD, micro_batch, chunk) for micro_batch, chunk in order] for _ in range(stages)]


def group_sizes(stages: int, micro_batches: int, group_size: int) -> list[int]:
    """Sizes of the groups: ``group_size`` each; a tail shorter than the pipeline is spread over the others.

    Example:
        >>> group_sizes(2, 5, 3), group_sizes(4, 8, 4), group_sizes(4, 11, 4), group_sizes(4, 3, 4)
        ([3, 2], [4, 4], [5, 6], [3])
    """
    full, tail = divmod(micro_batches, group_size)
    if tail == 0:
        return [group_size] * full
    if tail >= stages or full == 0:
        return [group_size] * full + [tail]
    size, larger = divmod(micro_batches, full)
    return [size] * (full - larger) + [size + 1] * larger


def _chunk_order(groups: list[int], chunks: int) -> list[tuple[int, int]]:
    """``(micro-batch, chunk)`` of the forwards: a group goes through chunk 0, then chunk 1, and so on."""
    order: list[tuple[int, int]] = []
    first = 0
    for size in groups:
        order += [(micro_batch, chunk) for chunk in range(chunks) for micro_batch in range(first, first + size)]
        first += size
    return order
