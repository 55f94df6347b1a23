"""How often a bucket is worth bringing to the device for its step (Deep Optimizer States, arXiv 2410.21316).

While the processor steps on k - 1 buckets, the link brings the k-th with its state to the device and back. With
U parameters/s stepped on the processor and B bytes/s of the link in either direction, s bytes of weights and state and
w bytes of the weight that layers compute with, both take equally long at::

    k* = 1 + s / (B / U - w)          B = 55 GB/s, U = 4e9/s, s = 12, w = 2:  k* = 2.02

A link that does not even carry the weights (B <= w U) leaves all steps to the processor.
"""

from __future__ import annotations

import math


def best_stride(steps: float, bytes_per_s: float, state: float, weight: float, most: int = 16) -> int | None:
    """The whole number beside k* with the shorter update; ``None`` where all steps are the processor's.

    Args:
        steps: parameters that the processor steps on per second.
        bytes_per_s: of the link, in one direction.
        state: bytes of a parameter that travel for a step on the device.
        weight: bytes of a parameter that travel after a step on the processor.
        most: strides above it are not worth their buffers.
    """
    spare = bytes_per_s / steps - weight
    best = 1 + state / spare if spare > 0 else math.inf
    if best > most:
        return None
    near = {max(1, math.floor(best)), math.ceil(best)}
    return min(near, key=lambda k: seconds(k, steps, bytes_per_s, state, weight))


def seconds(k: int, steps: float, bytes_per_s: float, state: float, weight: float) -> float:
    """Time per parameter of an update with every ``k``-th bucket on the device, whose own steps take none."""
    return max((k - 1) / k / steps, (state + weight * (k - 1)) / (k * bytes_per_s))
