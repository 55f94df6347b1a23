"""Around code that calls the model repeatedly: each call goes through all stages; see :mod:`.follower`.

Inside a step the strategy asks for it, for steps that call the layers more than once. Outside of a step, in a hook or
after a run, the call of a module that contains the layers does, where it takes no gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.layers.all_here import all_tokens
from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.draws.one_stream import OneStream
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.messages.further_groups import further_group
from lightning_megatron.mesh.parts.names import module_called, outwards
from lightning_megatron.pipeline.elsewhere.away import STATE, forget_written, refuse_away_metrics
from lightning_megatron.pipeline.forwards.entry import Entry, has_entry
from lightning_megatron.pipeline.repeated.follower import CallFollower
from lightning_megatron.pipeline.repeated.groups import Groups
from lightning_megatron.pipeline.repeated.wire import Wire
from lightning_megatron.pipeline.repeated.with_gradients import TrainingFollower
from lightning_megatron.pipeline.stage.calls import HookedCall
from lightning_megatron.pipeline.stage.stage import Stage

_PATIENCE_S = 180.0


class _OwnPart(Entry):
    """Around a part that this stage has and some other has not, while code calls the model repeatedly."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self.module = name, module

    def follow(self, follower: CallFollower) -> None:
        self._follower = follower
        self.open()

    def enter(self, *args: Any, **kwargs: Any) -> Any:
        return self._follower.call_unit(self._name, self.run_hooked, args, kwargs)


class _ModelCall(Entry):
    """Around a module that contains the layers: called outside of a step, it goes through all stages."""

    def __init__(self, calls: ModelCalls, module: nn.Module) -> None:
        self._model_calls, self.module = calls, module
        self.open()

    def enter(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self.run_hooked(*args, **kwargs)
        with self._model_calls.together_with_others(type(self.module).__name__):
            return self.run_hooked(*args, **kwargs)


class ModelCalls:
    """Runs user code on every stage; each call of the model in it goes through all stages.

    Args:
        module: the user's, cut.
        stage: this rank's part of it.
    """

    def __init__(self, module: nn.Module, stage: Stage) -> None:
        self.stage, self._module = stage, module
        around = module, stage.presence, stage.cursor.side_effects, stage.device
        self._follower, self._training = CallFollower(*around), TrainingFollower(*around)
        self._parts = self._own_parts()
        self._place = ""
        self._met = 0
        self._stages = stage.presence.stages
        self._wires: list[Wire] = []
        self._holders: list[_ModelCall] = []
        for name in reversed(list(outwards(stage.partition.trunk.name))):
            holder = module.get_submodule(name)
            if not isinstance(holder, (nn.ModuleList, nn.ModuleDict)) and not has_entry(holder):
                self._holders.append(_ModelCall(self, holder))

    @staticmethod
    def of(module: nn.Module, stage: Stage) -> ModelCalls:
        """Those of a module; made in the first run after it was cut."""
        marks = Marks.of(module.get_submodule(stage.partition.trunk.name))
        return marks.get(ModelCalls) or marks.put(ModelCalls(module, stage))

    def connect(self, mesh: ParallelMesh) -> None:
        """Go through the pipeline of this rank in ``mesh``."""
        wire = Wire(mesh.group("pipeline_parallel"), mesh.pipeline_ranks, mesh.stage, self.stage.device)
        self._follower.wire = self._training.wire = wire
        self._wires = []
        self._place = "model_calls/" + "_".join(map(str, mesh.pipeline_ranks))

    def prepare(self, groups: int) -> None:
        """Make what :meth:`together` needs for that many tasks at once.

        Each has a process group of its own, so that no message waits for those of another. Collective over the
        pipeline.
        """
        ranks, stage, device = self._follower.wire.ranks, self.stage.stage, self.stage.device
        while len(self._wires) < groups:
            group = further_group(self._follower.wire.group)
            raw_all_reduce(torch.zeros(1, device=device), group, keep=False)  # NCCL connects now, and not in turns
            self._wires.append(Wire(group, ranks, stage, device, ahead=True))

    def together(self, tasks: Sequence[Callable[[], Any]], groups: int) -> Groups:
        """Run tasks that call the model repeatedly, several of them at once; see :mod:`.groups`.

        Args:
            tasks: equal on all stages.
            groups: how many at a time; :meth:`prepare` was called for them.
        """
        if not self.stage.repeats:
            with self.outside("generate"):
                return self.together(tasks, groups)
        return self._at_once(self._follower, tasks, groups)

    def micro_batches(
        self, tasks: Sequence[Callable[[], Any]], asides: Sequence[Callable[[], AbstractContextManager[Any]]]
    ) -> Groups:
        """Run the user's training step on micro-batches, as many of them at once as there are stages.

        Args:
            tasks: forward and backward of each.
            asides: contexts around what others do in the middle of one.
        """
        places = min(len(tasks), self._stages)
        self.prepare(places)
        return self._at_once(self._training, tasks, places, asides)

    def _at_once(
        self,
        follower: CallFollower,
        tasks: Sequence[Callable[[], Any]],
        groups: int,
        asides: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
    ) -> Groups:
        wires = self._wires[:groups]
        for wire in wires:
            wire.begin()
        told = follower.wire
        follower.groups = found = Groups(wires, self.stage.stage, self.stage.device, asides)
        try:
            found.run(tasks)
        finally:
            follower.groups, follower.wire = None, told
        return found

    @property
    def of_training(self) -> TrainingFollower:
        """Answers the calls of a training step."""
        return self._training

    @property
    def side_by_side(self) -> bool:
        """Whether the code that runs is one of several tasks; see :meth:`together`."""
        return self._follower.groups is not None

    def agreed(self, answer: Tensor, name: str) -> Tensor:
        """The answer of the pipeline's first rank, for code whose calls go through all stages.

        In a step that is not known to call the model repeatedly it is this rank's own answer: the step starts over when
        it calls the model again.

        Args:
            answer: this rank's.
            name: of what asks, in words.
        """
        return self._follower.agreed(answer, name) if self.stage.repeats else answer

    def step_begins(self) -> None:
        """Leave the model's own calls alone, which ordinary steps make in every micro-batch."""
        for holder in self._holders:
            holder.close()

    def step_ends(self) -> None:
        """Meet the calls outside of steps."""
        for holder in self._holders:
            holder.open()

    def _own_parts(self) -> list[_OwnPart]:
        """Parts that are here, but not on every stage, and that nobody follows in ordinary steps."""
        followed = {id(call.module) for call in self.stage.calls}
        found: dict[int, _OwnPart] = {}
        for name in self.stage.presence.parts_of_some():
            unit = module_called(self._module, name)
            if unit is not None and id(unit) not in followed:
                found.setdefault(id(unit), _OwnPart(name, unit))
        return list(found.values())

    @contextmanager
    def training(self, streams: SegmentStreams | OneStream) -> Iterator[TrainingFollower]:
        """Around a training step; gives what answers its calls, and runs its backward."""
        follower = self._training
        follower.prepare(self.stage.presence, self.stage.cursor, streams)
        with follower.counting_once(), self.running(follower):
            follower.lend()
            yield follower

    @contextmanager
    def running(self, follower: CallFollower | None = None) -> Iterator[None]:
        """Around code that every stage of the pipeline runs, on all tokens on every context rank.

        Args:
            follower: answers the calls; by default, one that knows of no gradients. In one of a training step context
                ranks share the tokens inside of the layers.
        """
        stage, follower = self.stage, follower or self._follower
        wire, whole = follower.wire, stage.cursor.tokens is not None and follower is not self._training
        followed: list[tuple[HookedCall, Any]] = [(call, call.cursor) for call in stage.calls]
        fastpath = torch.backends.mha.get_fastpath_enabled()  # it reads weights where other stages have stand-ins
        torch.backends.mha.set_fastpath_enabled(False)
        wire.begin()
        for call, _ in followed:
            call.cursor = follower
        for part in self._parts:
            part.follow(follower)
        stage.repeats = True
        try:
            with all_tokens() if whole else nullcontext():
                yield
            wire.finish()
            if STATE.written:
                refuse_away_metrics(self._module)
        finally:
            stage.repeats = False
            torch.backends.mha.set_fastpath_enabled(fastpath)
            for part in self._parts:
                part.close()
            for call, cursor in followed:
                call.cursor = cursor
            forget_written()

    @contextmanager
    def together_with_others(self, name: str) -> Iterator[None]:
        """Around code that calls the model without gradients: outside of a step, all stages run it together.

        Args:
            name: of what is called.
        """
        if self.stage.cursor.running or self.stage.repeats or in_backward():
            yield
            return
        with self.outside(name):
            yield

    @contextmanager
    def outside(self, name: str) -> Iterator[None]:
        """Around a call outside of a step, which starts when all stages are there.

        Args:
            name: of what is called.
        """
        self._meet(name)
        with self.running():
            yield

    def _meet(self, name: str) -> None:
        """Wait for the other stages, as long as there is a store to meet in: it ends with the process of global rank 0.

        Raises:
            RuntimeError: some do not come.
        """
        try:
            self._wait_for_others(name)
        except dist.DistNetworkError:
            return

    def _wait_for_others(self, name: str) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._met += 1
        keys = {stage: f"{self._place}/{self._met}/{stage}" for stage in range(self._stages)}
        store.set(keys[self.stage.stage], "")
        begun = time.monotonic()
        while missing := [stage for stage, key in keys.items() if not store.check([key])]:
            if time.monotonic() - begun > _PATIENCE_S:
                raise RuntimeError(
                    f"`{name}` was called outside of a step, and pipeline stage {missing[0]} did not call it within "
                    f"{_PATIENCE_S:.0f} seconds. Each stage has some of the layers, so all ranks have to call the "
                    "model: take conditions such as `trainer.is_global_zero` off the call, and put them around what "
                    "is done with the result."
                )
            time.sleep(0.0005)
        if self._met > 2:
            store.delete_key(f"{self._place}/{self._met - 2}/{self.stage.stage}")

    def refuse_log(self) -> bool:
        """Whether a call of ``self.log`` comes from a layer of a model that is called repeatedly.

        Raises:
            RuntimeError: it does; only its own stage knows of it.
        """
        if self.stage.repeats and (inside := self._follower.inside or self._training.inside):
            raise RuntimeError(
                f"`{inside}` calls `self.log` in a step that calls the model repeatedly; only its own "
                "pipeline stage would know. Return the value, or keep it on the layer, and log it in the step."
            )
        return False
