"""Values that steps keep for the hooks after their loop, made those of all replicas' samples.

A replica's steps see its own samples, and so does what they count and collect on the module. One process has those of
all. How a value comes together is found out by a trial (:mod:`.logged`; :mod:`~..loss.trials.tries` in training), for
the names that hooks read; after the last batch, before the first of these hooks, replicas tell each other what they
have::

    self.right += (p == y).sum()      what was there, and the sum of what each has added
    self.outputs.append(self(x))      an entry for each batch, of the samples of all replicas
    self.losses.append(loss)          likewise, their mean or their sum
    self.best = max(self.best, x)     none of these: each keeps its own, and the user is told

Steps of training go on from what they have kept, in other hooks too; only what nothing else reads comes together there.
Hooks that know of replicas (:mod:`.reading_hooks`) find what their own has left. What callbacks collect themselves in
hooks after each batch stays their replica's, and the user is told if replicas have not the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.mesh.batches import batch_size_of
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.pipeline.elsewhere.undo import is_equal
from lightning_megatron.strategy.callbacks.loop_ends import LoopEnds
from lightning_megatron.strategy.evaluation.collected import Collected
from lightning_megatron.strategy.evaluation.logged import LoggedInEvaluation
from lightning_megatron.strategy.evaluation.reading_hooks import (
    hooks_behind,
    names_only_collected,
    names_read,
    names_steering,
)
from lightning_megatron.strategy.evaluation.value_of_replicas import KeptValue
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of, hook_of
from lightning_megatron.strategy.loss.over_replicas import unlike_values
from lightning_megatron.strategy.loss.tables import Name, is_in, sendable, spelled
from lightning_megatron.strategy.loss.traces import Traces, as_it_is
from lightning_megatron.strategy.loss.trials.tries import LossTrials

_LOOPS = {"training_step": "train", "validation_step": "validation", "test_step": "test"}
_TRIES = 4  # loops in whose first batch it is tried how values come together, as long as some are unknown


class KeptInLoop:
    """Values that the steps of one loop after another keep for the hooks after it.

    Args:
        module: the user's module.
        mesh: the grid.
        read: by name of a step, names that hooks after its loop read.
        ways: by name of a step, how each value that it writes comes together; "" where that is unknown.
        logged: is asked to try the first batch of a loop; ``None`` in training, whose trials go by themselves.

    Attributes:
        joined: by name of a step, whether its latest loop has kept what is that of all replicas now.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        read: Mapping[str, set[str]],
        ways: Callable[[str], Mapping[Name, Any]],
        logged: LoggedInEvaluation | None = None,
    ) -> None:
        self._module, self._read, self._written, self._logged = module, read, ways, logged
        self._group, self._replicas = mesh.group("data_parallel"), mesh.layout.data
        self._tries, self._told = dict[tuple[str, tuple[Any, ...]], int](), set[Name]()
        self._name, self._loader = "", ()
        self._metrics: bool | None = None
        self._traces: Traces | None = None
        self._latest: Traces | None = None
        self._values: dict[Name, KeptValue] = {}
        self._left: dict[Name, Any] = {}
        self._batches: list[dict[Any, float]] = []
        self.joined: dict[str, bool] = {}

    @contextmanager
    def around(self, name: str, batch: Any, loader: Sequence[Any]) -> Iterator[None]:
        """Around a step.

        Args:
            name: of the user's step.
            batch: of this replica.
            loader: number of its loader, where there are several.
        """
        self._begin(name, tuple(loader))
        yield
        self._note(name, batch)

    def together(self, name: str) -> None:
        """After the last batch, let every replica have what one process has; collective over the replicas.

        Args:
            name: of the user's step.
        """
        traces, self._traces = self._traces, None
        if traces is None or name != self._name:
            return
        self._name = ""
        ways, read = self._ways(name), self._read[name]
        known = self._join({value: (each, ways[value]) for value, each in self._values.items()})
        self.joined[name] = bool(known)
        self._say_unsure([value for value in known if self._logged and value in self._logged.unsure(name)], name)
        others = ((value, now) for value, (_, now) in traces.changes().items() if value not in known)
        apart = {value: now for value, now in others if ways.get(value) != "same" and is_in(value, read)}
        self._say(apart, name)
        if not objects.gather(bool(apart) or None, self._group).count(True):
            self._tries.update({(name, loader): _TRIES for step, loader in self._tries if step == name})

    def hand_over(self, names: Collection[Name]) -> None:
        """Before a step: let come together what the steps of this loop have kept so far of values that are written from
        the samples of all replicas from now on; collective over the replicas.

        Args:
            names: of such values.
        """
        leaving = [value for value in self._values if value in names]
        if not any(objects.gather(leaving or None, self._group)):
            return
        found = {value: (self._values.pop(value), self._left[value]) for value in leaving}
        known = self._join(found)
        lost = [spelled(value) for value in leaving if value not in known]
        if lost:
            rank_zero_warn(
                f"`{self._name}` has written {', '.join(f'`{each}`' for each in lost)} from the samples of each of the "
                f"{self._replicas} replicas in {len(self._batches)} batches, and how they come together is not known: "
                "what hooks read of these batches is that of a replica. It is written from all samples from now on."
            )

    def _join(self, values: Mapping[Name, tuple[KeptValue, Any]]) -> list[Name]:
        """Let values be those of all samples, each with how it comes together; the names of those that are then."""
        told = {name: each.tell(self._module, way, self._batches) for name, (each, way) in values.items()}
        every = [each or {} for each in objects.gather(told or None, self._group)]
        known = [name for name in values if all(name in e and e[name].added is not None for e in every)]
        for name in known:
            values[name][0].put(self._module, [each[name] for each in every], values[name][1])
        return known

    def _start_trial(self, traces: Traces | None) -> None:
        if self._logged is not None:
            self._logged.start = traces

    def _begin(self, name: str, loader: tuple[Any, ...]) -> None:
        self._start_trial(None)
        if (self._name and loader == self._loader) or not (self._read.get(name) or self._tells_metrics(name)):
            return
        self._latest = Traces(self._module, beside=True)
        if not self._name:
            self._name, self._batches, self._values, self._traces = name, [], {}, self._latest
        self._loader = loader
        self._tries[name, loader] = tries = self._tries.get((name, loader), 0) + 1
        self._start_trial(self._latest if tries <= _TRIES else None)

    def _tells_metrics(self, name: str) -> bool:
        """Whether a step may tell torchmetrics objects something, of which trials tell how it comes together."""
        if self._logged is None or name not in self._read:
            return False
        if self._metrics is None:
            self._metrics = any(isinstance(child, Metric) for child in self._module.modules())
        return self._metrics

    def _note(self, name: str, batch: Any) -> None:
        if self._traces is None or name != self._name:
            return
        ways = self._ways(name)
        latest, self._latest = self._latest, None
        if latest is not None:  # what another loader's batches wrote first has been the same so far
            new = self._found(
                latest, [value for value, way in ways.items() if way != "same" and value not in self._values]
            )
            for value, found in new.items():
                start = self._traces.start_of(value)
                if start is None or is_equal(start[1], found.start):
                    found.ends *= 1 + len(self._batches)
                    found.written = [False] * len(self._batches)
                    self._values[value] = found
        self._start_trial(None)
        weigh = {way for way in ways.values() if callable(way)}
        self._batches.append({"sizes": float(batch_size_of(batch)), **{way: float(way(batch)) for way in weigh}})
        for each in self._values.values():
            each.end_batch(self._module)
        self._left = {value: ways[value] for value in self._values}

    def _ways(self, name: str) -> dict[Name, Any]:
        """By name of a value that hooks read, how it comes together."""
        read = self._read[name]
        return {value: way for value, way in self._written(name).items() if is_in(value, read)}

    def _found(self, traces: Traces, names: Sequence[Name]) -> dict[Name, KeptValue]:
        """Locations of values, and their contents at the start of the loop."""
        found = {}
        for name in names:
            if (kept := traces.start_of(name)) is not None:
                found[name] = KeptValue(kept[0], name[1], kept[1])
        return found

    def _say_unsure(self, values: Sequence[Name], name: str) -> None:
        """Warn of values that some replicas' parts of a batch have written and others have not, where no trial has seen
        whether one process would.
        """
        if not values:
            return
        told = objects.gather([self._values[value].written for value in values], self._group)
        found = [
            value
            for place, value in enumerate(values)
            if any(len(set(batch)) > 1 for batch in zip(*(each[place] for each in told), strict=False))
        ]
        found = [value for value in found if value not in self._told]
        self._told.update(found)
        if found:
            rank_zero_warn(
                f"`{name}` writes {', '.join(f'`{spelled(each)}`' for each in found)} behind a condition on its batch, "
                f"which the samples of some of the {self._replicas} replicas meet and those of others do not: what "
                "those have written comes together that do, as where the condition is one on each sample. One that is "
                "on all samples of a batch (`if loss > 1`) has to be asked of what the replicas gather "
                "(`self.all_gather(x)`)."
            )

    def _say(self, apart: Mapping[Name, Any], name: str) -> None:
        """Warn of what each replica has kept of its own samples, if it is not the same on all of them."""
        mine: dict[Name, list[Any]] = {}
        for value, now in apart.items():
            mine.setdefault(sendable(value, self._module), []).append(as_it_is(now))
        found = [each for each in unlike_values(mine, self._group) if each not in self._told]
        self._told.update(found)
        if found:
            names = ", ".join(f"`{spelled(each)}`" for each in found)
            behind = f"on_{_LOOPS[name]}_batch_end"
            other = f", or `{behind}`," if is_overridden(behind, self._module) else ""
            rank_zero_warn(
                f"`{name}`{other} writes {names} from the samples of each of the {self._replicas} replicas, where one "
                "process writes it from all of them, and how they come together is not known: the hooks that read it "
                "see those of their replica. Gather what they need (`self.all_gather`), use a torchmetrics object, or "
                "pass `whole_batch_loss=False` if each replica's own is meant."
            )


class KeptForHooks(Callback):
    """Puts what steps of training and evaluation keep together over the replicas, after each loop.

    Args:
        module: the user's module.
        trainer: of the run.
        mesh: the grid.
        logged: finds out how values of evaluation come together.
        trials: find out how values of training do.

    Attributes:
        training: what steps of training keep.
        evaluation: what steps of evaluation keep.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        trainer: pl.Trainer,
        mesh: ParallelMesh,
        logged: LoggedInEvaluation,
        trials: LossTrials,
    ) -> None:
        read, replicas = dict[str, set[str]](), trials.replicas
        self._module, self._group = module, mesh.group("data_parallel")
        self._collected: Collected | None = None
        if mesh.layout.data > 1 and logged.tries:
            callbacks = callbacks_of(trainer)
            others = [callback for callback in callbacks if not isinstance(callback, KeptForHooks)]
            read = {step: names_read(module, others, loop) for step, loop in _LOOPS.items()}
            collected = names_only_collected(module, others, read["training_step"])
            if replicas is not None:
                replicas.read, replicas.collected = read["training_step"], collected
                replicas.steers, lines = names_steering(module, others)
                for line in lines[:1]:
                    rank_zero_warn(
                        f"{line} steers the next steps by what `training_step` has returned besides the loss, which "
                        f"each of the {mesh.layout.data} replicas has of its own samples, as under DDP, and one "
                        "process of all. Keep it on the module in the step (`self.last = x.detach()`): it is then put "
                        "together."
                    )
            read["training_step"] = collected  # what steps go on from stays their replica's
            self._collected = Collected(others, module, self._group)
            place = 1 + max((at for at, each in enumerate(others) if isinstance(each, LoopEnds)), default=-1)
            callbacks[:] = [*others[:place], self, *others[place:]]
        self.training = KeptInLoop(module, mesh, read, lambda _: {} if replicas is None else replicas.ways)
        self.evaluation = KeptInLoop(module, mesh, read, logged.written, logged)
        if replicas is not None and read:
            replicas.hand_over = self.training.hand_over

    def __reduce__(self) -> Any:
        """A run belongs to its processes: copies of its Trainer have a callback that does nothing."""
        return Callback, ()

    def is_whole(self, value: Any) -> bool:
        """Whether a number that the running hook logs to be summed over the replicas is that of all samples already: it
        is the same on all of them, after a loop whose values have been put together. Collective over them.

        Args:
            value: logged.
        """
        hook = hook_of(self._module)
        steps = [step for step, loop in _LOOPS.items() if hook in hooks_behind(loop)]
        if not any(kept.joined.get(step) for kept in (self.training, self.evaluation) for step in steps):
            return False
        told = objects.gather(value.detach().cpu() if isinstance(value, Tensor) else value, self._group)
        return all(is_equal(told[0], each) for each in told)

    def remove(self, trainer: pl.Trainer) -> None:
        """Take it out of the Trainer's callbacks."""
        callbacks = callbacks_of(trainer)
        callbacks[:] = [callback for callback in callbacks if callback is not self]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All batches are done on all ranks."""
        self._end(self.training, "training_step")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All batches are done on all ranks."""
        self._end(self.evaluation, "validation_step")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All batches are done on all ranks."""
        self._end(self.evaluation, "test_step")

    def _end(self, kept: KeptInLoop, step: str) -> None:
        kept.together(step)
        if self._collected is not None:
            self._collected.compare(_LOOPS[step])
