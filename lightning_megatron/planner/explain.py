"""Why a layout won, in the terms of the papers that layouts come from (arXiv 2104.04473, takeaways 1 to 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from lightning_megatron.planner.cluster import GIB, Cluster
from lightning_megatron.planner.prediction import Prediction
from lightning_megatron.planner.shape import ModelShape

_KINDS = {
    "compute": "compute (recomputation and the size of matrix products)",
    "tensor_communication": "exposed tensor-parallel communication",
    "pipeline_bubble": "the pipeline bubble",
    "pipeline_transfer": "stage-to-stage transfers",
    "data_communication": "exposed gradient reduction",
    "optimizer": "the optimizer",
    "other": "waiting for the slowest rank",
}


def explain(shape: ModelShape, cluster: Cluster, ranked: Sequence[Prediction]) -> str:
    """A paragraph on the first layout, and what the second loses on.

    Args:
        shape: the model.
        cluster: the machine.
        ranked: predictions, fastest first; at least one.
    """
    best = ranked[0]
    sentences = [_tensor(best, cluster), _pipeline(best), _data(best), _memory(best, shape)]
    if len(ranked) > 1:
        sentences.append(compare(best, ranked[1]))
    return " ".join(sentence for sentence in sentences if sentence)


def _tensor(best: Prediction, cluster: Cluster) -> str:
    """On the tensor-parallel size."""
    tensor = best.recipe.tensor
    share = 100 * best.breakdown.tensor_communication / best.iteration_seconds
    if tensor == 1:
        return "No tensor parallelism: layers fit without it, so its collectives would only cost time."
    place = "inside a node's NVLink" if tensor <= cluster.gpus_per_node else "across nodes"
    return f"Tensor parallelism of {tensor} stays {place}; its collectives cost {share:.1f}% of the step."


def _pipeline(best: Prediction) -> str:
    """On the pipeline's size, schedule and bubble."""
    recipe = best.recipe
    if recipe.pipeline == 1:
        return "No pipeline: the model fits without one, so there is no bubble."
    share = 100 * best.breakdown.pipeline_bubble / best.iteration_seconds
    chunks = f" with {recipe.chunks} chunks per rank" if recipe.chunks > 1 else ""
    return (
        f"{recipe.pipeline} pipeline stages run {recipe.schedule}{chunks} over {recipe.micro_batches} micro-batches of "
        f"{recipe.micro_batch}; the bubble is {share:.1f}% of the step."
    )


def _data(best: Prediction) -> str:
    """On data parallelism."""
    recipe = best.recipe
    if recipe.replicas == 1:
        return ""
    share = 100 * best.breakdown.data_communication / best.iteration_seconds
    state = "its optimizer state is sharded" if recipe.sharding != "none" else "every replica keeps all optimizer state"
    return f"A factor of {recipe.data} is data parallelism ({state}); what of it is exposed costs {share:.1f}%."


def _memory(best: Prediction, shape: ModelShape) -> str:
    """On memory and recomputation."""
    used, capacity = best.memory.total / GIB, best.capacity / GIB
    recompute = "layers are recomputed, or it would not fit" if best.recomputed else "nothing is recomputed"
    size = f"{shape.parameters / 1e9:.1f}B parameters"
    return f"{size} take {used:.0f} of {capacity:.0f} GiB on the fullest rank; {recompute}."


def compare(best: Prediction, other: Prediction) -> str:
    """What ``other`` loses against ``best``, and what it gains in return."""
    slower = 100 * (other.iteration_seconds / best.iteration_seconds - 1)
    ours, theirs = asdict(best.breakdown), asdict(other.breakdown)
    gaps = {name: theirs[name] - ours[name] for name in _KINDS}
    worst = max(gaps, key=lambda name: gaps[name])
    text = f"The runner-up ({other.recipe.describe()}) is {slower:.1f}% slower: it loses on {_KINDS[worst]}"
    gain = min(gaps, key=lambda name: gaps[name])
    if gaps[gain] < -0.002 * best.iteration_seconds:
        text += f", and gains less than that on {_KINDS[gain]}"
    return text + "."
