"""Refusals of arguments that cannot be meant, or exclude each other: said when the strategy is made.

What the user's module, callbacks, loaders and optimizers must not be is in :mod:`.run_checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from lightning_megatron.pipeline.cut.partition import PLACES
from lightning_megatron.pipeline.schedules.by_name import make_schedule, schedule_shape
from lightning_megatron.planner.topology import RankPlacement, Topology


def check_sizes(pipeline: Any, data: Any, tensor: Any) -> None:
    """Refuse axis sizes that no number of devices could satisfy.

    Raises:
        ValueError: a size is not a positive integer.
    """
    named = {"pipeline_parallel_size": pipeline, "tensor_parallel_size": tensor}
    if data != "auto":
        named["data_parallel_size"] = data
    for name, size in named.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            choices = "'auto' or an integer" if name == "data_parallel_size" else "an integer"
            raise ValueError(f"`{name}={size!r}` must be {choices} of at least 1.")


def check_tensor_options(tensor: int, plan: Any, sequence_parallel: Any) -> None:
    """Refuse tensor-parallel options that would be ignored or cannot be meant.

    Raises:
        ValueError: with the option's name and value.
    """
    if plan != "auto" and (not isinstance(plan, Mapping) or not plan):
        raise ValueError(f"`tensor_parallel_plan={plan!r}` must be 'auto' or a non-empty dict of pattern -> style.")
    if tensor == 1 and plan != "auto":
        raise ValueError("`tensor_parallel_plan` is given, but `tensor_parallel_size=1`; set `tensor_parallel_size`.")
    if tensor == 1 and sequence_parallel:
        raise ValueError("`sequence_parallel=True` needs `tensor_parallel_size` of at least 2.")


def check_options(
    *,
    micro_batch_size: Any,
    evaluation_micro_batch_size: Any,
    pipeline_schedule: Any,
    pipeline_schedule_options: Mapping[str, Any] | None,
    virtual_pipeline_parallel_size: Any,
    pipeline_split: Any,
    pipeline_parallel_size: int,
    bucket_size_mb: Any,
    micro_batch_loss_weight: Callable[..., Any] | None,
    whole_batch_loss: bool | str,
) -> None:
    """Refuse option values that are wrong whatever the module.

    Raises:
        ValueError: with the option's name and value.
    """
    sizes = {"micro_batch_size": micro_batch_size, "evaluation_micro_batch_size": evaluation_micro_batch_size}
    for name, size in sizes.items():
        if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"`{name}={size!r}` must be 'auto' or an integer of at least 1.")
    chunks, options = virtual_pipeline_parallel_size, dict(pipeline_schedule_options or {})
    if chunks is not None and (not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1):
        raise ValueError(f"`virtual_pipeline_parallel_size={chunks!r}` must be an integer of at least 1, or left out.")
    shape = schedule_shape(pipeline_schedule, chunks, options.get("placement"))
    # Built once for the chosen sizes, so that a wrong option or an impossible schedule of one's own is refused here.
    make_schedule(pipeline_schedule, pipeline_parallel_size, 2 * pipeline_parallel_size, chunks=chunks, **options)
    if pipeline_split != "auto":
        expected = pipeline_parallel_size * shape.chunks
        valid = not isinstance(pipeline_split, str) and isinstance(pipeline_split, Sequence)
        if not valid or len(pipeline_split) != expected or any(not isinstance(n, int) or n < 1 for n in pipeline_split):
            raise ValueError(
                f"`pipeline_split={pipeline_split!r}` must be 'auto' or a list of {expected} positive layer counts, "
                "one per pipeline stage and chunk, in the order of the layers; or 'profile'."
            )
    if not isinstance(bucket_size_mb, (int, float)) or bucket_size_mb <= 0:
        raise ValueError(f"`bucket_size_mb={bucket_size_mb!r}` must be a positive number of MiB.")
    if micro_batch_loss_weight is not None and not callable(micro_batch_loss_weight):
        raise ValueError("`micro_batch_loss_weight` must be a function of the micro-batch that returns a number.")
    if whole_batch_loss not in (True, False, "auto"):
        raise ValueError(f"`whole_batch_loss={whole_batch_loss!r}` must be 'auto', True or False.")
    if micro_batch_loss_weight is not None and whole_batch_loss is True:
        raise ValueError(
            "`micro_batch_loss_weight` weighs the losses of micro-batches, but with `whole_batch_loss=True` there are "
            "none."
        )


def check_times(timeout: Any, hang_timeout: Any) -> None:
    """Refuse invalid times.

    Raises:
        ValueError: with the option's name and value.
    """
    for name, value in {"timeout": timeout, "hang_timeout": hang_timeout}.items():
        if value is None:
            continue
        if not isinstance(value, timedelta):
            example = f"{name}=timedelta(seconds={value})" if isinstance(value, (int, float)) else "a timedelta"
            raise ValueError(f"`{name}={value!r}` must be a datetime.timedelta or None; pass `{example}`.")
        if value <= timedelta(0):
            never = "None for never" if name == "hang_timeout" else "None for torch's own"
            raise ValueError(f"`{name}={value!r}` must be longer than 0; pass a longer time, or {never}.")


def check_placement(placement: Any, topology: Any) -> None:
    """Refuse a placement of parts or of processes that is of another kind.

    Raises:
        ValueError: with the option's name and value.
    """
    if placement is not None and not isinstance(placement, Mapping):
        raise ValueError(
            f"`pipeline_placement={placement!r}` must be a dict of part -> {', '.join(map(repr, PLACES))}, such as "
            "{'model.norm': 'last'}."
        )
    if topology is not None and not isinstance(topology, (Topology, RankPlacement)):
        raise ValueError(
            f"`topology={topology!r}` must be a `lightning_megatron.planner.topology.Topology` of the cluster's "
            "islands, or a placement on one; leave it out where all links are alike."
        )


def check_gradient_options(reduce_dtype: Any, nonfinite: Any) -> None:
    """Refuse values that cannot be meant.

    Raises:
        ValueError: with the option's name and value.
    """
    if reduce_dtype is not None and (not isinstance(reduce_dtype, torch.dtype) or not reduce_dtype.is_floating_point):
        raise ValueError(f"`gradient_reduce_dtype={reduce_dtype!r}` must be a dtype such as torch.bfloat16, or None.")
    if nonfinite not in (None, "raise", "skip"):
        raise ValueError(f"`nonfinite={nonfinite!r}` must be 'raise', 'skip', or None.")


def check_overlap(overlap: Any, sharding: Any, compile_layers: Any) -> None:
    """Refuse an overlap that would do nothing, or that compiled layers would not wait for.

    Raises:
        ValueError: with the option to change.
    """
    if not isinstance(overlap, bool):
        raise ValueError(f"`overlap_parameter_gather={overlap!r}` must be True or False.")
    if overlap and sharding is False:
        raise ValueError(
            "`overlap_parameter_gather=True` needs `optimizer_sharding`, without which nothing is gathered."
        )
    if overlap and compile_layers:
        raise ValueError(
            "`overlap_parameter_gather=True` waits in the hooks of layers, which `compile_layers` compiles away; leave "
            "out one of the two."
        )


def check_loss_chunks(chunks: Any, weight_sharding: Any) -> None:
    """Refuse an invalid number of pieces, and weights that are gone when a piece is computed.

    Raises:
        ValueError: with the option to change.
    """
    if chunks is None or chunks == "auto" or (type(chunks) is int and chunks >= 1):
        if chunks is not None and weight_sharding:
            raise ValueError(
                f"`loss_chunks={chunks!r}` multiplies by the head's weight again in the backward, when "
                "`weight_sharding=True` has freed it; leave out one of the two."
            )
        return
    raise ValueError(f"`loss_chunks={chunks!r}` must be a number of pieces, 'auto' or None.")
