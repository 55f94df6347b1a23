"""What a run keeps: Lightning's hooks for state dicts, optimizers' state and checkpoints.

Lightning asks for whole states; a rank holds parts. Everything here is named and shaped as in one process, so that
what one layout saves any other can load.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoints.files.sources import open_source
from lightning_megatron.checkpoints.state.pretrained import match_weights
from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.checkpoints.state.stored import (
    GroupNames,
    Kinds,
    Match,
    StatePlace,
    add_saved_groups,
    added_groups,
    aliases,
    joined_values,
    load_module,
    load_optimizer,
    match,
    optimizer_templates,
    parameter_names,
    plain_values,
    state_places,
    stored_module,
    stored_optimizer,
    values_here,
)
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.pieces import PiecedTensor, as_pieces
from lightning_megatron.mesh.random_streams import SegmentStreams
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.elsewhere.twins import shown_whole
from lightning_megatron.strategy.data.loaders import make_resumable
from lightning_megatron.strategy.lightning import trainer_access as lightning_state
from lightning_megatron.strategy.processes import GridStrategy
from lightning_megatron.strategy.saving.checkpoint_io import MegatronCheckpointIO, megatron_checkpoint_io
from lightning_megatron.strategy.saving.newest import answer_from_markers, answered
from lightning_megatron.strategy.saving.preemption import listen
from lightning_megatron.strategy.saving.resume import (
    Resumption,
    about,
    gather_all_to_first,
    gather_to_first,
    note_what_is_read_ahead,
    replica_state,
)


class StateStrategy(GridStrategy):
    """A strategy whose ranks hold parts of one module's state; arguments as :class:`GridStrategy`."""

    _optimizer_names: list[GroupNames]
    _resumption: Resumption | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        answer_from_markers(StateStrategy)

    def on_train_start(self) -> None:
        """Go on where the checkpoint stopped; from here on, signals to stop are agreed upon between steps."""
        super().on_train_start()
        if self._resumption is not None:
            self._resumption.begin()
        if self.lightning_module is not None:
            note_what_is_read_ahead(self.lightning_module.trainer)
        if self.world_size > 1 and self.lightning_module is not None:
            listen(self.lightning_module.trainer, self.root_device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Raise what a background save has failed with since the last step."""
        self.checkpoint_io.check()

    @property
    def _streams(self) -> SegmentStreams | None:
        """The random streams of micro-batches and layers; there are some from ``setup`` on."""
        return None

    def _layout_details(self) -> dict[str, Any]:
        """What a checkpoint notes of the layout besides the sizes of the axes."""
        return {}

    @property
    def _tensor_state(self) -> TensorState:
        """How this rank's tensors are split."""
        return TensorState()

    @property
    def _presence(self) -> Presence:
        """What of the module is on this rank."""
        return Presence()

    @property
    def checkpoint_io(self) -> MegatronCheckpointIO:
        """The checkpoint plugin in use."""
        if not isinstance(self._checkpoint_io, MegatronCheckpointIO):
            given = self._checkpoint_io
            self._checkpoint_io = MegatronCheckpointIO() if given is None else megatron_checkpoint_io(given)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether optimizers go on with the state in the checkpoint."""
        return self.checkpoint_io.load_optimizer

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are read once this rank knows which tensors it holds."""
        return True

    @contextmanager
    def _logical_view(self, *, slices: bool = True) -> Generator[None, None, None]:
        """Show the module as it is in one process, to code that names and counts; without ``slices``, those stay."""
        assert self.lightning_module is not None
        with shown_whole(self.lightning_module, self._presence, slices=slices):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state; what is split over tensor-parallel ranks as pieces of logical tensors."""
        assert self.lightning_module is not None
        return self._stored_module()

    def _stored_module(self) -> dict[str, Any]:
        """This rank's part of the module's state, as checkpoints keep it."""
        assert self.lightning_module is not None
        return stored_module(self.lightning_module, self._tensor_state)

    def _load_module(self, state: Mapping[str, Any]) -> None:
        """Load a state that matches the module, whole or in pieces."""
        assert self.lightning_module is not None
        load_module(self.lightning_module, state, self._tensor_state)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole module's state on the CPU of global rank 0, an empty dict elsewhere; collective over all ranks."""
        assert self.lightning_module is not None
        logical = self._tensor_state.logical_state(self._local_state())
        return lightning_state.gather_state_dict(logical, self.mesh)

    def _local_state(self) -> dict[str, Any]:
        """This rank's tensors as they are used for updates."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def load_initial_weights(self, path: Any) -> None:
        """Fill this rank's part of the divided module from files, reading that part only; see
        :func:`~lightning_megatron.load_hf_weights`.

        Raises:
            RuntimeError: a parameter is missing there, or has another shape.
        """
        module = self.lightning_module
        assert module is not None
        source = open_source(path)
        shapes, further = self._whole_shapes()
        found = match_weights(source, shapes, further, path)
        state = {n: v for n, v in self._stored_module().items() if isinstance(v, (Tensor, PiecedTensor))}
        wanted = {n: (found.stored[n], as_pieces(v).empty_like()) for n, v in state.items() if n in found.stored}
        source.fill(wanted)
        self._load_module({name: pieces for name, (_, pieces) in wanted.items()})

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of a whole or partial state.

        Raises:
            RuntimeError: names of a plain state are missing or unexpected, and ``strict``.
        """
        module = self.lightning_module
        assert module is not None
        if not checkpoint.get("lightning_megatron", {}).get("is_matched"):
            kinds = {n: (v.shape, v.dtype) for n, v in checkpoint["state_dict"].items() if isinstance(v, Tensor)}
            found = self._match(kinds, {}, None)
            if strict and (found.missing or found.unexpected):
                raise RuntimeError(_does_not_fit(module, found))
        self._load_module(checkpoint["state_dict"])

    def _match(self, kinds: Kinds, saved_aliases: Mapping[str, str], prefixes: Mapping[str, str] | None) -> Match:
        """Which stored tensor each tensor of the whole module is loaded from; collective over the pipeline."""
        return match(kinds, *self._whole_shapes(), saved_aliases, prefixes)

    def _whole_shapes(self) -> tuple[dict[str, torch.Size], dict[str, str]]:
        """Logical shapes of the whole module's tensors, and its tied names; collective over the pipeline."""
        module, tensor = self.lightning_module, self._tensor_state
        assert module is not None
        state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
        own = {name: tensor.logical_shape(name, value) for name, value in state.items()}, aliases(module)
        stages = objects.gather(own, self.mesh.group("pipeline_parallel"))
        shapes = {name: shape for stage in stages for name, shape in stage[0].items()}
        further = {name: first for stage in stages for name, first in stage[1].items()}
        return shapes, further

    def _places(self, optimizer: Optimizer) -> list[StatePlace]:
        """Where an optimizer keeps the state of this rank's parameters."""
        assert self.lightning_module is not None
        return state_places(optimizer, self.lightning_module, self._tensor_state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State of an optimizer by parameter name, in pieces where it is split."""
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        index = next(i for i, candidate in enumerate(self.optimizers) if candidate is optimizer)
        assert self.lightning_module is not None
        names = self._optimizer_names[index]
        added = added_groups(optimizer, names, parameter_names(self.lightning_module))
        stages = objects.gather(added, self.mesh.group("pipeline_parallel"))
        added = [group for stage in stages for group in stage]
        return stored_optimizer(optimizer, names, self._places(optimizer), added)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer states."""
        states = checkpoint["optimizer_states"]
        about = checkpoint.get("lightning_megatron", {}).get("about", {})
        assert self.lightning_module is not None
        same = about.get("precision") == str(self.lightning_module.trainer.precision)
        for optimizer, names, state in zip(self.optimizers, self._optimizer_names, states, strict=True):
            load_optimizer(optimizer, names, self._places(optimizer), state, keep_types=same)
        _optimizers_to_device(self.optimizers, self.root_device)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save; every rank takes part. After a failure of some ranks only, nothing can be saved, and a message
        says so.
        """
        assert self._watch is not None
        if self._watch.reported and not self._watch.gather(seconds=5.0):
            print(
                f"{self.mesh.layout.describe(self.global_rank)}: no checkpoint at {filepath}: not all ranks failed "
                "together"
            )
            return
        checkpoint["lightning_megatron"] = self._run_section(checkpoint)
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _run_section(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint keeps for this package; whole on global rank 0."""
        module, mesh = self.lightning_module, self.mesh
        assert module is not None
        layout, trainer = mesh.layout, module.trainer
        tied = aliases(module)
        extra = {n: v for n, v in checkpoint["state_dict"].items() if not isinstance(v, (Tensor, PiecedTensor))}
        stages = gather_to_first((tied, extra), mesh.group("pipeline_parallel"), mesh, layout.pipeline)
        values = gather_all_to_first(plain_values(checkpoint.get("optimizer_states", [])))
        replica = replica_state(trainer, checkpoint.get("loops"), self.root_device)
        return {
            "local_aliases": tied,
            "aliases": {name: first for stage in stages for name, first in stage[0].items()},
            "extra": {name: value for stage in stages for name, value in stage[1].items()},
            "optimizer_values": joined_values(values),
            "replicas": gather_to_first(replica, mesh.group("data_parallel"), mesh, layout.data),
            "streams": self._streams.state_dict() if self._streams is not None else None,
            "about": about(trainer, mesh, self._layout_details()),
        }

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint directory (this rank's tensors only) or a plain Lightning checkpoint file."""
        module = self.lightning_module
        assert module is not None
        path, io = self.broadcast(answered(checkpoint_path)), self.checkpoint_io
        checkpoint = io.load_checkpoint(path, weights_only=weights_only)
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        if "state_dict" not in checkpoint:
            self._read_tensors(path, checkpoint, fitting and self.lightning_restore_optimizer)
        own = checkpoint.get("lightning_megatron", {})
        self._resumption = None
        if fitting and "replicas" in own and "loops" in checkpoint:
            self._resumption = Resumption(checkpoint, module.trainer, self.mesh, self.root_device)
            if own["streams"] is not None and self._streams is not None:
                self._streams.load_state_dict(own["streams"])
        return checkpoint

    def _read_tensors(self, path: Any, checkpoint: dict[str, Any], with_optimizer: bool) -> None:
        """Fill ``checkpoint`` with this rank's tensors.

        Raises:
            RuntimeError: the module's names or shapes are not those of the checkpoint, and it wants them to be.
        """
        module, io = self.lightning_module, self.checkpoint_io
        assert module is not None
        kinds, own = io.tensor_kinds(path), checkpoint["lightning_megatron"]
        found = self._match(kinds, own["aliases"], io.prefixes)
        if not found.fits:
            if module.strict_loading:
                raise RuntimeError(_does_not_fit(module, found))
            rank_zero_warn(f"{path} fits {type(module).__name__} in part: {found}.")
        wanted: dict[str, tuple[str, PiecedTensor]] = {}
        for name, value in self._stored_module().items():
            if name in found.stored and isinstance(value, (Tensor, PiecedTensor)):
                wanted[name] = found.stored[name], as_pieces(value).empty_like()
        states: list[dict[str, Any]] = []
        for index, groups in enumerate(checkpoint.get("optimizer_groups", []) if with_optimizer else []):
            state: dict[str, Any] = {}
            states.append({"state": state, "param_groups": groups})
            if index < len(self.optimizers):
                parameters = dict(module.named_parameters(remove_duplicate=False))
                add_saved_groups(self.optimizers[index], self._optimizer_names[index], groups, parameters)
                places = self._places(self.optimizers[index])
                values = checkpoint.get("optimizer_values", [])[index:][:1]
                for mine in values:
                    state |= values_here(mine, places, own["aliases"], self._optimizer_names[index])
                templates = optimizer_templates(kinds, index, places, own["aliases"], self._optimizer_names[index])
                for stored, (name, key, pieces) in templates.items():
                    wanted[stored] = stored, pieces
                    state.setdefault(name, {})[key] = pieces if stored in kinds and pieces.shape else pieces.local
        io.load_tensors(path, wanted)
        checkpoint["state_dict"] = {name: pieces for name, (_, pieces) in wanted.items() if name in found.stored}
        checkpoint["state_dict"] |= checkpoint.pop("state_dict_extra", {})
        own["is_matched"] = True
        if "optimizer_groups" in checkpoint:
            checkpoint["optimizer_states"] = states

    def process_dataloader(self, dataloader: object) -> object:
        """As :meth:`GridStrategy.process_dataloader`; training goes on where the checkpoint's run stopped."""
        dataloader = super().process_dataloader(dataloader)
        module = self.lightning_module
        if module is None or not module.trainer.training:
            return dataloader
        loader = make_resumable(dataloader)
        if self._resumption is not None:
            self._resumption.continue_loader(loader)
        return loader


def _does_not_fit(module: Any, found: Match) -> str:
    return (
        f"the checkpoint does not fit {type(module).__name__}: {found}; set `strict_loading = False` on the module to "
        "load what fits, or name what moved with `MegatronCheckpointIO(prefixes={'old.': 'new.'})`."
    )
