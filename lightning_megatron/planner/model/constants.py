"""Calibrated constants: the shares of datasheet peaks that a training step reaches, and other overheads.

The constants are physical (an efficiency, a latency, a count of passes over memory) and shared by all models and
layouts. ``tools/calibrate.py`` of the repository fits them to published runs; none is specific to one source of runs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

_ATTENTION_AT = 4096
"""Tokens at which ``attention_ampere`` and ``attention_hopper`` are stated."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Calibrated constants; shares are of datasheet values, times are seconds.

    Args:
        gemm_volta, gemm_ampere, gemm_hopper, gemm_blackwell: share of the 16-bit peak of a very large matrix product.
        gemm_fp8: share of the 8-bit peak of a very large matrix product.
        tile_waste: share of one wave of 128 x 128 tiles that is idle at the end of every product.
        k_half: inner dimension at which a product spends half of its time filling and draining its pipeline.
        memory: share of device memory bandwidth that a pass over a large tensor reaches.
        attention_ampere, attention_hopper: share of the 16-bit peak of fused attention's forward.
        attention_ramp: tokens of a sequence at which fused attention reaches half of what it does on endless ones;
            ``attention_*`` are the shares at 4096 tokens.
        misaligned: share of the 16-bit peak for products whose inner dimension is not a multiple of 8 elements.
        nvlink: share of NVLink bandwidth that a large collective reaches.
        network: share of the network's bandwidth that a large collective between nodes reaches.
        network_decay: loss of network bandwidth per doubling of the nodes in a group (congestion, stragglers).
        score_passes: passes over the score matrix of softmax and dropout in unfused attention's forward; the backward
            takes 1.25 times as many.
        eager_passes: factor on the memory passes of unfused norms, activations and rotary embeddings.
        contention: share of its own time that a transfer costs when it overlaps with compute, as it takes processors
            and memory bandwidth from the compute.
        tensor_hidden: share of tensor-parallel transfers that overlapping software hides behind compute.
        launch: seconds of host time per layer and pass, a lower bound on the time of a small layer.
        blocking: seconds of host time per layer and pass, added to GPU time if the host waits for every layer.
        step: seconds per optimizer step not included in the above (data, logging, loss scale, norm).
        jitter: relative slowdown per doubling of the ranks, as the slowest rank sets the time of a step.
    """

    gemm_volta: float = 0.75
    gemm_ampere: float = 0.817
    gemm_hopper: float = 0.704
    gemm_blackwell: float = 0.70
    gemm_fp8: float = 0.59
    tile_waste: float = 0.316
    k_half: float = 105.0
    memory: float = 0.7
    attention_ampere: float = 0.544
    attention_hopper: float = 0.428
    attention_ramp: float = 844.0
    misaligned: float = 0.0361
    nvlink: float = 0.722
    network: float = 0.719
    network_decay: float = 0.0516
    score_passes: float = 5.31
    eager_passes: float = 1.12
    contention: float = 0.164
    tensor_hidden: float = 0.589
    launch: float = 0.00025
    blocking: float = 0.00244
    step: float = 0.0229
    jitter: float = 0.00625

    def gemm(self, generation: str, precision: str) -> float:
        """Share of the peak that a very large matrix product reaches on a GPU generation at a precision."""
        if precision == "fp8":
            return self.gemm_fp8
        return float(getattr(self, f"gemm_{generation}"))

    def attention(self, generation: str, seq: int = _ATTENTION_AT) -> float:
        """Share of the 16-bit peak that fused attention reaches on a GPU generation, for a sequence of ``seq``."""
        share = self.attention_ampere if generation in ("volta", "ampere") else self.attention_hopper
        return share * (1.0 + self.attention_ramp / _ATTENTION_AT) / (1.0 + self.attention_ramp / seq)

    def with_values(self, **changes: float) -> Constants:
        """A copy with some constants replaced."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, float]:
        """Name -> value, for all constants."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


SPREAD: dict[str, float] = {
    "gemm_ampere": 0.05,
    "gemm_hopper": 0.07,
    "gemm_fp8": 0.10,
    "tile_waste": 0.5,
    "k_half": 0.5,
    "memory": 0.10,
    "attention_ampere": 0.2,
    "attention_hopper": 0.2,
    "misaligned": 1.0,
    "nvlink": 0.15,
    "network": 0.25,
    "network_decay": 0.7,
    "score_passes": 0.15,
    "eager_passes": 0.3,
    "contention": 0.5,
    "tensor_hidden": 0.2,
    "blocking": 0.5,
    "step": 0.5,
    "jitter": 0.5,
}
"""Prior standard deviation of the logarithm of each fitted constant; gemm_volta, gemm_blackwell and launch affect no
published run and are not fitted."""

PRIORS: dict[str, float] = {
    "gemm_ampere": 0.85,
    "gemm_hopper": 0.72,
    "gemm_fp8": 0.60,
    "tile_waste": 0.30,
    "k_half": 100.0,
    "memory": 0.75,
    "attention_ampere": 0.55,
    "attention_hopper": 0.45,
    "misaligned": 0.04,
    "nvlink": 0.75,
    "network": 0.70,
    "network_decay": 0.05,
    "score_passes": 5.0,
    "eager_passes": 1.0,
    "contention": 0.15,
    "tensor_hidden": 0.60,
    "blocking": 2e-3,
    "step": 2e-2,
    "jitter": 5e-3,
}
"""Prior mean of every fitted constant, from physical considerations; sources in docs/planning.md."""

DEFAULT_CONSTANTS = Constants()
"""Constants fitted to all published runs by ``python -m tools.calibrate``."""
