"""Requirements of a run's optimizers on the gradients, found out by a trial before the first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_megatron.data_parallel.buckets.holders import declared_elementwise
from lightning_megatron.data_parallel.buckets.low_precision import has_narrow_weights
from lightning_megatron.data_parallel.gradient_hooks import has_gradient_hooks
from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.data_parallel.step_guard import NonFinite, StepGuard
from lightning_megatron.data_parallel.update.loss_scale import LossScale
from lightning_megatron.data_parallel.update.trial import Independence, smallest_independence
from lightning_megatron.mesh.batches import batch_size_of
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.assembly.assembled import Assembled
from lightning_megatron.strategy.generation.first_try import calls_once
from lightning_megatron.strategy.lightning.hooks import (
    hooks_steps_later,
    reads_each_batch,
    reads_gradients,
    reads_weights,
    sees_earlier_gradients,
)
from lightning_megatron.strategy.lightning.trainer_access import accumulates, callbacks_of
from lightning_megatron.strategy.memory.too_large import TooLarge
from lightning_megatron.strategy.optimizers.step_hooks_seen import has_step_hooks
from lightning_megatron.strategy.options import run_checks
from lightning_megatron.strategy.options.expert_checks import check_expert_optimizers
from lightning_megatron.strategy.options.offload_checks import host_plan, refuse_own_split
from lightning_megatron.strategy.options.weight_checks import check_sharders, reads_in_steps, reads_whole_weights
from lightning_megatron.strategy.options.whole_step_checks import check_whole_steps
from lightning_megatron.strategy.processes import Processes

_log = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # shown by Lightning; each stage has its say


def prepare_updates(
    assembled: Assembled,
    optimizers: Sequence[Optimizer],
    trainer: pl.Trainer,
    processes: Processes,
    nonfinite: NonFinite,
    loss_scale: LossScale | None,
) -> StepGuard | None:
    """Lay out the gradient buckets, and let the optimizers update this rank's share.

    Args:
        assembled: the divided module.
        optimizers: with this rank's parameters.
        trainer: of the run.
        processes: of the strategy.
        nonfinite: what to do about a loss or gradient that is not finite.
        loss_scale: of float16, or ``None``.

    Returns:
        What looks at the summed gradients; ``None`` where autograd's are used as they are.

    Raises:
        MisconfigurationException: an optimizer or option that cannot work with gradients shared out like this.
    """
    gradients, module = assembled.engine.model_gradients, assembled.module
    processes.explain = TooLarge(trainer, gradients, optimizers, processes.place)
    if assembled.engine.splits_itself:
        refuse_own_split(gradients)
        run_checks.check_own_gradients(loss_scale, nonfinite, gradients.options.reduce_dtype)
        return None
    several = assembled.needs_gradients or accumulates(trainer)
    adds_up = several and has_narrow_weights(module)
    skips = nonfinite == "skip" or loss_scale is not None
    least = _least_independence(assembled, optimizers, processes, adds_up=adds_up, skips=skips)
    widens = adds_up and least is not Independence.NONE
    is_split = not assembled.tensor_state.is_trivial
    puts_together, together = (least is each and is_split for each in (Independence.PARAMETER, Independence.NONE))
    if not (assembled.needs_gradients or puts_together or together or widens):
        return None
    if loss_scale is not None:
        run_checks.check_scaled(module)
    sharded = gradients.options.weights is not None
    if sharded:
        check_sharders(optimizers, gradients.replicas.shards)
    reads = reads_whole_weights if sharded else reads_weights
    rank, place = processes.mesh.rank, processes.place
    hooked = has_step_hooks(optimizers) or hooks_steps_later(module, callbacks_of(trainer))
    keeps = _keeps_earlier(module, trainer, optimizers, processes) or (hooked and module.automatic_optimization)
    guard = StepGuard(gradients, processes.device, rank, place, nonfinite, loss_scale, rank_zero_info)
    gradients.prepare(
        assembled.groups,
        optimizers,
        whole=least is not Independence.ELEMENT,
        reads_gradients=hooked or reads_gradients(module, callbacks_of(trainer)) or has_gradient_hooks(module),
        each=accumulates(trainer) and (keeps or reads_each_batch(module, callbacks_of(trainer))),
        keeps=keeps,
        skips=guard.checks,
        reads_weights=hooked or reads(module, callbacks_of(trainer)),
        rounds=least is not Independence.NONE,
        widens=widens,
        reads_in_step=sharded and reads_in_steps(module, callbacks_of(trainer)),
        host=host_plan(gradients, module, optimizers, processes, least, assembles=puts_together),
        together=together,
        hidden=assembled.late.names if assembled.late is not None else frozenset(),
    )
    return guard


def _keeps_earlier(
    module: pl.LightningModule, trainer: pl.Trainer, optimizers: Sequence[Optimizer], processes: Processes
) -> bool:
    """Whether gradients of the update before may be seen after a step, or outlast it; collective over all ranks.

    They outlast it where user code clears them, or no optimizer does: torch's ``zero_grad`` clears what it updates.
    """
    callbacks = callbacks_of(trainer)
    if not module.automatic_optimization or sees_earlier_gradients(module, callbacks):
        return module.automatic_optimization
    if not reads_gradients(module, callbacks):
        return False
    updated = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    outside = any(p.requires_grad and id(p) not in updated for p in module.parameters())
    return any(objects.gather(outside, processes.mesh.group("world")))


def _least_independence(
    assembled: Assembled, optimizers: Sequence[Optimizer], processes: Processes, *, adds_up: bool, skips: bool
) -> Independence:
    """Try out what the optimizers update by themselves, and refuse those that need more than a rank holds.

    Args:
        assembled: the divided module.
        optimizers: of the run.
        processes: of the strategy.
        adds_up: whether 16-bit gradients are added up over several backwards.
        skips: whether updates may have to be left out.
    """
    gradients, layout = assembled.engine.model_gradients, processes.mesh.layout
    shards, lowered = gradients.replicas.shards, gradients.options.layer_dtype is not None
    least = Independence.ELEMENT
    experts = gradients.options.experts
    divided = shards * layout.pipeline * layout.tensor * experts > 1
    if divided or lowered or adds_up or skips or gradients.options.offload:
        declared = declared_elementwise(gradients.options.sharding)
        least = smallest_independence(optimizers, processes.device, declared)
    check_expert_optimizers(experts, optimizers, least)
    if least is Independence.NONE and shards > 1 and layout.pipeline == 1:
        names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        rank_zero_info(
            f"{names} needs {least.value} (found by a trial on small matrices): each of the {shards} replicas keeps "
            "its whole state, as with `optimizer_sharding=False`."
        )
        gradients.keep_whole()
    if least is Independence.NONE:
        check_whole_steps(optimizers, assembled.module, layout, lowered=lowered, skips=skips)
    return least


def end_step(gradients: ModelGradients, processes: Processes) -> None:
    """After a step's last backward: spread weights again, and say once per stage when they are freed from now on."""
    chosen = gradients.end_step()
    if chosen and processes.speaks_for_stage:
        _log.info("%s: `weight_sharding` goes on with %s.", processes.place, chosen)


def show_at_end(gradients: ModelGradients, processes: Processes) -> None:
    """After the last step of a fit: make weights whole, or say once per stage that there is no room for them.

    Args:
        gradients: of the module.
        processes: of the strategy.
    """
    gradients.finish_gather(spread=False)
    lacking = gradients.windows.show_if_room() if gradients.windows is not None else ""
    if lacking and processes.speaks_for_stage:
        _log.warning(
            "%s: the weights of the layers stay spread over the replicas (`weight_sharding`): for whole ones %s. The "
            "module's parameters read as NaN; `trainer.save_checkpoint` writes them from their shards.",
            processes.place,
            lacking,
        )


def weights_of(
    gradients: ModelGradients, module: pl.LightningModule, name: str, batch: Any
) -> AbstractContextManager[None]:
    """Around a step of evaluation: whole weights, or a layer's at a time where they are spread over replicas which, by
    its code, all run the same layers in it. Collective over the replicas.

    Args:
        gradients: of the module.
        module: the user's.
        name: of the step.
        batch: of this replica.
    """
    windows = gradients.windows
    if windows is not None and windows.opens_in_evaluation and name != "predict_step":
        kind: Any = type(module)
        once = calls_once(kind, name, tuple(window.name for window in windows.windows))
        if once and windows.are_equal(_samples(batch)):
            gradients.finish_gather(spread=False)
            return windows.evaluation()
    gradients.finish_gather()
    return nullcontext()


def _samples(batch: Any) -> int:
    """Number of samples of a batch; where that cannot be told, a number that no other replica has."""
    try:
        return batch_size_of(batch)
    except ValueError:
        return -1 - dist.get_rank()


def show_weights(gradients: ModelGradients, processes: Processes) -> None:
    """Make weights whole after a step that failed on every replica alike; else say that this rank has shards only.

    Args:
        gradients: of the module.
        processes: of the strategy.
    """
    place = gradients.windows.place if gradients.windows is not None else None
    if gradients.windows is None or place is None or gradients.windows.left_spread:
        return
    if processes.all_stand_at(place, gradients.replicas.group):
        gradients.finish_gather()
        processes.all_stand_at(f"{place}, whole", gradients.replicas.group)  # the first to leave closes its connections
    else:
        print(
            f"{processes.place}: the module keeps its shard of the layers' weights, and NaN elsewhere: not all "
            "replicas have failed in the same place, so none can gather them; load a checkpoint before it is used again"
        )
