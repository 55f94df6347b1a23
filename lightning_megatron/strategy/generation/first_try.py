"""Whether a training step calls the layers more than once, found out before its first schedule runs.

A stage of a schedule ends its run after its own layers, so only the last one would see the second call, with forwards
of others under way. A trial of the loss sees it beforehand
(:mod:`~lightning_megatron.strategy.loss.trials.tries`). Where there is none, the step is tried here on one micro-batch,
forward only, and what it writes is put back. That is left out where its code, as far as it can be read, names the model
no more than once.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_megatron.pipeline.run.pipeline_step import PipelineStep
from lightning_megatron.pipeline.stage.final_state import TRIAL
from lightning_megatron.strategy.generation.repeats import CALLS, Attempt, StartOver, sources
from lightning_megatron.strategy.logs.batch_copies import whole_copy
from lightning_megatron.strategy.logs.step_logs import no_logs
from lightning_megatron.strategy.step.step import Outcome
from lightning_megatron.strategy.step.step_context import StepContext

_OF_SELF = re.compile(r"\bdef \w+\(\s*self\b")
_LOOPS = re.compile(r"^\s*(for|while)\b|\bfor\b.*\bin\b", re.MULTILINE)


def calls_again(context: StepContext, call: Callable[[Any], Any], part: Any) -> bool:
    """Try the training step on a micro-batch; equal on all ranks.

    Args:
        context: what steps run on.
        call: the step.
        part: the micro-batch.
    """
    attempt, stages = Attempt(context.module, beside=True), context.stages
    eager = torch.compiler.set_stance("force_eager")  # a layer first compiled here would stay uncompiled later
    step = PipelineStep(context.schedule(1, forward_only=True), lambda batch, _: call(whole_copy(batch)), [part], TRIAL)
    trial, records = context.streams.trial(), context.recording.step()
    with trial, stages.running(part, 1, training=False) as executor, records, attempt.noting(), eager:
        executor.run(step)
    attempt.take_back()
    outcome = stages.outcome(lambda: Outcome(no_logs(context.device)), TRIAL)
    stages.settle()
    return isinstance(outcome.output, StartOver)


@functools.lru_cache(maxsize=16)
def calls_once(kind: type, name: str, layers: tuple[str, ...]) -> bool:
    """Whether the code of a step names what has the layers in it exactly once, outside of loops; not if that cannot be
    told.

    Args:
        kind: of the user's module.
        name: of the step.
        layers: their names.
    """
    holders = {".".join(("self", *layer.split(".")[:end])) for layer in layers for end in range(layer.count(".") + 1)}
    mentions = re.compile("|".join(rf"\b{re.escape(holder)}(?:\.forward)?(?=[(,)])" for holder in sorted(holders)))
    code = sources(kind, name)
    if _may_repeat(kind, code) or any("super()" in each or ".generate(" in each for each in code):
        return False
    code = [re.sub(r"\bdef \w+\(\s*self\b", "def _(", each) for each in code]
    return len(mentions.findall("\n".join(code))) == 1


def may_call_again(module: pl.LightningModule, layers: str) -> bool:
    """Whether the code of a training step names what has the layers in it, or a method of its own, more than once, or
    in a loop; or cannot be read.

    Args:
        module: the user's.
        layers: name of the container of the layers.
    """
    names, holders = layers.split(".")[:-1], ["self"]
    for name in names:
        holders.append(f"{holders[-1]}.{name}")
    mentions = re.compile("|".join(rf"\b{re.escape(holder)}(?:\.forward)?(?=[(,)])" for holder in holders))
    code = sources(type(module), "training_step")
    return _may_repeat(type(module), code) or len(mentions.findall("\n".join(code))) > 1


def _may_repeat(kind: type, code: Sequence[str]) -> bool:
    """Whether code of methods runs lines more than once: in a loop, or in a method that is called at several places; or
    cannot be read, as where they do not call their object ``self``.
    """
    if not all(code) or any(_LOOPS.search(text) or not _OF_SELF.search(text) for text in code):
        return True
    called = Counter(name for text in code for name in CALLS.findall(text))
    return any(count > 1 and sources(kind, name) for name, count in called.items())
