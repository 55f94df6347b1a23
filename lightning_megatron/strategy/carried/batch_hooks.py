"""Hooks that are given a batch, of which each replica has some samples and one process has all.

A hook may mix samples, or write from them what steps read::

    def on_after_batch_transfer(self, batch, i):  batch["x"] -= batch["x"].mean(0); return batch
    def on_train_batch_end(self, out, batch, i):  self.mean.lerp_(batch["x"].mean(0), 0.1)

So a hook whose code reads its batch is tried, on this replica's samples and on those of all. Where the rows or what it
writes are others, it runs on the samples of all from then on, and each replica goes on with its own rows::

    replica 0   [0 1] ──▶ [0 1 2 3] ──▶ hook ──▶ [0 1]       writes W
    replica 1   [2 3] ──▶ [0 1 2 3] ──▶ hook ──▶ [2 3]       writes W

Hooks that draw random numbers are left alone: the numbers of a replica's samples are its own, as under DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of, map_tensors, parts_of, tensors_of
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.other_generators import all_of_others, set_others, states_of_others
from lightning_megatron.mesh.parts.bytecode import instructions_of, names_in
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.pipeline.elsewhere.reachable import attributes_set_in
from lightning_megatron.pipeline.elsewhere.undo import Kept, is_equal
from lightning_megatron.strategy.data.joined_batches import in_order, joined_batches
from lightning_megatron.strategy.hooks.whole_hooks import may_run_on_one_rank
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks, functions_of
from lightning_megatron.strategy.lightning.samplers import deals_in_turns
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of
from lightning_megatron.strategy.logs.batch_copies import whole_copy
from lightning_megatron.strategy.loss.tables import NOT_USERS
from lightning_megatron.strategy.loss.traces import Traces
from lightning_megatron.strategy.processes import Processes

_TRANSFERS = ("on_before_batch_transfer", "on_after_batch_transfer")
_END = "on_train_batch_end"
_STARTS = tuple(f"on_{stage}_batch_start" for stage in ("validation", "test", "predict"))
_PLACES = {**dict.fromkeys((*_TRANSFERS, "on_train_batch_start", *_STARTS), 0), _END: 1}
"""Hook of a module -> place of the batch among its arguments; a callback's have the Trainer and the module before."""
_ALWAYS, _AGAIN = 8, 8  # calls of which the 1st, 2nd, 4th and 8th are tried, and factor between later ones
_OFF = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative, of rows that are computed among others


class _Ran(NamedTuple):
    """One run of a hook that left nothing behind.

    Attributes:
        batch: what it has made of one.
        written: name -> value.
        drew: whether it has drawn random numbers.
        failed: whether it has raised.
    """

    batch: Any
    written: dict[Any, Any]
    drew: bool
    failed: bool


class BatchHooks:
    """Runs hooks of training on the samples of all replicas, where it matters.

    Args:
        module: the user's.
        trainer: of the run.
        processes: connected.
    """

    def __init__(self, module: pl.LightningModule, trainer: pl.Trainer, processes: Processes) -> None:
        self._replaced = Replacements()
        steps = {name for each in functions_of(module, "training_step") for name in names_in(each.__code__)}
        owners: list[tuple[Any, Any]] = [(module, pl.LightningModule)]
        owners += [(callback, Callback) for callback in foreign_callbacks(callbacks_of(trainer))]
        if (data := getattr(trainer, "datamodule", None)) is not None:
            owners.append((data, pl.LightningDataModule))
        for owner, parent in owners:
            for name, place in _PLACES.items():
                if not hasattr(parent, name) or not is_overridden(name, owner, parent=parent):
                    continue
                at = place + 2 * (parent is Callback)
                if not reads_argument(owner, name, at) or may_run_on_one_rank(owner, name):
                    continue
                if name == _END and not _shared_names(owner, name, module) & steps:
                    continue
                hook = getattr(owner, name)
                self._replaced.call(owner, name, _BatchHook(hook, name, at, owner, module, processes).wrapped())

    def stop(self) -> None:
        """Give the hooks back."""
        self._replaced.take_back()


@dataclass
class _BatchHook:
    """A hook of the user's; see :class:`BatchHooks`."""

    hook: Callable[..., Any]
    name: str
    place: int
    owner: Any
    module: pl.LightningModule
    processes: Processes
    calls: int = 0
    due: int = 1
    of_all: bool = field(default=False)
    looks: int = 0
    look_at: int = 1

    def wrapped(self) -> Callable[..., Any]:
        """A function to call instead."""

        @functools.wraps(self.hook)
        def called(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= self.place:
                return self.hook(*args, **kwargs)
            if not self.module.trainer.training:
                self._look(args, kwargs)
                return self.hook(*args, **kwargs)
            self.calls += 1
            if self.calls == self.due and not self.of_all:
                self.due *= 2 if self.calls < _ALWAYS else _AGAIN
                self._try(args, kwargs)
            return self._on_all(args, kwargs) if self.of_all else self.hook(*args, **kwargs)

        return called

    @property
    def _where(self) -> str:
        code = functions_of(self.owner, self.name)[0].__code__
        return f"`{self.name}` ({code.co_filename}:{code.co_firstlineno})"

    def _try(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Find out whether it has to be given the samples of all."""
        batch = args[self.place]
        whole, rows = self._samples_of_all(batch)
        mine = self._run(args, kwargs, batch)
        if whole is None:
            other, differs = None, bool(mine.written)
        else:
            other = self._run(args, kwargs, whole)
            differs = mine.failed or other.failed or self._differs(mine, other, rows)
        cannot = other is None or other.failed
        with self.processes.naming_failures():
            mesh = self.processes.mesh
            told = objects.gather((differs and not mine.failed, cannot, mine.drew), mesh.group("world"))
        differ, cannot, drew = (any(each) for each in zip(*told, strict=True))
        if drew or not differ:
            self.due = 0 if drew else self.due
            return
        where, replicas = self._where, mesh.layout.data
        self.of_all, self.due = not cannot, 0
        if cannot:
            rank_zero_warn(
                f"{where} writes, or makes of its batch, what depends on the samples that are in it. Each of the "
                f"{replicas} replicas gives it its own, as under DDP, where one process gives it all: they cannot be "
                "put together, as they are of unlike sizes, or it does not run on all of them. Gather what it is made "
                "of (`self.all_gather(x)`), or do it in the data set or for each sample."
            )
        else:
            rank_zero_info(
                f"{where} is given the samples of all {replicas} replicas, as what it makes of them depends on all: "
                "they send each other their batches before each step."
            )

    def _look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Warn, in evaluation, of a hook that makes something else of half a batch: replicas may have unlike numbers of
        batches there, and do not wait for each other.
        """
        self.looks += 1
        if self.looks != self.look_at:
            return
        self.look_at *= 2 if self.looks < _ALWAYS else _AGAIN
        batch = args[self.place]
        try:
            half = batch_size_of(batch) // 2
        except ValueError:
            return
        if half == 0:
            return
        rows = list(range(half))
        all_of_it = self._run(args, kwargs, batch)
        part = self._run(args, kwargs, in_order(whole_copy(batch), rows))
        if all_of_it.drew or all_of_it.failed or part.failed:
            return
        if not alike(part.batch, kept := in_order(all_of_it.batch, rows)) and shapes(part.batch) == shapes(kept):
            self.look_at = 0
            rank_zero_warn(
                f"{self._where} makes of each sample of a batch what depends on the others in it. In evaluation each "
                f"of the {self.processes.mesh.layout.data} replicas gives it its own samples, as under DDP, where one "
                "process gives it all. Do it in the data set, for each sample, or pass `whole_batch_loss=False` if "
                "each replica's own is meant."
            )

    def _differs(self, mine: _Ran, other: _Ran, rows: list[int]) -> bool:
        return not (alike(mine.batch, in_order(other.batch, rows)) and alike(mine.written, other.written))

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Any) -> _Ran:
        """A run on a copy of a batch, after which everything is as before."""
        given, traces, own = whole_copy(batch), Traces(self.module, beside=True), None
        if self.owner is not self.module:
            own = Kept(vars(self.owner))
        before, failed, made = positions(), False, None
        with drawing_again():
            try:
                with _without_logs(self.module), traces.noted():
                    made = self.hook(*args[: self.place], given, *args[self.place + 1 :], **kwargs)
            except Exception:  # the run that counts raises it, if it is of this replica's samples
                failed = True
            drew = positions() != before
            written: dict[Any, Any] = {name: now for name, (_, now) in traces.changes().items()}
            written |= {("weight", name): True for name in traces.weights.found}
            if own is not None:
                written |= _changed(own)
                own.put_back(())
            traces.put_back()
        return _Ran(made if self.name in _TRANSFERS else given, written, drew, failed)

    def _samples_of_all(self, batch: Any) -> tuple[Any, list[int]]:
        """The samples of all replicas in one batch, ``None`` if they cannot be put together; and which are this one's.
        Collective over the replicas.
        """
        group = self.processes.mesh.group("data_parallel")
        with self.processes.naming_failures():
            told = objects.gather(map_tensors(batch, lambda tensor: tensor.detach().cpu()), group)
        try:
            sizes, whole = [batch_size_of(each) for each in told], told[0]
        except ValueError:
            return None, []
        for other in told[1:]:
            whole = None if whole is None else joined_batches(whole, other)
        if whole is None:
            return None, []
        total, mine = sum(sizes), self.processes.mesh.coordinates.data
        rows = list(range(sum(sizes[:mine]), sum(sizes[: mine + 1])))
        if len(set(sizes)) == 1 and deals_in_turns(self.module):
            whole = in_order(whole, torch.arange(total).view(len(sizes), -1).t().flatten().tolist())
            rows = list(range(mine, total, len(sizes)))
        device = next((tensor.device for tensor in tensors_of(batch)), None)
        return map_tensors(whole, lambda tensor: tensor.to(device)), rows

    def _on_all(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        batch = args[self.place]
        whole, rows = self._samples_of_all(batch)
        if whole is None:
            raise RuntimeError(
                f"{self._where} is given the samples of all {self.processes.mesh.layout.data} replicas, as what it "
                "makes of them depends on all, and the batches of this step cannot be put together, as their samples "
                "are of unlike sizes. Pad them to one size, or do for each sample what the hook does."
            )
        made = self.hook(*args[: self.place], whole, *args[self.place + 1 :], **kwargs)
        if self.name in _TRANSFERS:
            return in_order(made, rows)
        if self.name != _END:
            _write_back(batch, in_order(whole, rows))
        return made


def reads_argument(owner: Any, name: str, place: int) -> bool:
    """Whether the code of a hook reads its argument at a place, or all of them at once.

    Args:
        owner: of the hook, which is not among its arguments.
        name: of the hook.
        place: among its arguments.
    """
    code = functions_of(owner, name)[0].__code__
    names = code.co_varnames[1 : code.co_argcount]
    argument = names[place] if place < len(names) else code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    return any(
        step.opname.startswith("LOAD_") and (step.argval == argument or argument in _pair(step.argval))
        for step in instructions_of(code)
    )


def _pair(argument: Any) -> tuple[Any, ...]:
    return argument if isinstance(argument, tuple) else ()


def _shared_names(owner: Any, name: str, module: pl.LightningModule) -> set[str]:
    """Attributes of a module that a hook names, and those that it sets."""
    codes = [function.__code__ for function in functions_of(owner, name)]
    named, kept = {each for code in codes for each in names_in(code)}, {*vars(module), *module._buffers}
    kept |= {each for each in named if not callable(getattr(type(module), each, len))}
    return (named & kept - NOT_USERS) | {each for code in codes for each in attributes_set_in(code)}


def _changed(own: Kept) -> dict[Any, Any]:
    """Numbers, tensors and lists that a callback has set since."""
    now = {key: value for key, value in own.table.items() if isinstance(value, (Tensor, int, float, list))}
    return {
        ("callback", key): map_tensors([value], lambda tensor: tensor.detach().clone())
        for key, value in now.items()
        if not is_equal(own.earlier(key), value)
    }


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same, but for the rounding of what is computed among more rows."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or not one.is_floating_point():
            return is_equal(one, other)
        return bool(
            torch.allclose(one, other.to(one), rtol=(off := _OFF.get(one.dtype, 1e-2)), atol=off, equal_nan=True)
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    parts = parts_of(one)
    if parts and type(one) is type(other):
        others = parts_of(other)
        return len(parts) == len(others) and all(map(alike, parts, others))
    return is_equal(one, other)


def shapes(value: Any) -> list[torch.Size]:
    """Of all tensors in a value."""
    return [tensor.shape for tensor in tensors_of(value)]


def _write_back(batch: Any, rows: Any) -> None:
    """Let a batch be what a hook has made of its rows."""
    if isinstance(batch, Tensor):
        if not is_equal(batch, rows):
            batch.copy_(rows)
        return
    pairs: Any = ()
    if isinstance(batch, MutableMapping):
        for key in [key for key in batch if key not in rows]:
            del batch[key]
        pairs = rows.items()
    elif isinstance(batch, MutableSequence) and len(batch) == len(rows):
        pairs = enumerate(rows)
    for key, value in pairs:
        known = batch.get(key) if isinstance(batch, MutableMapping) else batch[key]
        if isinstance(known, Tensor) and isinstance(value, Tensor) and known.shape != value.shape:
            batch[key] = value
        elif isinstance(known, Tensor) or parts_of(known):
            _write_back(known, value)
        elif known is not value:
            batch[key] = value
    if not isinstance(batch, (MutableMapping, MutableSequence)):
        for known, value in zip(parts_of(batch), parts_of(rows), strict=True):
            _write_back(known, value)


def positions() -> tuple[Any, ...]:
    """Positions of all generators."""
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else ()
    return (*states_of_others(), torch.get_rng_state().tolist(), cuda)


@contextmanager
def drawing_again() -> Iterator[None]:
    """While it lasts, what is drawn is drawn again later."""
    others = all_of_others()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        yield
    set_others(others)


@contextmanager
def _without_logs(module: pl.LightningModule) -> Iterator[None]:
    with Replacements() as replaced:
        for name in ("log", "log_dict"):
            replaced.call(module, name, lambda *args, **kwargs: None)
        yield
