"""``MegatronStrategy``: Lightning's hooks, each handed on to what does the work. No mathematics lives here.

::

    options      what the user asked for              _run     one run, from ``setup`` to ``teardown``:
    _processes   ranks, mesh, collectives, failures            steps, gradients, logs, state and checkpoints
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_megatron.data_parallel.update.loss_scale import LossScale
from lightning_megatron.mesh.layout import resolve_layout
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.pipeline.cut.partition import Partition
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy import questions
from lightning_megatron.strategy.generation.lists import continue_prompts
from lightning_megatron.strategy.lightning.distributed import leaving_meta_tensors, move_optimizers
from lightning_megatron.strategy.lightning.launcher import Launcher
from lightning_megatron.strategy.lightning.precision import MegatronPrecision, megatron_precision
from lightning_megatron.strategy.lightning.restoring import restore_now
from lightning_megatron.strategy.lightning.trainer_access import is_under_way, present, seed_workers, show_device_mesh
from lightning_megatron.strategy.memory.memory_report import memory_report
from lightning_megatron.strategy.options import options as given
from lightning_megatron.strategy.options.documented import documents_options
from lightning_megatron.strategy.processes import Processes
from lightning_megatron.strategy.run import Run, report_of
from lightning_megatron.strategy.saving.adapter_folder import save_adapter
from lightning_megatron.strategy.saving.before_run import is_whole, save_before_run
from lightning_megatron.strategy.saving.checkpoint_io import MegatronCheckpointIO, megatron_checkpoint_io
from lightning_megatron.strategy.start import start_run
from lightning_megatron.strategy.world import World

if TYPE_CHECKING:
    from lightning_megatron.parallelize import ParallelReport
    from lightning_megatron.planner import Plan, Prediction, Recipe


@documents_options
class MegatronStrategy(ParallelStrategy):
    """Trains an ordinary LightningModule with pipeline, tensor, data, context and expert parallelism.

    ``Trainer(strategy=MegatronStrategy(pipeline_parallel_size=2), devices=4)`` puts the module on a grid of 2
    pipeline stages × 2 data-parallel replicas. The module's layers are cut at their calls; losses, gradients and
    weights are those of one process (schedule: SC21, arXiv 2104.04473). The arguments are described by
    :class:`~lightning_megatron.strategy.options.options.Options`, and below by ``help``.

    Raises:
        ValueError: an argument is out of range, or sizes do not fit the number of devices.

    Attributes:
        options: the arguments; those that ``layout="auto"`` leaves to the planner are settled when training starts.
        plan: what the planner found; ``None`` before training, and where the layout was given.
        context_report, loss_report, activation_report: what ran on tokens, or pieces of them, or lay in host memory.
    """

    plan: Plan | None = None
    context_report, loss_report, activation_report = map(report_of, ("tokens", "heads", "traffic"))
    records_timeline = property(lambda self: self.options.engine().record_timeline)
    generate, memory_report, measured_timeline = continue_prompts, memory_report, questions.measured_timeline
    gradient_norm, explain, rehearse = questions.gradient_norm, questions.explain, questions.rehearse
    save_adapter = save_adapter
    restore_checkpoint_after_setup = True  # this rank must know which tensors it holds; see `restoring`

    def __init__(
        self, pipeline_parallel_size: int = 1, data_parallel_size: int | str = "auto", tensor_parallel_size: int = 1, *,
        context_parallel_size: int = 1, evaluation_micro_batch_size: int | str = "auto", log_expert_load: bool = False,
        weight_sharding: given.WeightSharding = False, optimizer_sharding: given.OptimizerSharding = True,
        accelerator: Any = None, log_gradient_norm: bool = False, pipeline_layers: str = "auto",
        expert_parallel_size: int = 1, nonfinite: given.NonFinite = None, pipeline_split: str | Sequence[int] = "auto",
        expert_tensor_parallel_size: int = 1, expert_dispatch: str = "all_to_all",
        expert_parallel_plan: str | Mapping[str, str | int] = "auto",
        process_group_backend: str | None = None, gradient_reduce_dtype: torch.dtype | None = None,
        overlap_parameter_gather: bool = False, bucket_size_mb: float = 25.0, checkpoint_io: CheckpointIO | None = None,
        context_parallel_options: Mapping[str, Any] | None = None, sequence_parallel: bool = False,
        pipeline_schedule: str | Callable[..., Any] = "1f1b", virtual_pipeline_parallel_size: int | None = None,
        tensor_parallel_plan: str | Mapping[str, str] = "auto", parallel_devices: list[torch.device] | None = None,
        micro_batch_loss_weight: given.LossWeight | None = None, hang_timeout: timedelta | None = timedelta(minutes=20),
        loss_chunks: int | str | None = None, record_timeline: bool = False, precision_plugin: Precision | None = None,
        expert_balance: given.ExpertBalance = None, variable_shapes: bool = False, initial_weights: Any = None,
        whole_batch_loss: bool | str = "auto", activation_recompute: given.Recompute = None, layout: str | None = None,
        layout_options: Mapping[str, Any] | None = None, optimizer_offload: given.OffloadOptions = False,
        pipeline_schedule_options: Mapping[str, Any] | None = None, pipeline_placement: Mapping[str, str] | None = None,
        topology: given.Topology | given.RankPlacement | None = None, compile_layers: given.CompileOptions = False,
        timeout: timedelta | None = timedelta(minutes=30), cluster_environment: ClusterEnvironment | None = None,
        activation_offload: given.ActivationOffload = None, random_streams: str = "torch", mlp_chunks: Any = None,
        micro_batch_size: int | str = "auto", weight_streaming: given.Streams = None,
    ) -> None:  # fmt: skip
        self.options = given.Options.among(locals())
        self.num_nodes, self._processes = 1, Processes(process_group_backend, timeout, hang_timeout)
        self._stage_speeds: tuple[float, ...] | None = None
        self._run: Run | None = None
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)

    @classmethod
    def from_plan(cls, plan: Plan | Prediction | Recipe, **arguments: Any) -> Self:
        """The strategy that runs a plan's best layout, a prediction or a recipe; further arguments as ever."""
        from lightning_megatron.strategy.planning import recipe_of

        return cls(**{**given.arguments_of(recipe_of(plan)), **arguments})

    def unstarted(self, world: World | None = None, **changes: Any) -> Self:
        """A strategy of the same options, but for ``changes``, not started; ``world`` is this one's if ``None``."""
        twin = copy.copy(self)
        twin.options = options = replace(self.options, **changes)
        given_by = options.process_group_backend, options.timeout, options.hang_timeout
        twin._run, twin._processes = None, Processes(*given_by, world or self._processes.world)
        return twin

    @property
    def run(self) -> Run:
        """The run in progress, or the latest; a RuntimeError before the first."""
        return present(self._run, "run yet")

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes, as tuners ask before a run; in a run always, for samplers and logs."""
        return self.num_nodes * self.num_processes > 1 or is_under_way(self.lightning_module)

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return present(self.parallel_devices, "devices")[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the process groups."""
        return self._processes.backend

    @property
    def global_rank(self) -> int:
        """This process's rank: as launched, or as a topology numbers the processes."""
        return self._processes.rank_of(super().global_rank)

    @property
    def mesh(self) -> ParallelMesh:
        """Process groups and coordinates of this rank; a RuntimeError before processes are connected."""
        return self._processes.mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as torch's ``DeviceMesh``, as in Lightning's ModelParallelStrategy."""
        return self.mesh.device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers shard over data-parallel replicas: all stages of one replica load the same samples."""
        return self._processes.replica(self.num_nodes * self.num_processes, self.global_rank, self.options)

    def _configure_launcher(self) -> None:
        resolve_layout(self.num_nodes * self.num_processes, **self.options.sizes)  # refuses sizes that do not fit
        environment = present(self.cluster_environment, "cluster environment")
        self._launcher = Launcher(environment, self.num_processes, self.num_nodes, processes=self._processes)

    def setup_environment(self) -> None:
        """Connect the processes and build the mesh."""
        super().setup_environment()
        module = present(self.lightning_module, "module")
        if self.options.asks_the_planner and self._processes.numbers is None:
            from lightning_megatron.strategy.planning import settle

            sizes = self.num_nodes * self.num_processes, self.num_processes
            settled = settle(self.options, module, *sizes, self.root_device)
            self.options, self.plan, self._stage_speeds = settled.options, settled.plan, settled.stage_speeds
            self._processes.numbers = settled.numbers
        environment, shape = present(self.cluster_environment, "cluster environment"), self.options.sizes
        self._processes.connect(environment, self.root_device, self.num_nodes, self.num_processes, shape)
        show_device_mesh(module, self.device_mesh)
        if self._run is not None and self._run.module is module:
            self._run.begin_another()

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over data-parallel replicas unless another group is given."""
        return self._processes.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree on a decision over the world."""
        return self._processes.agree(decision, everyone=all)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """``tensor`` of every replica, or of every rank of another group, stacked: ``[replicas, ...]``."""
        return self._processes.all_gather(tensor, group, sync_grads)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._processes.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send ``obj`` from rank ``src`` to all."""
        return self._processes.broadcast(obj, src)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, and stay long enough for them to hear."""
        self._processes.end(exception)

    @property
    def precision_plugin(self) -> Precision:
        """The plugin in use; its clipping sees the gradients of all stages."""
        self._precision_plugin = self._precision_plugin or MegatronPrecision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else megatron_precision(plugin)

    @property
    def checkpoint_io(self) -> MegatronCheckpointIO:
        """The checkpoint plugin in use."""
        if not isinstance(self._checkpoint_io, MegatronCheckpointIO):
            self._checkpoint_io = megatron_checkpoint_io(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def setup(self, trainer: pl.Trainer) -> None:
        """Cut the module, make the ranks alike, set up gradients and optimizers, and load a checkpoint's weights."""
        present(self.accelerator, "accelerator").setup(trainer)
        run = trainer, present(self.lightning_module, "module"), self._processes, self.precision_plugin, self.options
        with self._processes.naming_echoes():  # a rank that is refused later may still be connecting groups
            self._run = start_run(*run, self.checkpoint_io, self._stage_speeds, self._run)
            self.model = self._run.module
            if trainer.state.fn == TrainerFn.FITTING:
                self.setup_optimizers(trainer)
                self._run.prepare_updates(self.optimizers)
                move_optimizers(self.optimizers, self.root_device)
            self.setup_precision_plugin()
            restore_now(trainer, whole=self.partition is None)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Run ``configure_optimizers`` in sight of the whole module, then drop what other stages own."""
        self._reset_optimizers_and_schedulers()
        with self.run.saving.weights.logical_view(slices=False):
            with self.run.configuring():
                super().setup_optimizers(trainer)
            self.run.take_optimizers(self.optimizers)

    def model_to_device(self) -> None:
        """Move this rank's part of the module to its device."""
        present(self.lightning_module, "module").to(self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build tensors on the CPU (or nowhere, with ``empty_init``): the stage moves to its device once it is cut."""
        with self._processes.building(bool(empty_init)), self.precision_plugin.tensor_init_context():
            yield

    def teardown(self) -> None:
        """Release what belongs to a run; the module stays cut, so that another ``fit`` or ``test`` can follow."""
        self._processes.stop_watching()
        if self._run is not None:
            self._run.close()
        self._processes.part()
        with leaving_meta_tensors(self.lightning_module):
            super().teardown()

    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers alike on all stages of a replica; training goes on where the checkpoint's run stopped."""
        seed_workers(dataloader, self.distributed_sampler_kwargs["rank"])
        return dataloader if self._run is None else self._run.continue_loader(dataloader)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As Lightning's; tells that this rank takes part."""
        self._processes.beat()
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_start(self) -> None:
        """Go on where the checkpoint stopped; from here on, signals to stop are agreed upon between steps."""
        self.run.saving.begin_training()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Raise what a background save has failed with since the last step."""
        self.checkpoint_io.check()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``training_step`` on every micro-batch, forward and backward; returns the mean loss."""
        return self.run.training_step(args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``validation_step`` through all stages."""
        return self.run.evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``test_step`` through all stages."""
        return self.run.evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``predict_step``; every rank returns its replica's predictions, in order."""
        return self.run.evaluate("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Publish the gradients of a scheduled step, or run autograd for a plain one."""
        return self.run.backward(closure_loss, optimizer, args, kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate without summing over replicas."""
        with self.run.accumulating():
            yield

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        """Step; an optimizer whose step fails gets its parameters back. What hooks log meanwhile is put together."""
        self.run.check_prepared(optimizer)
        with self.run.updating(closure):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_train_end(self) -> None:
        """Hand round what the last hooks wrote."""
        self.run.end_training()

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether optimizers resume with the state in the checkpoint."""
        return self.checkpoint_io.load_optimizer

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state; what is split over tensor-parallel ranks as pieces of logical tensors."""
        if self._run is None and is_whole(self.lightning_module):
            return present(self.lightning_module, "module").state_dict()
        return self.run.saving.weights.saved()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole module's state on the CPU of global rank 0, an empty dict elsewhere; collective over all ranks."""
        return self.run.whole_state()

    def load_initial_weights(self, path: Any) -> None:
        """Fill this rank's part of the divided module from files; see :func:`~lightning_megatron.load_hf_weights`."""
        self.run.saving.weights.fill_from(path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of a whole or partial state; a RuntimeError if ``strict`` and names do not fit."""
        self.run.saving.load_model(checkpoint, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State of an optimizer by parameter name, in pieces where it is split."""
        return self.run.saving.optimizer_state(optimizer, self.optimizers)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer states."""
        self.run.saving.load_optimizers(checkpoint, self.optimizers)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save; every rank takes part. After a failure of some ranks only, a message says that nothing is saved."""
        if self._run is None and is_whole(self.lightning_module):
            whole = present(self.lightning_module, "module"), self.checkpoint_io, checkpoint, filepath, storage_options
            return save_before_run(*whole, is_first=self.is_global_zero)
        self.run.save(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint directory (this rank's tensors only) or a plain Lightning checkpoint file."""
        return self.run.saving.load(checkpoint_path, self.optimizers, weights_only)

    @property
    def partition(self) -> Partition | None:
        """Assignment of layers and parts to stages; ``None`` with one stage, and before ``setup``."""
        stage = Stage.of(self.lightning_module) if self.lightning_module is not None else None
        return None if stage is None else stage.partition

    @property
    def parallel_report(self) -> ParallelReport | None:
        """The tensor-parallel plan; ``None`` before ``setup`` and with one tensor-parallel rank."""
        return self._run.assembled.report if self._run is not None else None

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale of ``precision="16-mixed"``; ``None`` for other precisions."""
        return getattr(self.precision_plugin, "loss_scale", None)

    @property
    def skipped_steps(self) -> int:
        """Updates left out in this run because a loss or gradient was not finite."""
        return self._run.skipped_steps if self._run is not None else 0
