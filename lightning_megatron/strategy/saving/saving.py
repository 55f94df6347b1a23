"""Saves and restores a run: states of modules and optimizers, checkpoints, and resuming from them.

Lightning asks for whole states; a rank holds parts. Everything here is named and shaped as in one process, so that
what one layout saves any other can load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoints.files.dcp_plans import STATE_BESIDE, beside
from lightning_megatron.checkpoints.files.directory import open_checkpoint
from lightning_megatron.checkpoints.files.sources import Source
from lightning_megatron.checkpoints.files.storage import BoxReader
from lightning_megatron.checkpoints.state.stored import (
    GroupNames,
    Kinds,
    Match,
    add_saved_groups,
    added_groups,
    aliases,
    joined_groups,
    joined_values,
    load_optimizer,
    optimizer_names,
    optimizer_templates,
    parameter_names,
    plain_values,
    stored_optimizer,
    values_here,
)
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.pieces import PiecedTensor, plain_if_whole
from lightning_megatron.strategy.assembly.assembled import Assembled
from lightning_megatron.strategy.carried.mixing_collators import warn_of_mixing
from lightning_megatron.strategy.data.loaders import make_resumable
from lightning_megatron.strategy.lightning import trainer_access as lightning_state
from lightning_megatron.strategy.lightning.distributed import move_optimizers
from lightning_megatron.strategy.lightning.preemption import Preemption, listen
from lightning_megatron.strategy.lightning.samplers import Samplers
from lightning_megatron.strategy.processes import Processes
from lightning_megatron.strategy.saving.checkpoint_io import MegatronCheckpointIO
from lightning_megatron.strategy.saving.kept_names import with_all_stages
from lightning_megatron.strategy.saving.model_state import ModelState, PartOfState, does_not_fit, shares_memory
from lightning_megatron.strategy.saving.newest import answered
from lightning_megatron.strategy.saving.resume import (
    Resumption,
    about,
    gather_all_to_first,
    gather_to_first,
    note_what_is_read_ahead,
    replica_state,
)
from lightning_megatron.strategy.saving.state_on_disk import StateOnDisk


class Saving:
    """Saves and loads the state of one run; every rank takes part in each call.

    Args:
        assembled: the divided module.
        trainer: of the run.
        processes: of the strategy.
        io: writes and reads checkpoints.
        details: what a checkpoint notes of the layout besides the sizes of the axes.

    Attributes:
        weights: the module's part of the state.
        optimizer_names: of each optimizer, the names of each parameter group's parameters on all stages.
    """

    def __init__(
        self,
        assembled: Assembled,
        trainer: pl.Trainer,
        processes: Processes,
        io: MegatronCheckpointIO,
        details: Mapping[str, Any],
    ) -> None:
        self.weights = ModelState(assembled, processes.mesh)
        self.optimizer_names: list[GroupNames] = []
        self._module = assembled.module
        self._engine = assembled.engine
        self._streams = assembled.streams
        self._trainer = trainer
        self._processes = processes
        self._mesh = processes.mesh
        self._io = io
        self._details = details
        self._samplers = Samplers(trainer, processes.mesh)
        self._resumption: Resumption | None = None
        self._preemption: Preemption | None = None

    def localize(self, optimizers: Sequence[Optimizer]) -> None:
        """Drop the parameters of other stages from optimizers that were made in sight of the whole module."""
        names = parameter_names(self._module)
        self.optimizer_names = [lightning_state.localize_optimizer(optimizer, names) for optimizer in optimizers]

    def begin_training(self) -> None:
        """Go on where the checkpoint stopped; from here on, signals to stop are agreed upon between steps."""
        if self._resumption is not None:
            self._resumption.begin()
        note_what_is_read_ahead(self._trainer)
        if self._mesh.layout.world_size > 1:
            ranks = self._processes
            self._preemption = listen(self._trainer, ranks.device, ranks.wants_batch, ranks.naming_failures)

    def close(self) -> None:
        """Stop listening to signals, and give the choice of samplers back to Lightning."""
        self._samplers.release()
        if self._preemption is not None:
            self._preemption.remove()
            self._preemption = None

    def continue_loader(self, dataloader: object) -> object:
        """A training loader that resumes where the checkpoint's run stopped; other loaders unchanged."""
        if not self._trainer.training:
            return dataloader
        warn_of_mixing(dataloader, self._mesh.layout.data)
        loader = make_resumable(dataloader)
        if self._resumption is not None:
            self._resumption.continue_loader(loader)
        return loader

    def optimizer_state(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """State of one of the optimizers by parameter name, in pieces where it is split."""
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        index = next(i for i, candidate in enumerate(optimizers) if candidate is optimizer)
        names = self.optimizer_names[index]
        added = added_groups(optimizer, names, parameter_names(self._module))
        added = joined_groups(objects.gather(added, self._mesh.group("pipeline_parallel")))
        return stored_optimizer(optimizer, names, self._engine.model_gradients.state_places(optimizer), added)

    def load_optimizers(self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Load this rank's part of the optimizers' states, after ``on_fit_start``."""
        own = checkpoint.get("lightning_megatron", {})
        same = own.get("about", {}).get("precision") == str(self._trainer.precision)
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        for optimizer, names, state in zip(
            optimizers, self.optimizer_names, checkpoint["optimizer_states"], strict=False
        ):
            if own:
                add_saved_groups(optimizer, names, state["param_groups"], parameters)
            places = self._engine.model_gradients.state_places(optimizer)
            load_optimizer(optimizer, names, places, state, keep_types=same)
        move_optimizers(optimizers, self._processes.device)

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load this rank's part of a whole or partial state.

        Raises:
            RuntimeError: names of a plain state are missing or unexpected, and ``strict``.
        """
        state, own = checkpoint["state_dict"], checkpoint.get("lightning_megatron", {})
        if isinstance(state, StateOnDisk):
            names = own.get("names") or self._fitting(own["path"], state.kinds_now(), {}, strict).stored
            state = self._read_weights(own["path"], state, names)
        else:
            found = self.weights.match({n: (v.shape, v.dtype) for n, v in state.items() if isinstance(v, Tensor)})
            if strict and (found.missing or found.unexpected):
                raise RuntimeError(does_not_fit(self._module, found))
        self.weights.load(state)

    def _read_weights(self, path: Any, state: StateOnDisk, names: Mapping[str, str]) -> dict[str, Any]:
        """A state to load: tensors that ``on_load_checkpoint`` has read, and this rank's part of the others, which is
        read into the memory that the module has.

        Args:
            path: of the checkpoint, whose checksums were compared before.
            state: after the hook.
            names: of the module's tensors -> those in ``state``.

        Raises:
            RuntimeError: a rank could not read its part.
        """
        untouched = state.untouched
        touched = {name: state[stored] for name, stored in names.items() if stored not in untouched}
        others = {n: state[n] for n in state if n not in untouched and not isinstance(state[n], Tensor)}
        memory = self.weights.memory()
        keeps = shares_memory(touched.values(), memory.values())  # a hook gives a weight the value of another one
        wanted = {
            name: (untouched[names[name]], pieces.empty_like() if keeps else pieces)
            for name, pieces in memory.items()
            if names.get(name) in untouched
        }
        for _, pieces in wanted.values():
            pieces.clear_padding()
        self._io.load_tensors(path, wanted)
        return others | touched | {name: pieces for name, (_, pieces) in wanted.items()}

    def _fitting(self, path: Any, kinds: Kinds, tied: Mapping[str, str], strict: bool) -> Match:
        """Match each of the module's tensors with one of the checkpoint at ``path``; collective.

        Raises:
            RuntimeError: the module's names or shapes are not those of the checkpoint, and ``strict``.
        """
        found = self.weights.match(kinds, tied, self._io.prefixes)
        if not found.fits:
            if strict:
                raise RuntimeError(does_not_fit(self._module, found))
            rank_zero_warn(f"{path} fits {type(self._module).__name__} in part: {found}.")
        return found

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        """Write a Lightning checkpoint; after a failure of some ranks only, say that nothing can be saved."""
        self.weights.ends()
        if not self._processes.can_meet():
            print(f"{self._processes.place}: no checkpoint at {path}: not all ranks failed together")
            return
        self._engine.share_copies()
        whole = with_all_stages(checkpoint, self._engine.model_gradients.presence, self._mesh)
        whole["lightning_megatron"] = self._run_section(checkpoint)  # not in `checkpoint`, which hooks may have kept
        self._io.save_checkpoint(whole, path, storage_options=storage_options)

    def _run_section(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """This package's section of a checkpoint; whole on global rank 0."""
        mesh, layout = self._mesh, self._mesh.layout
        tied, presence = aliases(self._module), self._engine.model_gradients.presence
        extra = {n: v for n, v in checkpoint["state_dict"].items() if not isinstance(v, (Tensor, PiecedTensor))}
        stages = gather_to_first((tied, extra), mesh.group("pipeline_parallel"), mesh, layout.pipeline)
        values = gather_all_to_first(plain_values(checkpoint.get("optimizer_states", [])))
        replica = replica_state(self._trainer, checkpoint.get("loops"), self._processes.device)
        return {
            "local_aliases": tied,
            "aliases": {name: first for stage in stages for name, first in stage[0].items()},
            "extra": {name: value for stage in stages for name, value in stage[1].items()},
            "optimizer_values": joined_values(values),
            "replicas": gather_to_first(replica, mesh.group("data_parallel"), mesh, layout.data),
            "streams": self._streams.state_dict(),
            "order": self._samplers.order,
            "about": about(self._trainer, mesh, self._details, presence.entries) if mesh.rank == 0 else {},
        }

    def load(self, path: Any, optimizers: Sequence[Optimizer], weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint directory (this rank's tensors only) or a plain Lightning checkpoint file.

        Args:
            path: of the checkpoint.
            optimizers: of the run.
            weights_only: whether pickled objects are refused; ``None`` for what the plugin says.
        """
        path = self._processes.broadcast(answered(path), 0)
        checkpoint = self._io.load_checkpoint(path, weights_only=weights_only)
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        if "state_dict" not in checkpoint:
            self._read_tensors(path, checkpoint, optimizers if fitting and self._io.load_optimizer else None)
        own = checkpoint.get("lightning_megatron", {})
        self._resumption = None
        if fitting and "replicas" in own and "loops" in checkpoint:
            self._samplers.go_on(own)
            self._resumption = Resumption(checkpoint, self._trainer, self._mesh, self._processes.device)
            if own["streams"] is not None:
                self._streams.load_state_dict(own["streams"])
        return checkpoint

    def _read_tensors(self, path: Any, checkpoint: dict[str, Any], optimizers: Sequence[Optimizer] | None) -> None:
        """Fill ``checkpoint`` with this rank's tensors; those of optimizers only where some are given.

        Weights are read by :meth:`load_model`, into their place. Until then, and for code that looks at them after
        that, they are on disk (:class:`StateOnDisk`): whole ones where the module has an ``on_load_checkpoint`` of its
        own, otherwise this rank's parts.

        Raises:
            RuntimeError: the module's names or shapes are not those of the checkpoint, and it wants them to be.
        """
        module, kinds, own = self._module, self._io.tensor_kinds(path), checkpoint["lightning_megatron"]
        wanted: dict[str, tuple[str, PiecedTensor]] = {}
        own["path"], source = path, _tensors_of(path)
        if is_overridden("on_load_checkpoint", module):
            of_optimizers = {stored for stored, *_ in optimizer_names(kinds)}
            names = {name: name for name in kinds if name not in of_optimizers}
            names |= {name: stored for name, stored in own["aliases"].items() if stored in names}
            state = StateOnDisk(kinds, names, source.read)
        else:
            found = self._fitting(path, kinds, own["aliases"], module.strict_loading)
            specs = {name: pieces.empty_like(device="meta") for name, pieces in self.weights.memory().items()}
            names = {name: stored for name, stored in found.stored.items() if name in specs}
            own["names"] = {name: name for name in names}
            parts = {stored: specs[name] for name, stored in names.items()}
            state = StateOnDisk(kinds, names, partial(_part_of, source, parts))
        states = [] if optimizers is None else self._optimizer_states(checkpoint, kinds, optimizers, wanted)
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._with_parts(path, checkpoint, own["aliases"], wanted)
        self._io.load_tensors(path, wanted)
        checkpoint["state_dict"] = state
        checkpoint["state_dict"].update(checkpoint.pop("state_dict_extra", {}))
        if "optimizer_groups" in checkpoint:
            checkpoint["optimizer_states"] = states

    def _with_parts(
        self, path: Any, value: Any, tied: Mapping[str, str], wanted: dict[str, tuple[str, PiecedTensor]]
    ) -> Any:
        """``value`` with its states beside the module's; their tensors are added to ``wanted``, to be read."""
        if type(value) is not dict:
            return value
        where = value.get(STATE_BESIDE)
        if where is None:
            value |= {key: self._with_parts(path, each, tied, wanted) for key, each in value.items()}
            return value
        kinds = self._io.tensor_kinds(path, beside(where))
        part = PartOfState(value["extra"])
        for name, own in self.weights.memory().items():
            stored = beside(where, tied.get(name, name))
            if stored in kinds and kinds[stored][0] == own.shape:
                pieces = own.empty_like()
                part[name] = plain_if_whole(pieces)
                wanted[beside(where, name)] = stored, pieces
        return part

    def _optimizer_states(
        self,
        checkpoint: Mapping[str, Any],
        kinds: Mapping[str, Any],
        optimizers: Sequence[Optimizer],
        wanted: dict[str, tuple[str, PiecedTensor]],
    ) -> list[dict[str, Any]]:
        """States of the optimizers, whose tensors are added to ``wanted`` and read with the rest."""
        tied = checkpoint["lightning_megatron"]["aliases"]
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        states: list[dict[str, Any]] = []
        for index, groups in enumerate(checkpoint.get("optimizer_groups", [])):
            state: dict[str, Any] = {}
            states.append({"state": state, "param_groups": groups})
            if index >= len(optimizers):
                continue
            names, given = self.optimizer_names[index], len(optimizers[index].param_groups)
            add_saved_groups(optimizers[index], names, groups, parameters)
            places = self._engine.model_gradients.state_places(optimizers[index])
            for mine in checkpoint.get("optimizer_values", [])[index:][:1]:
                state |= values_here(mine, places, tied, names)
            templates = optimizer_templates(kinds, index, places, tied, names)
            for stored, (name, key, pieces) in templates.items():
                wanted[stored] = stored, pieces
                state.setdefault(name, {})[key] = plain_if_whole(pieces)
            del optimizers[index].param_groups[given:], names[given:]  # `on_fit_start` may add them, as before
        return states


def _tensors_of(path: Any) -> Source:
    """A checkpoint directory, opened for its tensors alone."""
    folder = open_checkpoint(path)
    return Source("directory", folder, BoxReader(folder).read_metadata())


def _part_of(source: Source, parts: Mapping[str, PiecedTensor], stored: str) -> Tensor | PiecedTensor:
    """This rank's part of a stored tensor, in memory of its own."""
    pieces = parts[stored].empty_like(device="cpu")
    source.fill({stored: (stored, pieces)})
    return plain_if_whole(pieces)
