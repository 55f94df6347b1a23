"""Refusals of what a run brings along: a module, callbacks, loaders and optimizers that cannot be trained so.

They are asked when the run starts, before any step, and name what to change. Arguments of the strategy that cannot be
meant are refused earlier, where it is made (:mod:`.checks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.utils.data import default_collate

from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.data_parallel.presplit import splits_itself
from lightning_megatron.experts.balance.balancing import is_known
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.mesh.parts.packages import comes_from
from lightning_megatron.strategy.lightning.hooks import names_used
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of

_GRADIENTS = frozenset(
    (
        *("grad", "parameters", "named_parameters", "param_groups", "clip_gradients", "get_total_norm"),
        *("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"),
    )
)
"""Names in code that looks at gradients."""


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
    *,
    tries: bool = True,
) -> None:
    """Refuse what a module or a callback does that this strategy cannot do.

    Raises:
        MisconfigurationException: with what to change.
    """
    clip = trainer.gradient_clip_val
    if isinstance(clip, (int, float)) and not clip >= 0:
        raise MisconfigurationException(
            f"`Trainer(gradient_clip_val={clip})` must not be below 0; use a positive bound, or leave it out."
        )
    _check_callbacks(trainer, module, layout)
    _check_mixtures(trainer, module, layout, balance)
    if layout.world_size > 1:
        _check_made(module)
    _check_backward(module, layout)
    if layout.pipeline > 1 and trainer.state.fn == TrainerFn.FITTING:
        _check_adapters(module)
    if layout.pipeline > 1 or micro_batch_size != "auto":
        _check_steps(module)
    elif layout.data > 1 and tries:
        _check_fetching(
            module,
            f"so that nothing tells what its loss is a mean over in those of `data_parallel_size={layout.data}` "
            "replicas; take a `batch`, or pass `whole_batch_loss=False` if the mean of their losses is meant",
        )


def _check_callbacks(trainer: pl.Trainer, module: pl.LightningModule, layout: Layout) -> None:
    """Refuse callbacks that need a module in one piece, and those and loggers of another Lightning."""
    callbacks = callbacks_of(trainer)
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
                f"{type(callback).__name__} replaces weights by masked ones, of which every rank has a part with "
                f"`tensor_parallel_size={layout.tensor}` and `pipeline_parallel_size={layout.pipeline}`: it would "
                "prune other weights than in one process, or none. Use both sizes 1 for it, or zero weights in a hook "
                "(`self.layer.weight.mul_(mask)` in `on_train_batch_end`), which sees them whole."
            )
    for thing in (*callbacks, *trainer.loggers):
        if any(comes_from(kind, "pytorch_lightning") for kind in (type(thing), type(thing).__mro__[-2])):
            raise MisconfigurationException(
                f"{type(thing).__name__} comes from `pytorch_lightning`; import it from `lightning.pytorch`."
            )


def _check_made(module: pl.LightningModule) -> None:
    """Refuse parameters that have no shape before the first forward: ranks share them out earlier."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise MisconfigurationException(
                f"`{name}` gets its shape in the first forward (`nn.Lazy...`), and several processes share parameters "
                "out before that. Call its module once on an example in the constructor or in `setup`, or give it its "
                "sizes."
            )


def _check_adapters(module: pl.LightningModule) -> None:
    """Refuse peft adapters that compare those of all layers."""
    for name, child in module.named_modules():
        if hasattr(child, "rankallocator") and comes_from(type(child), "peft"):
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
                f"`{called}` multiplies its experts by `experts_implementation='grouped_mm'`, which torch does not "
                "support in float64; build it with `experts_implementation='eager'`, or use another "
                "`precision` than '64-true'."
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


def _check_backward(module: pl.LightningModule, layout: Layout) -> None:
    """Refuse an override of ``backward`` that reads gradients, which are summed and put together after it."""
    if layout.world_size == 1 or not module.automatic_optimization or not is_overridden("backward", module):
        return
    if read := names_used(module, "backward") & _GRADIENTS:
        raise MisconfigurationException(
            f"`LightningModule.backward` is overridden and uses `{min(read)}`, but it runs before gradients are summed "
            f"over {layout.world_size} ranks and seen whole: do that in `on_after_backward` or "
            "`on_before_optimizer_step`, which find what one process finds."
        )


def _check_steps(module: pl.LightningModule) -> None:
    if is_overridden("backward", module):
        raise MisconfigurationException(
            "`LightningModule.backward` is overridden, but with micro-batches the schedule runs the backward; remove "
            "the override, or use `pipeline_parallel_size=1` and `micro_batch_size='auto'`."
        )
    _check_fetching(
        module,
        "which cannot be cut into micro-batches; take a `batch`, or use `pipeline_parallel_size=1` and "
        "`micro_batch_size='auto'`",
    )


def _check_fetching(module: pl.LightningModule, why: str) -> None:
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        function = getattr(module, step)
        if callable(function) and is_param_in_hook_signature(function, "dataloader_iter", explicit=True):
            raise MisconfigurationException(f"`{step}(self, dataloader_iter)` fetches its own batches, {why}.")


def check_prepared(optimizer: Optimizer, gradients: ModelGradients) -> None:
    """Refuse the step of an optimizer that was made after the work of the others had been shared out.

    Raises:
        MisconfigurationException: with what to change.
    """
    buckets = gradients.buckets
    if buckets is not None and buckets.updates_pieces and id(optimizer) not in gradients.updates:
        raise MisconfigurationException(
            f"{type(optimizer).__name__} is none of the optimizers that `configure_optimizers` has returned, whose "
            "work the ranks share out before the first step: this one would find no gradients, or those of one "
            "replica. Change the `param_groups` of those that there are, return all of them from "
            "`configure_optimizers`, or pass `MegatronStrategy(optimizer_sharding=False)`."
        )


def check_registered(optimizer: Optimizer, module: nn.Module, known: frozenset[Tensor]) -> None:
    """Refuse parameters whose gradients nobody puts together: new ones, and those that the module does not register.

    Args:
        optimizer: about to step.
        module: the user's module.
        known: its parameters when the fit began.

    Raises:
        MisconfigurationException: with what to change.
    """
    if all(known.issuperset(group["params"]) for group in optimizer.param_groups):
        return
    names = {parameter: name for name, parameter in module.named_parameters()}
    others = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
    if added := [p for p in others if p in names]:
        what = ", ".join(f"`{names[p]}` of shape {tuple(p.shape)}" for p in added[:3])
        raise MisconfigurationException(
            f"{type(optimizer).__name__} was given {what} after the fit had begun, when stages and replicas had shared "
            "out the parameters that there were: no rank would put together the gradients of new ones. Make such "
            "modules in `__init__` or `configure_model`, frozen (`requires_grad_(False)`) until they are used, or "
            "before another `trainer.fit`."
        )
    raise MisconfigurationException(
        f"{type(optimizer).__name__} has {len(others)} parameters (the first of shape {tuple(others[0].shape)}) that "
        "are none of the module's, as those in a plain list or dict are: their gradients would not be put together, "
        "nor would checkpoints hold them. Keep them in `nn.ParameterList`, `nn.ModuleList` or `nn.ModuleDict`, or as "
        "attributes of the module."
    )


def check_optimizers(optimizers: Sequence[Optimizer], stages: int, replicas: int) -> None:
    """Refuse optimizers that need the whole model at once when it is spread over stages, or gradients by rows.

    Raises:
        MisconfigurationException: with what to change.
    """
    if replicas > 1 and any(isinstance(optimizer, SparseAdam) for optimizer in optimizers):
        raise MisconfigurationException(
            f"SparseAdam takes sparse gradients only, and over `data_parallel_size={replicas}` replicas gradients are "
            "summed as dense ones; build the embedding with `sparse=False` and use Adam, use SGD, or one replica."
        )
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
                f"`{name}` cannot be combined with a module that splits itself in `configure_model` "
                "(`parallelize_module`, `fully_shard`), whose gradients torch sums; leave it out, or let "
                "`tensor_parallel_size` split the module."
            )
