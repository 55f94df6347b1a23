"""Runs one step as one rank of a launch, without the launch.

A rehearsal is not a model. The Trainer, the strategy, the mesh, the tensor-parallel plan, the stages, the buckets and
the user's own step run as in training. Only three things are replaced: the process group sends nothing, the weights
have no memory, and the first message of the previous stage is computed. A configuration that cannot run therefore
raises the same error as the real launch.
"""

from __future__ import annotations

import gc
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_megatron.mesh.layout import Layout
from lightning_megatron.mesh.mesh import MESH_AXES
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.lightning.one_step import (
    LightningModule,
    StepMoments,
    one_step_trainer,
    own_rank_afterwards,
)
from lightning_megatron.strategy.memory.ledger import gradients_of
from lightning_megatron.strategy.rehearsed import Communication, Rehearsal
from lightning_megatron.tools.rehearsal.meter import MemoryMeter, bytes_of
from lightning_megatron.tools.rehearsal.neighbours import PaperWorld
from lightning_megatron.tools.rehearsal.paper import BACKEND, Ledger, paper_world
from lightning_megatron.tools.rehearsal.paper_host import PaperHost
from lightning_megatron.tools.rehearsal.weightless import Weightless

if TYPE_CHECKING:
    from lightning_megatron.strategy.strategy import MegatronStrategy

_DEPTH = 6


class OneBatch:
    """A loader of one batch."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        yield self._batch

    def __len__(self) -> int:
        return 1


class Witness:
    """Measures a step from Lightning's hooks, before the Trainer frees anything."""

    def __init__(self, ledger: Ledger, meter: MemoryMeter) -> None:
        self._ledger, self._meter = ledger, meter
        self.moments = StepMoments(self._start, self._update, self._end)
        self.found: dict[str, Any] = {}

    def _start(self) -> None:
        self._ledger.phase = "step"
        gc.collect()  # what trials have left behind would be freed in the step, and count against its activations
        self._meter.start()

    def _update(self) -> None:
        self._ledger.phase = "optimizer"

    def _end(self, strategy: Any, module: LightningModule) -> None:
        # Gradient buffers are allocated in the step, but are not activations.
        activations = self._meter.kept - self._meter.within(_gradients(strategy, module))
        kept = {"activations": activations, "peak": self._meter.peak}
        if (traffic := strategy.run.assembled.traffic) is not None:
            kept["host"] = traffic.most
        self.found = {
            "bytes_by_kind": held_bytes(strategy, module) | kept,
            "schedules": strategy.run.engine.schedules,
            "plan": strategy.parallel_report.explain() if strategy.parallel_report is not None else "",
        }
        self._ledger.phase = "after the step"


def held_bytes(strategy: Any, module: LightningModule) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state that a rank holds after a training step.

    Args:
        strategy: the strategy in training.
        module: this rank's part of the module.
    """
    held = [*module.parameters(), *_shards(strategy)]
    weights = {id(tensor.untyped_storage()): tensor for tensor in held}
    state = [
        tensor
        for optimizer in strategy.optimizers
        for tensor in (*_tensors(optimizer.state), *_tensors([group["params"] for group in optimizer.param_groups]))
    ]
    optimizer = {id(t.untyped_storage()): t for t in state if id(t.untyped_storage()) not in weights}
    known = weights.keys() | optimizer.keys()
    gradients = [tensor for tensor in _gradients(strategy, module) if id(tensor.untyped_storage()) not in known]
    return {
        "weights": bytes_of(weights.values()),
        "gradients": bytes_of(gradients),
        "optimizer": bytes_of(optimizer.values()),
    }


def _shards(strategy: Any) -> list[Tensor]:
    """Bytes that this rank keeps of weights that replicas share out, which no parameter shows between steps."""
    made = strategy.run.engine.model_gradients.buckets
    found = [bucket.weights for bucket in made.buckets if bucket.weights] if made is not None else []
    return [tensor for weights in found for tensor in (weights.own, weights.flat)]


def _gradients(strategy: Any, module: LightningModule) -> list[Tensor]:
    """All tensors that hold gradients, in buckets or in ``.grad``."""
    return list(gradients_of(module.parameters(), strategy.run.engine.model_gradients))


def _tensors(value: Any, depth: int = _DEPTH) -> list[Tensor]:
    """Tensors in a nest of containers and of this package's own objects."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or value is None:
        return []
    if isinstance(value, (list, tuple, set)):
        children: Iterable[Any] = value
    elif hasattr(value, "values") and hasattr(value, "keys"):
        children = value.values()
    elif comes_from(type(value), PACKAGE) and hasattr(value, "__dict__"):
        children = vars(value).values()
    else:
        return []
    return [tensor for child in children for tensor in _tensors(child, depth - 1)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the Trainer's warnings about hardware and loggers, which do not apply to a rehearsal."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def rehearse(
    strategy: MegatronStrategy,
    module: LightningModule | Callable[[], Any],
    batch: Any = None,
    *,
    world_size: int,
    rank: int = 0,
    devices_per_node: int = 8,
    host_gib: float | None = None,
    **trainer: Any,
) -> Rehearsal:
    """Build and run one step as ``rank`` of ``world_size`` would, in this process and without memory for weights.

    Args:
        strategy: of the launch; it stays unchanged.
        module: the module to train, or a function that makes it (and may return it together with a batch). The module
            cannot be used afterwards: it is cut, and has no values. Build large ones on the meta device, as for a real
            launch.
        batch: a batch of one replica's loader; by default the first batch of the module's own ``train_dataloader``.
        world_size: number of ranks of the launch.
        rank: global rank to run.
        devices_per_node: ranks per node.
        host_gib: free memory of a node for activations that its ranks keep there, in GiB; ``None``: as much as they
            want.
        trainer: further arguments of the Trainer that affect a step, such as ``precision`` or ``gradient_clip_val``.

    Returns:
        The rank's parameters, bytes, instructions and communication.

    Raises:
        ValueError: ``rank`` lies outside of the world, the optimizer steps on the host, ``host_gib`` is
            negative, ``module`` does not make a LightningModule, or the Trainer took no step. Errors of the launch
            itself are raised unchanged.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"`rank={rank}` must lie in 0 to {world_size - 1}, for `world_size={world_size}`.")
    if strategy.options.optimizer_offload:
        raise ValueError("a rehearsal counts a device's memory, not its host's; leave `optimizer_offload` out of it.")
    if host_gib is not None and host_gib < 0:
        raise ValueError(f"`host_gib={host_gib}` must be the free memory of a node, in GiB, or None.")
    meter, per_node = MemoryMeter(), math.gcd(world_size, devices_per_node)
    node = range(rank // per_node * per_node, rank // per_node * per_node + per_node)
    alone = own_rank_afterwards()
    with _quiet(), alone, paper_world(rank, world_size) as ledger, Weightless(meter.seen) as mode:
        built, batch = _built(module, batch)
        whole = sum({id(p): p.numel() for p in built.parameters()}.values())
        witness = Witness(ledger, meter)
        rehearsed = strategy.unstarted(
            PaperWorld(mode, PaperHost(host_gib, lambda: _stages_of(rehearsed.mesh.layout, node))),
            process_group_backend=BACKEND,
            whole_batch_loss=bool(strategy.options.whole_batch_loss is True),
            expert_balance="replica",  # whether a loss mixes samples shows in numbers, of which there are none
        )
        runner = one_step_trainer(rehearsed, rank, world_size, devices_per_node, witness.moments, trainer)
        _fit(runner, built, batch, witness)
        return _report(rehearsed, built, whole, ledger, witness, mode)


def _stages_of(layout: Layout, ranks: Iterable[int]) -> list[int]:
    return [layout.coordinates(rank).pipeline for rank in ranks]


def _built(module: Any, batch: Any) -> tuple[LightningModule, Any]:
    """The module and its batch, from a module or from a function that makes them."""
    made = module if isinstance(module, LightningModule) else module()
    if isinstance(made, tuple) and len(made) == 2:
        made, batch = made[0], made[1] if batch is None else batch
    if not isinstance(made, LightningModule):
        raise ValueError(
            f"the function to rehearse returned {type(made).__name__}; return a LightningModule, or a pair of it and a "
            "batch."
        )
    return made, batch


def _fit(runner: Any, module: LightningModule, batch: Any, witness: Witness) -> None:
    """Run one step; an error in it is raised as such, even if another error follows during teardown."""
    try:
        if batch is None:
            runner.fit(module)
        else:
            runner.fit(module, OneBatch(batch))
    except BaseException:
        if witness.moments.error is not None:
            raise witness.moments.error from None
        raise
    if not witness.found:
        raise ValueError("the Trainer took no step; give a batch, or a `train_dataloader` that yields one.")


def _report(
    strategy: Any, module: LightningModule, whole: int, ledger: Ledger, witness: Witness, mode: Weightless
) -> Rehearsal:
    mesh, stage = strategy.mesh, Stage.of(module)
    schedules: dict[tuple[int, bool], Schedule] = witness.found["schedules"]
    lists = [schedule.instructions[mesh.stage] for (_, forward_only), schedule in schedules.items() if not forward_only]
    axes = {tuple(torch.distributed.get_process_group_ranks(mesh.group(axis))): axis for axis in reversed(MESH_AXES)}
    axes[tuple(range(mesh.layout.world_size))] = "world"
    if (experts := mesh.expert_groups(strategy.options.expert_ranks)) is not None:
        axes.setdefault(tuple(torch.distributed.get_process_group_ranks(experts.group)), "expert_parallel")
        if experts.copies is not None:
            axes.setdefault(tuple(torch.distributed.get_process_group_ranks(experts.copies)), "expert_copies")
    communication = [
        Communication(
            entry.phase,
            entry.operation,
            axes.get(entry.ranks, "shared"),
            entry.ranks,
            entry.peer if entry.peer >= 0 else None,
            entry.bytes,
            count,
        )
        for entry, count in ledger.counts.items()
    ]
    here = stage.presence.layers_here() if stage is not None else []
    layers = tuple(stage.partition.trunk.layer_names.index(name) for name in here) if stage is not None else ()
    return Rehearsal(
        rank=mesh.rank,
        layout=mesh.layout,
        plan=witness.found["plan"],
        layers=layers,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        whole_parameters=whole,
        bytes_by_kind=witness.found["bytes_by_kind"],
        instructions=tuple(str(step) for step in lists[-1]) if lists and stage is not None else (),
        communication=tuple(communication),
        remarks=tuple(
            f"{place} read a number that a rehearsal does not have and was told {answer!r}"
            for place, answer in mode.guesses.items()
        ),
    )
