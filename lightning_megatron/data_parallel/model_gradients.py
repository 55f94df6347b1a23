"""The gradients of one module on one rank: where they collect, who counts them, and which optimizers update pieces.

Below it lie the buckets, which know of groups and buffers only; here names, stages and tensor-parallel parts come in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.checkpoints.state.stored import StatePlace, parameter_names
from lightning_megatron.data_parallel.buckets.bucket import Bucket, WeightLayout
from lightning_megatron.data_parallel.buckets.buckets import GradientBuckets
from lightning_megatron.data_parallel.buckets.holders import Sharing, data_sharing
from lightning_megatron.data_parallel.buckets.local import LocalGradients
from lightning_megatron.data_parallel.buckets.low_precision import lowered_parameters
from lightning_megatron.data_parallel.buckets.shards import FlatPlacement
from lightning_megatron.data_parallel.global_norm import global_norm, whole_norm
from lightning_megatron.data_parallel.gradient_hooks import GradientSink, HookedGradients, hooks_off
from lightning_megatron.data_parallel.gradient_options import GradientOptions
from lightning_megatron.data_parallel.master_weights import MasterWeights
from lightning_megatron.data_parallel.presplit import ReplicaAverage, splits_itself
from lightning_megatron.data_parallel.update.host_plan import HostPlan
from lightning_megatron.data_parallel.update.kept_state import KeptState
from lightning_megatron.data_parallel.update.piecewise import PiecewiseUpdate
from lightning_megatron.data_parallel.update.sent_gradients import Change, SentGradients
from lightning_megatron.data_parallel.update.step_hooks import StepHooks
from lightning_megatron.data_parallel.update.whole_matrices import whole_matrices
from lightning_megatron.data_parallel.update.whole_steps import WholeSteps
from lightning_megatron.data_parallel.windows.arriving import ArrivingWindows
from lightning_megatron.data_parallel.windows.spread import Spread, frozen_buckets, spread_parameters
from lightning_megatron.data_parallel.windows.step_windows import StepWindows
from lightning_megatron.layers.whole.parameter_parts import ParameterParts
from lightning_megatron.mesh.mesh import Holders, ParallelMesh
from lightning_megatron.pipeline.elsewhere.presence import Presence


class ModelGradients:
    """Buckets, piecewise updates and the global norm of one module.

    Args:
        module: the user's module, already cut if there are several stages.
        mesh: the grid.
        device: this rank's device.
        presence: what of the module is on this rank.
        tensor: puts together what is split over tensor-parallel ranks.
        options: how gradients are summed and weights kept.
        several: whether a gradient has terms of several ranks or backwards.
        layers: names of the layers whose weights may be spread over the replicas.

    Attributes:
        closed: buckets of the run before, until the next one.
        weights: what this rank updates of the parameters that it does not update as they are.
        shows_whole: around code of the user's that looks at gradients; split ones are seen whole there.
        shows_parts: around a backward that a step runs itself, and what is done with its gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        device: torch.device,
        presence: Presence,
        tensor: TensorState,
        options: GradientOptions,
        *,
        several: bool = False,
        layers: Sequence[str] = (),
    ) -> None:
        self._layers = layers if options.weights is not None else ()
        self._module, self._mesh, self._device = module, mesh, device
        self.presence = presence
        self._tensor = tensor
        self.options = options
        self._masters: dict[tuple[str, ...], tuple[FlatPlacement, Tensor]] = {}
        self._replicas: Sharing | None = None
        self.closed: GradientBuckets | None = None
        self.local: LocalGradients | None = None
        self._experts = mesh.expert_groups(options.experts)
        self._several = several and not splits_itself(module)
        self.shows_whole: Callable[[], AbstractContextManager[None]] = nullcontext
        self.shows_parts: Callable[[], AbstractContextManager[None]] = nullcontext
        self._autograd: GradientSink = LocalGradients(())
        if splits_itself(module) and mesh.layout.data > 1:
            self._autograd = ReplicaAverage(module, mesh.group("data_parallel"))
        self._late: ArrivingWindows | None = None
        self._sent = SentGradients()
        self.windows: StepWindows | None = None
        self._kept = KeptState(module, tensor, self._place)
        self.weights = MasterWeights(module, self._kept, self._spread_place, self._all_buckets)
        self.buckets: GradientBuckets | None = None
        self.updates: dict[int, StepHooks] = {}
        self._hooked: HookedGradients | None = None
        self._kinds = {"each": False, "keeps": False}

    @property
    def sink(self) -> GradientSink:
        """Collector of gradients: buckets, ``.grad`` over several backwards, or ``.grad`` after a single one; with
        the user's hooks on them, where several backwards or ranks have terms of one gradient."""
        plain = self.buckets or self.local or self._autograd
        if not self._several:
            return plain
        if self._hooked is None or self._hooked.sink is not plain:
            parameters, own = self._module.named_parameters(), int(plain is self.buckets)
            self._hooked = HookedGradients(plain, parameters, self._around_hooks, own, **self._kinds)
        return self._hooked

    @contextmanager
    def without_hooks(self) -> Iterator[GradientSink]:
        """The sink of gradients that are thrown away, while the user's hooks are off their parameters."""
        kept = sink.kept() if isinstance(sink := self.sink, HookedGradients) else nullcontext(sink)
        with hooks_off(self._module.named_parameters()), kept as bare:
            yield bare

    def on_parts(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A step that is tried on parts of a batch, on all replicas at once; see :meth:`.Agreement.on_parts`."""
        return call if self.windows is None else self.windows.agreement.on_parts(call)

    def _around_hooks(self) -> AbstractContextManager[None]:
        if self.windows is not None:
            self.windows.hold_all()
        return self.shows_whole()

    @property
    def replicas(self) -> Sharing:
        """How the replicas of this stage share the optimizer; collective when first asked for."""
        if self._replicas is None:
            self._replicas = data_sharing(self._mesh, self.options.sharding)
        return self._replicas

    def keep_whole(self) -> None:
        """Share no optimizer's work between the replicas: each of them updates all parameters."""
        self._replicas = data_sharing(self._mesh, False)

    def holders_of(self, name: str) -> Holders:
        """The stages and ranks that hold parameter ``name``."""
        return self.presence.holders(name)

    def prepare(
        self,
        groups: Mapping[Holders, Any],
        optimizers: Sequence[Optimizer],
        *,
        whole: bool,
        reads_gradients: bool,
        each: bool = False,
        keeps: bool = False,
        skips: bool = False,
        reads_weights: bool = False,
        rounds: bool = True,
        widens: bool = False,
        reads_in_step: bool = False,
        host: HostPlan | None = None,
        together: bool = False,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        """Lay out buckets for the module's parameters, and let the optimizers update pieces.

        Args:
            groups: group of this rank for each kind of holders other than the replicas of one stage.
            optimizers: hold the module's parameters.
            whole: whether an optimizer needs whole parameters.
            reads_gradients: whether the user's code looks at ``.grad`` between backward and update.
            each: whether it does so after each batch of those that are accumulated for an update.
            keeps: whether gradients of the update before may be looked at after a step, or outlast its ``zero_grad``.
            skips: whether updates may have to be skipped.
            reads_weights: whether the user's code may look at weights between an update and the next step.
            rounds: whether gradients of 16-bit weights may accumulate in float32, and be rounded once for the update.
            widens: whether they must, over the micro-batches of a step, also without replicas.
            reads_in_step: whether the user's code may look at weights between a step's forward and its backward.
            host: what of the optimizers lies in host memory.
            together: whether optimizers step on all parameters together, of which some are split.
            hidden: names of spread parameters whose values come later.
        """
        self.finish_gather()
        self.close()
        self._release()
        self._kinds = {"each": each, "keeps": keeps}
        parameters, replicas = dict(self._module.named_parameters()), self.replicas
        kinds = {
            holder: Sharing.of_group(group, sharded=group is not None and self._shards(holder), holders=holder)
            for holder, group in groups.items()
        }
        shared = {name: kinds[holder] for name in parameters if (holder := self.holders_of(name)) in kinds}
        options = self.options
        lowered = lowered_parameters(self._module, options.layer_dtype)
        gathers = whole and not self._tensor.is_trivial and not together
        self._kept.together = self._steps_on_wholes(optimizers) if together else {}
        self.updates |= self._kept.together
        if replicas.group is None and not (shared or lowered or gathers or skips or widens or options.inspect or host):
            self.local = LocalGradients(parameters.values())
            return
        spread = spread_here(self._module, self._layers, self.presence)
        self.buckets = GradientBuckets(
            parameters,
            replicas,
            shared,
            options.bucket_bytes,
            layout=WeightLayout(lowered, whole, gathers, rounds, host.memory_for if host else None, hidden),
            reads_gradients=reads_gradients,
            inspect=options.inspect,
            reduce_dtype=options.reduce_dtype,
            apart=spread.trained,
            sums_shards=options.weights is not None and options.weights.sums == "micro_batch",
        )
        if spread.modules:
            looks = options.weights, reads_in_step, reads_weights
            frozen = frozen_buckets(parameters, spread.frozen, replicas, options.bucket_bytes, hidden)
            self.windows = StepWindows(self._module, spread, self.buckets, frozen, *looks)
        self._sent = host.sent if host else SentGradients()
        self.buckets.on_summed = self._sent.send if self._sent.goes_ahead else None
        parts = self._module, self._mesh.group("tensor_parallel"), self._tensor, self.buckets
        self._kept.wholes = whole_matrices(*parts) if gathers else None
        self._restore_masters(self.buckets)
        if together:
            return
        if self.buckets.updates_pieces or skips or not self.buckets.buckets:  # those of what is unfrozen later follow
            if options.overlap_gather and replicas.shards > 1 and not reads_weights:
                self._late = ArrivingWindows(self._module, self.buckets)
            for optimizer in optimizers:
                means = self._late, self._kept.wholes, host.steps(optimizer) if host else None
                self.updates[id(optimizer)] = PiecewiseUpdate(optimizer, self.buckets, *means)

    def _steps_on_wholes(self, optimizers: Sequence[Optimizer]) -> dict[int, WholeSteps]:
        names, group = parameter_names(self._module), self._mesh.group("tensor_parallel")

        def parts_of(parameter: nn.Parameter) -> ParameterParts | None:
            return self._tensor.parts_of(names[id(parameter)]) if id(parameter) in names else None

        return {id(each): WholeSteps(each, group, parts_of) for each in optimizers}

    def _shards(self, holders: Holders) -> bool:
        """Whether those who hold a parameter share its optimizer's work; copies of experts lie on tensor ranks too."""
        return self.replicas.shards > 1 or (holders.of_experts and self.options.sharding is True)

    def _restore_masters(self, buckets: GradientBuckets) -> None:
        """Go on with the float32 weights of an earlier run of the same module, of which layers kept 16 bits."""
        for bucket in buckets.buckets:
            placement, master = self._masters.pop(tuple(bucket.names), (None, None))
            if bucket.weights is not None and master is not None and placement == bucket.placement:
                bucket.weights.master.copy_(master)
        self._masters = {}

    def close(self) -> None:
        """Remove hooks; what the optimizers keep can still be asked for, and saved."""
        if self._hooked is not None:
            self._hooked.close()
            self._hooked = None
        for update in self.updates.values():
            update.close()
        self.updates = {}
        if self._late is not None:
            self._late.close()
            self._late = None
        if self.windows is not None:
            self.windows.close()
        if self.local is not None:
            self.local.close()
            self.local = None
        if self.buckets is not None:
            self.buckets.close()
            self.closed, self.buckets = self.buckets, None

    def _release(self) -> None:
        """Free an earlier run's buffers, except the float32 weights of which layers keep 16 bits."""
        closed, self.closed, self.windows = self.closed, None, None
        for bucket in closed.buckets if closed is not None else []:
            if bucket.weights is not None and bucket.weights.lowered:
                self._masters[tuple(bucket.names)] = bucket.placement, bucket.weights.master
            for parameter in bucket.parameters:
                parameter.grad = None

    def training_step(self) -> AbstractContextManager[None]:
        """Around a training step, which may use weights that are still under way, or spread over the replicas."""
        if self.windows is not None:
            return self.windows.step()
        return self._late.step() if self._late is not None else nullcontext()

    def end_step(self) -> str:
        """Spread weights again, once a step's last backward has run; returns what it has chosen for later steps."""
        return self.windows.end_step() if self.windows is not None else ""

    def finish_gather(self, *, spread: bool = True) -> None:
        """Wait for weights under way, and make whole what is ``spread`` over the replicas; collective over them."""
        if self._late is not None:
            self._late.finish()
        if self.windows is not None and spread:
            self.windows.show_all()

    def skip_updates(self) -> None:
        """Let the optimizers' next step change nothing."""
        for update in self.updates.values():
            update.skip()

    def restore(self) -> None:
        """Put the parameters back into optimizers whose step failed."""
        for update in self.updates.values():
            update.restore()

    def change(self, parameters: Iterable[nn.Parameter], change: Change) -> None:
        """Change this rank's part of the summed gradients of ``parameters``: whole ones, or its shard of them."""
        for parameter in parameters:
            if (gradient := self._held(parameter)) is not None:
                self._sent.change(*self._place(parameter), gradient, change)

    def _held(self, parameter: nn.Parameter) -> Tensor | None:
        bucket, index = self._place(parameter)
        if bucket is None or not bucket.scattered:
            return parameter.grad
        piece = bucket.pieces.get(index)
        return None if piece is None else piece.update.grad

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Whether a backward has come to ``parameter`` on any rank that holds it, once gradients have been summed."""
        bucket, index = self._place(parameter)
        return parameter.grad is not None if bucket is None else bucket.touched[index]

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """2-norm of the gradients of ``parameters`` over the whole model, each element counted once."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        pairs = [(p, grad) for p in parameters if (grad := self._held(p)) is not None]
        over_world = self._experts is not None or (self.buckets is not None and self.buckets.scatters)
        counted = [grad for p, grad in pairs if self._counts(names.get(id(p)), p, over_world)]
        if splits_itself(self._module):
            return whole_norm(counted)
        layout = self._mesh.layout
        if over_world:
            return global_norm(counted, [self._mesh.group("world")], self._device)
        groups = [self._mesh.group("tensor_parallel")] if layout.tensor > 1 else []
        groups += [self._mesh.group("pipeline_parallel")] if layout.pipeline > 1 else []
        if not groups:  # whole gradients are here: the bits of torch's own norm, and so of plain Lightning
            return torch.nn.utils.get_total_norm(counted)
        return global_norm(counted, groups, self._device)

    def _counts(self, name: str | None, parameter: nn.Parameter, over_world: bool) -> bool:
        """Whether this rank counts what it holds of a parameter; over a replica, or the world, each element once."""
        bucket = self._place(parameter)[0]
        sharing = bucket.sharing if bucket is not None and bucket.scattered else Sharing()
        if self._experts is not None and name is not None and self.holders_of(name).of_experts:
            counts = self.presence.is_counted_here(name, over_stages=True, over_tensor=False)
            # each copy has a shard of the sum, or all of it
            return sharing.shards > 1 or (self._experts.is_first_copy and counts)
        if over_world and (sharing.copy if sharing.shards > 1 else self._mesh.coordinates.data) != 0:
            return False
        over = {"over_stages": not sharing.spans_stages, "over_tensor": not sharing.spans_tensor}
        return name is None or self.presence.is_counted_here(name, **over)

    def state_places(self, optimizer: Optimizer) -> list[StatePlace]:
        """Locations of an optimizer's state of the parameters that this rank updates."""
        if (update := self.updates.get(id(optimizer))) is not None:
            update.cut_state()
        return self._kept.places(optimizer)

    def _spread_place(self, parameter: nn.Parameter) -> tuple[Bucket, int] | None:
        return None if self.windows is None else self.windows.spread_place(parameter)

    def _all_buckets(self) -> Sequence[Bucket]:
        buckets = self.buckets or self.closed
        return [] if buckets is None else buckets.buckets

    def _place(self, parameter: nn.Parameter) -> tuple[Bucket | None, int]:
        buckets = self.buckets or self.closed
        return (buckets.place_of(parameter) if buckets is not None else None) or (None, 0)


def spread_here(module: nn.Module, layers: Sequence[str], presence: Presence) -> Spread:
    """The parameters of this rank's part of a module that are spread over the replicas: those that no others hold.

    Args:
        module: the user's, already cut.
        layers: names of the layers whose weights may be spread; without any, nothing is.
        presence: what of the module is on this rank.
    """
    names = [name for name, _ in module.named_parameters()] if layers else []
    return spread_parameters(module, layers, [name for name in names if not presence.holders(name).are_replicas])
