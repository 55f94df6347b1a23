"""Refuses what weights spread over replicas cannot be combined with, before any work starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_megatron.data_parallel.buckets.holders import OptimizerSharding
from lightning_megatron.data_parallel.windows.sharded_weights import WeightSharding, sharded_weights_of
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.pipeline.cut.trunk import find_trunk
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.generation.streaming import Streams, streaming_of
from lightning_megatron.strategy.hooks.blind import hook_is_blind, is_blind
from lightning_megatron.strategy.lightning.hooks import (
    foreign_callbacks,
    hooks_between_steps,
    other_callbacks,
    takes_second_gradients,
)
from lightning_megatron.strategy.options.together import check_module_with, check_options_with, refuse_with

_WITHOUT = {
    "compile_layers": False,
    "overlap_parameter_gather": False,
    "layout": None,
    "topology": None,
}
"""Options that cannot be combined with sharded weights, and the only values that do."""

_SEEN = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_FIRST = ("on_fit_start", "on_train_start", "on_sanity_check_start", "on_sanity_check_end", "on_load_checkpoint")
_OVERRIDDEN = (*_SEEN, "configure_gradient_clipping", "backward")
_BLIND = (
    *(lightnings.ModelCheckpoint, lightnings.EarlyStopping, lightnings.ProgressBar, lightnings.ModelSummary),
    *(lightnings.LearningRateMonitor, lightnings.DeviceStatsMonitor, lightnings.Timer),
    lightnings.GradientAccumulationScheduler,
)
"""Callbacks of Lightning's that never look at weights, or ask the strategy for them."""


def check_weight_sharding(options: Any) -> None:
    """Refuse an invalid value, and options that cannot be combined with sharded weights.

    Raises:
        ValueError: with both options.
    """
    sharding = options.weight_sharding
    asked = sharded_weights_of(sharding)
    if sharding:
        check_options_with("weight_sharding=True", options, _WITHOUT, "weight_sharding=False")
    if sharding and options.optimizer_sharding is False:
        raise ValueError(
            "`weight_sharding=True` needs `optimizer_sharding`: a replica updates the part of the weights that it "
            "keeps; leave `optimizer_sharding=False` out."
        )
    size = options.optimizer_sharding.get("shard") if isinstance(options.optimizer_sharding, Mapping) else None
    if asked is not None and asked.shard is not None and size not in (None, asked.shard):
        raise ValueError(
            f"`weight_sharding={{'shard': {asked.shard}}}` and `optimizer_sharding={{'shard': {size}}}` differ: a "
            "replica updates the part of the weights that it keeps; leave one of the two out."
        )


def optimizer_sharding_of(optimizer: OptimizerSharding, weights: WeightSharding) -> OptimizerSharding:
    """How replicas share the optimizer's work: as they share weights, where a number is given for these."""
    asked = sharded_weights_of(weights)
    if asked is None or asked.shard is None:
        return optimizer
    return {**(optimizer if isinstance(optimizer, Mapping) else {}), "shard": asked.shard}


def check_sharded_weights(sharding: WeightSharding, module: pl.LightningModule, layout: Layout, layers: str) -> None:
    """Refuse modules whose weights cannot be shared out.

    Args:
        sharding: the user's choice.
        module: the user's.
        layout: of the run.
        layers: name of the container of its layers, or ``"auto"``.

    Raises:
        MisconfigurationException: with what to change.
    """
    if not sharding:
        return
    given = "weight_sharding=True"
    if layout.data * layout.context == 1:
        devices = f"{layout.world_size} devices make {layout.pipeline} stages"
        refuse_with(given, f"one replica: {devices}; use more devices")
    asked, replicas = sharded_weights_of(sharding), layout.data * layout.context
    if asked is not None and asked.shard is not None and replicas % asked.shard:
        fitting = [n for n in range(2, replicas + 1) if replicas % n == 0]
        raise ValueError(
            f"`weight_sharding={{'shard': {asked.shard}}}` does not divide the {replicas} replicas; use one of "
            f"{fitting}."
        )
    check_module_with(
        given,
        module,
        by_hand="a step of your own may update weights while a layer needs them",
        compiled="compiled code does not wait for weights",
    )
    if takes_second_gradients(module):
        refuse_with(given, "`create_graph=True`: gradients of gradients need weights that have been freed")
    if Stage.of(module) is None and (said := _without_layers(module, layers)) is not None:
        refuse_with(given, f"a module without a list of layers, whose weights it would share out: {said}")


_NOT_STREAMED = {
    "weight_sharding": False,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "compile_layers": False,
    "loss_chunks": None,
    "layout": None,
    "topology": None,
}
"""Options that cannot be combined with streamed weights, and the only values that do."""


def check_weight_streaming(options: Any) -> None:
    """Refuse an invalid value, and options that cannot be combined with streamed weights.

    Raises:
        ValueError: with both options.
    """
    streaming = streaming_of(options.weight_streaming)
    if streaming is not None:
        check_options_with(str(streaming), options, _NOT_STREAMED, "weight_streaming=None")


def check_streamed_weights(given: Streams, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse runs and modules that need weights while their layer does not run.

    Raises:
        MisconfigurationException: with what to change.
    """
    streaming = str(streaming_of(given))
    if given is None:
        return
    if trainer.state.fn == TrainerFn.FITTING:
        refuse_with(streaming, "`fit`, which updates weights; `optimizer_offload` and `weight_sharding` are for that")
    if str(trainer.precision) == "fp8-mixed":
        refuse_with(streaming, "8-bit products, which keep weights of their own")
    hand = "its steps may update weights, which are lost after their layer"
    check_module_with(streaming, module, by_hand=hand, compiled="compiled code does not wait for weights")


def _without_layers(module: pl.LightningModule, layers: str) -> str | None:
    try:
        find_trunk(module, layers, instead="weight_sharding=False")
    except ValueError as error:
        return str(error).rstrip(".")
    return None


def check_sharders(optimizers: Sequence[Optimizer], shards: int) -> None:
    """Refuse optimizers that need more of the weights than a replica keeps.

    Raises:
        MisconfigurationException: with the optimizers.
    """
    if shards == 1:
        names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise MisconfigurationException(
            f"`weight_sharding=True` cannot share out the weights that {names} updates: each replica would need all of "
            "them, or `optimizer_sharding` gives each all of them. Use an optimizer such as AdamW, or pass "
            "`weight_sharding=False`."
        )


def reads_whole_weights(module: pl.LightningModule, callbacks: list[Callback]) -> bool:
    """Whether a hook that runs between two steps may look at weights, which are whole there then."""
    own = hooks_between_steps(module)
    if not module.automatic_optimization or _seeing(callbacks):
        return True
    return not all(hook_is_blind(module, hook) for hook in own)


def reads_before_steps(module: pl.LightningModule, callbacks: list[Callback]) -> bool:
    """Whether a hook that runs before the first step, or between steps, may look at weights."""
    if reads_whole_weights(module, callbacks):
        return True
    if any(is_overridden(hook, module) and not hook_is_blind(module, hook) for hook in _FIRST):
        return True
    return any(is_overridden(hook, each, parent=Callback) for each in _seeing(callbacks) for hook in _FIRST)


def reads_in_steps(module: pl.LightningModule, callbacks: list[Callback]) -> bool:
    """Whether a hook that runs inside a step, after its forward, may look at weights."""
    if any(is_overridden(hook, module) for hook in _OVERRIDDEN):
        return True
    return any(is_overridden(hook, each, parent=Callback) for each in _seeing(callbacks) for hook in _SEEN)


def _seeing(callbacks: list[Callback]) -> list[Callback]:
    """Callbacks that are neither this package's nor known, or read, not to look at weights."""
    others = other_callbacks(callbacks)
    foreign = foreign_callbacks(others)
    return [each for each in others if not (is_blind(each) if each in foreign else isinstance(each, _BLIND))]
