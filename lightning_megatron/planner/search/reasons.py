"""Explains why a layout is the fastest, in the terms of SC21 (arXiv 2104.04473, takeaways 1 to 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from lightning_megatron.pipeline.schedules.text import counted
from lightning_megatron.planner.cost.host_activations import repeated_share
from lightning_megatron.planner.cost.memory import stage_parameters
from lightning_megatron.planner.cost.mixture import expert_parameters_here, sent_bytes
from lightning_megatron.planner.cost.prediction import Prediction, predict
from lightning_megatron.planner.cost.sharded_state import case_of, shards, step_volume
from lightning_megatron.planner.model.cluster import GIB, MIB, Cluster
from lightning_megatron.planner.model.constants import DEFAULT_CONSTANTS, Constants
from lightning_megatron.planner.model.recipe import VEE_SCHEDULES
from lightning_megatron.planner.model.shape import ModelShape

_SAME = 0.05
"""Percent below which two layouts are as fast."""

_KINDS = {
    "compute": "compute (efficiency of matrix products)",
    "tensor_communication": "exposed tensor-parallel communication",
    "context_communication": "exposed messages between context ranks",
    "expert_communication": "rows of tokens sent to experts",
    "pipeline_bubble": "the pipeline bubble",
    "pipeline_transfer": "stage-to-stage transfers",
    "data_communication": "exposed gradient reduction",
    "optimizer": "the optimizer",
    "other": "waiting for the slowest rank",
}


def explain(
    shape: ModelShape,
    cluster: Cluster,
    ranked: Sequence[Prediction],
    *,
    least: int | None = None,
    constants: Constants = DEFAULT_CONSTANTS,
) -> str:
    """Explain the fastest layout in a paragraph, and compare it with the second.

    Args:
        shape: the model.
        cluster: the machine.
        ranked: predictions, fastest first; at least one.
        least: the fewest GPUs t p that one replica fits on, if known.
        constants: calibrated constants.
    """
    best = ranked[0]
    sentences = [
        _tensor(best, cluster),
        _context(best, shape),
        _experts(best, shape),
        _pipeline(best),
        _micro_batch(best, shape, cluster, constants),
    ]
    sentences += [_data(best, least), _weights(best, shape, cluster), _memory(best, shape)]
    if len(ranked) > 1:
        sentences.append(compare(best, ranked[1]))
    return " ".join(sentence for sentence in sentences if sentence)


def _tensor(best: Prediction, cluster: Cluster) -> str:
    """Sentence on the tensor-parallel size."""
    tensor = best.recipe.tensor
    share = 100 * best.breakdown.tensor_communication / best.iteration_seconds
    if tensor == 1:
        return "No tensor parallelism: layers fit without it, so its collectives would only cost time."
    place = "inside a node's NVLink" if tensor <= cluster.gpus_per_node else "across nodes"
    return f"Tensor parallelism of {tensor} stays {place}; its collectives cost {share:.1f}% of the step."


def _context(best: Prediction, shape: ModelShape) -> str:
    """Sentence on the ranks that share the tokens of a sequence; empty for one."""
    recipe = best.recipe
    if recipe.context == 1:
        return ""
    tokens = f"{recipe.context} context ranks share the {shape.seq:,} tokens of a sequence"
    share = 100 * best.breakdown.context_communication / best.iteration_seconds
    return f"{tokens}; {_METHODS[recipe.context_method]} costs {share:.1f}% of the step."


_METHODS = {
    "gather": "gathering keys and values",
    "ring": "passing keys and values around",
    "ulysses": "exchanging tokens for heads",
}


def _experts(best: Prediction, shape: ModelShape) -> str:
    """Sentence on the ranks that share out experts; empty for a dense model."""
    recipe = best.recipe
    if not shape.experts:
        return ""
    each = f"{shape.experts} experts of which a token takes {shape.top_k}"
    if recipe.expert == 1:
        return f"Every replica holds all of the {each}: no rows are sent."
    share = 100 * best.breakdown.expert_communication / best.iteration_seconds
    busiest = f", {recipe.imbalance:g} times the mean on the busiest rank" if recipe.imbalance > 1 else ""
    held = _size(recipe.element * shape.mixtures * expert_parameters_here(shape, recipe) / recipe.pipeline)
    sent = _size(sent_bytes(shape, recipe))
    return (
        f"{recipe.expert} ranks share out the {each}{busiest}, so that each holds {held} of them; per layer and "
        f"micro-batch a rank sends {sent} of rows, which costs {share:.1f}% of the step."
    )


def _pipeline(best: Prediction) -> str:
    """Sentence on the pipeline's size, schedule and bubble."""
    recipe = best.recipe
    if recipe.pipeline == 1:
        return "No pipeline: the model fits without one, so there is no bubble."
    share = 100 * max(0.0, best.breakdown.pipeline_bubble) / best.iteration_seconds  # stages may differ in work
    chunks = f" with {recipe.chunks} chunks per rank" if recipe.chunks > 1 else ""
    batches = f"{counted(recipe.micro_batches, 'micro-batch')} of {recipe.micro_batch}"
    run = f"{recipe.pipeline} pipeline stages run {recipe.schedule}{chunks} over {batches}"
    return f"{run}; the bubble is {share:.1f}% of the step{_ideal_bubble(best)}."


def _ideal_bubble(best: Prediction) -> str:
    """Clause that compares the simulated bubble with the closed form of SC21, for GPipe, 1F1B and interleaved."""
    recipe = best.recipe
    if recipe.schedule in VEE_SCHEDULES or recipe.schedule.startswith("zb"):
        return ", for weight gradients fill it"
    ideal = (recipe.pipeline - 1) / (recipe.chunks * recipe.micro_batches)
    name = "(p - 1)/(v m)" if recipe.chunks > 1 else "(p - 1)/m"
    return f" ({name} of even stages would be {100 * ideal:.1f}% of their work)"


def _micro_batch(best: Prediction, shape: ModelShape, cluster: Cluster, constants: Constants) -> str:
    """Sentence on the micro-batch size: larger ones use the GPU better, smaller ones shorten the bubble."""
    recipe = best.recipe
    reasons = []
    for size in (recipe.micro_batch // 2, 2 * recipe.micro_batch):
        if not size or recipe.global_batch % (recipe.data * size):
            continue
        other = predict(shape, replace(recipe, micro_batch=size), cluster, constants=constants)
        if not other.fits:
            reasons.append(f"{size} would not fit like this")
            continue
        slower = 100 * (other.iteration_seconds / best.iteration_seconds - 1)
        if slower > 0:
            reasons.append(f"{size} would be {slower:.1f}% slower for {_reason(best, other)}")
    return f"As micro-batch, {' and '.join(reasons)}." if reasons else ""


def _gaps(best: Prediction, other: Prediction) -> dict[str, float]:
    """Kind -> seconds that ``other`` takes more than ``best`` for the same number of sequences."""
    ours, theirs = asdict(best.breakdown), asdict(other.breakdown)
    scale = best.recipe.global_batch / other.recipe.global_batch
    return {name: scale * theirs[name] - ours[name] for name in _KINDS}


def _reason(best: Prediction, other: Prediction) -> str:
    """The kind of time by which ``other`` exceeds ``best`` most, in words."""
    gaps = _gaps(best, other)
    worst = max(gaps, key=lambda name: gaps[name])
    return "recomputation" if worst == "compute" and other.recomputed > best.recomputed else _KINDS[worst]


def _data(best: Prediction, least: int | None) -> str:
    """Sentence on data parallelism; empty for one replica."""
    recipe = best.recipe
    if recipe.data == 1:
        return ""
    share = 100 * best.breakdown.data_communication / best.iteration_seconds
    state = "its optimizer state is sharded" if recipe.sharding != "none" else "every replica keeps all optimizer state"
    state = "its weights are sharded" if recipe.shards_weights else state
    replica = recipe.tensor * recipe.pipeline * recipe.context
    why = "one replica takes no fewer" if replica == least else f"one would fit on {least}, but slower"
    size = f"A replica has {counted(replica, 'GPU')} ({why})" if least is not None else "The model is repeated"
    return (
        f"{size}, and {recipe.data} replicas share the batch ({state}); what of their messages is exposed costs "
        f"{share:.1f}% of the step."
    )


def _weights(best: Prediction, shape: ModelShape, cluster: Cluster) -> str:
    """Sentence on weights that replicas share out; empty where each has its own."""
    recipe = best.recipe
    if not recipe.shards_weights or recipe.replicas == 1:
        return ""
    fullest = max(stage_parameters(shape, recipe, stage) for stage in (0, recipe.pipeline - 1))
    parts = shards(recipe, cluster.gpus_per_node)
    moved = step_volume(recipe, fullest, cluster.gpus_per_node)
    until = "its layer has run" if case_of(recipe).frees_layers else "the step ends"
    place = ", which lies in host memory," if recipe.weight_offload else ""
    return (
        f"Each rank keeps 1/{parts} of its weights{place} and gathers the rest until {until}: {_size(moved.gathered)} "
        f"a step, and {_size(moved.summed)} of gradients to sum."
    )


def _memory(best: Prediction, shape: ModelShape) -> str:
    """Sentence on memory and recomputation."""
    used, capacity = best.memory.total / GIB, best.capacity / GIB
    said = [f"{shape.size} parameters take {used:.0f} of {capacity:.0f} GiB on the fullest rank", *_given_up(best)]
    return "; ".join(said) + "."


def _given_up(best: Prediction) -> list[str]:
    """The time and host memory spent to save memory."""
    kept, away, repeated = best.recipe, best.recipe.activation_offload, repeated_share(best.recipe)
    said = ["layers are recomputed, or it would not fit"] if best.recomputed else []
    if isinstance(away, float | int):
        said.append(f"activations of {100 * away:.0f}% of the tokens go to host memory")
    elif away is not None:
        said.append("the inputs of layers go to host memory")
    if repeated:
        said.append("what is linear of the others is computed again")
    if kept.optimizer_offload:
        share = 100 * best.breakdown.optimizer / best.iteration_seconds
        said.append(
            f"{100 * kept.optimizer_offload:.0f}% of the optimizer step on the host, for {share:.1f}% of the step"
        )
    said = said or ["nothing is recomputed"]
    said += [f"logits are computed in {kept.loss_chunks} pieces"] if kept.loss_chunks > 1 else []
    said += [f"MLPs are computed in {kept.mlp_chunks} pieces"] if kept.mlp_chunks > 1 else []
    said += [f"{_size(best.memory.host)} of each rank lie in host memory"] if best.memory.host else []
    return said


def _size(size: float) -> str:
    """Bytes in a unit that people read."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{size / unit:.0f} {name}" if size >= 10 * unit else f"{size / unit:.1f} {name}"
    return f"{size / 1024:.1f} KiB"


def compare(best: Prediction, other: Prediction) -> str:
    """Sentence on the time that ``other`` loses against ``best``, and the time that it gains."""
    slower = 100 * (best.tokens_per_second / other.tokens_per_second - 1)
    gaps = _gaps(best, other)
    lost = f"{100 * max(gaps.values()) / best.iteration_seconds:.1f}%"
    if slower < _SAME:
        return f"The runner-up ({other.recipe.describe()}) is as fast."
    runner = f"The runner-up ({other.recipe.describe()}) is {slower:.1f}% slower"
    text = f"{runner}: it loses {lost} on {_reason(best, other)}"
    if min(gaps.values()) < -0.002 * best.iteration_seconds:
        text += f", and gains less than that on {_reason(other, best)}"
    return text + "."
