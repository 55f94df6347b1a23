"""Values that hooks log about gradients and weights, made equal on the ranks that each hold a part of the model.

``self.log_dict(grad_norm(self, 2))`` in ``on_before_optimizer_step`` names the parameters that this rank holds: one
stage's, and of split ones a slice. So what hooks log is held back until they are done, put together over the ranks of
one model, and logged on all of them::

    stage 0   grad_norm/layers.0 = 3   grad_norm_total = 5   ┐                         layers.0 = 3, layers.1 = 12,
    stage 1   grad_norm/layers.1 = 12  grad_norm_total = 12  ┘ ── exchanged, logged ──▶  total = sqrt(3² + ... + 12²)

Names that one rank logs are logged everywhere; norms of slices are put together; the total is the norm of all. A value
that depends on another stage's weights is that stage's. Of anything else that differs, the value of the last stage is
kept.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.strategy.carried.step_stores import CLOCKS
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks, may_branch, may_log, names_used
from lightning_megatron.strategy.lightning.trainer_access import hook_of, in_hook
from lightning_megatron.strategy.logs.step_logs import LOG_SIGNATURE

_NORM = re.compile(r"grad_([0-9.]+|inf)_norm(?!_total)")
_TOTAL = re.compile(r"grad_([0-9.]+|inf)_norm_total")
_HOOKS = (
    *("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end"),
    *(
        f"on_{verb}_{when}"
        for verb in ("validation", "test")
        for when in ("start", "epoch_start", "epoch_end", "batch_start", "batch_end")
    ),
)


_OF_ALL_REPLICAS = tuple(hook for hook in _HOOKS if "batch" not in hook or "train" in hook)
_MEASURES = CLOCKS | {"max_memory_allocated", "memory_allocated", "memory_reserved", "mem_get_info", "memory_info"}
_MEASURES |= {"virtual_memory", "cpu_percent", "getrusage", "getpid", "global_rank", "local_rank"}


class HooksThatMeasure:
    """Knows which hooks of a module and of callbacks read what is each rank's own: a clock, memory in use, its number.

    Args:
        module: the user's module.
        callbacks: of the Trainer.
    """

    def __init__(self, module: pl.LightningModule, callbacks: Iterable[Callback]) -> None:
        self._owners: list[Any] = [module, *foreign_callbacks(callbacks)]

    def __contains__(self, hook: str) -> bool:
        return any(hasattr(owner, hook) and _MEASURES & names_used(owner, hook) for owner in self._owners)


@dataclass(frozen=True)
class Missing:
    """Stands for a number that this rank cannot compute.

    Attributes:
        part: dotted name of what is elsewhere.
    """

    part: str


@dataclass
class HookLog:
    """One call of ``self.log``.

    Attributes:
        hook: name of the hook that made it.
        value: the number, or the :class:`Missing` part of another stage that it depends on.
        options: the other arguments, with the name.
    """

    hook: str
    value: Any
    options: dict[str, Any]

    @property
    def key(self) -> tuple[str, str]:
        """Key that tells it from others."""
        return self.hook, self.options["name"]


class HookLogs:
    """Holds logs back while an optimizer steps, and exchanges them.

    Args:
        mesh: the grid.
        device: where tensors live.
        measure: tells which hooks log what differs from rank to rank.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device, measure: HooksThatMeasure) -> None:
        self._mesh, self._device, self._measure = mesh, device, measure
        self._held: list[HookLog] | None = None
        self._told: set[str] = set()

    def hold(self) -> None:
        """Hold back what is logged from now on."""
        self._held = []

    def release(self) -> None:
        """Forget what is held, after a failure."""
        self._held = None

    def take(self, module: pl.LightningModule, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether this call of ``self.log`` is held back."""
        hook = hook_of(module)
        if self._held is None or hook is None:
            return False
        options = dict(LOG_SIGNATURE.bind(module, *args, **kwargs).arguments)
        options.pop("self")
        value = options.pop("value")
        if options.get("rank_zero_only") or isinstance(value, (Metric, dict)):
            return False
        if isinstance(value, Absent):
            value = Missing(value.part)
        value = value.detach().cpu() if isinstance(value, Tensor) else value
        self._held.append(HookLog(hook, value, options))
        return True

    def flush(self, module: pl.LightningModule, log: Callable[..., None]) -> None:
        """Log what was held back, on every rank alike; collective over the ranks that hold one model.

        Args:
            module: the user's module.
            log: ``self.log`` without holding back.
        """
        held, self._held = self._held or [], None
        layout = self._mesh.layout
        if layout.tensor > 1:
            held = self._exchange("tensor_parallel", list(range(layout.tensor)), held, slices=True)
        if layout.pipeline > 1:
            ranks = self._mesh.pipeline_ranks
            held = self._exchange("pipeline_parallel", [sorted(ranks).index(r) for r in ranks], held, slices=False)
        for entry in held:
            value = entry.value.to(self._device) if isinstance(entry.value, Tensor) else entry.value
            with in_hook(module, entry.hook):
                log(**entry.options, value=value)

    def _exchange(self, axis: str, order: Sequence[int], held: list[HookLog], *, slices: bool) -> list[HookLog]:
        gathered = [entries or [] for entries in objects.gather(held or None, self._mesh.group(axis))]
        found: dict[tuple[str, str], list[HookLog]] = {}
        for index in order:
            for entry in {entry.key: entry for entry in gathered[index]}.values():
                found.setdefault(entry.key, []).append(entry)
        if not slices:
            found = {key: _known(entries) for key, entries in found.items()}
        merged = [self._merge(entries, slices=slices) for entries in found.values()]
        _put_totals_together(merged, differing={key for key, entries in found.items() if not _equal(entries)})
        return merged

    def _merge(self, entries: list[HookLog], *, slices: bool) -> HookLog:
        name = entries[0].options["name"]
        norm = _NORM.search(name)
        if _equal(entries):
            return entries[0]
        if slices and norm is not None:
            return HookLog(entries[0].hook, _norm([entry.value for entry in entries], norm), entries[0].options)
        if _TOTAL.search(name) is None and name not in self._told and self._tells(entries[-1]):
            self._told.add(name)
            values = ", ".join(f"{float(entry.value):.9g}" for entry in entries)
            rank_zero_warn(
                f"`{name}`, logged in `{entries[0].hook}`, differs between the ranks that share one model ({values}): "
                "each holds only a part of the parameters. The last of these is logged. For the norm of all gradients "
                "log `self.trainer.strategy.gradient_norm()`, or pass `MegatronStrategy(log_gradient_norm=True)`."
            )
        return entries[-1]

    def _tells(self, entry: HookLog) -> bool:
        """Whether a number that is not the same on all ranks is none that was measured on each of them."""
        return isinstance(entry.value, Tensor) or (isinstance(entry.value, float) and entry.hook not in self._measure)


def _known(entries: list[HookLog]) -> list[HookLog]:
    """The entries whose values are numbers.

    Raises:
        RuntimeError: there is none.
    """
    known = [entry for entry in entries if not isinstance(entry.value, Missing)]
    if not known:
        raise RuntimeError(
            f"the value `{entries[0].options['name']}` that `{entries[0].hook}` logs depends on parts of several "
            f"pipeline stages, among them `{entries[0].value.part}`: no stage can compute it. Log a value per part, or "
            "use `pipeline_parallel_size=1`."
        )
    return known


def _equal(entries: list[HookLog]) -> bool:
    first = entries[0].value
    return all(bool(entry.value == first) or _are_nan(entry.value, first) for entry in entries)


def _are_nan(*values: Any) -> bool:
    return all(bool(value != value) for value in values)


def _norm(values: Iterable[Any], match: re.Match[str]) -> Tensor:
    """Norm of norms, as Lightning's ``grad_norm`` computes it."""
    numbers = [float(value) for value in values]
    return torch.tensor(numbers, dtype=torch.float64).norm(float(match.group(1)))


def _put_totals_together(entries: list[HookLog], differing: set[tuple[str, str]]) -> None:
    """Compute totals that differed between ranks from the norms that all ranks logged together."""
    for entry in entries:
        match = _TOTAL.search(entry.options["name"])
        if match is None or entry.key not in differing:
            continue
        part = f"grad_{match.group(1)}_norm"
        norms = [e.value for e in entries if e.hook == entry.hook and e is not entry and part in e.options["name"]]
        entry.value = _norm(norms, match)


def _that_log(module: pl.LightningModule, callbacks: Iterable[Callback]) -> list[tuple[Any, str]]:
    """Hooks of a module and of callbacks whose code may log, with their owners."""
    others = ((callback, Callback) for callback in foreign_callbacks(callbacks))
    return [
        (owner, hook)
        for owner, parent in ((module, None), *others)
        for hook in _HOOKS
        if is_overridden(hook, owner, parent=parent) and may_log(owner, hook)
    ]


class KeysOfReplicas:
    """Refuses hooks that log a key on some replicas only: its mean would wait for the others, or take another key's.

    What each has logged is compared after hooks whose code logs, and has a loop or a condition. Batches of evaluation
    are left alone, as replicas may have unlike numbers of them.

    Args:
        module: the user's module.
        callbacks: of the Trainer.
        group: the replicas.
    """

    def __init__(self, module: pl.LightningModule, callbacks: Iterable[Callback], group: dist.ProcessGroup) -> None:
        self._group, self._logged = group, list[str]()
        self._replaced = Replacements()
        for owner, hook in _that_log(module, callbacks):
            if hook in _OF_ALL_REPLICAS and may_branch(owner, hook):
                self._replaced.call(owner, hook, self._comparing(getattr(owner, hook), hook))

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note a call of ``self.log``, whose value is put together over the replicas."""
        if not kwargs.get("rank_zero_only"):
            self._logged.append(str(args[0] if args else kwargs.get("name")))

    def _comparing(self, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(hook)
        def compared(*args: Any, **kwargs: Any) -> Any:
            self._logged = []
            result = hook(*args, **kwargs)
            self._compare(name)
            return result

        return compared

    def _compare(self, hook: str) -> None:
        told = [each or [] for each in objects.gather(list(dict.fromkeys(self._logged)) or None, self._group)]
        if all(each == told[0] for each in told):
            return
        everywhere = set(told[0]).intersection(*told[1:])
        some = sorted({key for each in told for key in each} - everywhere)
        listed = ", ".join(f"`{key}`" for key in some[:8])
        what = f"logs {listed} on some of the {len(told)} replicas only" if some else "logs its keys in unlike orders"
        raise RuntimeError(
            f"`{hook}` {what}, where one process logs the values of all samples, and no replica knows what others "
            "lack. Log the same keys on every replica (0 where there is nothing, or a torchmetrics object), gather "
            "what they are made of (`self.all_gather`), log them in the step, or pass `rank_zero_only=True`."
        )

    def remove(self) -> None:
        """Give the hooks back."""
        self._replaced.take_back()


class HeldHooks:
    """Holds back what the hooks of a module and of callbacks log, each until it has returned on this rank.

    Lightning's own callbacks and this package's log nothing that differs, and are left alone; so are hooks whose code
    does not log.

    Args:
        module: the user's module.
        callbacks: of the Trainer.
        logs: collects and exchanges.
        log: ``self.log`` without holding back.
    """

    def __init__(
        self, module: pl.LightningModule, callbacks: Iterable[Callback], logs: HookLogs, log: Callable[..., None]
    ) -> None:
        self._module, self._logs, self._log = module, logs, log
        self._replaced = Replacements()
        for owner, hook in _that_log(module, callbacks):
            self._replaced.call(owner, hook, self._holding(getattr(owner, hook)))

    def _holding(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def held(*args: Any, **kwargs: Any) -> Any:
            self._logs.hold()
            try:
                result = hook(*args, **kwargs)
            except BaseException:
                self._logs.release()
                raise
            self._logs.flush(self._module, self._log)
            return result

        return held

    def remove(self) -> None:
        """Give the hooks back."""
        self._replaced.take_back()
