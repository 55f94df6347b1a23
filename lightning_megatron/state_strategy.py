"""What a run keeps: Lightning's hooks for state dicts, optimizers' state and checkpoints.

Lightning asks for whole states; a rank holds parts. Everything here is named and shaped as in one process, so that
what one layout saves any other can load.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron import lightning_state
from lightning_megatron.grid_strategy import GridStrategy
from lightning_megatron.pipeline.stage import stage_of
from lightning_megatron.pipeline.standin import whole_view
from lightning_megatron.plugins.checkpoint import MegatronCheckpointIO
from lightning_megatron.tensor_state import TensorState


class StateStrategy(GridStrategy):
    """A strategy whose ranks hold parts of one module's state; arguments as :class:`GridStrategy`."""

    _optimizer_names: list[lightning_state.GroupNames]

    @property
    def _tensor_state(self) -> TensorState:
        """How this rank's tensors are split."""
        return TensorState()

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The checkpoint plugin in use."""
        if self._checkpoint_io is None:
            self._checkpoint_io = MegatronCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are read once this rank knows which tensors it holds."""
        return True

    @contextmanager
    def _whole_view(self) -> Generator[None, None, None]:
        """Show the parameters of all stages, on the meta device."""
        stage = stage_of(self.lightning_module) if self.lightning_module is not None else None
        with whole_view(stage.hidden if stage is not None else []):
            yield

    @contextmanager
    def _logical_view(self) -> Generator[None, None, None]:
        """Show the module as it is in one process, to code that only counts."""
        assert self.lightning_module is not None
        with self._tensor_state.logical_view(self.lightning_module), self._whole_view():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, split tensors in their logical shape (on the first tensor-parallel rank)."""
        assert self.lightning_module is not None
        return self._tensor_state.logical_state(self.lightning_module.state_dict())

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole module's state on the CPU of global rank 0, an empty dict elsewhere; collective over all ranks."""
        return lightning_state.gather_state_dict(self.lightning_module_state_dict(), self.mesh)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of a whole or partial state."""
        assert self.lightning_module is not None
        with self._whole_view():
            whole = set(self.lightning_module.state_dict())
        lightning_state.load_module(self.lightning_module, checkpoint, whole, strict, self._tensor_state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State of an optimizer by parameter name."""
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        index = next(i for i, candidate in enumerate(self.optimizers) if candidate is optimizer)
        assert self.lightning_module is not None
        state = lightning_state.optimizer_state(optimizer, self._optimizer_names[index], self.lightning_module)
        return self._tensor_state.logical_optimizer(state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer states."""
        assert self.lightning_module is not None
        states = checkpoint["optimizer_states"]
        for optimizer, names, state in zip(self.optimizers, self._optimizer_names, states, strict=True):
            lightning_state.load_optimizer(optimizer, names, self.lightning_module, state, self._tensor_state)
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
        if isinstance(self.checkpoint_io, MegatronCheckpointIO) or self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint directory (this rank's tensors only) or a plain Lightning checkpoint file."""
        assert self.lightning_module is not None
        path = self.broadcast(checkpoint_path)
        checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        if isinstance(self.checkpoint_io, MegatronCheckpointIO):
            fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
            lightning_state.read_tensors(
                self.checkpoint_io, path, checkpoint, self.lightning_module, fitting, self._tensor_state
            )
        return checkpoint
