"""State of a run besides weights and optimizers: positions of its random numbers and data, and its layout.

Random states and loaders differ between replicas and are equal on the stages and tensor ranks of one, so the first
rank collects them from the ranks of its own row of the grid.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_megatron.mesh.draws.random_streams import collect_rng_state
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.strategy.data.loaders import Continuation, ResumableLoader
from lightning_megatron.strategy.data.walk import batch_size_of, walk_of
from lightning_megatron.strategy.lightning.epoch_boundary import (
    SavedAt,
    consumed_batches,
    go_on,
    place_of,
    set_counters,
)
from lightning_megatron.strategy.lightning.trainer_access import fetched_loaders, loader_states, loading_mode
from lightning_megatron.strategy.saving.adapter_notes import adapter_notes

_PACKAGES = ("lightning_megatron", "torch", "lightning", "transformers", "numpy")


def about(trainer: pl.Trainer, mesh: ParallelMesh, extra: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The part of a checkpoint that a human asks for first: layout, versions, the module's class."""
    layout = {"layout": asdict(mesh.layout) | dict(extra), "precision": str(trainer.precision)}
    return layout | about_module(trainer.lightning_module, names)


def about_module(module: pl.LightningModule, names: Iterable[str]) -> dict[str, Any]:
    """The part of this that belongs to the module; ``names`` are those of all its parameters and buffers."""
    return {
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "huggingface": _huggingface_configs(module),
        "generation": _generation_configs(module),
        "adapters": adapter_notes(module, names),
        "versions": {"python": platform.python_version()} | _versions(),
    }


def _huggingface_configs(module: Any) -> dict[str, Any]:
    """Start of the names of every outermost Hugging Face model in a module -> its config."""
    if "transformers" not in sys.modules:
        return {}
    kind = sys.modules["transformers"].PreTrainedModel
    found: dict[str, Any] = {}
    for name, child in module.named_modules():
        if isinstance(child, kind) and name not in Parts(start.removesuffix(".") for start in found):
            config = json.loads(child.config.to_json_string(use_diff=False))
            found[f"{name}." if name else ""] = {**config, "architectures": [type(child).__name__]}
    return found


def _generation_configs(module: Any) -> dict[str, Any]:
    """Start of the names of every Hugging Face model that generates -> its generation config."""
    found = {}
    for name, child in module.named_modules() if "transformers" in sys.modules else ():
        config = child.__dict__.get("generation_config")
        if config is not None and hasattr(config, "to_json_string"):
            found[f"{name}." if name else ""] = json.loads(config.to_json_string())
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
    return objects.gather_to(value, 0, group) or []


def gather_all_to_first(value: Any) -> list[Any]:
    """``value`` of every rank, on global rank 0; empty elsewhere. Collective."""
    return objects.gather_to(value, 0) or []


def replica_state(trainer: pl.Trainer, loops: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """Random state and loaders of this replica, where the checkpoint holds the state of ``loops``."""
    state: dict[str, Any] = {"random": collect_rng_state(device)}
    combined, fetcher = fetched_loaders(trainer)
    if combined is not None and loops is not None:
        batches = consumed_batches(loops)[1]
        ahead = len(getattr(fetcher, "batches", ()))
        loaders = [loader for loader in combined.flattened if isinstance(loader, ResumableLoader)]
        state["loaders"] = [
            walk_of(loader).state(loader, _of_this_pass(loading_mode(combined), loader, batches), ahead)
            | {"batch_size": batch_size_of(loader)}
            for loader in loaders
        ]
        state["stateful"] = loader_states(combined)
    return state


def _of_this_pass(mode: str, loader: Any, batches: int) -> int:
    """Batches that ``loader`` gave since it last began, of ``batches`` that all loaders together gave in the epoch."""
    length = sized_len(loader)
    if not length or batches <= length:
        return batches
    return length if mode == "max_size" else (batches - 1) % length + 1


def note_what_is_read_ahead(trainer: pl.Trainer) -> None:
    """Tell loaders whether Lightning prefetches a batch, as it does where their length is unknown."""
    combined, fetcher = fetched_loaders(trainer)
    if combined is None or fetcher is None:
        return
    for loader in combined.flattened:
        if isinstance(loader, ResumableLoader):
            walk_of(loader).is_read_ahead = fetcher.length is None


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
        self._place: SavedAt | None = place_of(self._loops)
        set_counters(self._loops)
        self._continuation = Continuation(self._epoch, self._state["random"], device)
        self._loaders: list[ResumableLoader] = []
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
        if place in (SavedAt.LAST_BATCH, SavedAt.VALIDATED) or not self._loaders:
            self._continuation.rewind()
            self._continuation.is_over = True
            for loader in self._loaders:
                walk_of(loader).restore(loader)
        elif place is SavedAt.INSIDE:
            self._continuation.begin()
        go_on(self._trainer, place)

    def continue_loader(self, loader: Any) -> None:
        """Let a training loader go on; called once per loader, in Lightning's order.

        Where an epoch has yet to be ended, the next one makes its iterators by itself.
        """
        if not isinstance(loader, ResumableLoader) or self._continuation.is_over:
            return
        states, index = self._state.get("loaders", []), len(self._loaders)
        state: dict[str, Any] = states[index % len(states)] if states else {}  # loaders may be asked for twice
        self._loaders.append(loader)
        exact = self._is_exact(loader, state)
        if self._place in (SavedAt.LAST_BATCH, SavedAt.VALIDATED):
            walk_of(loader).go_on(loader, state, 0, None, exact)
            return
        batches = self._batches_here(loader, state, self._batches)
        if index == 0 and batches != self._batches:
            self._count_batches(batches)
        of_pass = self._batches_here(loader, state, state.get("fetched", self._batches))
        walk_of(loader).go_on(loader, state, of_pass, self._continuation, exact)

    def _is_exact(self, loader: ResumableLoader, state: Mapping[str, Any]) -> bool:
        """Whether this run's batches, and the workers that make them, are those of the run that was saved."""
        same = self._replicas == self._saved_replicas and state.get("batch_size") == batch_size_of(loader)
        workers = state.get("workers", {}).get("given_out")
        if workers is None or len(workers) == loader.num_workers:
            return same
        if any(worker is not None for worker in workers):
            rank_zero_warn(
                f"The data set drew random numbers in {len(workers)} loader workers; with "
                f"`num_workers={loader.num_workers}` it continues with other numbers. Samples stay in order."
            )
        return False

    def _batches_here(self, loader: ResumableLoader, state: Mapping[str, Any], batches: int) -> int:
        """``batches`` of the run that was saved in batches of this run.

        Raises:
            ValueError: the consumed samples are not a whole number of them.
        """
        before, now = state.get("batch_size"), batch_size_of(loader)
        if batches == 0 or (before == now and self._replicas == self._saved_replicas):
            return batches
        if before is None or now is None:
            raise ValueError(
                f"the run consumed {batches} batches on {self._saved_replicas} replicas; with "
                f"`data_parallel_size={self._replicas}` they can only be counted for loaders with a fixed batch size. "
                f"Resume with `data_parallel_size={self._saved_replicas}`, or from the end of an epoch."
            )
        samples, step = batches * before * self._saved_replicas, now * self._replicas
        if samples % step:
            nearest = _batch_size_near(now, samples, self._replicas)
            how = f"resume with `data_parallel_size={self._saved_replicas}`, or from the end of an epoch"
            if nearest is not None:
                how = f"choose a batch size whose product with the replicas divides {samples}, for instance "
                how += f"`batch_size={nearest}`"
            raise ValueError(
                f"the run consumed {samples} samples of this epoch, which is not a whole number of batches of {now} on "
                f"`data_parallel_size={self._replicas}` replicas; {how}."
            )
        return samples // step

    def _count_batches(self, batches: int) -> None:
        """Let Lightning's counters of the epoch under way count this run's batches."""
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        shift = batches - self._batches
        for field in fields(current):
            setattr(current, field.name, getattr(current, field.name) + shift)


def _batch_size_near(wanted: int, samples: int, replicas: int) -> int | None:
    """The batch size nearest to ``wanted`` of which ``replicas`` read ``samples`` in whole steps; ``None`` if none do.

    24 samples, 2 replicas, 5 wanted: 4, in 3 steps of 8 samples.
    """
    each = samples // replicas
    fitting = [size for size in range(1, each + 1) if each % size == 0]
    return min(fitting, key=lambda size: abs(size - wanted), default=None) if samples % replicas == 0 else None
