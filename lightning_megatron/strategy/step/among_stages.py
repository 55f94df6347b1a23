"""The stages of this rank's pipeline, as a scheduled step meets them.

With several, they make sure that they train on the same batch, hear the outcome from the stage that computes the loss,
and keep equal what each of them keeps a copy of. A module that is not cut is the only stage, and has nobody to agree
with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.data_parallel.buckets.low_precision import has_narrow_weights
from lightning_megatron.mesh.batches import checksum
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.pipeline.run.clock import StepClock, gather_timeline
from lightning_megatron.pipeline.run.executor import PipelineExecutor
from lightning_megatron.pipeline.run.finality import StageFinality, WholeFinality
from lightning_megatron.pipeline.run.links import StageLinks
from lightning_megatron.pipeline.schedules.by_name import make_schedule
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.schedules.lowering import halve_backwards, join_halves, lower
from lightning_megatron.pipeline.schedules.plain import mirrored
from lightning_megatron.pipeline.schedules.simulation import Timeline
from lightning_megatron.pipeline.stage.final_state import TRIAL
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.pipeline.stage.uncut import UncutModule
from lightning_megatron.strategy.carried.frozen_elsewhere import FrozenElsewhere
from lightning_megatron.strategy.generation.repeats import Repeats, StartOver
from lightning_megatron.strategy.hooks.added_later import AddedHooks
from lightning_megatron.strategy.logs.copy_exchange import CopyExchange
from lightning_megatron.strategy.logs.leftovers import Leftovers
from lightning_megatron.strategy.logs.step_logs import no_logs
from lightning_megatron.strategy.options.choices import EngineOptions
from lightning_megatron.strategy.step.delivery import OutcomeDelivery
from lightning_megatron.strategy.step.step import Outcome
from lightning_megatron.strategy.world import World


class OneStage:
    """A module that is not cut.

    Args:
        module: the user's module.
        mesh: the grid, with one stage.
        device: this rank's device.
        streams: random streams per segment.
    """

    def __init__(
        self, module: pl.LightningModule, mesh: ParallelMesh, device: torch.device, streams: SegmentStreams
    ) -> None:
        self._module, self._mesh, self._device, self._streams = module, mesh, device, streams
        self._opened: tuple[UncutModule, PipelineExecutor] | None = None

    repeats = None
    may_run_around = False  # one stage has nobody to wait for
    runs_once = frozenset[str]()  # it runs no code again
    is_behind_layers = True  # nobody waits for what is before it

    def set_back(self) -> Mapping[tuple[str, Any], Any]:
        """Nothing: values that layers have set stay as they are at the end of the step."""
        return {}

    def note_missing(self, error: Exception) -> None:
        """Nothing is elsewhere."""

    def leaves_behind(self, where: str) -> bool:
        """Not asked."""
        return False

    def schedule(self, micro_batches: int, *, forward_only: bool, around: bool = False) -> Schedule:
        """F0 B0 F1 B1 ...: with nobody to wait for, one micro-batch at a time needs the least memory."""
        return lower(make_schedule("1f1b", 1, micro_batches, forward_only=forward_only))

    def begin_training(self) -> None:
        """Nothing to agree on."""

    def begin_evaluation(self) -> None:
        """Nothing to agree on."""

    def looks(self, call: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
        """There are no other stages."""
        return call

    @contextmanager
    def running(self, batch: Any, micro_batches: int, *, training: bool) -> Iterator[PipelineExecutor]:
        """See :class:`Stages`."""
        whole, executor = self._open()
        try:
            yield executor
        finally:
            whole.end()  # steps that run whole, after a trial, draw as the user's code does

    def _open(self) -> tuple[UncutModule, PipelineExecutor]:
        if self._opened is None:
            whole = UncutModule(self._module, self._streams)
            links = StageLinks(self._mesh.group("pipeline_parallel"), self._mesh.pipeline_ranks, self._device)
            self._opened = whole, PipelineExecutor(whole, links, WholeFinality())
        return self._opened

    @contextmanager
    def segments(self, *, again: bool = False) -> Iterator[None]:
        """Around a step that is run by itself, or ``again`` around its backward: layers draw from their streams."""
        whole = self._open()[0]
        if again:
            whole.enter_again()
        else:
            whole.enter(0)
        try:
            yield
        finally:
            whole.end()

    def outcome(self, make: Callable[[], Outcome], name: str) -> Outcome:
        """This stage's own."""
        return make()

    def share(self, value: Tensor) -> Tensor:
        """This stage's own."""
        return value

    def note_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """There are no copies on other stages."""

    def note_gradients(self, has_gradient: Callable[[nn.Parameter], bool]) -> None:
        """There are no copies on other stages."""

    def share_copies(self) -> None:
        """There are no copies on other stages."""

    def settle(self) -> None:
        """Nothing was sent."""

    def release(self) -> None:
        """Remove hooks."""
        self.close()

    def timeline(self) -> Timeline | None:
        """Nothing is recorded of one stage."""
        return None

    def close(self) -> None:
        """Remove hooks."""
        if self._opened is not None:
            self._opened[0].close()
            self._opened = None


class _Connection(NamedTuple):
    links: StageLinks
    executor: PipelineExecutor
    parameters: list[nn.Parameter]


class SeveralStages:
    """A module that is cut, and this rank's stage of it.

    Args:
        module: the user's module, cut.
        mesh: the grid.
        device: this rank's device.
        stage: this rank's part of the module.
        tensor: how parameters are split over tensor-parallel ranks.
        options: the user's choices.
        world: what lies outside of this process.
        ended: called at the end of each run of a step, to wait for replicas that go on.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        device: torch.device,
        stage: Stage,
        tensor: TensorState,
        options: EngineOptions,
        world: World,
        ended: Callable[[], None],
    ) -> None:
        self._world, self._ended = world, ended
        self._module, self._mesh, self._device = module, mesh, device
        self._stage, self._tensor, self._options = stage, tensor, options
        self._has_loss = mesh.rank == mesh.loss_rank
        self._hooks, self._hooked = AddedHooks(module), 0
        self.repeats = Repeats(module, stage, mesh)
        self._delivery = OutcomeDelivery(mesh, device)
        self._leftovers = Leftovers(module, stage.presence, mesh, device, stage.cursor.side_effects)
        self._copies = CopyExchange(stage, mesh, device)
        self._frozen = FrozenElsewhere(module, stage.presence, mesh.group("pipeline_parallel"), device)
        self._clock = StepClock(device) if options.record_timeline else None
        self._opened: _Connection | None = None

    @property
    def runs_once(self) -> frozenset[str]:
        """See :class:`Stages`."""
        return self._stage.partition.before

    @property
    def may_run_around(self) -> bool:
        """See :class:`Stages`; a rank that is alone has nothing to try it on, and rows of tokens are not joined."""
        return self._world.compares and self._stage.calls_layers_whole and self._mesh.layout.context == 1

    @property
    def is_behind_layers(self) -> bool:
        """See :class:`Stages`."""
        return self._stage.is_behind_layers or self.repeats.is_between_calls

    def set_back(self) -> Mapping[tuple[str, Any], Any]:
        """See :class:`Stages`."""
        return self._stage.cursor.side_effects.set_back()

    def note_missing(self, error: Exception) -> None:
        """See :class:`Stages`."""
        self._stage.presence.note_missing(error)

    def leaves_behind(self, where: str) -> bool:
        """See :class:`Stages`."""
        return self._stage.leaves_behind(where)

    def schedule(self, micro_batches: int, *, forward_only: bool, around: bool = False) -> Schedule:
        """The user's; in 16 bits with halved backwards, which round in every schedule alike."""
        stages, only = self._mesh.layout.pipeline, forward_only or around
        schedule = self._options.make_schedule(stages, micro_batches, forward_only=only)
        if around and not forward_only:
            schedule = mirrored(schedule)
        return (halve_backwards if self._rounds() else join_halves)(lower(schedule))

    def _rounds(self) -> bool:
        """Whether layers compute in 16 bits."""
        narrow = has_narrow_weights(self._module)
        return narrow or torch.is_autocast_enabled(self._device.type)

    def begin_training(self) -> None:
        """Make copies of trained parts equal, and hear what is trained."""
        self._copies.begin_training()
        self._frozen.share()

    def begin_evaluation(self) -> None:
        """Make copies of trained parts equal if a training step came before."""
        self._copies.begin_evaluation()

    def looks(self, call: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
        """See :class:`Stages`."""
        return self._leftovers.looks(call, name)

    @contextmanager
    def running(self, batch: Any, micro_batches: int, *, training: bool, name: str = "") -> Iterator[PipelineExecutor]:
        """See :class:`Stages`.

        Raises:
            RuntimeError: the stage before loaded another batch.
        """
        opened, self._stage.called_again = self._connection(), False
        self._leftovers.snapshot()
        fastpath = torch.backends.mha.get_fastpath_enabled()  # it reads weights where other stages have stand-ins
        torch.backends.mha.set_fastpath_enabled(False)
        self.repeats.model_calls.step_begins()
        try:
            self._check_equal_batches(opened, batch, micro_batches)
            self._delivery.expect()
            yield opened.executor
            self._ended()
            if training:
                self._leftovers.share_buffers()
        finally:
            self.repeats.model_calls.step_ends()
            torch.backends.mha.set_fastpath_enabled(fastpath)

    def _connection(self) -> _Connection:
        """Connection to the other stages, opened in the first step of a run."""
        if self._opened is None:
            links = self._world.links(self._mesh, self._device, self._equal_boundaries())
            finality = StageFinality(self._module, self._stage.presence)
            variable = self._options.variable_shapes or not self._module.automatic_optimization  # passes differ
            self._stage.cursor.tells_always = variable
            executor = self._world.executor(self._stage, links, finality, variable, self._clock)
            self._opened = _Connection(links, executor, list(self._module.parameters()))
        return self._opened

    def _equal_boundaries(self) -> Any:
        """Group of ranks that hold the same hidden state between layers: the tensor group, where this package split it
        and not along the sequence.
        """
        split = self._mesh.layout.tensor > 1 and bool(self._tensor.table)
        return self._mesh.group("tensor_parallel") if split and not self._options.sequence_parallel else None

    def _check_equal_batches(self, opened: _Connection, batch: Any, micro_batches: int) -> None:
        """Refuse to train on batches that differ between the stages of a replica."""
        self._hooks.look()
        if self._hooks.others:
            self._stage.renew(follows=self._hooks.came)
            self._hooked += self._hooks.came
        trainer = getattr(self._module, "_trainer", None)
        crossing = _crossing(opened.parameters, self._hooked, 0 if trainer is None else trainer.current_epoch)
        mine = [float(checksum(batch)), float(micro_batches), crossing]
        before = opened.links.compare_notes(self._mesh.stage, mine)
        arriving = 0.0 if before is None else before[2]
        leaving = arriving + mine[2]
        if len(self._stage.partition.owners) > self._mesh.layout.pipeline:  # chunks follow on those of later stages
            arriving = leaving = opened.links.hear_last(self._mesh.stage, leaving)
        opened.executor.expect_gradients(arriving, leaving)
        if before is not None and before[:2] != mine[:2]:
            raise RuntimeError(
                "the pipeline stages of one replica loaded different batches. Every stage must load the same one: seed "
                "the sampler and what is drawn where a dataset is made or read (`L.seed_everything` before it), let "
                "Lightning add its distributed sampler, or shard by `trainer.strategy.distributed_sampler_kwargs` "
                "instead of the global rank."
            )

    def outcome(self, make: Callable[[], Outcome], name: str) -> Outcome:
        """Made where the loss is computed, and sent to the other stages with what the step left on the module."""
        if not self._has_loss:
            outcome = self._delivery.receive()
            self._leftovers.apply(outcome.state)
            return outcome
        alike = name == TRIAL or self._options.gradients.experts > 1
        again = self._agree(self._stage.called_again) if alike else self._stage.called_again
        outcome = Outcome(no_logs(self._device), output=StartOver()) if again else make()
        outcome.state = self._leftovers.changes()
        self._delivery.send(outcome)
        return outcome

    def _agree(self, again: bool) -> bool:
        """Whether the step called the layers again in any replica; their next steps have to run alike."""
        if self._mesh.layout.data == 1:
            return again
        flag = torch.tensor(int(again), device=self._device)
        return bool(raw_all_reduce(flag, self._mesh.group("data_parallel"), maximum=True))

    def share(self, value: Tensor) -> Tensor:
        """See :class:`Stages`."""
        return self._delivery.share(value)

    def note_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """See :class:`Stages`."""
        self._copies.note_trained(parameters)

    def note_gradients(self, has_gradient: Callable[[nn.Parameter], bool]) -> None:
        """See :class:`Stages`."""
        self._copies.note_gradients(has_gradient)
        self._frozen.check()

    def share_copies(self) -> None:
        """See :class:`Stages`."""
        self._copies.share()

    def release(self) -> None:
        """A cut module keeps what it has: every step needs it."""

    def settle(self) -> None:
        """See :class:`Stages`; the stage that computes the loss updates its weights meanwhile."""
        self._delivery.settle()

    def timeline(self) -> Timeline | None:
        """See :class:`Stages`; collective over the pipeline."""
        if self._clock is None:
            return None
        return gather_timeline(self._clock, self._mesh.group("pipeline_parallel"), self._mesh.pipeline_ranks)

    def close(self) -> None:
        """Forget the connections."""
        self._opened = None


def _crossing(parameters: Iterable[nn.Parameter], hooked: int, epoch: int) -> float:
    """Number that changes when parameters are frozen or unfrozen, hooks come or an epoch begins, which may have longer
    sequences than the one before: what crosses boundaries may, too."""
    return float(hash((hooked, epoch, *map(attrgetter("requires_grad"), parameters))) % (1 << 32))
