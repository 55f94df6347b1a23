"""From a whole module to this rank's part of it, ready to run steps.

The order matters, and is the same on every rank::

    agree on random state -> convert dtype -> split layers over tensor ranks -> cut into stages
        -> materialize what is on the meta device -> move -> compile, recompute -> engine -> agree on weights
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.context_parallel.region import TokenRegion
from lightning_megatron.data_parallel.model_gradients import spread_here
from lightning_megatron.data_parallel.presplit import agree_on_start, splits_itself
from lightning_megatron.data_parallel.renormalised_rows import check_renormalised
from lightning_megatron.mesh.draws.answers import ALL_ANSWERS
from lightning_megatron.mesh.draws.mode import LayoutDraws
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.mesh import Holders, ParallelMesh
from lightning_megatron.parallelize.plan.row import SEQUENCE_SPLIT
from lightning_megatron.pipeline.cut.partition import make_partition
from lightning_megatron.pipeline.cut.trunk import LayersHere, find_trunk, note_trunk
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.forwards.compiled import check_compile, compile_layers
from lightning_megatron.pipeline.forwards.lazy_heads import LazyHeads
from lightning_megatron.pipeline.forwards.lifted import lift_compilation
from lightning_megatron.pipeline.forwards.low_precision_linears import check_float8, multiply_in_8_bits
from lightning_megatron.pipeline.forwards.recompute import recompute_layers
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.activations.install import arrange
from lightning_megatron.strategy.assembly import alike
from lightning_megatron.strategy.assembly.assembled import Assembled
from lightning_megatron.strategy.assembly.late_weights import LateWeights
from lightning_megatron.strategy.assembly.layer_split import LayerSplit
from lightning_megatron.strategy.assembly.module_options import ModuleOptions
from lightning_megatron.strategy.assembly.own_dtypes import convert_as_forward_does
from lightning_megatron.strategy.assembly.refusals import already_cut, check_own_split
from lightning_megatron.strategy.generation.streaming import stream_weights
from lightning_megatron.strategy.lightning.hooks import reads_weights
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of, trainer_of
from lightning_megatron.strategy.memory.whole_shape import note_shape
from lightning_megatron.strategy.options.choices import EngineOptions
from lightning_megatron.strategy.step.engine import StepEngine, layers_of
from lightning_megatron.strategy.world import World

if TYPE_CHECKING:
    from lightning_megatron.parallelize import ParallelReport


class Assembler:
    """Divides one module over the mesh.

    Args:
        mesh: the grid.
        device: this rank's device.
        precision: converts the module and its parameters.
        options: how to divide the module.
        engine_options: passed on to the engine.
        world: what lies outside of this process.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        device: torch.device,
        precision: Precision,
        options: ModuleOptions,
        engine_options: EngineOptions,
        world: World,
    ) -> None:
        self._world = world
        self._mesh = mesh
        self._device = device
        self._precision = precision
        self._options = options
        self._engine_options = engine_options

    def assemble(
        self,
        module: pl.LightningModule,
        syncs_batch_norm: bool = False,
        from_files: bool = False,
        fits: bool = False,
    ) -> Assembled:
        """Divide ``module``, in place.

        Args:
            module: whole, or divided by an earlier run of the same layout.
            syncs_batch_norm: whether batch norms are over the samples of all replicas.
            from_files: whether its weights will be read from files.
            fits: whether it will be trained.

        Raises:
            ValueError: the module cannot be divided so; the message says what to change.
            RuntimeError: an earlier run cut the module for another layout.
        """
        mesh = self._mesh
        self._check(module)
        alike.agree_on_random_state(mesh, self._device)
        seed = alike.agree_on_base_seed(self._device)
        apart = self._engine_options.whole_batch_loss is False
        streams = SegmentStreams(self._device, mesh.coordinates.data, seed, self._draws(), apart=apart)
        module = self._converted(module)
        tensor_state, report = self._layer_split().split(module)
        alike.synchronize(module, mesh, wanted=syncs_batch_norm)
        stage = self._cut(module, streams, tensor_state)
        presence = self._presence(module, stage, tensor_state)
        layers = layers_of(module, stage, self._options.pipeline_layers)
        about = layers, self._options.streaming, self._device
        streamed = stream_weights(module, *about, from_files, mesh.group("data_parallel"))
        hidden = self._late(module, layers, presence) if fits else ()
        given = seed, tensor_state.table, streamed.settle if streamed else None
        built = self._world.materialize(module, self._device, *given, hidden)
        late = None if built is None else LateWeights(module, built, self._device)
        module.to(self._device)
        if streamed is not None:
            streamed.install()
        self._replace_forwards(module, stage)
        engine = StepEngine(
            module, mesh, self._device, stage, presence, streams, tensor_state, self._engine_options, self._world
        )
        agreed = None if streamed is not None else frozenset[str]() if late is None else late.filled
        groups = self._agree_on_weights(module, engine, presence, tensor_state, agreed)
        engine.note_trained()
        tokens, heads = self._split_tokens(module, stage, report), self._lazy_heads(module, stage)
        tensor = mesh.group("tensor_parallel") if mesh.layout.tensor > 1 else None
        asked = self._options.pipeline_layers, self._options.activations
        traffic, pieces = arrange(module, stage, *asked, self._device, self._world.host, tensor)
        parts = tokens, heads, traffic, pieces, streamed, late
        return Assembled(module, engine, tensor_state, report, streams, groups, *parts)

    def _late(self, module: pl.LightningModule, layers: Sequence[str], presence: Presence) -> frozenset[str]:
        """Names of parameters that are spread over replicas, of which none needs more than its shard."""
        if self._engine_options.gradients.weights is None or self._mesh.of_gradients.layout.data == 1:
            return frozenset()
        spread = spread_here(module, layers, presence)
        return frozenset((*spread.trained, *spread.frozen))

    @property
    def _in_8_bits(self) -> bool:
        return self._precision.precision == "fp8-mixed"  # type: ignore[comparison-overlap]

    def _check(self, module: pl.LightningModule) -> None:
        """Refuse what does not depend on the parts of a module."""
        if self._in_8_bits:
            check_float8(self._device, self._options.compile_layers)
        if splits_itself(module):
            self._check_own_split()

    def _converted(self, module: pl.LightningModule) -> pl.LightningModule:
        """The module in its dtypes, whose whole shape is noted: it will be divided."""
        module = self._precision.convert_module(module)  # type: ignore[assignment]
        if not splits_itself(module):
            convert_as_forward_does(module)
        if self._mesh.layout.pipeline * self._mesh.layout.tensor * self._options.experts > 1:
            note_shape(module)
            note_trunk(module)
        if not splits_itself(module):
            sharded = self._engine_options.gradients.weights is not None
            check_renormalised(module, self._mesh.layout.world_size, weight_sharding=sharded)
        return module

    def _presence(self, module: pl.LightningModule, stage: Stage | None, tensor_state: TensorState) -> Presence:
        if stage is not None:
            return stage.presence
        divided_here = not splits_itself(module)  # else its DTensors say what is whole
        return Presence.uncut(module, tensor_state.table, self._mesh.coordinates.tensor if divided_here else 0)

    def _replace_forwards(self, module: pl.LightningModule, stage: Stage | None) -> None:
        """Let the layers that are here be compiled, multiply in 8 bits and be recomputed, as far as asked for."""
        here = self._layers_here(module, stage)
        compile_layers(here, self._options.compile_layers)
        if done := multiply_in_8_bits(here, self._in_8_bits):
            rank_zero_info(done)
        if self._options.activation_recompute is not None or stage is not None:
            recompute_layers(here, self._options.activation_recompute)

    def _agree_on_weights(
        self,
        module: pl.LightningModule,
        engine: StepEngine,
        presence: Presence,
        tensor_state: TensorState,
        agreed: Collection[str] | None,
    ) -> dict[Holders, Any]:
        """Give all replicas the same weights, but for those of names that are ``agreed``; ``None``: all are.

        Returns:
            Holders of parameters -> their groups.
        """
        if engine.splits_itself:
            self._agree_on_own_split(module)
            return {}
        holders = {name: engine.model_gradients.holders_of(name) for name, _ in module.named_parameters()}
        groups = self._mesh.holder_groups(self._all_holders(presence, tensor_state), self._options.experts)
        if agreed is not None:
            of_holders = {name: groups[each] for name, each in holders.items() if each in groups}
            alike.agree_on_weights(module, self._mesh.of_gradients, of_holders, agreed)
        return groups

    def _layers_here(self, module: pl.LightningModule, stage: Stage | None) -> LayersHere:
        if stage is None:
            return LayersHere(module, self._options.pipeline_layers)
        return LayersHere(module, cut=stage.partition.trunk, owned=tuple(stage.presence.layers_here()))

    def _draws(self) -> LayoutDraws | None:
        """The mode that answers draws, where they are to be those of one process."""
        options = self._engine_options
        if options.random_streams != "layout":
            return None
        splits = self._mesh.layout.world_size > 1 or options.micro_batch_size != "auto"
        return LayoutDraws(ALL_ANSWERS, splits=splits)

    def _lazy_heads(self, module: pl.LightningModule, stage: Stage | None) -> LazyHeads | None:
        """Find the heads whose logits are to be computed in pieces."""
        if self._options.loss_chunks is None:
            return None
        layers = layers_of(module, stage, self._options.pipeline_layers)
        calls = stage is None or stage.partition.owners[-1] == stage.stage
        return LazyHeads(module, layers, self._options.loss_chunks, calls)

    def _split_tokens(
        self, module: pl.LightningModule, stage: Stage | None, report: ParallelReport | None
    ) -> TokenRegion | None:
        """Split the tokens of the module's steps over context ranks, where there are several."""
        if stage is not None:
            stage.cursor.tokens = None
        if self._mesh.layout.context == 1:
            return None
        group, blocks, asked = self._mesh.group("context_parallel"), self._blocks(report), self._options.context
        shared = blocks, self._mesh.context_levels(asked["heads_over"])
        if stage is not None:  # whose layers ask the region themselves
            if asked["balance"] == "auto":  # messages of all micro-batches are cut alike
                asked = {**asked, "balance": "zigzag"}
            stage.cursor.tokens = region = TokenRegion(module, (), group, asked, *shared)
            return region
        try:
            layers = find_trunk(module, self._options.pipeline_layers, "context_parallel_size=1").layers(module)
        except ValueError as error:
            raise ValueError(
                f"`context_parallel_size={group.size()}` splits the input of repeated layers: {error}"
            ) from error
        return TokenRegion(module, layers, group, asked, *shared)

    def _blocks(self, report: ParallelReport | None) -> tuple[dist.ProcessGroup, str] | None:
        """Tensor ranks that share out the tokens of a context rank, and the layer where they begin to."""
        for row in report.rows if report is not None and report.sequence_parallel else ():
            if row.style == SEQUENCE_SPLIT:
                return self._mesh.group("tensor_parallel"), row.name
        return None

    def _layer_split(self) -> LayerSplit:
        asked, steps = self._options, self._engine_options
        given = asked.tensor_plan, steps.sequence_parallel, asked.experts, asked.expert_parts, asked.expert_dispatch
        alone = self._mesh.layout.data * self._mesh.layout.context == 1 and not steps.sequence_parallel
        per_replica = alone or steps.expert_balance is not None
        by_views = not (asked.compile_layers or asked.activations.runs_tokens)
        return LayerSplit(self._mesh, self._precision, *given, asked.expert_plan, per_replica, by_views)

    def _cut(self, module: pl.LightningModule, streams: SegmentStreams, tensor_state: TensorState) -> Stage | None:
        earlier = Stage.of(module)
        mesh = self._mesh
        if mesh.layout.pipeline == 1:
            if earlier is not None:
                raise RuntimeError(already_cut(earlier, 1))
            return None
        schedule = self._engine_options.make_schedule(mesh.layout.pipeline, 1, forward_only=True)
        if earlier is not None:
            owners = tuple(schedule.owner(virtual)[0] for virtual in range(schedule.virtual_stages))
            if earlier.partition.owners != owners or earlier.stage != mesh.stage:
                raise RuntimeError(already_cut(earlier, mesh.layout.pipeline))
            earlier.cursor.use_streams(streams)
            return earlier
        self._lift_compilation(module)
        partition = make_partition(
            module,
            schedule,
            pipeline_layers=self._options.pipeline_layers,
            pipeline_split=self._options.pipeline_split,
            placement=self._options.pipeline_placement,
            stage_speeds=self._options.stage_speeds,
            whole_shapes={name: entry.spec.global_shape for name, entry in tensor_state.table.items()},
            hooks_write=trainer_of(module) is not None and reads_weights(module, callbacks_of(module.trainer)),
        )
        presence = Presence.of_stage(module, partition, mesh.stage, tensor_state.table, mesh.coordinates.tensor)
        return Stage(module, partition, presence, self._device, streams)

    def _lift_compilation(self, module: pl.LightningModule) -> None:
        """Let stages get between the layers of a module that the user has compiled."""
        options = self._options
        try:
            check_compile(True, self._engine_options.schedule, options.activation_recompute)
            compiles, then = True, "each of its layers is compiled by itself"
        except ValueError as reason:
            compiles, then = False, f"runs as it was written: {reason}"
        trunk = find_trunk(module, options.pipeline_layers)
        lifted = lift_compilation(module, trunk, compiles=compiles)
        for name in lifted:
            rank_zero_info(f"`{name or type(module).__name__}` is compiled; under a pipeline {then}.")

    def _check_own_split(self) -> None:
        check_own_split(
            pipeline_parallel_size=(self._mesh.layout.pipeline, 1),
            micro_batch_size=(self._engine_options.micro_batch_size, "auto"),
            tensor_parallel_plan=(self._options.tensor_plan, "auto"),
            sequence_parallel=(self._engine_options.sequence_parallel, False),
            activation_recompute=(self._options.activation_recompute, None),
            precision=(self._precision.precision, str(self._precision.precision).replace("fp8", "bf16")),
        )

    def _agree_on_own_split(self, module: pl.LightningModule) -> None:
        sizes = {"data_parallel": self._mesh.layout.data, "tensor_parallel": self._mesh.layout.tensor}
        agree_on_start(module, *(self._mesh.group(axis) if size > 1 else None for axis, size in sizes.items()))

    def _all_holders(self, presence: Presence, tensor_state: TensorState) -> list[Holders]:
        """Every combination of holders in the world besides one stage's own: equal on all ranks."""
        sets = presence.shared_stage_sets()
        holders = [Holders(stages, False) for stages in sets]
        holders += [Holders(stages, False, True) for stages in presence.shared_stage_sets(of_experts=True)]
        if tensor_state.sums_gradients:
            singles = [(index,) for index in range(self._mesh.layout.pipeline)]
            holders += [Holders(stages, True) for stages in (*sets, *singles)]
        return holders
