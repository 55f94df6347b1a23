"""The arguments of ``MegatronStrategy``: what they mean, which go together, and what each part of a run takes of them.

They are fixed when the strategy is made and checked there, so that a value that cannot be meant is refused before any
process starts. Only the planner changes them, as a whole: :meth:`Options.with_recipe` makes new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch

from lightning_megatron.context_parallel.region import check_options as check_context_options
from lightning_megatron.data_parallel.buckets.holders import OptimizerSharding, check_sharding
from lightning_megatron.data_parallel.gradient_options import GradientOptions
from lightning_megatron.data_parallel.offload_request import OffloadOptions, check_offload, offload_of
from lightning_megatron.data_parallel.step_guard import NonFinite
from lightning_megatron.data_parallel.windows.sharded_weights import WeightSharding, sharded_weights_of
from lightning_megatron.pipeline.forwards.compiled import CompileOptions, check_compile
from lightning_megatron.pipeline.forwards.recompute import Recompute, check_recompute
from lightning_megatron.pipeline.schedules.instructions import Placement
from lightning_megatron.planner.topology import RankPlacement, Topology
from lightning_megatron.strategy.activations.install import ActivationOffload, ActivationOptions, MlpChunks
from lightning_megatron.strategy.assembly.module_options import ModuleOptions
from lightning_megatron.strategy.generation.streaming import Streams, streaming_of
from lightning_megatron.strategy.options import checks
from lightning_megatron.strategy.options.balance_asked import Balance, ExpertBalance
from lightning_megatron.strategy.options.choices import EngineOptions, LossWeight
from lightning_megatron.strategy.options.context_checks import check_context
from lightning_megatron.strategy.options.expert_checks import check_experts
from lightning_megatron.strategy.options.left_to_planner import check_layout
from lightning_megatron.strategy.options.recipes import arguments_of as arguments_of
from lightning_megatron.strategy.options.together import check_activations, check_draws
from lightning_megatron.strategy.options.weight_checks import (
    check_weight_sharding,
    check_weight_streaming,
    optimizer_sharding_of,
)

if TYPE_CHECKING:
    from lightning_megatron.planner import Recipe


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to train, as the user asked for it.

    Args:
        pipeline_parallel_size: stages that share the layers.
        data_parallel_size: replicas that share each global batch; ``"auto"`` takes the rest of the devices.
        tensor_parallel_size: ranks that share each layer's matrices.
        context_parallel_size: ranks that share the tokens of each sequence.
        context_parallel_options: ``{"method": "gather", "balance": "auto"}``: how attention meets the other ranks'
            tokens, and how tokens are dealt out (by a mask, ``"zigzag"`` or ``"block"``); see
            ``docs/long_context.md``.
        expert_parallel_size: ranks of a stage (tensor × data) that share out the experts of mixtures, and send each
            other the tokens for them.
        expert_tensor_parallel_size: further ranks over each of which every expert is cut along its inner width; with
            ``expert_parallel_size`` e, e times as many ranks of a stage hold all experts.
        expert_dispatch: how tokens come to their experts: ``"all_to_all"`` sends each rank the rows for its experts,
            ``"all_gather"`` all tokens, which are fewer numbers where a token has more experts than there are ranks.
        expert_parallel_plan: what to do with which experts, where their structure (``"auto"``) does not say: pattern of
            modules -> ``"experts"``, ``"gathered"`` or ``"whole"``, pattern of parameters -> the dim that counts
            experts; see ``docs/experts.md``.
        expert_balance: ``"replica"`` says that a balancing loss, or a capacity, of all tokens is meant to be that of
            each replica's, as in DDP; else it is refused, but for Hugging Face's and this package's, which are of all
            replicas' tokens. ``"bias"`` or ``{"bias": rate}`` balances experts by their biases; see
            :class:`~lightning_megatron.callbacks.ExpertBias`. ``"loss"`` or ``{"loss": factor, "scope": "sequence"}``
            adds a balancing loss to that of ``training_step``; see ``docs/experts.md``.
        tensor_parallel_plan: how layers are split, ``{pattern: style}`` as in Hugging Face's ``base_model_tp_plan``;
            ``"auto"`` takes the model's own plan, drop-in layers, or rules that are tried against the unsplit module.
        sequence_parallel: split norms, dropout and residuals along the sequence too (arXiv 2205.05198).
        micro_batch_size: samples per micro-batch; ``"auto"`` makes about four micro-batches per stage (one with one
            stage).
        evaluation_micro_batch_size: samples per micro-batch in validation, test and prediction; ``"auto"`` runs each
            batch whole, so that the step is called once per batch, as in one process.
        pipeline_schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"``, ``"zb-h1"``, ``"zb-h2"``, ``"zb-v"``,
            ``"dualpipe-v"``, or a function of your own; see ``docs/schedules.md``.
        pipeline_schedule_options: options of the schedule: ``group_size`` of ``"interleaved"``, ``memory_limit`` of
            ``"zb-h2"``, ``placement`` (``"loop"`` or ``"vee"``) of your own.
        virtual_pipeline_parallel_size: pieces of the module per stage, for ``"interleaved"`` (2 when not given) and
            functions of your own.
        pipeline_layers: dotted name of the ``nn.ModuleList`` or ``nn.Sequential`` to cut; ``"auto"`` finds the largest.
        pipeline_split: layers per stage; ``"auto"`` balances forward FLOPs, counting embedding and head; ``"profile"``
            does the same, measures the layers in the first steps, and reports the imbalance and a more even split.
        pipeline_placement: where parts outside the layers live, e.g. ``{"model.norm": "last"}`` (first, last, all);
            what is not named is placed by reading the module's code.
        activation_recompute: which activations are computed again in backward instead of being kept: ``"full"`` (every
            layer), ``{"every": n}`` (every n-th), ``"selective"`` (the attention core of every layer), or names or
            patterns of layers or modules in them, such as ``["*.mlp"]``.
        activation_offload: layers whose activations are kept in host memory until the backward: ``"all"``, ``{"every":
            n}`` or patterns of names; or ``{"tokens": 0.4}``: those of that share of the tokens, the others' computed
            again, and never attention; ``"auto"``: as many as fit. See ``docs/long_context.md``.
        compile_layers: compile each layer of the trunk with ``torch.compile``, once for all of them; a dict gives its
            arguments, such as ``{"mode": "max-autotune"}``.
        record_timeline: note when each computation of a training step starts and ends; see ``measured_timeline``.
        micro_batch_loss_weight: weight of a micro-batch in the step's loss, as a function of the micro-batch; by
            default its number of samples. Return the number of unpadded tokens to make a token mean over padded
            batches exact.
        whole_batch_loss: whether code outside the layers sees each batch whole. ``"auto"`` tries the step on parts of a
            batch and does what makes it that of one process: weighs micro-batches by samples or by counted targets,
            adds them up, or runs only the layers in micro-batches, where these compute sample by sample, and the code
            around them on the whole batch; and weighs the losses of replicas, or warns of what is each replica's own.
            ``True`` says that the loss is one of the whole batch; ``False`` takes the mean of the losses of
            micro-batches and replicas as it is.
        random_streams: ``"torch"`` draws from torch's generators, by stage and micro-batch; ``"layout"`` from counters
            over the global batch, so that dropout and noise are those of one process. See ``docs/random_numbers.md``.
        variable_shapes: send shapes with every activation, for steps that cut or pad by a batch's content.
        optimizer_sharding: share the optimizer's work and state out over the replicas: each updates its part of the
            weights. ``{"shard": n}`` does so among n neighbouring replicas (those of a node) and repeats it in every
            other n. ``{"elementwise": False}`` declares that the optimizer needs whole parameters, which a trial finds
            out otherwise. ``False`` keeps the whole state on every replica.
        weight_sharding: share weights out over the replicas, too: a rank keeps its part of each layer, embedding and
            head, trained or frozen, and they are whole while they run; or ``{"shard": n, "free": "auto" | "layer" |
            "step", "sum": "micro_batch" | "step"}``. See ``docs/memory.md``.
        weight_streaming: in evaluation and prediction, ``"cpu"`` keeps weights in host memory, and ``"disk"`` in files,
            until their layer runs; ``{"from": "disk", "ahead": 2}`` reads two ahead. See ``docs/generation.md``.
        optimizer_offload: step the optimizer in host memory, which holds its weights and state; or ``{"to": FOLDER,
            "keep": 0.5, "interleave": k}``: in files, half of it on the device. See ``docs/memory.md``.
        overlap_parameter_gather: let updated weights travel while the next step begins; each layer waits for its own.
            Does nothing where a hook of the module or of a callback may look at weights in between.
        loss_chunks: compute logits in this many pieces of the tokens, in the loss and again in its backward, so that
            they are never whole; ``"auto"`` makes pieces of at most 64 MiB. See ``docs/long_context.md``.
        mlp_chunks: run modules in layers that treat every token alike, such as MLPs, in this many pieces of the tokens,
            and again in the backward; or ``{"*.mlp": 8}``: those of these names. See ``docs/long_context.md``.
        gradient_reduce_dtype: dtype in which gradients are summed over replicas, such as ``torch.bfloat16``; by
            default that of the main gradients: float32, or float64 for parameters of that.
        nonfinite: what to do about a loss or gradient that is NaN or infinite: ``"raise"`` an error that names where
            it began, or ``"skip"`` the update, on every rank; by default nothing, as in one process.
        log_gradient_norm: log the global norm of the gradients before clipping as ``grad_norm``.
        log_expert_load: log the rows of the busiest expert over the mean, as ``expert_load``; see
            :class:`~lightning_megatron.callbacks.ExpertLoad`.
        bucket_size_mb: size of a gradient bucket in MiB.
        process_group_backend: ``"gloo"`` or ``"nccl"``; by default what fits the device.
        timeout: of collectives.
        hang_timeout: once a rank has waited for others this long, the rank that takes no part is named, and all end.
            Choose it longer than the longest step, and than anything that one rank does alone; ``None``: never.
        initial_weights: Hugging Face model folder, ``.safetensors``, ``.ckpt`` or checkpoint directory to start from;
            every rank reads its own part. A checkpoint given to ``fit`` comes after it.
        layout: ``"auto"`` lets the planner choose sizes, schedule, micro-batch, recomputation and sharding when
            training starts, for the module's shape, the loader's batch and the devices; see ``docs/planning.md``.
        layout_options: facts that cannot be detected (``batch_size`` per replica, ``seq``, ``heads``, ``shape``,
            ``cluster``), and limits of the planner's search, such as ``{"tensor": 2}``.
        topology: islands of the cluster; processes are numbered so that the least traffic crosses slow links.

    Raises:
        ValueError: an argument is out of range, or arguments contradict each other; the message names them.
    """

    pipeline_parallel_size: int = 1
    data_parallel_size: int | str = "auto"
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    context_parallel_options: Mapping[str, Any] | None = None
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    expert_dispatch: str = "all_to_all"
    expert_parallel_plan: str | Mapping[str, str | int] = "auto"
    expert_balance: ExpertBalance = None
    tensor_parallel_plan: str | Mapping[str, str] = "auto"
    sequence_parallel: bool = False
    micro_batch_size: int | str = "auto"
    evaluation_micro_batch_size: int | str = "auto"
    pipeline_schedule: str | Callable[..., Any] = "1f1b"
    pipeline_schedule_options: Mapping[str, Any] | None = None
    virtual_pipeline_parallel_size: int | None = None
    pipeline_layers: str = "auto"
    pipeline_split: str | Sequence[int] = "auto"
    pipeline_placement: Mapping[str, str] | None = None
    activation_recompute: Recompute = None
    activation_offload: ActivationOffload = None
    compile_layers: CompileOptions = False
    micro_batch_loss_weight: LossWeight | None = None
    whole_batch_loss: bool | str = "auto"
    random_streams: str = "torch"
    variable_shapes: bool = False
    record_timeline: bool = False
    optimizer_sharding: OptimizerSharding = True
    weight_sharding: WeightSharding = False
    weight_streaming: Streams = None
    optimizer_offload: OffloadOptions = False
    overlap_parameter_gather: bool = False
    loss_chunks: int | str | None = None
    mlp_chunks: MlpChunks = None
    gradient_reduce_dtype: torch.dtype | None = None
    nonfinite: NonFinite = None
    log_gradient_norm: bool = False
    log_expert_load: bool = False
    bucket_size_mb: float = 25.0
    process_group_backend: str | None = None
    timeout: timedelta | None = timedelta(minutes=30)
    hang_timeout: timedelta | None = timedelta(minutes=20)
    initial_weights: Any | None = None
    layout: str | None = None
    layout_options: Mapping[str, Any] | None = None
    topology: Topology | RankPlacement | None = None

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Self:
        """The options among the arguments of a call, by name."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def __post_init__(self) -> None:
        checks.check_sizes(self.pipeline_parallel_size, self.data_parallel_size, self.tensor_parallel_size)
        checks.check_tensor_options(self.tensor_parallel_size, self.tensor_parallel_plan, self.sequence_parallel)
        checks.check_options(
            micro_batch_size=self.micro_batch_size,
            evaluation_micro_batch_size=self.evaluation_micro_batch_size,
            pipeline_schedule=self.pipeline_schedule,
            pipeline_schedule_options=self.pipeline_schedule_options,
            virtual_pipeline_parallel_size=self.virtual_pipeline_parallel_size,
            pipeline_split="auto" if self.profiles_layers else self.pipeline_split,
            pipeline_parallel_size=self.pipeline_parallel_size,
            bucket_size_mb=self.bucket_size_mb,
            micro_batch_loss_weight=self.micro_batch_loss_weight,
            whole_batch_loss=self.whole_batch_loss,
        )
        checks.check_times(self.timeout, self.hang_timeout)
        checks.check_placement(self.pipeline_placement, self.topology)
        check_recompute(self.activation_recompute)
        check_compile(self.compile_layers, self.pipeline_schedule, self.activation_recompute)
        check_sharding(self.optimizer_sharding)
        checks.check_gradient_options(self.gradient_reduce_dtype, self.nonfinite)
        checks.check_loss_chunks(self.loss_chunks, self.weight_sharding)
        checks.check_overlap(self.overlap_parameter_gather, self.optimizer_sharding, self.compile_layers)
        check_context(self)
        check_experts(self)
        check_weight_sharding(self)
        check_weight_streaming(self)
        check_offload(self)
        check_draws(self)
        check_activations(self)
        check_layout(self)

    @property
    def asks_the_planner(self) -> bool:
        """Whether the layout, or the numbering of the processes, is left to the planner."""
        return self.layout == "auto" or self.topology is not None

    @property
    def profiles_layers(self) -> bool:
        """Whether the layers are timed in the first steps."""
        return self.pipeline_split == "profile"

    @property
    def expert_sizes(self) -> tuple[int, int]:
        """Ranks that share out experts, and ranks that share out each of them."""
        return self.expert_parallel_size, self.expert_tensor_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Ranks of a stage that hold all experts together."""
        return self.expert_parallel_size * self.expert_tensor_parallel_size

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the mesh's axes, as :func:`~lightning_megatron.mesh.layout.resolve_layout` takes them."""
        return {
            "tensor": self.tensor_parallel_size,
            "context": self.context_parallel_size,
            "data": self.data_parallel_size,
            "pipeline": self.pipeline_parallel_size,
            "last_stage_first": self.engine().schedule_shape.placement is Placement.LOOP,
        }

    def module(self, stage_speeds: tuple[float, ...] | None = None) -> ModuleOptions:
        """How to divide the module over stages and tensor-parallel ranks.

        Args:
            stage_speeds: relative speed of each stage's devices, where they differ.
        """
        return ModuleOptions(
            pipeline_layers=self.pipeline_layers,
            pipeline_split="auto" if self.profiles_layers else self.pipeline_split,
            pipeline_placement=self.pipeline_placement,
            activation_recompute=self.activation_recompute,
            compile_layers=self.compile_layers,
            tensor_plan=self.tensor_parallel_plan,
            context=check_context_options(self.context_parallel_size, self.context_parallel_options),
            loss_chunks=self.loss_chunks,
            activations=ActivationOptions.of(self.activation_offload, self.mlp_chunks),
            experts=self.expert_ranks,
            expert_parts=self.expert_tensor_parallel_size,
            expert_dispatch=self.expert_dispatch,
            expert_plan=self.expert_parallel_plan,
            stage_speeds=stage_speeds,
            streaming=streaming_of(self.weight_streaming),
        )

    def engine(self, layer_dtype: torch.dtype | None = None) -> EngineOptions:
        """How to run a step.

        Args:
            layer_dtype: 16-bit dtype in which layers hold their weights; ``None`` for the parameters' own.
        """
        return EngineOptions(
            micro_batch_size=self.micro_batch_size,
            evaluation_micro_batch_size=self.evaluation_micro_batch_size,
            schedule=self.pipeline_schedule,
            chunks=self.virtual_pipeline_parallel_size,
            schedule_options=dict(self.pipeline_schedule_options or {}),
            loss_weight=self.micro_batch_loss_weight,
            whole_batch_loss=self.whole_batch_loss,
            variable_shapes=self.variable_shapes,
            record_timeline=self.record_timeline or self.profiles_layers,
            sequence_parallel=self.sequence_parallel,
            gradients=GradientOptions(
                sharding=optimizer_sharding_of(self.optimizer_sharding, self.weight_sharding),
                bucket_bytes=int(self.bucket_size_mb * 1024 * 1024),
                layer_dtype=layer_dtype,
                reduce_dtype=self.gradient_reduce_dtype,
                inspect=self.nonfinite is not None,
                overlap_gather=self.overlap_parameter_gather,
                experts=self.expert_ranks,
                weights=sharded_weights_of(self.weight_sharding),
                offload=offload_of(self.optimizer_offload),
            ),
            expert_balance=self.balance_of,
            added_balance=Balance.asked(self.expert_balance).added,
            random_streams=self.random_streams,
            pipeline_layers=self.pipeline_layers,
        )

    @property
    def balance_of(self) -> str | None:
        """The replicas whose balancing losses are meant: ``"replica"`` for its own; ``None`` for the whole batch's."""
        return "replica" if Balance.asked(self.expert_balance).per_replica else None

    @property
    def details(self) -> dict[str, Any]:
        """A checkpoint's notes about the layout besides the sizes of the axes."""
        schedule = self.pipeline_schedule if isinstance(self.pipeline_schedule, str) else "custom"
        return {
            "schedule": schedule,
            "chunks": self.virtual_pipeline_parallel_size,
            "sequence_parallel": self.sequence_parallel,
        }

    def with_recipe(self, recipe: Recipe) -> Self:
        """The same options with the layout that the planner chose.

        Raises:
            ValueError: the layout cannot be combined with the other options; the message names them.
        """
        chosen = arguments_of(recipe)
        if isinstance(self.optimizer_sharding, Mapping):
            chosen["optimizer_sharding"] = self.optimizer_sharding
        return replace(
            self,
            **chosen,
            # Without sharding there is nothing to gather.
            overlap_parameter_gather=self.overlap_parameter_gather and bool(chosen["optimizer_sharding"]),
            layout=None,
            layout_options=self.layout_options if self.topology is not None else None,
        )
