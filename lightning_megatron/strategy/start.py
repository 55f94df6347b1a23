"""How a run starts: what it cannot train is refused, its callbacks are inserted, the module is divided and filled.

What can be told from the module, the Trainer and the options alone is refused first, before any memory is taken and
before ranks talk. A module that an earlier run has divided is taken over as it is.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron.checkpoints.loading.as_built import note_places
from lightning_megatron.checkpoints.loading.pretrained import has_start, start_from
from lightning_megatron.strategy.assembly.alike import synchronize
from lightning_megatron.strategy.assembly.assembler import Assembler
from lightning_megatron.strategy.assembly.shared_memory import check_shared_memory
from lightning_megatron.strategy.callbacks.expert_bias import insert_expert_callbacks
from lightning_megatron.strategy.callbacks.gradient_norm import insert_gradient_norm
from lightning_megatron.strategy.callbacks.layer_profile import insert_profile
from lightning_megatron.strategy.callbacks.loop_ends import insert_loop_ends, remove_loop_ends
from lightning_megatron.strategy.generation.stopping import agree_on_stops
from lightning_megatron.strategy.lightning import trainer_access as lightning_state
from lightning_megatron.strategy.options import run_checks
from lightning_megatron.strategy.options.balance_asked import Balance
from lightning_megatron.strategy.options.context_checks import check_context_run
from lightning_megatron.strategy.options.expert_checks import check_expert_ranks, check_expert_run
from lightning_megatron.strategy.options.options import Options
from lightning_megatron.strategy.options.together import check_activations_run, check_draws_run
from lightning_megatron.strategy.options.weight_checks import check_sharded_weights, check_streamed_weights
from lightning_megatron.strategy.processes import Processes
from lightning_megatron.strategy.run import Run
from lightning_megatron.strategy.saving.checkpoint_io import MegatronCheckpointIO
from lightning_megatron.strategy.saving.model_state import ModelState


def start_run(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    processes: Processes,
    precision: Precision,
    options: Options,
    io: MegatronCheckpointIO,
    stage_speeds: tuple[float, ...] | None = None,
    earlier: Run | None = None,
) -> Run:
    """Divide the module, fill it with its initial weights, and take it over for a run.

    Args:
        trainer: of the run.
        module: the user's; whole, or divided by an earlier run.
        processes: connected.
        precision: the plugin in use.
        options: of the strategy.
        io: writes and reads checkpoints.
        stage_speeds: relative speed of every stage's devices, where they differ.
        earlier: the strategy's run before this one, if any.

    Raises:
        MisconfigurationException: a module or callback that this strategy cannot train with.
        ValueError: the module cannot be divided so; the message says what to change.
    """
    check_expert_ranks(*options.expert_sizes, processes.mesh.layout)
    check_expert_run(*options.expert_sizes, trainer, module)
    check_sharded_weights(options.weight_sharding, module, processes.mesh.layout, options.pipeline_layers)
    check_streamed_weights(options.weight_streaming, trainer, module)
    check_context_run(options.context_parallel_size, str(precision.precision), module)
    check_activations_run(options.activation_offload, str(precision.precision), module)
    check_draws_run(options.random_streams, module, processes.mesh.layout)
    size, tries = options.micro_batch_size, options.whole_batch_loss is not False
    run_checks.check_run(trainer, module, processes.mesh.layout, size, options.balance_of, tries=tries)
    engine_options = options.engine(getattr(precision, "layer_dtype", None))
    fits, again = trainer.state.fn == TrainerFn.FITTING, earlier is not None and earlier.module is module
    check_shared_memory(module, processes.mesh.layout, engine_options.gradients, fits, again)
    lightning_state.settle_callbacks(trainer, processes.mesh.layout, bool(options.optimizer_sharding))
    remove_loop_ends(trainer)  # a copy of a Trainer has those of the run that it was copied in
    if processes.mesh.layout.world_size > 1:
        lightning_state.insert_failure_callback(trainer, processes.report)
        insert_loop_ends(trainer, processes.end_loop, predicts=options.expert_ranks > 1)
    if options.profiles_layers:
        insert_profile(trainer)
    insert_expert_callbacks(trainer, load=options.log_expert_load, rate=Balance.asked(options.expert_balance).rate)
    if options.log_gradient_norm:
        insert_gradient_norm(trainer)
    agree_on_stops(module, processes.mesh)  # before losses of replicas put something around `generate`, too
    syncs = lightning_state.syncs_batch_norm(trainer)
    if earlier is not None and again:
        synchronize(module, processes.mesh, wanted=syncs)
        module.to(processes.device)
        return Run(trainer, earlier.assembled, processes, precision, options, io, earlier)
    module_options = options.module(stage_speeds)
    assembler = Assembler(processes.mesh, processes.device, precision, module_options, engine_options, processes.world)
    loads = has_start(module, options.initial_weights)
    note_places(module, processes.constructions, in_order=not loads)
    assembled = assembler.assemble(module, syncs, loads, fits)
    if (path := start_from(module, options.initial_weights)) is not None:
        state = ModelState(assembled, processes.mesh)
        if assembled.late is not None:
            assembled.late.load = state.reader_of(path)
        else:
            state.fill_from(path)
    return Run(trainer, assembled, processes, precision, options, io)
