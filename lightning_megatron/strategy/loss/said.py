"""Messages to the user about how a batch is cut and weighed: a line where the answer is not the mean over samples."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterable
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_megatron.mesh.batches import batch_size_of, tensors_of
from lightning_megatron.mesh.draws.batch_draws import Place
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from
from lightning_megatron.strategy.logs.combining import Mean
from lightning_megatron.strategy.logs.step_logs import LogKey
from lightning_megatron.strategy.loss.weighing import Finding, Reading

_OF_SIZES = (RuntimeError, ValueError, IndexError, AssertionError)
_SIZES = re.compile(
    r"\b(batch|shape|size|dim|length|element|row|sample|broadcast|stack|match|mismatch|numel)|out of (range|bounds)",
    re.IGNORECASE,
)


def say_statistics(module: nn.Module, layers: Iterable[str]) -> None:
    """One line about layers that compute over what they see of a batch; for runs that are not tried."""
    for name in layers:
        for path, child in module.get_submodule(name).named_modules(prefix=name):
            if isinstance(child, _BatchNorm) or type(child).__name__ == "_SpectralNorm":
                rank_zero_info(
                    f"`{path}` ({type(child).__name__.lstrip('_')}), and whatever else in the layers computes "
                    "statistics in each forward, does so micro-batch by micro-batch; `whole_batch_loss=True` lets "
                    "it see whole batches."
                )
                return


def say_around(found: Finding, now: Reading, parts: int) -> None:
    """One line where layers run in micro-batches, and the code around them on the whole batch.

    Args:
        found: by the trial.
        now: what is known with it.
        parts: how many micro-batches a batch has.
    """
    rank_zero_info(
        f"{_why_whole(found, now)}. So that the step is that of one process, the layers run in {parts} micro-batches, "
        "and the code before and after them once on the whole batch: all forwards, then all backwards, with the "
        f"activations of all {parts} micro-batches."
    )


def say_reading(before: Reading, found: Finding, now: Reading, parts: int, stages: int, apart: str) -> None:
    """One line about what differs from the mean over samples, and one about logged values.

    Args:
        before: what was known before the trial.
        found: by it.
        now: what is known with it.
        parts: how many micro-batches a batch has.
        stages: of the pipeline.
        apart: why the layers cannot run in micro-batches where the loss is one of the whole batch; or "".
    """
    if now.whole:
        idle = f", in which each of the {stages} stages is busy a {stages}th of the time" if stages > 1 else ""
        idle += f" (its layers cannot run in micro-batches: {apart})" if apart else ""
        of_loss = not (now.writes or now.draws or now.undecided)
        lets = "A loss that is a mean over samples, or `micro_batch_loss_weight=...`, lets it run in micro-batches; "
        remedy = lets if of_loss else ""
        rank_zero_info(
            f"{_why_whole(found, now)}. So that the step is that of one process, each batch runs whole{idle}, with the "
            f"activations of all {parts} micro-batches. {remedy}`whole_batch_loss=False` takes the mean of their "
            "losses as it is."
        )
        return
    if now.way != (before.way if before.fits else None):
        what = "a sum" if now.way == "sum" else f"a mean over {now.way}"
        how = "added up" if now.way == "sum" else "weighted by their number of these"
        rank_zero_info(f"the loss of `training_step` is {what}: micro-batches and replicas are {how}.")
    new = [key for key, ways in now.logs.items() if not ways and before.logs.get(key, True)]
    if new:
        rank_zero_warn(
            f"what `self.log` is given as {with_lines(new, found)} for a batch is not made of what its micro-batches "
            "give; the mean of theirs is logged. Log a torchmetrics object, or pass `whole_batch_loss=True`."
        )


def logs_partly(keys: Iterable[LogKey], said: set[str]) -> bool:
    """Say which means some micro-batches or replicas have logged and others have not; whether there are any.

    Args:
        keys: that some have logged, as numbers.
        said: names of those that were said before, which grows.
    """
    means = [key for key in keys if (key.how == "mean" or isinstance(key.how, Mean)) and not key.sized]
    new = {key.name: key.line for key in means if key.name not in said}
    said.update(new)
    if new:
        told = ", ".join(f"`{name}` ({line})" for name, line in new.items())
        rank_zero_warn(
            f"what `self.log` is given as {told} is logged for some parts of a batch (micro-batches, or what replicas "
            "have) and not for others. The mean of those that log it is logged, weighted by all of their samples. If "
            "it is a mean over some of them, pass over how many, for the mean of one process: "
            "`self.log(..., batch_size=int(mask.sum()))`."
        )
    return bool(means)


def warn_of_metrics(keys: Iterable[tuple[LogKey, int]], replicas: int, said: set[str]) -> None:
    """Say which metrics some replicas have called and logged, and others have not.

    Args:
        keys: each with how many replicas have.
        replicas: how many there are.
        said: names of those that were said before, which grows.
    """
    for key, count in keys:
        if key.name not in said:
            said.add(key.name)
            rank_zero_warn(
                f"the metric behind `{key.name}` ({key.line}) was called by {count} of {replicas} replicas, and the "
                "mean of what it gives them is logged. Call it on all, on no samples where there are none."
            )


def warn_of_logged(before: Reading, now: Reading, step: int) -> None:
    """Say which numbers were logged as means although they are not: a trial could not tell, as all were equal.

    Args:
        before: what was known in those steps.
        now: what is known.
        step: in which micro-batches first differed.
    """
    means = (Mean("weights"), Mean("sizes"))
    names = [key for key, how in now.within.items() if key not in before.logs and how is not None and how not in means]
    if names:
        rank_zero_warn(
            f"step {step} logged {', '.join(f'`{name}`' for name in names)} as the mean of its micro-batches, which is "
            "not the value of the batch: in all of them it had been the same before. From now on it is put together "
            "as the batch would give it."
        )
    for key in sorted(before.slight):
        if now.within.get(key) != before.within.get(key):
            rank_zero_warn(
                f"step {step} logged `{key}` as the {before.within.get(key)} of its micro-batches, which is not the "
                "value of the batch: before, at most one of those that were tried had another number than 0."
            )


def warn_of_shared_draws(places: Iterable[Place]) -> None:
    """Say that micro-batches had the same numbers in steps before, where one process draws each sample's own.

    Args:
        places: that have drawn them.
    """
    for line, function, _ in places:
        rank_zero_warn(
            f"`{function}` in {line} draws single numbers, and not one for the batch; in the steps before this that "
            "drew them all micro-batches had the same, as a condition had kept them out of the steps that were tried. "
            "Draw them in every step, in front of the condition, or in one call for all samples."
        )


def warn_of_earlier_steps(steps: int, of: str = "micro-batches'") -> None:
    """Say that steps before may have differed from those of one process.

    Args:
        steps: how many there were.
        of: whose losses were weighed.
    """
    remedy = " Pass `whole_batch_loss=True`." if of != "replicas'" else ""
    rank_zero_warn(
        f"up to step {steps} the {of} losses could not be told from those of a mean over their samples; "
        f"those steps may differ from the steps of one process.{remedy}"
    )


def warn_of_another_way(before: Reading, now: Reading, steps: int) -> None:
    """The same of replicas, if their losses come together in another way than in the steps before.

    Args:
        before: what was known in those steps.
        now: what is known.
        steps: how many there were.
    """
    if before.fits and (not now.fits or now.way != before.way):
        warn_of_earlier_steps(steps, "replicas'")


def say_how_cut(error: Exception, batch: Any, parts: int) -> None:
    """Add to an error in a step on micro-batches how its batch was cut, where that may be the cause.

    An error that is of the cut speaks of sizes: of tensors that do not fit, or of rows that are not there. Others (a
    file that is missing, a value that the user's own code refuses) are told as in one process.

    Args:
        error: raised by the step.
        batch: the user's batch.
        parts: how many micro-batches it was cut into.
    """
    if not _speaks_of_sizes(error):
        return
    lengths = [tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim]
    size = batch_size_of(batch)
    if parts > 1 and any(length != size for length in lengths):
        error.add_note(
            f"The batch was cut into {parts} micro-batches along dimension 0 of the tensors as long as its first one, "
            f"{size}; its tensors are {', '.join(map(str, lengths))} long, and those of another length went whole to "
            "every micro-batch. Let the first tensor of a batch have the batch dimension, give a mask that all samples "
            f"share no length of {size}, or set `micro_batch_size` to at least the batch size."
        )
    elif parts > 1 and isinstance(error, _OF_SIZES) and not _is_refusal(error):
        error.add_note(
            f"The batch was cut into {parts} micro-batches along dimension 0 of its tensors, which are {size} long. If "
            "its samples do not lie along that dimension (tensors of [sequence, batch], samples packed one after the "
            f"other), or code of yours counts on all of them (`x.view({size}, -1)`), set `micro_batch_size={size}` or "
            "more, so that it stays whole, or put the batch dimension first."
        )


def with_lines(keys: Iterable[str], found: Finding) -> str:
    """Keys of logged numbers, each with the line that logs it, where that is known."""
    return ", ".join(f"`{key}` ({found.lines[key]})" if key in found.lines else f"`{key}`" for key in keys)


def _speaks_of_sizes(error: Exception) -> bool:
    first, _, _ = str(error).partition("\n")  # what follows quotes code, in errors of compilers
    return isinstance(error, (AssertionError, IndexError)) or _SIZES.search(first) is not None


def _is_refusal(error: Exception) -> bool:
    """Whether this package has raised an error, and knows its cause."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    if not comes_from(frame, PACKAGE):
        return False
    return linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise")


def _why_whole(found: Finding, now: Reading) -> str:
    if now.stays:
        return "`whole_batch_loss=True`"
    if now.writes:
        return f"`training_step` writes `{now.writes}`, which the micro-batches of a batch do not write alike"
    if now.undecided:
        return (
            f"`training_step` changes `{now.undecided}` in one micro-batch alone of those tried, or in none, behind a "
            "condition on many samples, which does not show what the whole batch changes; until it does"
        )
    if now.draws:
        return f"`training_step` draws {now.draws}, which its micro-batches would not draw as the whole does"
    if now.bends and now.fits:
        return str(now.bends)
    if found.failed:
        return f"`training_step` does not run on two micro-batches by themselves ({found.failed})"
    whole, mean = found.numbers
    return (
        f"the loss of `training_step` is {whole:.6g} for two micro-batches at once, and {mean:.6g} as the mean of "
        "their losses"
    )


def say_mixed(why: str, replicas: int) -> None:
    """Say that batches stay whole, as a backward mixes their samples."""
    rank_zero_info(f"{why}. So that the step is that of one process, each batch runs whole.")
    if replicas > 1:
        warn_of_mixed(why, replicas)


def warn_of_mixed(why: str, replicas: int) -> None:
    """Warn that each replica does so with its own samples."""
    rank_zero_warn(
        f"{why}. Each of the {replicas} replicas does so with its own samples, where one process has those of all; "
        "pass `whole_batch_loss=False` if each replica's own is meant."
    )


def refused_write(step: str, name: str, *, known: bool) -> str:
    """Text of the refusal of a value that micro-batches write so that no trial tells what one process leaves.

    Args:
        step: name of the user's step.
        name: of the value.
        known: whether trials have seen it written.
    """
    whole = "whole_batch_loss=True" if step == "training_step" else 'evaluation_micro_batch_size="auto"'
    if known:
        return (
            f"`{step}` writes `{name}` otherwise in one micro-batch of a batch than in another, where "
            "it wrote the same in all that were tried: what one process leaves there is not known. Pass "
            f"`{whole}`, or write it after the step, in a hook such as `on_train_batch_end`."
        )
    return (
        f"`{step}` writes `{name}`, which it did not write in the steps that were tried, and "
        "not the same for all micro-batches of a batch: what one process leaves there is not known. Pass "
        f"`{whole}`, or write it in the first step too."
    )
