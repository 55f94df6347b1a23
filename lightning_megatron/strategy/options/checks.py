"""Refusals: what cannot work is said before any work starts, with the argument to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import LBFGS, Optimizer
from torch.utils.data import default_collate

from lightning_megatron.data_parallel.presplit import splits_itself
from lightning_megatron.data_parallel.update.trial import Independence
from lightning_megatron.experts.balance.balancing import is_known
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.pipeline.cut.partition import PLACES
from lightning_megatron.pipeline.schedules.by_name import make_schedule, schedule_shape
from lightning_megatron.planner.topology import Placement, Topology
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of


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
        raise ValueError(f"`tensor_parallel_plan={plan!r}` must be 'auto' or a dict of pattern -> style, not empty.")
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
            "`micro_batch_loss_weight` weighs micro-batches, of which `whole_batch_loss=True` leaves none."
        )


def check_times(timeout: Any, hang_timeout: Any) -> None:
    """Refuse times that are none.

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
    if topology is not None and not isinstance(topology, (Topology, Placement)):
        raise ValueError(
            f"`topology={topology!r}` must be a `lightning_megatron.planner.topology.Topology` of the cluster's "
            "islands, or a placement on one; leave it out where all links are alike."
        )


def check_micro_batch(loader: Any, size: int | str) -> None:
    """Refuse micro-batches that are larger than every batch; one that is collated otherwise may have any length.

    Args:
        loader: of training.
        size: ``micro_batch_size``.

    Raises:
        ValueError: with both sizes.
    """
    batch = getattr(loader, "batch_size", None)
    usual = getattr(loader, "collate_fn", default_collate) is default_collate
    if usual and isinstance(size, int) and isinstance(batch, int) and size > batch:
        raise ValueError(
            f"`micro_batch_size={size}` is more than the samples of a batch (`DataLoader(batch_size={batch})`); use at "
            f"most {batch}."
        )


def check_run(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    layout: Layout,
    micro_batch_size: int | str,
    balance: str | None = None,
) -> None:
    """Refuse what a module or a callback does that this strategy cannot do.

    Raises:
        MisconfigurationException: with what to change.
    """
    callbacks = callbacks_of(trainer)
    clip = trainer.gradient_clip_val
    if isinstance(clip, (int, float)) and not clip >= 0:
        raise MisconfigurationException(
            f"`Trainer(gradient_clip_val={clip})` must not be below 0; use a positive bound, or leave it out."
        )
    for callback in callbacks:
        measures = isinstance(callback, StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module)
        if measures and layout.pipeline > 1:
            raise MisconfigurationException(
                f"{type(callback).__name__} ends with an epoch without backward, to measure BatchNorm's statistics "
                f"again; the schedule of `pipeline_parallel_size={layout.pipeline}` has a backward in every step. Use "
                "`WeightAveraging` or `EMAWeightAveraging`, which average the statistics, or "
                "`pipeline_parallel_size=1`."
            )
        if isinstance(callback, ModelPruning) and layout.pipeline * layout.tensor > 1 and not splits_itself(module):
            raise MisconfigurationException(
                f"{type(callback).__name__} puts masks in the place of weights, of which every rank has a part with "
                f"`tensor_parallel_size={layout.tensor}` and `pipeline_parallel_size={layout.pipeline}`: it would "
                "prune other weights than in one process, or none. Use both sizes 1 for it, or zero weights in a hook "
                "(`self.layer.weight.mul_(mask)` in `on_train_batch_end`), which sees them whole."
            )
    for thing in (*callbacks, *trainer.loggers):
        if type(thing).__mro__[-2].__module__.startswith("pytorch_lightning") or type(thing).__module__.startswith(
            "pytorch_lightning"
        ):
            raise MisconfigurationException(
                f"{type(thing).__name__} comes from `pytorch_lightning`; import it from `lightning.pytorch`."
            )
    _check_mixtures(trainer, module, layout, balance)
    if layout.pipeline > 1 and trainer.state.fn == TrainerFn.FITTING:
        _check_adapters(module)
    if layout.pipeline > 1 or micro_batch_size != "auto":
        _check_steps(module)


def _check_adapters(module: pl.LightningModule) -> None:
    """Refuse adapters of peft's that compare those of all layers."""
    for name, child in module.named_modules():
        if hasattr(child, "rankallocator") and type(child).__module__.startswith("peft."):
            raise MisconfigurationException(
                f"`{name}` is an AdaLoRA: it ranks the adapters of all layers against each other and penalises them "
                "together, and a pipeline stage has only its own. Use LoRA, or `pipeline_parallel_size=1` with "
                "`tensor_parallel_size` and replicas."
            )


def _check_mixtures(trainer: pl.Trainer, module: pl.LightningModule, layout: Layout, balance: str | None) -> None:
    """Refuse Hugging Face mixtures of experts whose loss would be another one, or that cannot compute."""
    for name, child in module.named_modules():
        config, called = getattr(child, "config", None), name or type(child).__name__
        grouped = getattr(config, "_experts_implementation", None) == "grouped_mm"
        if grouped and trainer.precision_plugin.precision == "64-true":
            raise MisconfigurationException(
                f"`{called}` multiplies its experts by `experts_implementation='grouped_mm'`, which torch has not in "
                "float64; build it with `experts_implementation='eager'`, or use another `precision` than '64-true'."
            )
        if getattr(config, "output_router_logits", False) is not True:
            continue
        counts = getattr(config, "router_aux_loss_coef", None) != 0 and trainer.state.fn == TrainerFn.FITTING
        what = f"`{called}` has `config.output_router_logits=True`: its auxiliary loss"
        if layout.data > 1 and counts and balance is None and not is_known(child):
            raise MisconfigurationException(
                f"{what} is not made by a `load_balancing_loss_func(gate_logits, ...)`, so that over "
                f"`data_parallel_size={layout.data}` replicas it would be that of each of them. "
                "`expert_balance='replica'` says that this is meant, as in DDP; for that of the whole batch set it to "
                "False and add a loss of your own, on what `self.all_gather(router_logits, sync_grads=True)` gives."
            )
        if layout.context > 1 and layout.data > 1 and counts and balance is None:
            raise MisconfigurationException(
                f"{what} is of the tokens of all replicas, of which a rank has a part of its replica's with "
                f"`context_parallel_size={layout.context}`. Set it to False, or use `context_parallel_size=1` or "
                "`data_parallel_size=1`."
            )


def _check_steps(module: pl.LightningModule) -> None:
    if is_overridden("backward", module):
        raise MisconfigurationException(
            "`LightningModule.backward` is overridden, but with micro-batches the schedule runs the backward; remove "
            "the override, or use `pipeline_parallel_size=1` and `micro_batch_size='auto'`."
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        function = getattr(module, step)
        if callable(function) and is_param_in_hook_signature(function, "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                f"`{step}(self, dataloader_iter)` fetches its own batches, which cannot be cut into micro-batches; "
                "take a `batch`, or use `pipeline_parallel_size=1` and `micro_batch_size='auto'`."
            )


def check_optimizers(optimizers: Sequence[Optimizer], stages: int) -> None:
    """Refuse optimizers that need the whole model at once when it is spread over stages.

    Raises:
        MisconfigurationException: with what to change.
    """
    if stages == 1:
        return
    updated: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if updated.setdefault(id(parameter), number) != number:
                raise MisconfigurationException(
                    f"optimizers {updated[id(parameter)]} and {number} both hold a parameter of shape "
                    f"{tuple(parameter.shape)}; with `pipeline_parallel_size={stages}` give each parameter to one "
                    "optimizer, or use `pipeline_parallel_size=1`."
                )
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException(
                "LBFGS takes inner products over all parameters, which lie on different stages; use another "
                "optimizer, or `pipeline_parallel_size=1`."
            )


def check_independence(
    optimizers: Sequence[Optimizer], least: Independence, layout: Layout, shards: int, lowered: bool
) -> None:
    """Refuse optimizers that need more of the model at once than a rank holds.

    Args:
        optimizers: the module's.
        least: the smallest thing that they update by itself.
        layout: axis sizes.
        shards: ranks that share the optimizer's work.
        lowered: whether layers compute with 16-bit copies of the weights.

    Raises:
        MisconfigurationException: with what to change.
    """
    names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    if least is Independence.NONE and shards > 1:
        raise MisconfigurationException(
            f"{names} needs {least.value} (found by a trial on small matrices), but `optimizer_sharding` shares them "
            f"out over {shards} replicas; pass `MegatronStrategy(optimizer_sharding=False)`, or use an optimizer that "
            "updates every parameter by itself."
        )
    if least is Independence.NONE and layout.pipeline * layout.tensor > 1:
        raise MisconfigurationException(
            f"{names} needs {least.value} (found by a trial on small matrices), but `pipeline_parallel_size="
            f"{layout.pipeline}` and `tensor_parallel_size={layout.tensor}` spread them over ranks; use an optimizer "
            "that updates every parameter by itself, or set both to 1."
        )
    if least is Independence.NONE and lowered:
        raise MisconfigurationException(
            f"{names} needs {least.value}, or calls its closure several times (found by a trial on small matrices); "
            "mixed precision updates float32 copies of the weights, which the closure does not see. Use "
            "`precision='32-true'` or 'bf16-true'."
        )


def check_scaled(module: pl.LightningModule) -> None:
    """Refuse what a dynamic loss scale cannot follow.

    Raises:
        MisconfigurationException: with what to change.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "`precision='16-mixed'` scales the loss by a number that changes from step to step, which manual "
            "optimization cannot follow; use `precision='bf16-mixed'`, or set `self.automatic_optimization = True`."
        )


def check_own_gradients(loss_scale: Any, nonfinite: Any, reduce_dtype: Any) -> None:
    """Refuse what this package does to gradients, for a module whose own code has split it.

    Raises:
        MisconfigurationException: with the option to leave out.
    """
    wanted = {"precision='16-mixed'": loss_scale, "nonfinite": nonfinite, "gradient_reduce_dtype": reduce_dtype}
    for name, value in wanted.items():
        if value is not None:
            raise MisconfigurationException(
                f"`{name}` does not go together with a module that splits itself in `configure_model` "
                "(`parallelize_module`, `fully_shard`), whose gradients torch sums; leave it out, or let "
                "`tensor_parallel_size` split the module."
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
    """Refuse a number of pieces that is none, and weights that are gone when a piece is computed.

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
