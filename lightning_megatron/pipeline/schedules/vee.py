"""ZB-V, DualPipeV and the forward-only order of a V: two chunks per rank, down in chunk 0 and back up in chunk 1.

Rank 0 holds the first and the last virtual stage, so the backward of a micro-batch starts on the rank of its last
forward without a transfer, and backwards start early on all ranks. With F = I = W a rank has no idle time between its
first and its last instruction, with the activation memory of 1F1B (ZB-V: Qi et al., arXiv 2401.10241, section 6;
DualPipeV: half of DeepSeek-V3's DualPipe, arXiv 2412.19437, where each forward is paired with a backward of the other
chunk).

Both are written as phases. A phase is a pattern and how often a rank repeats it: ``"F1 I1 W"`` is a forward of chunk 1,
the input half of a backward of chunk 1, and the oldest delayed weight half. Micro-batches are implicit: the n-th
forward of a chunk is that of micro-batch n, and so on. A step with fewer micro-batches than the pattern needs omits the
instructions of the micro-batches that it lacks.
"""

from __future__ import annotations

from collections import deque

from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind

_Phases = list[tuple[str, int]]


def zb_v(stages: int, micro_batches: int) -> list[list[Instruction]]:
    """ZB-V: zero bubble at the activation memory of 1F1B, with at most 2p chunks in flight, each half a stage.

    Args:
        stages: Number of stage ranks, p.
        micro_batches: Micro-batches per step; the full pattern needs 2p-1.

    Returns:
        Per stage rank, its instructions.
    """
    count = max(micro_batches, 2 * stages - 1)
    return [_spell(_zb_v_phases(stages, rank, count), micro_batches) for rank in range(stages)]


def dual_pipe_v(stages: int, micro_batches: int) -> list[list[Instruction]]:
    """DualPipeV: in the steady state each forward is followed by the whole backward of the other chunk.

    Args:
        stages: Number of stage ranks, p.
        micro_batches: Micro-batches per step; the full pattern needs 2p.

    Returns:
        Per stage rank, its instructions; at most 2p+1 chunks in flight.
    """
    count = max(micro_batches, 2 * stages)
    return [_spell(_dual_pipe_v_phases(stages, rank, count), micro_batches) for rank in range(stages)]


def forward_only(stages: int, micro_batches: int) -> list[list[Instruction]]:
    """Evaluation on a V: forwards of chunk 0 until the first chunk 1 is ready, then the two chunks alternately.

    Args:
        stages: Number of stage ranks, p.
        micro_batches: Micro-batches per step.

    Returns:
        Per stage rank, its 2 * m instructions.
    """
    return [
        _spell([("F0", 2 * (stages - rank) - 1), ("F1 F0", micro_batches)], micro_batches) for rank in range(stages)
    ]


def _zb_v_phases(stages: int, rank: int, count: int) -> _Phases:
    below = stages - rank - 1
    return [
        ("F0", 2 * below + 1),
        ("F1 F0", rank),
        ("F1 I1 W", below + 1),
        ("F0 I0 W F1 I1 W", count - 2 * stages + rank + 1),
        ("I0 W F1 I1 W", below),
        ("I0 I1", rank),
        ("I0 W", below + 1),
        ("W", 2 * rank),
    ]


def _dual_pipe_v_phases(stages: int, rank: int, count: int) -> _Phases:
    below = stages - rank - 1
    # The drain of 2 * (rank + 1) backwards alternates the chunks; its second half splits them to fill the last bubbles.
    whole = ["B1", "B0"] * (rank + 1)
    split = ["I1", "I0"] * (rank + 1)
    return [
        ("F0", 2 * below),
        ("F0 F1", rank + 1),
        ("I1 W F1", below),
        ("F0 B1 F1 B0", count - 2 * stages + rank + 1),
        ("B1 F1 B0", below),
        (" ".join(whole[: rank + 1] + split[rank + 1 :]), 1),
        ("W I0", below),
        ("W", rank + 1),
    ]


def _spell(phases: _Phases, micro_batches: int) -> list[Instruction]:
    """Turn patterns into instructions, without those of micro-batches that the step does not have."""
    done = {"F0": 0, "F1": 0, "B0": 0, "B1": 0}
    kept_back: deque[tuple[int, int]] = deque()
    order = []
    for pattern, times in phases:
        for word in pattern.split() * times:
            if word == "W":
                index, chunk = kept_back.popleft()
            else:
                chunk, counter = int(word[1]), ("F" if word[0] == "F" else "B") + word[1]
                index = done[counter]
                done[counter] += 1
            if word[0] == "I":
                kept_back.append((index, chunk))
            if index < micro_batches:
                order.append(Instruction(Kind(word[0]), index, chunk))
    return order
