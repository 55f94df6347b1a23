"""``MegatronStrategy``: Lightning's hooks mapped onto the engine. No mathematics lives here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoints.state.pretrained import start_from
from lightning_megatron.checkpoints.state.stored import GroupNames, parameter_names
from lightning_megatron.data_parallel.buckets.holders import OptimizerSharding, check_sharding
from lightning_megatron.data_parallel.model_gradients import GradientOptions
from lightning_megatron.data_parallel.step_guard import NonFinite
from lightning_megatron.mesh.random_streams import SegmentStreams
from lightning_megatron.pipeline.cut.partition import Partition
from lightning_megatron.pipeline.forwards.compiled import CompileOptions, check_compile
from lightning_megatron.pipeline.forwards.recompute import Recompute, check_recompute
from lightning_megatron.pipeline.schedules.instructions import Placement
from lightning_megatron.pipeline.schedules.simulation import Timeline
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.planner.topology import Placement as TopologyPlacement
from lightning_megatron.planner.topology import Topology
from lightning_megatron.strategy import checks
from lightning_megatron.strategy.callbacks.layer_profile import insert_profile
from lightning_megatron.strategy.layout_request import Choice, check_layout
from lightning_megatron.strategy.lightning import trainer_access as lightning_state
from lightning_megatron.strategy.logs.metrics import MetricRouter
from lightning_megatron.strategy.logs.replay import LogReplay
from lightning_megatron.strategy.logs.step_logs import StepResult
from lightning_megatron.strategy.optimization_strategy import insert_gradient_norm
from lightning_megatron.strategy.planned_strategy import PlannedStrategy
from lightning_megatron.strategy.step.assembly import Assembler, ModuleOptions
from lightning_megatron.strategy.step.scheduled import EngineOptions, LossWeight

if TYPE_CHECKING:
    from lightning_megatron.parallelize import ParallelReport
    from lightning_megatron.tools.rehearsal import Rehearsal

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class MegatronStrategy(PlannedStrategy):
    """Trains an ordinary LightningModule with pipeline and data parallelism.

    ``Trainer(strategy=MegatronStrategy(pipeline_parallel_size=2), devices=4)`` puts the module on a grid of 2
    pipeline stages × 2 data-parallel replicas. The module's layers are cut at their calls; losses, gradients and
    weights are those of one process (schedule: SC21, arXiv 2104.04473).

    Args:
        pipeline_parallel_size: stages that share the layers.
        data_parallel_size: replicas that share each global batch; ``"auto"`` takes the rest of the devices.
        tensor_parallel_size: ranks that share each layer's matrices.
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
        compile_layers: compile each layer of the trunk with ``torch.compile``, once for all of them; a dict gives its
            arguments, such as ``{"mode": "max-autotune"}``.
        record_timeline: note when each computation of a training step starts and ends; see ``measured_timeline``.
        micro_batch_loss_weight: weight of a micro-batch in the step's loss, as a function of the micro-batch; by
            default its number of samples. Return the number of unpadded tokens to make a token mean over padded
            batches exact.
        variable_shapes: send shapes with every activation, for steps that cut or pad by a batch's content.
        optimizer_sharding: share the optimizer's work and state out over the replicas: each updates its part of the
            weights. ``{"shard": n}`` does so among n neighbouring replicas (those of a node) and repeats it in every
            other n. ``{"elementwise": False}`` declares that the optimizer needs whole parameters, which a trial finds
            out otherwise. ``False`` keeps the whole state on every replica.
        overlap_parameter_gather: let updated weights travel while the next step begins; each layer waits for its own.
            Does nothing where a hook of the module or of a callback may look at weights in between.
        gradient_reduce_dtype: dtype in which gradients are summed over replicas, such as ``torch.bfloat16``; by
            default that of the main gradients: float32, or float64 for parameters of that.
        nonfinite: what to do about a loss or gradient that is NaN or infinite: ``"raise"`` an error that names where
            it began, or ``"skip"`` the update, on every rank; by default nothing, as in one process.
        log_gradient_norm: log the global norm of the gradients before clipping as ``grad_norm``.
        bucket_size_mb: size of a gradient bucket in MiB.
        process_group_backend: ``"gloo"`` or ``"nccl"``; by default what fits the device.
        timeout: of collectives.
        hang_timeout: once a rank has waited for others this long, the rank that takes no part is named, and all end.
            Choose it longer than the longest step, and than anything that one rank does alone; ``None``: never.
        accelerator: see Lightning.
        parallel_devices: see Lightning.
        cluster_environment: see Lightning.
        initial_weights: Hugging Face model folder, ``.safetensors``, ``.ckpt`` or checkpoint directory to start from;
            every rank reads its own part. A checkpoint given to ``fit`` comes after it.
        checkpoint_io: see Lightning; by default ``MegatronCheckpointIO``.
        precision_plugin: see Lightning.
        layout: ``"auto"`` lets the planner choose sizes, schedule, micro-batch, recomputation and sharding when
            training starts, for the module's shape, the loader's batch and the devices; see ``docs/planning.md``.
        layout_options: facts that cannot be detected (``batch_size`` per replica, ``seq``, ``heads``, ``shape``,
            ``cluster``), and limits of the planner's search, such as ``{"tensor": 2}``.
        topology: islands of the cluster; processes are numbered so that the least traffic crosses slow links.

    Raises:
        ValueError: an argument is out of range, or sizes do not fit the number of devices.
    """

    def __init__(
        self,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int = 1,
        *,
        tensor_parallel_plan: str | Mapping[str, str] = "auto",
        sequence_parallel: bool = False,
        micro_batch_size: int | str = "auto",
        evaluation_micro_batch_size: int | str = "auto",
        pipeline_schedule: str | Callable[..., Any] = "1f1b",
        pipeline_schedule_options: Mapping[str, Any] | None = None,
        virtual_pipeline_parallel_size: int | None = None,
        pipeline_layers: str = "auto",
        pipeline_split: str | Sequence[int] = "auto",
        pipeline_placement: Mapping[str, str] | None = None,
        activation_recompute: Recompute = None,
        compile_layers: CompileOptions = False,
        micro_batch_loss_weight: LossWeight | None = None,
        variable_shapes: bool = False,
        record_timeline: bool = False,
        optimizer_sharding: OptimizerSharding = True,
        overlap_parameter_gather: bool = False,
        gradient_reduce_dtype: torch.dtype | None = None,
        nonfinite: NonFinite = None,
        log_gradient_norm: bool = False,
        bucket_size_mb: float = 25.0,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _DEFAULT_TIMEOUT,
        hang_timeout: timedelta | None = timedelta(minutes=20),
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        initial_weights: Any | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        layout: str | None = None,
        layout_options: Mapping[str, Any] | None = None,
        topology: Topology | TopologyPlacement | None = None,
    ) -> None:
        checks.check_sizes(pipeline_parallel_size, data_parallel_size, tensor_parallel_size)
        checks.check_tensor_options(tensor_parallel_size, tensor_parallel_plan, sequence_parallel)
        checks.check_options(
            micro_batch_size=micro_batch_size,
            evaluation_micro_batch_size=evaluation_micro_batch_size,
            pipeline_schedule=pipeline_schedule,
            pipeline_schedule_options=pipeline_schedule_options,
            virtual_pipeline_parallel_size=virtual_pipeline_parallel_size,
            pipeline_split="auto" if pipeline_split == "profile" else pipeline_split,
            pipeline_parallel_size=pipeline_parallel_size,
            bucket_size_mb=bucket_size_mb,
            micro_batch_loss_weight=micro_batch_loss_weight,
        )
        check_recompute(activation_recompute)
        check_compile(compile_layers, pipeline_schedule, activation_recompute)
        check_sharding(optimizer_sharding)
        checks.check_gradient_options(gradient_reduce_dtype, nonfinite)
        checks.check_overlap(overlap_parameter_gather, optimizer_sharding, compile_layers)
        self._profiles = pipeline_split == "profile"
        self._module_options = ModuleOptions(
            pipeline_layers=pipeline_layers,
            pipeline_split="auto" if self._profiles else pipeline_split,
            pipeline_placement=pipeline_placement,
            activation_recompute=activation_recompute,
            compile_layers=compile_layers,
            tensor_plan=tensor_parallel_plan,
        )
        self._engine_options = EngineOptions(
            micro_batch_size=micro_batch_size,
            evaluation_micro_batch_size=evaluation_micro_batch_size,
            schedule=pipeline_schedule,
            chunks=virtual_pipeline_parallel_size,
            schedule_options=dict(pipeline_schedule_options or {}),
            loss_weight=micro_batch_loss_weight,
            variable_shapes=variable_shapes,
            record_timeline=record_timeline or self._profiles,
            sequence_parallel=sequence_parallel,
            gradients=GradientOptions(
                sharding=optimizer_sharding,
                bucket_bytes=int(bucket_size_mb * 1024 * 1024),
                reduce_dtype=gradient_reduce_dtype,
                inspect=nonfinite is not None,
                overlap_gather=overlap_parameter_gather,
            ),
        )
        chosen = {
            "pipeline_parallel_size": (pipeline_parallel_size, 1),
            "data_parallel_size": (data_parallel_size, "auto"),
            "tensor_parallel_size": (tensor_parallel_size, 1),
            "sequence_parallel": (sequence_parallel, False),
            "micro_batch_size": (micro_batch_size, "auto"),
            "pipeline_schedule": (pipeline_schedule, "1f1b"),
            "virtual_pipeline_parallel_size": (virtual_pipeline_parallel_size, None),
            "activation_recompute": (activation_recompute, None),
        }
        given = {name: value for name, (value, default) in chosen.items() if value != default}
        self._choice = Choice(check_layout(layout, given), dict(layout_options or {}), topology)
        self._nonfinite = nonfinite
        self._guard = None
        self._logs_gradient_norm = log_gradient_norm
        placement = self._engine_options.schedule_shape.placement
        sizes = {
            "tensor": tensor_parallel_size,
            "data": data_parallel_size,
            "pipeline": pipeline_parallel_size,
            "last_stage_first": placement is Placement.LOOP,
        }
        super().__init__(
            sizes,
            process_group_backend,
            timeout,
            hang_timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._assembled = None
        self._metrics: MetricRouter | None = None
        self._initial_weights = initial_weights
        self._reduce_gradients = True
        self._scheduled = False
        self._unreplayed: StepResult | None = None
        self._replay = LogReplay()
        self._optimizer_names: list[GroupNames] = []

    def setup(self, trainer: pl.Trainer) -> None:
        """Cut the module, make the ranks alike, and set up gradients and optimizers."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        checks.check_run(trainer, module, self._sizes["pipeline"], self._engine_options.micro_batch_size)
        lightning_state.insert_failure_callback(trainer, self._report)
        if self._profiles:
            insert_profile(trainer)
        if self._logs_gradient_norm:
            insert_gradient_norm(trainer)
        if self._assembled is None or self._assembled.module is not module:
            self._assemble(module)
        else:
            self.model_to_device()
        assert self._assembled is not None
        lightning_state.show_whole_summary(trainer, self._logical_view)
        if self._metrics is not None:
            self._metrics.attach(module)
        module.__dict__["log"] = self._log
        self._hold_hooks(module, lightning_state.callbacks_of(trainer))
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._prepare_gradients(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _assemble(self, module: pl.LightningModule) -> None:
        assembler = Assembler(
            self.mesh,
            self.root_device,
            self.precision_plugin,
            self._module_options,
            self._with_precision(self._engine_options),
        )
        self._assembled = assembler.assemble(module)
        self.model = self._assembled.module
        path = start_from(module, self._initial_weights)
        if path is not None:
            self.load_initial_weights(path)
        layout = self.mesh.layout
        self._metrics = None
        if layout.pipeline * layout.tensor > 1 or self._engine_options.micro_batch_size != "auto":
            self._metrics = MetricRouter(self.mesh, self.root_device, lambda: self._engine.recorder)

    @property
    def _streams(self) -> SegmentStreams | None:
        return self._assembled.streams if self._assembled is not None else None

    def _layout_details(self) -> dict[str, Any]:
        options = self._engine_options
        schedule = options.schedule if isinstance(options.schedule, str) else "custom"
        return {"schedule": schedule, "chunks": options.chunks, "sequence_parallel": options.sequence_parallel}

    @property
    def parallel_report(self) -> ParallelReport | None:
        """The tensor-parallel plan; ``None`` before ``setup`` and with one tensor-parallel rank."""
        return self._assembled.report if self._assembled is not None else None

    def model_to_device(self) -> None:
        """Move this rank's part of the module to its device."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build tensors on the CPU (or nowhere, with ``empty_init``): the stage moves to its device once it is cut."""
        device = torch.device("meta" if empty_init else "cpu")
        with device, self.precision_plugin.tensor_init_context():
            yield

    def rehearse(
        self, module: pl.LightningModule | Callable[[], Any], batch: Any = None, *, world_size: int, rank: int = 0,
        devices_per_node: int = 8, **trainer: Any,
    ) -> Rehearsal:  # fmt: skip
        """Build and run one step as ``rank`` of ``world_size`` would, in this process and without memory for weights.

        Args:
            module: the module, or a function that makes it; used up by the rehearsal.
            batch: what one replica's loader would give; by default the first batch of the module's own.
            world_size: ranks of the launch.
            rank: which of them to be.
            devices_per_node: ranks on each node.
            trainer: arguments of the Trainer that matter to a step, such as ``gradient_clip_val``.

        Returns:
            What that rank holds, does and sends; see :func:`lightning_megatron.tools.rehearsal.rehearse`.
        """
        from lightning_megatron.tools.rehearsal import rehearse

        return rehearse(
            self, module, batch, world_size=world_size, rank=rank, devices_per_node=devices_per_node, **trainer
        )

    def explain(self, module: torch.nn.Module | None = None) -> str:
        """The tensor-parallel plan as a table: each module, its style, shapes, and collectives.

        Args:
            module: whole, also on the meta device, to see the plan that it would get; needs no processes. By default
                the module in training.

        Raises:
            RuntimeError: no module was given, and none has been split yet.
            ValueError: there is no plan for ``module``.
        """
        if module is not None:
            from lightning_megatron.parallelize import explain

            plan, sequence = self._module_options.tensor_plan, self._engine_options.sequence_parallel
            return explain(module, self._sizes["tensor"], plan, sequence).explain()
        if self.parallel_report is None:
            raise RuntimeError(
                "there is no plan yet: it is made when a Trainer starts with `tensor_parallel_size` above 1. Give a "
                "module, `strategy.explain(module)`, to see its plan now."
            )
        return self.parallel_report.explain()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Run ``configure_optimizers`` in sight of the whole module, then drop what other stages own."""
        assert self.lightning_module is not None
        self._reset_optimizers_and_schedulers()
        with self._whole_view():
            super().setup_optimizers(trainer)
            names = parameter_names(self.lightning_module)
            checks.check_optimizers(self.optimizers, self.mesh.layout.pipeline)
            self._engine.remember_copies(
                p for o in self.optimizers for group in o.param_groups for p in group["params"]
            )
        self._optimizer_names = [lightning_state.localize_optimizer(opt, names) for opt in self.optimizers]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``training_step`` on every micro-batch, forward and backward; returns the mean loss."""
        assert self.lightning_module is not None
        module, batch = self.lightning_module, args[0] if args else next(iter(kwargs.values()))
        step = functools.partial(self._call_step, module.training_step, args, kwargs)
        gradients = self._engine.model_gradients
        with self._naming_failures(), self.precision_plugin.train_step_context(), gradients.training_step():
            manual = not module.automatic_optimization
            self._scheduled = not manual and not self._engine.is_plain(batch)
            if not self._scheduled:
                output, self._unreplayed = self._engine.record_plain(step, batch)
                if manual or output is None:
                    self._replay_plain()
                return output
            result = self._engine.train(
                step,
                batch,
                accumulate=module.trainer.accumulate_grad_batches,
                fresh=self._starts_accumulation,
                reduce=self._reduce_gradients,
                scale=self._scale,
            )
            self._replay(module, result)
            return lightning_state.training_output(result)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``validation_step`` through all stages."""
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``test_step`` through all stages."""
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``predict_step``; every rank returns its replica's predictions, in order."""
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _evaluate(self, name: str, context: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.lightning_module is not None
        batch = args[0] if args else next(iter(kwargs.values()))
        step = functools.partial(self._call_step, getattr(self.lightning_module, name), args, kwargs)
        with self._naming_failures(), context():
            self._engine.model_gradients.finish_gather()
            result: StepResult = self._engine.evaluate(step, batch, name)
            self._replay(self.lightning_module, result)
            return result.output

    @staticmethod
    def _call_step(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> Any:
        if args:
            return step(batch, *args[1:], **kwargs)
        first = next(iter(kwargs))
        return step(**{**kwargs, first: batch})

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Publish the gradients of a scheduled step, or run autograd for a plain one."""
        assert self.lightning_module is not None
        module, precision, engine = self.lightning_module, self.precision_plugin, self._engine
        closure_loss = precision.pre_backward(closure_loss, module)
        with self._naming_failures():
            if not self._scheduled:
                engine.note_plain_loss(closure_loss)
                engine.begin_plain_gradients(
                    reduce=self._reduce_gradients, fresh=self._starts_fresh(), scale=self._scale
                )
                scaled = closure_loss if self._scale == 1.0 else closure_loss * self._scale
                precision.backward(scaled, module, optimizer, *args, **kwargs)
            engine.finish_gradients()
            self._check_step(self._reduce_gradients)
            if not self._scheduled and module.automatic_optimization:
                self._replay_plain()
        return precision.post_backward(closure_loss, module)

    def _replay_plain(self) -> None:
        """Replay the logs of a plain step: after its backward, so that the replicas' values could travel meanwhile."""
        assert self.lightning_module is not None
        result, self._unreplayed = self._unreplayed, None
        if result is None:
            return
        hook = self.lightning_module._current_fx_name
        self.lightning_module._current_fx_name = "training_step"
        with self.precision_plugin.train_step_context():
            self._replay(self.lightning_module, self._engine.finish_plain(result))
        self.lightning_module._current_fx_name = hook

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate without summing over replicas."""
        self._reduce_gradients = False
        try:
            yield
        finally:
            self._reduce_gradients = True

    @property
    def partition(self) -> Partition | None:
        """Which stage owns what; ``None`` with one stage, and before ``setup``."""
        stage = Stage.of(self.lightning_module) if self.lightning_module is not None else None
        return None if stage is None else stage.partition

    @property
    def records_timeline(self) -> bool:
        """Whether ``record_timeline=True`` was given."""
        return self._engine_options.record_timeline

    def measured_timeline(self) -> Timeline | None:
        """When each computation of the latest training step started and ended on every stage of this pipeline.

        Collective over the pipeline. Draw it with :mod:`lightning_megatron.pipeline.timeline`, beside
        ``simulate(schedule, measured_costs(timeline))``.

        Returns:
            Times in seconds; ``None`` before the first step, and with one stage.

        Raises:
            RuntimeError: the strategy was made without ``record_timeline=True``.
        """
        return self._engine.measured_timeline()

    def teardown(self) -> None:
        """Release what belongs to a run; the module stays cut, so that another ``fit`` or ``test`` can follow."""
        assert self.cluster_environment is not None
        if self._watch is not None:
            self._watch.stop()
        if self._assembled is not None:
            self._engine.close()
        self._release_hooks()
        if self._metrics is not None:
            self._metrics.detach()
        if self.lightning_module is not None:
            self.lightning_module.__dict__.pop("log", None)
        super().teardown()
