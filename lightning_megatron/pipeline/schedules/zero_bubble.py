"""ZB-H1 and ZB-H2: split the backward, and fill the bubbles with weight gradients, for which no stage waits.

The previous stage waits for the input half of a backward (I); the weight half (W) can run at any later time (Qi et al.,
Zero Bubble Pipeline Parallelism, arXiv 2401.10241). Both schedules have the shape of 1F1B; they differ in how many
forwards a rank runs before its first backward, and how many weight halves it delays until the pipeline drains::

    ZB-H1   stage 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
            stage 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
            stage 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

If rank r delays r weight halves, no rank needs more memory than the first stage of 1F1B: every rank has p micro-batches
in flight. With memory for each further micro-batch, every rank can run one more forward ahead or delay one more weight
half; with 2p-1 micro-batches and F = I = W, no bubble remains inside the span of a rank.
"""

from __future__ import annotations

from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind


def zb_h1(stages: int, micro_batches: int) -> list[list[Instruction]]:
    """ZB-H1: a smaller bubble at the activation memory of 1F1B, with at most p micro-batches in flight on any rank.

    Args:
        stages: Number of stage ranks, p.
        micro_batches: Micro-batches per step.

    Returns:
        Per stage rank, its instructions; idle time per rank (p-1)(F+I-W).
    """
    return [_split_order(micro_batches, warm_up=stages - rank - 1, held_back=rank) for rank in range(stages)]


def zb_h2(stages: int, micro_batches: int, memory_limit: int | None = None) -> list[list[Instruction]]:
    """ZB-H2: a still smaller bubble, with as many micro-batches in flight as ``memory_limit`` allows.

    Args:
        stages: Number of stage ranks, p.
        micro_batches: Micro-batches per step.
        memory_limit: Micro-batches whose activations a rank may hold, from p (equal to ZB-H1) to 2p-1 (the default;
            more memory does not help).

    Returns:
        Per stage rank, its instructions; idle time per rank (p-1)(F+I-2W) at the default limit.

    Raises:
        ValueError: If ``memory_limit`` is below ``stages``.
    """
    limit = 2 * stages - 1 if memory_limit is None else memory_limit
    if limit < stages:
        raise ValueError(
            f"memory_limit={limit} is below stages={stages}: the first stage needs {stages} micro-batches in flight"
            f" to keep the pipeline full; use memory_limit={stages} to {2 * stages - 1}, or fewer stages"
        )
    # With fewer micro-batches than the limit, a larger warm-up would only delay the first backwards.
    extra = max(min(limit, 2 * stages - 1, micro_batches) - stages, 0)
    orders = []
    for rank in range(stages):
        after = stages - rank - 1
        ahead = round(extra * after / max(stages - 1, 1))
        orders.append(_split_order(micro_batches, warm_up=after + ahead, held_back=rank + extra - ahead))
    return orders


def _split_order(micro_batches: int, warm_up: int, held_back: int) -> list[Instruction]:
    """``warm_up`` forwards; then F and I alternately; a W follows each I once ``held_back`` other Ws are delayed."""
    order = [Instruction(Kind.FORWARD, index) for index in range(min(warm_up, micro_batches))]
    for index in range(micro_batches):
        if index + warm_up < micro_batches:
            order.append(Instruction(Kind.FORWARD, index + warm_up))
        order.append(Instruction(Kind.BACKWARD_INPUT, index))
        if index >= held_back:
            order.append(Instruction(Kind.BACKWARD_WEIGHT, index - held_back))
    first = max(micro_batches - held_back, 0)
    return order + [Instruction(Kind.BACKWARD_WEIGHT, index) for index in range(first, micro_batches)]
