"""Into which micro-batches a batch of training is cut, and what each of them counts in the loss of the batch.

What the user says goes first (``micro_batch_loss_weight=``, ``whole_batch_loss=``), then what the step's code shows (it
may return ``None``, it calls the layers again), then what trials of the step find out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.mesh.batches import auto_micro_batch_size, batch_size_of, split_batch
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.parts.names import parent
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step
from lightning_megatron.pipeline.forwards.compiled import has_compiled
from lightning_megatron.strategy.carried.all_samples import AllSamples
from lightning_megatron.strategy.carried.unlike_writes import UnlikeWrites
from lightning_megatron.strategy.data.alike_batches import AlikeBatches
from lightning_megatron.strategy.data.batch_numbers import NumbersOfAll
from lightning_megatron.strategy.data.pointing import PointingBatches, has_numbers_beside
from lightning_megatron.strategy.generation.first_try import calls_again, may_call_again
from lightning_megatron.strategy.generation.middle import Exchanged
from lightning_megatron.strategy.generation.repeats import Repeats
from lightning_megatron.strategy.hooks.backward_code import takes_gradients
from lightning_megatron.strategy.lightning.samplers import deals_equally
from lightning_megatron.strategy.lightning.trainer_access import fetched_loaders
from lightning_megatron.strategy.logs.joined import Joint
from lightning_megatron.strategy.loss.counted import NEXT_TO_NOTHING, Counted
from lightning_megatron.strategy.loss.once import OncePerBatch
from lightning_megatron.strategy.loss.replicas_said import say_untried_by_hand
from lightning_megatron.strategy.loss.skips import Asks, Skips
from lightning_megatron.strategy.loss.trials.backward_trials import BackwardsOverReplicas, BackwardTrials
from lightning_megatron.strategy.loss.trials.padding import PaddingOverReplicas
from lightning_megatron.strategy.loss.trials.tries import LossTrials
from lightning_megatron.strategy.mixtures.mixing import MixingTrials
from lightning_megatron.strategy.step.step_context import StepContext


@dataclass
class Cut:
    """Weights of the micro-batches of a batch.

    Attributes:
        weights: in means.
        total: of the weights, over all replicas.
        logs: how logged values combine, where that is known.
        once: what the step writes once per batch.
        sums: whether their losses are added up.
        layers: the micro-batches in which layers run, where the loss is one of the whole batch.
        joint: how micro-batches of evaluation come together.
        counts: whether a pass of counts goes before the step.
        turns: what micro-batches exchange that take turns, where the step calls the layers more than once.
    """

    weights: list[float]
    total: float = 1.0
    logs: Mapping[str, Any] = field(default_factory=dict)
    once: OncePerBatch = field(default_factory=OncePerBatch)
    sums: bool = False
    layers: list[Any] = field(default_factory=list)
    joint: Joint | None = None
    counts: bool = False
    turns: Exchanged | None = None

    def share(self, replicas: int) -> float:
        """By what a replica's loss is multiplied, so that the mean over the replicas is the loss of all."""
        return (1.0 if self.sums else sum(self.weights)) * replicas / self.total


class Cuts:
    """Cuts the batches of a run.

    Args:
        context: what steps run on.

    Attributes:
        mixing: tries whether a mixture's loss is one of the whole batch.
        backwards: tries whether code in backwards mixes samples.
        trials: of the loss.
        weighs: whether what replicas' batches count may differ before any trial: the user says what they do, or each
            replica's loader may give other numbers of samples.
        latest: of :meth:`uncut`.
    """

    def __init__(self, context: StepContext) -> None:
        self._context, self._options, self._stages = context, context.options, context.stages
        self._layout, self._has_loss = context.mesh.layout, context.mesh.rank == context.mesh.loss_rank
        self._alike = AlikeBatches()
        self._said_unlike, self._pointing = False, PointingBatches()
        self._probed = False
        self._skips = Skips(context.module, alone=self._layout.data == 1)
        self._says_weight = self._options.loss_weight is not None
        tries = self._options.whole_batch_loss is not False
        self._tries_uncut = tries and self._layout.data > 1 and context.module.automatic_optimization
        if tries and self._layout.data > 1 and not context.module.automatic_optimization:
            say_untried_by_hand(self._layout.data)
        self.weighs, self._unlike = self._says_weight and self._layout.data > 1, False
        self._loaders: Any = None
        self._refuses_turns: str | None = None
        self._said_turns: str | None = None
        self.latest = Cut([1.0], float(self._layout.data))
        self.trials = LossTrials(context)
        replicas = self.trials.replicas
        self.all_samples = None if replicas is None else AllSamples(context, replicas)
        adds = self._tries_uncut and not self._says_weight and replicas is not None
        self._numbers = NumbersOfAll(context.mesh.group("data_parallel") if adds else None, context.device)
        self._padding = None if replicas is None or not self._tries_uncut else PaddingOverReplicas(context, replicas)
        writes = UnlikeWrites(context.module, context.device, replicas) if replicas is not None and tries else None
        self._unlike_writes = writes
        self.mixing, self.backwards = MixingTrials(context), BackwardTrials(context)
        alone = self._layout.pipeline == 1 and self._options.micro_batch_size == "auto"
        if tries and not alone:
            called = functions_of_step(context.module)
            context.streams.of_batch.expect(called, compiled=has_compiled(context.module))
        self._backwards_told = BackwardsOverReplicas(context, asks=self._tries_uncut and alone)

    def close(self) -> None:
        """Give back what trials have replaced."""
        self.mixing.close()
        self.backwards.close()

    def candidates(self, batch: Any) -> list[Any]:
        """The micro-batches of ``micro_batch_size=``; the batch, where the user has said that it stays whole."""
        if self._options.whole_batch_loss is True and not self._stages.may_run_around:
            return [batch]
        self._look_at_loaders(batch)
        return self.split(batch, self._options.micro_batch_size, alike=True)

    def stays_whole(self, batch: Any) -> bool:
        """Whether a batch that one stage runs is not cut, on all replicas alike. Collective over them."""
        size = self._options.micro_batch_size
        self._look_at_loaders(batch)
        return self._some_stay_whole(size == "auto" or batch_size_of(batch) <= int(size))

    def _some_stay_whole(self, whole: bool) -> bool:
        """Whether the batch stays whole here, or on a replica that has fewer samples, or others."""
        differ = self._unlike or (self._layout.data > 1 and self._pointing.may_come)
        cuts = differ and (self._layout.pipeline > 1 or self._options.micro_batch_size != "auto")
        return any(objects.gather(whole, self._context.mesh.group("data_parallel"))) if cuts else whole

    def split(self, batch: Any, chosen: int | str, *, alike: bool = False) -> list[Any]:
        """A batch in micro-batches of a chosen size, or of one found by the number of stages.

        Args:
            batch: the whole.
            chosen: samples of a micro-batch, or "auto".
            alike: whether a batch stays whole of which other tensors would be cut than of the first, or that points
                at its own samples.
        """
        size = batch_size_of(batch)
        part = auto_micro_batch_size(size, self._layout.pipeline) if chosen == "auto" else int(chosen)
        if alike and part < size and not self._alike.include(batch, size):
            if not self._said_unlike:
                self._said_unlike = True
                rank_zero_info(
                    "the tensors of a batch are not of one length where those of the first were, or the other way "
                    "round, as where combined loaders end with batches of different sizes, or where the tensors of a "
                    "list, one per sample, all are as long as there are samples. Such batches run whole."
                )
            return [batch]
        return [batch] if alike and self._pointing.includes(batch, part) else split_batch(batch, part)

    def choose(self, call: Callable[[Any], Any], batch: Any, split: list[Any], *, first: bool) -> tuple[list[Any], Cut]:
        """The micro-batches in which a batch runs, and what they count; tries the step where need be.

        Args:
            call: the user's step, taking a (micro-)batch.
            batch: equal on all stages of a replica.
            split: what :meth:`candidates` gives for it.
            first: whether no gradients have been collected for the next update.
        """
        mixing, counts = self.mixing, self.mixing.counts
        mixing.begin()
        several = self._layout.pipeline > 1 or self._pointing.may_come
        if several and self._some_stay_whole(len(split) == 1):
            split = [batch]
        with counts.aside():
            parts, cut = self._cut(call, batch, split)
            weights = cut.weights if len(parts) > 1 and not cut.sums else ()
        if self.trials.began:
            mixing.retry()
            self.backwards.begins = True
        if mixing.mixes(call, batch, split, first=first, weights=weights) and (len(parts) > 1 or cut.layers):
            self.trials.keep_whole()
            parts, cut = self._cut(call, batch, split)
        cut.counts = counts.agreed(parts) and not cut.sums
        if counts.used and len(parts) > 1 and not cut.counts:  # another replica's batch is too small to be cut
            parts, cut = [batch], Cut([1.0 if cut.sums else sum(cut.weights)], cut.total)
        if first and (cut.turns is not None or self._context.passes is None):  # else it stays whole
            total = 1.0 if cut.sums else sum(cut.weights[:2])
            scales = [weight / total for weight in cut.weights[:2]]
            with counts.aside():
                mixed = self.backwards.mixes(call, batch, parts, scales, around=bool(cut.layers))
            if mixed:
                self.trials.keep_whole()
                parts, cut = self._cut(call, batch, split)
        self._write_all(call, batch)
        return parts, cut

    def uncut(self, call: Callable[[Any], Any], batch: Any, *, first: bool) -> tuple[Any, Cut]:
        """The batch that one stage runs uncut, and its weight beside those of the others; arguments as above."""
        run = batch
        self.mixing.begin()
        if self._tries_uncut or self.weighs:
            with self.mixing.counts.aside(always=True):
                (run,), self.latest = self._cut(call, batch, [batch])
            if self.trials.began:
                self.mixing.retry()
        self.mixing.mixes(call, batch, [batch], first=first)
        self.mixing.counts.agreed([batch])
        told, replicas = self.trials.reading, self.trials.replicas
        if first and self._backwards_told.is_due(begins=self.trials.began) and not told.whole and replicas is not None:
            with self.mixing.counts.aside(always=True):
                self._backwards_told.look(call, replicas.pieces_of(batch), told.way)
        self._write_all(call, batch)
        return run, self.latest

    def _write_all(self, call: Callable[[Any], Any], batch: Any) -> None:
        """Let values that the step goes on from be written from the samples of all replicas."""
        self.begin()
        if self._padding is not None:
            with self.mixing.counts.aside(always=True):
                self._padding.look(call, batch)
        if self.all_samples is not None:
            with self.mixing.counts.aside(always=True):
                self.all_samples.write(call, batch)

    def begin(self) -> None:
        """Before the step: look at what it can write."""
        if self._unlike_writes is not None:
            self._unlike_writes.begin()

    def look(self) -> None:
        """Before a stage hears what the step has left where it ends: look at what it has written here itself."""
        if self._unlike_writes is not None and not self._has_loss:
            self._unlike_writes.look()

    def settle(self) -> None:
        """After the step: what it goes on from is what the samples of all replicas have written. Collective over them,
        as is :meth:`check`.
        """
        if self.all_samples is not None:
            self.all_samples.settle()
        if self._unlike_writes is not None:
            self._unlike_writes.start()

    def check(self) -> None:
        """Before the update: that replicas have written nothing else otherwise.

        Raises:
            RuntimeError: they have.
        """
        if self._unlike_writes is not None:
            self._unlike_writes.finish()

    def _look_at_loaders(self, batch: Any) -> None:
        """Find out whether replicas may have unlike numbers of samples, and batches that point at their samples;
        collective where there are new loaders.
        """
        module = self._context.module
        if self._layout.data == 1:
            self._pointing.may_come = True
            return
        combined, _ = fetched_loaders(module.trainer)
        if combined is self._loaders:
            return
        self._loaders = combined
        mine = deals_equally(module), has_numbers_beside(batch)
        told = objects.gather(mine, self._context.mesh.group("world"))
        self._unlike, self._pointing.may_come = not all(deals for deals, _ in told), any(beside for _, beside in told)
        self.weighs = self._says_weight or (self._unlike and self._options.whole_batch_loss is not False)

    def asks(self, parts: Sequence[Any]) -> Asks | None:
        """Tells the stages that a step leaves its batch out; ``None`` where no step does."""
        if not self._skips.may or len(parts) > 1:
            return None
        return self._skips.asks(self._stages.share, self._context.device)

    def weights(self, parts: Sequence[Any]) -> list[float]:
        """Weight of each micro-batch in the means of this replica."""
        weight_of = self._options.loss_weight
        return [float(weight_of(part) if weight_of is not None else batch_size_of(part)) for part in parts]

    def _cut(self, call: Callable[[Any], Any], batch: Any, parts: list[Any]) -> tuple[list[Any], Cut]:
        """The micro-batches that a batch of training runs in, and what their losses and logged values count."""
        whole = self._options.whole_batch_loss
        repeats = self._stages.repeats
        passes = repeats is not None and self._repeats(repeats, call, parts)
        if passes and not self._may_take_turns(len(parts)):
            parts = [batch] if whole and not self._says_weight else parts
            if not self._tries_uncut or self._says_weight:
                weights = self.weights(parts)
                return parts, Cut(weights, self._over_replicas(weights, self._says_weight))
        elif self._skips.whole and whole and len(parts) > 1:
            if whole == "auto":
                self._skips.say(len(parts), self._layout.pipeline)
            parts = [batch]
        elif self._tries_uncut and self.trials.cuts_none:
            parts = [batch]  # of which is tried what it counts beside those of the other replicas
        logs: Mapping[str, Any] = {}
        once, sums = OncePerBatch(), False
        weigh: Callable[[Any], float] | None = self._options.loss_weight
        layers: list[Any] = []
        tries = len(parts) > 1 or self._tries_uncut
        if whole and (tries or self.trials.reading.fits):
            tried = self._numbers.look(batch, parts)
            read = self.trials.read(call, *tried) if tries else self.trials.reading
            if repeats is not None and self.trials.again and not passes:
                repeats.note("training_step")
                return self._cut(call, batch, parts)
            once = self.trials.once
            if passes and not read.whole and self.trials.turns:
                parts = [batch]
            if read.whole or self.trials.looks_new:
                around = self.trials.around and not self.trials.looks_new
                layers, parts = parts if around and len(parts) > 1 else [], [batch]
            if read.tells_replicas:
                logs, sums = read.within, read.way == "sum"
                weigh = read.way if isinstance(read.way, Counted) else weigh
        elif len(parts) > 1:
            self.trials.say_statistics()
        if sums:
            parts, layers = self._numbers.used(parts), self._numbers.into(layers)
            turns = self._turns(parts) if passes else None
            return parts, Cut([1.0] * len(parts), 1.0, logs, once, sums, layers, turns=turns)
        weights = [float((weigh or batch_size_of)(part)) for part in parts]
        if isinstance(weigh, Counted) and not all(weights):  # a mean over nothing is no number
            parts, weights = [batch], [sum(weights) or NEXT_TO_NOTHING]
        total = self._over_replicas(weights, weigh is not None, weigh or batch_size_of)
        turns = self._turns(parts) if passes else None
        return parts, Cut(weights, total, logs, once, layers=layers, turns=turns)

    def _may_take_turns(self, parts: int) -> bool:
        """Whether micro-batches of a step that calls the layers more than once may take turns, as its code looks."""
        if parts == 1 or self._options.whole_batch_loss != "auto" or self._says_weight:
            return False
        if self._refuses_turns is None:
            told = objects.gather(self._why_whole(), self._context.mesh.group("world"))
            self._refuses_turns = next((each for each in told if each), "")
            if self._refuses_turns:
                self._say_turns(self._refuses_turns, parts)
        return not self._refuses_turns

    def _why_whole(self) -> str:
        """Why batches of a step that calls the layers more than once run whole, before any trial."""
        if self.mixing.has_routers:
            return "experts are judged on whole batches"
        if self._context.gradients.windows is not None:
            return "`weight_sharding` gathers layers as they run, in one order on all replicas"
        if self._context.streams.draws is not None:
            return "`random_streams='layout'` counts its draws"
        if self._layout.context > 1:
            return "context ranks share the tokens of one at a time"
        if takes_gradients(self._context.module):
            return "its code runs in backwards, or takes gradients itself"
        return self._skips.whole

    def _turns(self, parts: Sequence[Any]) -> Exchanged | None:
        """The exchange among the micro-batches, if they take turns."""
        if self.trials.turns or len(parts) > 1:
            self._say_turns(self.trials.turns, len(parts))
        return self.trials.exchanged if len(parts) > 1 else None

    def _say_turns(self, why: str, parts: int) -> None:
        if why != self._said_turns:
            self._said_turns = why
            Repeats.say_turns(why, self._layout.pipeline, parts)

    def _repeats(self, repeats: Repeats, call: Callable[[Any], Any], parts: Sequence[Any]) -> bool:
        """Whether the training step calls the layers more than once, as far as is known; tried once, if need be."""
        tried, self._probed = self._probed, True
        if (known := repeats.includes("training_step")) or tried:
            return known
        will_be_tried = self._options.whole_batch_loss and len(parts) > 1
        module, model = self._context.module, parent(self._context.layers[0])
        may = bool(self._skips.whole) or (not will_be_tried and may_call_again(module, model))
        if may and calls_again(self._context, call, parts[0]):
            repeats.note("training_step")
        return repeats.includes("training_step")

    def _over_replicas(
        self, weights: Sequence[float], differ: bool, way: Callable[[Any], float] | None = None
    ) -> float:
        """The total of the weights over all replicas, so that losses divided by it add up; known where the look at
        whether to try the step has counted in the same way.
        """
        total, replicas = sum(weights), self._layout.data
        if replicas == 1 or not (differ or self.weighs):
            return total * replicas
        told = self.trials.replicas
        if told is not None and told.counted is not None and told.counted[0] == way:
            return told.counted[1]
        shared = torch.tensor(total, dtype=torch.float64, device=self._context.device)
        return float(raw_all_reduce(shared, self._context.mesh.group("data_parallel"), keep=False))
