"""``MegatronStrategy``: Lightning's hooks mapped onto the engine. No mathematics lives here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoints.state.pretrained import start_from
from lightning_megatron.checkpoints.state.stored import GroupNames, parameter_names
from lightning_megatron.data_parallel.buckets.holders import OptimizerSharding
from lightning_megatron.data_parallel.step_guard import NonFinite
from lightning_megatron.mesh.random_streams import SegmentStreams
from lightning_megatron.pipeline.cut.partition import Partition
from lightning_megatron.pipeline.forwards.compiled import CompileOptions
from lightning_megatron.pipeline.forwards.recompute import Recompute
from lightning_megatron.pipeline.run.links import USUAL_LINKS
from lightning_megatron.pipeline.schedules.simulation import Timeline
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.planner.topology import Placement as TopologyPlacement
from lightning_megatron.planner.topology import Topology
from lightning_megatron.strategy import checks
from lightning_megatron.strategy.callbacks.layer_profile import insert_profile
from lightning_megatron.strategy.lightning import trainer_access as lightning_state
from lightning_megatron.strategy.logs.metrics import MetricRouter
from lightning_megatron.strategy.logs.replay import LogReplay
from lightning_megatron.strategy.optimization_strategy import OptimizationStrategy, insert_gradient_norm
from lightning_megatron.strategy.options import Options, arguments_of, documents_options
from lightning_megatron.strategy.step.assembly import Assembler
from lightning_megatron.strategy.step.choices import LossWeight
from lightning_megatron.strategy.step.step import Outcome, Step

if TYPE_CHECKING:
    from lightning_megatron.parallelize import ParallelReport
    from lightning_megatron.planner import Plan, Prediction, Recipe
    from lightning_megatron.tools.rehearsal import Rehearsal

_DEFAULT_TIMEOUT = timedelta(minutes=30)


@documents_options
class MegatronStrategy(OptimizationStrategy):
    """Trains an ordinary LightningModule with pipeline and data parallelism.

    ``Trainer(strategy=MegatronStrategy(pipeline_parallel_size=2), devices=4)`` puts the module on a grid of 2
    pipeline stages × 2 data-parallel replicas. The module's layers are cut at their calls; losses, gradients and
    weights are those of one process (schedule: SC21, arXiv 2104.04473).

    Args:
        accelerator: see Lightning.
        parallel_devices: see Lightning.
        cluster_environment: see Lightning.
        checkpoint_io, precision_plugin: see Lightning; by default ``MegatronCheckpointIO`` and the Trainer's.

    Raises:
        ValueError: an argument is out of range, or sizes do not fit the number of devices.

    Attributes:
        options: the arguments; those that ``layout="auto"`` leaves to the planner are settled when training starts.
        plan: what the planner found; ``None`` before training, and where the layout was given.
    """

    plan: Plan | None = None

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
        self.options = Options.among(locals())
        self._guard = None
        self._stage_speeds: tuple[float, ...] | None = None
        super().__init__(
            self.options.sizes,
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
        self._reduce_gradients = True
        self._links = USUAL_LINKS
        self._step: Step | None = None
        self._replay = LogReplay()
        self._optimizer_names: list[GroupNames] = []

    @classmethod
    def from_plan(cls, plan: Plan | Prediction | Recipe, **arguments: Any) -> Self:
        """The strategy that runs what the planner found.

        Args:
            plan: of :func:`lightning_megatron.planner.plan` (its best layout), one of its predictions, or a recipe.
            arguments: further arguments of the strategy.

        Raises:
            ValueError: the strategy cannot run it.
        """
        from lightning_megatron.strategy.planning import recipe_of

        return cls(**{**arguments_of(recipe_of(plan)), **arguments})

    def _settle_layout(self) -> None:
        """Ask the planner for what was left to it, once."""
        if not self.options.asks_the_planner or self._numbers is not None or self.plan is not None:
            return
        from lightning_megatron.strategy.planning import settle

        assert self.lightning_module is not None
        world = self.num_nodes * self.num_processes
        settled = settle(self.options, self.lightning_module, world, self.num_processes, self.root_device)
        self.options, self.plan = settled.options, settled.plan
        self._sizes, self._numbers, self._stage_speeds = settled.options.sizes, settled.numbers, settled.stage_speeds
        if self.plan is not None:
            rank_zero_info(f"layout='auto': {self.plan.best.recipe.describe()}\n{self.plan.explanation}")

    def setup(self, trainer: pl.Trainer) -> None:
        """Cut the module, make the ranks alike, and set up gradients and optimizers."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        checks.check_run(trainer, module, self.options.pipeline_parallel_size, self.options.micro_batch_size)
        lightning_state.insert_failure_callback(trainer, self._report)
        if self.options.profiles_layers:
            insert_profile(trainer)
        if self.options.log_gradient_norm:
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
            self.options.module(self._stage_speeds),
            self.options.engine(getattr(self.precision_plugin, "layer_dtype", None), self._links),
        )
        self._assembled = assembler.assemble(module)
        self.model = self._assembled.module
        path = start_from(module, self.options.initial_weights)
        if path is not None:
            self.load_initial_weights(path)
        layout = self.mesh.layout
        self._metrics = None
        if layout.pipeline * layout.tensor > 1 or self.options.micro_batch_size != "auto":
            self._metrics = MetricRouter(self.mesh, self.root_device, self._engine.recording)

    @property
    def _streams(self) -> SegmentStreams | None:
        return self._assembled.streams if self._assembled is not None else None

    def _layout_details(self) -> dict[str, Any]:
        return self.options.details

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

            options = self.options
            return explain(
                module, options.tensor_parallel_size, options.tensor_parallel_plan, options.sequence_parallel
            ).explain()
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
        with self._logical_view(slices=False):
            super().setup_optimizers(trainer)
            names = parameter_names(self.lightning_module)
            checks.check_optimizers(self.optimizers, self.mesh.layout.pipeline)
            self._engine.note_trained(p for o in self.optimizers for group in o.param_groups for p in group["params"])
        self._optimizer_names = [lightning_state.localize_optimizer(opt, names) for opt in self.optimizers]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``training_step`` on every micro-batch, forward and backward; returns the mean loss."""
        assert self.lightning_module is not None
        module, batch = self.lightning_module, args[0] if args else next(iter(kwargs.values()))
        step = functools.partial(self._call_step, module.training_step, args, kwargs)
        engine, precision = self._engine, self.precision_plugin
        with self._naming_failures(), precision.train_step_context(), engine.model_gradients.training_step():
            self._step = engine.step(batch)
            output = self._step.forward(step, batch, self._window())
            outcome = self._step.finish()
            if outcome is not None:
                self._replay(module, outcome.logs)
            return output

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
            outcome = self._engine.evaluate(step, batch, name)
            self._replay(self.lightning_module, outcome.logs)
            return outcome.output

    @staticmethod
    def _call_step(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> Any:
        if args:
            return step(batch, *args[1:], **kwargs)
        first = next(iter(kwargs))
        return step(**{**kwargs, first: batch})

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Publish the gradients of a scheduled step, or run autograd for a plain one."""
        assert self.lightning_module is not None
        module, precision, step = self.lightning_module, self.precision_plugin, self._step
        assert step is not None
        closure_loss = precision.pre_backward(closure_loss, module)
        autograd = functools.partial(self._autograd, optimizer, args, kwargs)
        with self._naming_failures():
            step.backward(closure_loss, autograd, self._window())
            self._check_step(self._reduce_gradients)
            outcome = step.finish()
            if outcome is not None:
                self._replay_late(outcome)
        return precision.post_backward(closure_loss, module)

    def _autograd(
        self, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Tensor
    ) -> None:
        assert self.lightning_module is not None
        self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)

    def _replay_late(self, outcome: Outcome) -> None:
        """Replay the logs of a step after its backward, during which the replicas' values could travel."""
        assert self.lightning_module is not None
        hook = self.lightning_module._current_fx_name
        self.lightning_module._current_fx_name = "training_step"
        with self.precision_plugin.train_step_context():
            self._replay(self.lightning_module, outcome.logs)
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
        return self.options.record_timeline or self.options.profiles_layers

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
            lightning_state.replace_samplers(self.lightning_module.trainer)
        super().teardown()
