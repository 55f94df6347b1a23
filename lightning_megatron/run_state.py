"""What a run is besides weights and optimizers: where its random numbers and its data stand, and how it is laid out.

Random states and loaders differ between replicas and are equal on the stages and tensor ranks of one, so the first
rank collects them from the ranks of its own row of the grid.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_megatron.data.resume import (
    Continuation,
    ResumableLoader,
    batch_size_of,
    continue_loader,
    loader_state,
)
from lightning_megatron.epoch_boundary import Place, consumed_batches, go_on, place_of, set_counters
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.rng import collect_rng_state

_PACKAGES = ("lightning_megatron", "torch", "lightning", "transformers", "numpy")


def about(trainer: pl.Trainer, mesh: ParallelMesh, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a checkpoint that a human asks for first: layout, versions, the module's class."""
    module = trainer.lightning_module
    return {
        "layout": asdict(mesh.layout) | dict(extra),
        "precision": str(trainer.precision),
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "huggingface": _huggingface_configs(module),
        "versions": {"python": platform.python_version()} | _versions(),
    }


def _huggingface_configs(module: Any) -> dict[str, Any]:
    """Start of the names of every outermost Hugging Face model in a module -> its config."""
    if "transformers" not in sys.modules:
        return {}
    kind = sys.modules["transformers"].PreTrainedModel
    found: dict[str, Any] = {}
    for name, child in module.named_modules():
        if isinstance(child, kind) and not any(name.startswith(outer) for outer in found):
            config = json.loads(child.config.to_json_string(use_diff=False))
            found[f"{name}." if name else ""] = {**config, "architectures": [type(child).__name__]}
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def gather_to_first(value: Any, group: Any, mesh: ParallelMesh, members: int) -> list[Any]:
    """``value`` of every rank of a group that global rank 0 is in, on rank 0; empty elsewhere. Collective."""
    if members == 1:
        return [value] if mesh.rank == 0 else []
    if 0 not in dist.get_process_group_ranks(group):
        return []
    found: list[Any] = [None] * members
    dist.gather_object(value, found if mesh.rank == 0 else None, dst=0, group=group)
    return found if mesh.rank == 0 else []


def replica_state(trainer: pl.Trainer, device: torch.device) -> dict[str, Any]:
    """Random state and loaders of this replica."""
    state: dict[str, Any] = {"random": collect_rng_state(device)}
    combined = trainer.fit_loop._combined_loader
    if combined is not None:
        loaders = [loader for loader in combined.flattened if isinstance(loader, ResumableLoader)]
        state["loaders"] = [loader_state(loader) for loader in loaders]
        state["stateful"] = combined._state_dicts()
    return state


class Resumption:
    """Puts the random numbers and the loaders of a fit where a checkpoint was saved.

    Args:
        checkpoint: as loaded.
        trainer: restores its loops from it.
        mesh: the grid.
        device: this rank's device.
    """

    def __init__(
        self, checkpoint: dict[str, Any], trainer: pl.Trainer, mesh: ParallelMesh, device: torch.device
    ) -> None:
        replicas: list[dict[str, Any]] = checkpoint["lightning_megatron"]["replicas"]
        self._trainer = trainer
        index = mesh.coordinates.data
        self._replicas = mesh.layout.data
        self._saved_replicas = len(replicas)
        self._state = replicas[index % len(replicas)]
        self._loops = checkpoint["loops"]
        self._epoch, self._batches = consumed_batches(self._loops)
        self._place: Place | None = place_of(self._loops)
        set_counters(self._loops)
        self._continuation = Continuation(self._epoch, self._state["random"], device)
        self._loaders = 0
        self._give_each_replica_its_loaders()

    def _give_each_replica_its_loaders(self) -> None:
        stateful = self._state.get("stateful")
        loops = self._loops["fit_loop"].get("state_dict", {})
        if not stateful or "combined_loader" not in loops:
            return
        foreign = [state for state in stateful if state != {"resumes": True}]
        if foreign and self._replicas != self._saved_replicas:
            raise ValueError(
                f"the checkpoint holds the states of {self._saved_replicas} replicas' own dataloaders, which cannot be "
                f"shared among `data_parallel_size={self._replicas}`; resume with "
                f"`data_parallel_size={self._saved_replicas}`, or use a plain `DataLoader`, which can be continued by "
                "any number of replicas."
            )
        loops["combined_loader"] = stateful

    def begin(self) -> None:
        """The loops are about to go on; called at the start of every fit, of which the first counts."""
        if self._place is None:
            return
        place, self._place = self._place, None
        if not self._loaders:
            self._continuation.rewind()
            self._continuation.is_over = True
        go_on(self._trainer, place)

    def continue_loader(self, loader: Any) -> None:
        """Let a training loader go on; called once per loader, in Lightning's order.

        Where an epoch has yet to be ended, the next one makes its iterators by itself.
        """
        if self._place in (Place.LAST_BATCH, Place.VALIDATED):
            return
        if not isinstance(loader, ResumableLoader) or self._continuation.is_over:
            return
        states = self._state.get("loaders", [])
        state = states[self._loaders] if self._loaders < len(states) else None
        first = self._loaders == 0
        self._loaders += 1
        batches = self._batches_here(loader, state)
        if first and batches != self._batches:
            self._count_batches(batches)
        continue_loader(loader, batches, state, self._continuation)

    def _batches_here(self, loader: ResumableLoader, state: Mapping[str, Any] | None) -> int:
        """Consumed batches in the batches of this run.

        Raises:
            ValueError: the consumed samples are not a whole number of them.
        """
        before, now = state["batch_size"] if state is not None else None, batch_size_of(loader)
        if self._batches == 0 or (before == now and self._replicas == self._saved_replicas):
            return self._batches
        if before is None or now is None:
            raise ValueError(
                f"the run consumed {self._batches} batches on {self._saved_replicas} replicas; with "
                f"`data_parallel_size={self._replicas}` they can only be counted for loaders with a fixed batch size. "
                f"Resume with `data_parallel_size={self._saved_replicas}`, or from the end of an epoch."
            )
        samples, step = self._batches * before * self._saved_replicas, now * self._replicas
        if samples % step:
            raise ValueError(
                f"the run consumed {samples} samples of this epoch, which is not a whole number of batches of {now} on "
                f"`data_parallel_size={self._replicas}` replicas; choose a batch size whose product with the replicas "
                f"divides {samples}, for instance {before * self._saved_replicas}."
            )
        return samples // step

    def _count_batches(self, batches: int) -> None:
        """Let Lightning's counters of the epoch under way count this run's batches."""
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        shift = batches - self._batches
        for field in fields(current):
            setattr(current, field.name, getattr(current, field.name) + shift)
