"""Refuses what experts on several ranks cannot be combined with, before any work starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_megatron.data_parallel.update.trial import Independence
from lightning_megatron.experts.by_plan import GATHERED, check_plan
from lightning_megatron.mesh.batches import batch_size_of
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.mesh.mesh import ExpertGroups
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.options.balance_asked import Balance
from lightning_megatron.strategy.options.together import check_module_with, check_options_with, check_size, refuse_with

_WITHOUT_EXPERTS = {"compile_layers": False}
"""Options that cannot be combined with expert ranks, and the only values that do."""
_WITHOUT_PARTS = {**_WITHOUT_EXPERTS, "layout": None}
"""Likewise where experts are cut themselves, which the planner does not."""

_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")


def check_experts(options: Any) -> None:
    """Refuse an invalid expert-parallel size, and options that cannot be combined with expert ranks.

    Raises:
        ValueError: with both options.
    """
    size = options.expert_parallel_size
    check_size("expert_parallel_size", size)
    check_size("expert_tensor_parallel_size", options.expert_tensor_parallel_size)
    Balance.asked(options.expert_balance)
    if options.expert_dispatch not in ("all_to_all", "all_gather"):
        raise ValueError(f"`expert_dispatch={options.expert_dispatch!r}` must be 'all_to_all' or 'all_gather'.")
    if options.expert_dispatch == "all_gather" and options.expert_ranks == 1:
        raise ValueError(
            "`expert_dispatch='all_gather'` says how tokens come to experts of other ranks; distribute them by "
            "`expert_parallel_size`, or leave it out."
        )
    check_plan(options.expert_parallel_plan)
    if options.expert_parallel_plan != "auto":
        _check_planned(options)
    sizes = ("expert_parallel_size", _WITHOUT_EXPERTS), ("expert_tensor_parallel_size", _WITHOUT_PARTS)
    for name, only in sizes:
        if getattr(options, name) > 1:
            check_options_with(f"{name}={getattr(options, name)}", options, only, f"{name}=1")


def _check_planned(options: Any) -> None:
    plan = options.expert_parallel_plan
    if options.expert_ranks == 1:
        raise ValueError(
            "`expert_parallel_plan` says which experts are distributed how; distribute them by `expert_parallel_size`, "
            "or leave it out."
        )
    if GATHERED in plan.values():
        only = {"weight_sharding": False, "expert_dispatch": "all_to_all"}
        check_options_with(f"expert_parallel_plan={plan!r}", options, only, "expert_parallel_plan='auto'")


def check_expert_ranks(size: int, parts: int, layout: Layout) -> None:
    """Refuse an expert-parallel size, times the parts of each expert, that does not divide the ranks of a stage.

    Raises:
        ValueError: with sizes that do.
    """
    ranks = layout.tensor * layout.context * layout.data
    if ranks % (size * parts) and parts > 1:
        raise ValueError(
            f"`expert_parallel_size={size}` times `expert_tensor_parallel_size={parts}` does not divide the {ranks} "
            "ranks of a stage, over which experts are distributed; use sizes whose product does, or more devices."
        )
    if ranks % size:
        fitting = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        context = f"`context_parallel_size={layout.context}` times " if layout.context > 1 else ""
        sizes = f"`tensor_parallel_size={layout.tensor}` times {context}`data_parallel_size={layout.data}`"
        raise ValueError(
            f"`expert_parallel_size={size}` does not divide the {ranks} ranks of a stage ({sizes}), over which experts "
            f"are distributed; use {' or '.join(fitting)}, or more devices."
        )


def check_expert_run(size: int, parts: int, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse modules, callbacks and precisions that experts on several ranks do not know what to do with.

    Raises:
        MisconfigurationException: with what to change.
    """
    if size * parts == 1:
        return
    given = f"expert_parallel_size={size}" if size > 1 else f"expert_tensor_parallel_size={parts}"
    precision = str(trainer.precision_plugin.precision)
    if precision not in _PRECISIONS:
        refuse_with(given, f"`precision={precision!r}`: it computes in {', '.join(map(repr, _PRECISIONS))}")
    check_module_with(
        given,
        module,
        by_hand="gradients taken inside of a step are those of a rank's own experts",
        compiled="how many tokens a rank's experts get is not known when code is compiled",
    )
    if any(isinstance(callback, ModelPruning) for callback in getattr(trainer, "callbacks", ())):
        masks = "it replaces weights by masked ones, of which every rank has its own experts' only"
        refuse_with(given, f"ModelPruning: {masks}")
    if noisy := _jitter(module):
        refuse_with(
            given, f"`{noisy}`: noise on what the router sees is drawn by each rank for its own tokens; set it to 0"
        )


def _jitter(module: pl.LightningModule) -> str:
    """A setting of a Hugging Face configuration that adds noise to hidden states of routers; "" if none does."""
    for child in module.modules():
        for name, value in vars(getattr(child, "config", None) or object).items():
            if name.endswith("jitter_noise") and isinstance(value, float) and value > 0:
                return f"config.{name}={value}"
    return ""


def check_expert_optimizers(size: int, optimizers: Sequence[Optimizer], least: Independence) -> None:
    """Refuse optimizers that need more than single elements of a parameter.

    Raises:
        MisconfigurationException: with what to change.
    """
    if size > 1 and least is not Independence.ELEMENT:
        names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise MisconfigurationException(
            f"{names} needs {least.value} (found by a trial on small matrices), but experts distributed over {size} "
            "ranks leave every rank a part of their parameters; use an optimizer that updates every element by itself, "
            "such as AdamW or SGD, or `expert_parallel_size=1` and `expert_tensor_parallel_size=1`; with "
            "`layout='auto'`, `layout_options={'expert': 1}`."
        )


def check_batches(size: int | str | None, groups: ExpertGroups | None, batch: Any) -> None:
    """Refuse batches of different sizes, which ranks would cut into different numbers of micro-batches.

    Collective over the ranks that share out experts.

    Args:
        size: samples per micro-batch, or how they are found; ``None`` where batches are not cut.
        groups: this rank's; ``None`` where experts are not shared out.
        batch: this rank's.

    Raises:
        ValueError: with the sizes.
    """
    if groups is None or size is None:
        return
    sizes = objects.gather(batch_size_of(batch), groups.group)
    if len(set(sizes)) > 1:
        raise ValueError(
            f"the batches of the {groups.size} replicas over which experts are distributed have "
            f"{', '.join(map(str, sizes))} samples, but all of them take part in every micro-batch, so they need "
            "equally many; shard the data by `trainer.strategy.distributed_sampler_kwargs` into equal parts, or pass "
            "`DataLoader(drop_last=True)`."
        )
