"""Checkpoints as directories: tensors by name and box through ``torch.distributed.checkpoint``, the rest beside them.

A save is four things in a row: copy (only when asynchronous), plan, write, publish. Only the last makes anything
visible; see :mod:`lightning_megatron.checkpoints.files.directory` for what a directory holds.

::

    step k   copy ─┐                               step k+1 ...            the next save waits for this one
    thread         └─ plan ─ write ─ publish ──────────────────────────▶
"""

from __future__ import annotations

import io
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult

from lightning_megatron.checkpoints.files.dcp_plans import (
    PieceLoadPlanner,
    PieceSavePlanner,
    saved_kinds,
)
from lightning_megatron.checkpoints.files.directory import (
    ABOUT,
    META,
    data_folder,
    new_token,
    open_checkpoint,
    publish,
    remove_checkpoint,
)
from lightning_megatron.checkpoints.files.folder import Folder
from lightning_megatron.checkpoints.files.sources import load_plain
from lightning_megatron.checkpoints.files.storage import BoxReader, BoxWriter
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.pieces import PiecedTensor, as_pieces
from lightning_megatron.strategy.saving.separation import separate
from lightning_megatron.strategy.saving.single_file import SingleFile


class MegatronCheckpointIO(CheckpointIO):
    """Saves and loads checkpoint directories; every rank takes part.

    Args:
        async_save: go on training while the checkpoint is written. Saving then takes only the time of a copy to host
            memory; a failure in the background is raised at the next step, and the end of the run waits.
        load_optimizer: whether optimizers resume with their state in the checkpoint; ``False`` starts them afresh.
        prefixes: start of a name in the checkpoint -> start of the name in the module, for weights that have moved,
            such as ``{"model.": "backbone.model."}``; the longest that fits counts.
        weights_only: whether ``meta.pt`` may hold plain data only. ``False`` also loads arbitrary pickled objects
            (custom hyperparameter types), which runs code from the file: only for checkpoints you trust.
        verify: whether loading first reads every file once, each on one rank, and compares its checksum, so that a
            damaged checkpoint is refused and not trained on. ``False`` reads only what each rank needs.
        single_file: save one file, as Lightning does, for ``torch.load`` and other readers; see :mod:`.single_file`.

    Raises:
        ValueError: ``single_file`` together with ``async_save``.
    """

    def __init__(
        self,
        async_save: bool = False,
        load_optimizer: bool = True,
        prefixes: Mapping[str, str] | None = None,
        weights_only: bool = True,
        verify: bool = True,
        single_file: bool = False,
    ) -> None:
        if single_file and async_save:
            raise ValueError(
                "`single_file=True` gathers all tensors in one file, for which the ranks have to wait; leave "
                "`async_save=True` out, or save directories and convert them by `lightning-megatron checkpoint export`."
            )
        self.verify, self.single_file = verify, single_file
        self._verified: str | None = None  # path whose tensors are being loaded, in one or several parts
        self.async_save = async_save
        self.load_optimizer = load_optimizer
        self.prefixes = dict(prefixes or {})
        self._weights_only = weights_only
        self._group: Any = None
        self._pending: Future[Any] | None = None
        self._pending_path: Any = None
        self._has_saved = False
        self._to_remove: list[Any] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint``; collective over all ranks.

        Args:
            checkpoint: Lightning's checkpoint, with ``"state_dict"`` and ``"optimizer_states"`` keyed by parameter name
                and holding this rank's tensors only, plain or in pieces.
            path: directory to create, on a mounted file system or anywhere fsspec reaches; one of that name is
                replaced once the new one is whole.
            storage_options: options of the fsspec file system.

        Raises:
            RuntimeError: a rank could not write its part; the message names it. Nothing is left at ``path``, and
                what was there before stays.
        """
        self.wait()
        if self.single_file:
            file = SingleFile(path, storage_options, objects.broadcast(new_token(), 0, self._process_group()))
            self._save_directory(checkpoint, file.directory, None)
            failure = file.write() if _is_first() else None
            _raise_together(failure, f"the checkpoint {path} was not saved", self._process_group())
        else:
            self._save_directory(checkpoint, path, storage_options)

    def _save_directory(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        tensors, meta = separate(checkpoint)
        target = Folder(path, storage_options)
        writer = _CheckpointWriter(target, objects.broadcast(new_token(), 0, self._process_group()), meta)
        self._warn_of_pickles(writer.meta)
        options: dict[str, Any] = {
            "storage_writer": writer,
            "planner": PieceSavePlanner(),
            "process_group": self._process_group(),
            "no_dist": not _distributed(),
        }
        if not self.async_save:
            with _explained(path, writer), _no_dist_is_fine():
                dcp.save(tensors, **options)
            return
        if _is_first():
            with suppress(OSError):  # the background save will tell; `save_last="link"` makes its link at once
                target.parent.make()
        stager = _HostStager()
        with _no_dist_is_fine():
            pending = dcp.async_save(tensors, async_stager=stager, **options)
        assert isinstance(pending, Future)
        self._pending, self._pending_path, self._pending_writer = pending, path, writer

    def _warn_of_pickles(self, meta: bytes) -> None:
        """Say at the first save, and not when a run wants to resume, that plain loading will not do."""
        if not self._weights_only or self._has_saved or not _is_first():
            return
        self._has_saved = True
        try:
            load_plain(meta, "the checkpoint", trust=False)
        except RuntimeError as error:
            rank_zero_warn(f"Resuming will need a choice: {error}")

    def check(self) -> None:
        """Raise what a finished background save failed with; returns at once while it is running."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for a background save.

        Raises:
            RuntimeError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        removals, self._to_remove = self._to_remove, []
        with _explained(self._pending_path, self._pending_writer):
            pending.result()
        for path in removals:
            remove_checkpoint(path)

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read everything but the tensors; :meth:`load_tensors` fills those in.

        A plain Lightning checkpoint file is read whole.

        Raises:
            FileNotFoundError: there is no checkpoint at ``path``.
            IncompleteCheckpointError: the directory has no completion marker, or lost a file.
        """
        self.wait()
        self._verified = None
        trust = not self._choose(weights_only)
        folder = Folder(path)
        if folder.is_file():
            return load_plain(folder.parent.read(folder.name), str(folder), trust)
        data = open_checkpoint(path)
        return load_plain(data.read(META), f"{data}/{META}", trust)

    def _choose(self, weights_only: bool | None) -> bool:
        return self._weights_only if weights_only is None else weights_only

    @staticmethod
    def tensor_kinds(path: Any, start: str = "") -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Logical shape and type of tensors in a checkpoint directory, by name; see :func:`saved_kinds`."""
        return saved_kinds(BoxReader(open_checkpoint(path)).read_metadata(), start)

    def load_tensors(self, path: Any, into: Mapping[str, tuple[str, PiecedTensor]]) -> None:
        """Fill pieces, in place; collective over all ranks.

        Args:
            path: of the checkpoint.
            into: for each piece, under any key, the name it is stored under and the piece.

        Raises:
            RuntimeError: a rank could not read its part; the message names it.
        """
        failure: Exception | None = None
        try:
            folder = open_checkpoint(path)
            if self.verify and self._verified != str(path):
                folder.verify(*_own_share())
                self._verified = str(path)
            with _no_dist_is_fine():  # every rank knows by itself what to read
                dcp.load(
                    {key: pieces for key, (_, pieces) in into.items()},
                    storage_reader=BoxReader(folder),
                    planner=PieceLoadPlanner({key: stored for key, (stored, _) in into.items()}),
                    no_dist=True,
                )
        except CheckpointException as error:  # no `Exception`, and of this rank alone
            failure = next(iter(error.failures.values()))[0]  # type: ignore[assignment]
        except Exception as error:
            failure = error
        _raise_together(failure, f"the checkpoint {path} was not loaded", self._process_group())

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint directory, link or file; while a save is running, once that has succeeded."""
        if self._pending is not None:
            self._to_remove.append(path)
            return
        remove_checkpoint(path)

    def __getstate__(self) -> dict[str, Any]:
        """Without a background save, and the group that its ranks meet through: those stay with this one."""
        return self.__dict__ | {"_group": None, "_pending": None, "_to_remove": []}

    def teardown(self) -> None:
        """Wait for a background save."""
        self.wait()
        self._group = None

    def _process_group(self) -> Any:
        """Ranks meet through a CPU group of their own, so that a background save never meets training's messages."""
        if not _distributed():
            return None
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group


def megatron_checkpoint_io(plugin: CheckpointIO | None) -> MegatronCheckpointIO:
    """The plugin to use where the user gave ``plugin``, or none.

    Lightning's ``AsyncCheckpointIO`` becomes ``async_save=True``: it would hold collectives in a thread of its own.

    Raises:
        MisconfigurationException: any other plugin: it would save what this rank holds, for the same layout only.
    """
    if plugin is None:
        return MegatronCheckpointIO()
    if isinstance(plugin, AsyncCheckpointIO):
        inner = plugin.__dict__.get("_checkpoint_io") or MegatronCheckpointIO()
        if isinstance(inner, MegatronCheckpointIO):
            inner.async_save = True
            return inner
    if isinstance(plugin, MegatronCheckpointIO):
        return plugin
    raise MisconfigurationException(
        f"`{type(plugin).__name__}` writes what one process holds, for the same layout only; checkpoints "
        "of MegatronStrategy, at one device too, hold boxes of tensors that any layout can load. Leave it out, or use "
        "`Trainer(plugins=[MegatronCheckpointIO(...)])`, which takes fsspec paths, saves asynchronously, or writes one "
        "file with `single_file=True`. On one device `Trainer(strategy='auto')` takes any plugin."
    )


class _CheckpointWriter(BoxWriter):
    """Adds the small files to the boxes and publishes the directory, on the first rank.

    The small files' content is fixed when the writer is made: callbacks go on changing theirs during a background save.
    """

    def __init__(self, target: Folder, token: str, meta: dict[str, Any]) -> None:
        super().__init__(data_folder(target, token))
        self._target = target
        self._small: dict[str, bytes] = {}
        if not _is_first():
            return
        self._step = int(meta.get("global_step", 0))
        about = {"step": self._step, "epoch": meta.get("epoch", 0)} | meta["lightning_megatron"].get("about", {})
        buffer = io.BytesIO()
        torch.save(meta, buffer)
        self._small = {META: buffer.getvalue(), ABOUT: json.dumps(about, indent=1).encode()}

    @property
    def meta(self) -> bytes:
        """Content that is stored beside the tensors, on the first rank."""
        return self._small.get(META, b"")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        for name, data in self._small.items():
            self.add_file(name, data)
        publish(self._target, self.folder, self.files, self._step, time.time())


class _HostStager(AsyncStager):
    """Copies this rank's tensors to host memory, into plain tensors of their own."""

    def stage(self, state_dict: Any) -> Any:
        return {name: as_pieces(value).on_host() for name, value in state_dict.items()}

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def synchronize_staging(self) -> None:
        """The copy is done when :meth:`stage` returns."""

    def close(self) -> None:
        """Nothing is kept."""


class _explained:
    """Turns a failed save into one error that names ranks and reasons, and removes what it had written."""

    def __init__(self, path: Any, writer: _CheckpointWriter) -> None:
        self._path = path
        self._writer = writer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        if _is_first():
            _remove_quietly(self._writer.folder)
        if isinstance(error, CheckpointException):
            reasons = "; ".join(
                f"rank {rank}: {type(failure[0]).__name__}: {failure[0]}" for rank, failure in error.failures.items()
            )
            raise RuntimeError(f"the checkpoint {self._path} was not saved. {reasons}") from error


def _remove_quietly(folder: Folder) -> None:
    try:
        folder.remove()
    except OSError as error:
        warnings.warn(f"could not remove the unfinished {folder}: {error}", stacklevel=2)


@contextmanager
def _no_dist_is_fine() -> Iterator[None]:
    """DCP warns when there is one process only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable).*")
        yield


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _own_share() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if _distributed() else (0, 1)


def _is_first() -> bool:
    return not _distributed() or dist.get_rank() == 0


def _raise_together(failure: Exception | None, what: str, group: Any) -> None:
    """Raise on every rank what any of them failed with."""
    if failure is not None and not _distributed():
        raise failure
    reasons = objects.gather(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if not any(reasons):
        return
    named = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)
    raise RuntimeError(f"{what}. {named}") from failure
