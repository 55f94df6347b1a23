"""Starts and ends the processes of a node, and answers ``ckpt_path="last"`` from completion markers meanwhile.

Lightning asks each ModelCheckpoint for files called ``last*`` and takes the one changed last. After a crash that can be
an older one than ``step=40.ckpt`` beside it, or one that was not finished. So while a function of the Trainer runs
under this launcher, which only our strategy has, its ModelCheckpoints answer from the markers instead, and what was
saved on SLURM's signal counts too. Averaging callbacks and loggers that upload get the methods of
:mod:`~lightning_megatron.strategy.lightning.averaging` and :mod:`~lightning_megatron.strategy.lightning.uploads` for as
long. Other Trainers' callbacks are left alone.

Lightning kills all processes at once when one has failed, which may be before the others have said whose failure it
was. Here they get some seconds to end by themselves; one that fails before the ranks have met is named here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_megatron.mesh.replaced import Replacement, Replacements
from lightning_megatron.mesh.watch.peers import told
from lightning_megatron.strategy.lightning.averaging import averages_parts
from lightning_megatron.strategy.lightning.restoring import restores_when_set_up
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of
from lightning_megatron.strategy.lightning.uploads import uploads_directories
from lightning_megatron.strategy.saving.newest import newest_checkpoint

if TYPE_CHECKING:
    from lightning_megatron.strategy.processes import Processes

_QUESTION = "_find_last_checkpoints"
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_LOOK_S = 0.2
_BEFORE_S = 1.0  # for what a failed process still prints
_PATIENCE_S = 10.0  # for ranks that end by themselves, with the failure's name
INTERRUPTED = 130  # exit code of a program that Ctrl-C has ended
TERMINATED = 143  # by SIGTERM: not 0, so that whatever restarts jobs does not take the run for finished
_EARLY = "before the ranks had met"


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher of one process per device.

    Args:
        arguments: Lightning's.
        processes: of the strategy; know whether the ranks have met.
    """

    def __init__(self, *arguments: Any, processes: Processes) -> None:
        super().__init__(*arguments)
        self._processes = processes
        self._children: _Children | None = None
        processes.exit_of = self.exit_of

    def __getstate__(self) -> dict[str, Any]:
        """Without the processes that it has started, which a copy has not."""
        return self.__dict__ | {"procs": [], "_children": None}

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other processes of this node, then call ``function``."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            with _quiet_children():
                self._call_children_scripts()
            self._children = _Children(self.procs, lambda: self._processes.are_watched)
            self._children.start()
        elif isinstance(environment, LightningEnvironment) and environment.local_rank() > 0:
            _hear_interrupts()
            _Orphan(lambda: self._processes.are_watched).start()
        subprocess_script._set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            if trainer is None:
                return function(*args, **kwargs)
            saves: Any = trainer.strategy.checkpoint_io
            with (
                answers_from_markers(trainer),
                averages_parts(trainer),
                uploads_directories(trainer, saves.wait),
                restores_when_set_up(trainer),
            ):
                return function(*args, **kwargs)
        except BaseException:
            if self._children is not None:
                self._children.forget_interrupts()
            if not self._processes.are_watched:  # the others would wait for this rank until their timeout
                if self._children is not None:
                    self._children.leave()
                _kill(self.procs)
            raise

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook may run it: where no other process is started, which would run the script again."""
        return self.num_processes == 1 and self.num_nodes == 1

    def exit_of(self, pid: int) -> int | None:
        """Exit status of a process that was started here and has ended; ``None`` of others."""
        return next((process.poll() for process in self.procs if process.pid == pid), None)


class _Children(threading.Thread):
    """Ends all processes of this node some time after one of them has failed.

    Args:
        children: started here, local ranks from 1.
        are_watched: whether the ranks have met, and name failures themselves.
    """

    def __init__(self, children: list[subprocess.Popen[bytes]], are_watched: Callable[[], bool]) -> None:
        super().__init__(name="lightning_megatron children", daemon=True)
        self._children, self._are_watched = children, are_watched
        self._left = False
        self._heard, heard = os.pipe()
        for end in (self._heard, heard):
            os.set_blocking(end, False)
        self._before: int | None = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(heard, warn_on_full_buffer=False)

    def forget_interrupts(self) -> None:
        """Leave signals to whom they were left before; on the main thread only."""
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._before)
            self._before = None

    def _is_interrupted(self) -> bool:
        """Whether Ctrl-C came while the main thread waits inside of torch for ranks that are starting."""
        try:
            return signal.SIGINT in os.read(self._heard, 64) and not self._are_watched()
        except BlockingIOError:
            return False

    def leave(self) -> None:
        """Say nothing more: this process ends them, and says why itself."""
        self._left = True

    def run(self) -> None:
        """Look after them until all have ended well."""
        while not self._left:
            if self._is_interrupted():
                said = f"\nStopped by Ctrl-C {_EARLY}; there was nothing to save."
                print(said, file=sys.stderr, flush=True)
                _kill(self._children)
                os._exit(INTERRUPTED)
            codes = [child.poll() for child in self._children]
            if all(code == 0 for code in codes):
                return
            failed = [(number, code) for number, code in enumerate(codes, start=1) if code]
            if failed:
                self._end(*failed[0])
            time.sleep(_LOOK_S)

    def _end(self, local: int, code: int) -> None:
        if not self._are_watched():
            time.sleep(_BEFORE_S)
            if self._left:
                return
            said = f"the process of local rank {local} {told(code)}".replace("in the middle of the run", _EARLY)
            print(f"\n{said}\nAll ranks end with it.", file=sys.stderr, flush=True)
        else:
            time.sleep(_PATIENCE_S)
        _kill(self._children)
        os._exit(1)


@contextmanager
def _quiet_children() -> Iterator[None]:
    """Start processes in here to whom torch does not print a page of C++ frames about each question to a store whose
    process, this one, is gone; and who leave Ctrl-C to this process until they are in the run, instead of printing a
    traceback each from the middle of an import.
    """
    is_given = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    takes_signals = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if takes_signals else None
    try:
        yield
    finally:
        if takes_signals:
            signal.signal(signal.SIGINT, before)
        if not is_given:
            del os.environ[_LOG_LEVEL]


def _hear_interrupts() -> None:
    """Take Ctrl-C as any process of Python does, which this one was started without."""
    takes_signals = threading.current_thread() is threading.main_thread()
    if takes_signals and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Orphan(threading.Thread):
    """Ends this process if the one that started it is gone before the ranks have met.

    Args:
        are_watched: whether they have met.
    """

    def __init__(self, are_watched: Callable[[], bool]) -> None:
        super().__init__(name="lightning_megatron orphan", daemon=True)
        self._are_watched, self._parent = are_watched, os.getppid()

    def run(self) -> None:
        """Look after the parent until the ranks look after each other."""
        while not self._are_watched():
            if os.getppid() != self._parent:
                os._exit(1)
            time.sleep(_LOOK_S)


def _kill(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.kill()


@contextmanager
def answers_from_markers(trainer: pl.Trainer) -> Iterator[None]:
    """Let the ModelCheckpoints of ``trainer`` find the newest checkpoint that is whole.

    Raises:
        AttributeError: this version of Lightning asks ModelCheckpoint by another name.
    """
    with Replacements() as replaced:
        for callback in callbacks_of(trainer):
            if isinstance(callback, ModelCheckpoint):
                replaced.put(callback, _QUESTION, _Search(callback))
        yield


class _Search(Replacement):
    """Stands for ``ModelCheckpoint._find_last_checkpoints`` of one callback."""

    def __init__(self, callback: ModelCheckpoint) -> None:
        super().__init__(callback, _QUESTION)
        self._callback, self._lightnings = callback, getattr(callback, _QUESTION)

    def __call__(self, trainer: pl.Trainer) -> set[str]:
        """Lightning's answer, with the newest whole checkpoint."""
        folder = self._callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
        found = self._lightnings(trainer)
        saves_last = bool(self._callback.save_last or self._callback.save_on_exception)
        places = folder, self._callback.FILE_EXTENSION, trainer.default_root_dir
        return newest_checkpoint(found, *places, saves_last=saves_last)
