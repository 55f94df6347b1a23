"""Writes of a step into the state of its optimizers, such as momenta that it halves or forgets.

One process does so once per batch::

    for state in self.optimizers().state.values():
        state["exp_avg"].mul_(0.5)           written in place: a version of the tensor tells, and the dispatcher
    self.optimizers().state.clear()          written into the tables: they hold other things than before

Trials put it back, and find that the batch has to run whole. Where a step's code runs more than once for a batch, or on
some pipeline stages alone, it is refused. Only steps are looked at whose code speaks of such a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.mesh.autograd import version_of
from lightning_megatron.strategy.lightning.hooks import step_names
from lightning_megatron.strategy.lightning.trainer_access import optimizers_and_schedulers

_SPOKEN = frozenset({"state", "load_state_dict", "state_dict", "__setstate__"})


def states_of(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Table, name and tensor of all that the optimizers of a run keep of their parameters."""
    for at, optimizer in enumerate(_optimizers(module)):
        for place, values in enumerate(optimizer.state.values()):
            for key, each in _entries(values).items():
                if isinstance(each, Tensor):
                    yield f"optimizers.{at}.state.{place}", str(key), each


def _optimizers(module: nn.Module) -> list[Optimizer]:
    return optimizers_and_schedulers(module)[0] if isinstance(module, pl.LightningModule) else []


class StateTables:
    """Contents of the tables of optimizers' states at one moment.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kept = [
            (optimizer, optimizer.state, {key: (values, _entries(values)) for key, values in optimizer.state.items()})
            for optimizer in _optimizers(module)
        ]

    def changed(self) -> set[tuple[str, str]]:
        """Tables that hold other things now, and a name in them or ""."""
        found: set[tuple[str, str]] = set()
        for at, (optimizer, table, kept) in enumerate(self._kept):
            name = f"optimizers.{at}.state"
            if optimizer.state is not table or table.keys() != kept.keys():
                found.add((name, ""))
                continue
            for place, (key, values) in enumerate(table.items()):
                was, entries = kept[key]
                now, inner = _entries(values), f"{name}.{place}"
                if values is not was or now.keys() != entries.keys():
                    found.add((inner, ""))
                    continue
                found |= {(inner, str(each)) for each, value in now.items() if not _same(value, entries[each])}
        return found

    def put_back(self) -> None:
        """Let the tables hold again what they held; what is written into tensors stays."""
        for optimizer, table, kept in self._kept:
            optimizer.state = table  # type: ignore[assignment]
            for key in [key for key in table if key not in kept]:
                del table[key]
            for key, (values, entries) in kept.items():
                table[key] = values
                if isinstance(values, dict):
                    values.clear()
                    values.update(entries)


def _entries(values: Any) -> dict[Any, Any]:
    return dict(values) if isinstance(values, dict) else {}


def _same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, (int, float, str)) and type(now) is type(before) and now == before)


class StatesInRuns:
    """Refuses a step that writes its optimizers' state where its code runs more than once, or on some stages only.

    Args:
        module: the user's module.
        stages: number of pipeline stages.
    """

    def __init__(self, module: nn.Module, stages: int) -> None:
        self._module, self._stages = module, stages
        self._spoken = not _SPOKEN.isdisjoint(step_names(module))
        self._parts = 1
        self._tables: StateTables | None = None
        self._versions: list[tuple[tuple[str, str], Tensor, int]] = []

    def begin(self, parts: int) -> None:
        """At the start of a batch of ``parts`` micro-batches."""
        self._tables = None
        if not self._spoken or (parts == 1 and self._stages == 1):
            return
        self._parts, self._tables = parts, StateTables(self._module)
        with torch._C.DisableTorchFunction():
            self._versions = [((at, key), each, version_of(each)) for at, key, each in states_of(self._module)]

    def check(self) -> None:
        """After a run of the step.

        Raises:
            RuntimeError: it has written.
        """
        if self._tables is None:
            return
        with torch._C.DisableTorchFunction():
            written = self._tables.changed()
            written |= {name for name, each, version in self._versions if version_of(each) != version}
        if not written:
            return
        name = ".".join(part for part in min(written) if part)
        if self._stages > 1:
            raise RuntimeError(
                f"the step writes the optimizer's state `{name}`, and of the {self._stages} pipeline stages each has "
                "its own part, of which it reaches some only. Write it in a hook (`on_train_batch_start`, "
                "`on_train_batch_end`), which runs on all of them."
            )
        raise RuntimeError(
            f"the step writes the optimizer's state `{name}`, and would again in each of the {self._parts} "
            "micro-batches of the batch: nothing had shown it before this step. Write it in a hook "
            "(`on_train_batch_start`, `on_train_batch_end`), or set `micro_batch_size` to the size of a batch."
        )
