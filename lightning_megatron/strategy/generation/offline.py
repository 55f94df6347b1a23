"""Generates from files, without a script: what ``lightning-megatron generate`` runs on each rank.

The model is built without memory, and each rank reads its own part of the weights.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.checkpoints.files.library_names import open_weights
from lightning_megatron.checkpoints.loading.pretrained import load_hf_weights, match_weights
from lightning_megatron.checkpoints.state.stored import aliases
from lightning_megatron.parallelize import explain
from lightning_megatron.pipeline.cut.partition import make_partition
from lightning_megatron.pipeline.schedule import make_schedule
from lightning_megatron.strategy.generation import files
from lightning_megatron.strategy.generation.lists import prepare_tasks, run_tasks
from lightning_megatron.strategy.generation.requests import Requests
from lightning_megatron.strategy.strategy import MegatronStrategy

_ROUNDS = 4  # batches of a step, for each that is under way at once: between steps a run can be ended


@dataclass(frozen=True)
class Job:
    """Description of the texts to generate.

    Attributes:
        weights: a Hugging Face folder, or a checkpoint.
        config: Hugging Face's, of the model.
        dtype: of its weights.
        generation: its generation config; ``None`` if there is none.
        tokenizer: Hugging Face's.
        prompts: texts.
        ids: their tokens.
        batch: prompts at a time.
        seed: of random numbers.
        options: of ``generate``.
        sizes: of the layout, as :class:`MegatronStrategy` takes them.
        out: file to write; ``None`` to print.
        asked: what this is about, in values of JSON.
        as_json: print JSON rather than text.
        stream: where weights wait until their layer runs, ``"cpu"`` or ``"disk"``; ``None`` for memory.
        groups: batches that a pipeline has under way at once.
        prefill: prompts at a time before the first token of a batch; ``None`` for all of it.
    """

    weights: str
    config: Any
    dtype: torch.dtype
    generation: Any
    tokenizer: Any
    prompts: list[str]
    ids: list[list[int]]
    batch: int
    seed: int
    options: Mapping[str, Any]
    sizes: Mapping[str, int]
    out: Path | None
    asked: Mapping[str, Any] = field(default_factory=dict)
    as_json: bool = False
    stream: str | None = None
    groups: int = 1
    prefill: int | None = None

    def build(self) -> Any:
        """The model without memory."""
        from transformers import AutoModelForCausalLM

        if type(self.config) not in AutoModelForCausalLM._model_mapping:
            kind = type(self.config).__name__
            raise ValueError(f"Hugging Face has no model that continues a text (AutoModelForCausalLM) for a `{kind}`.")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)
        if self.generation is not None:
            model.generation_config = self.generation
        return model.eval()

    def check_weights(self, model: Any) -> None:
        """Refuse files whose names or shapes are not those of the model, before they are read.

        Raises:
            ValueError: says which are missing, or have another shape.
        """
        shapes = {name: value.shape for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        try:
            match_weights(open_weights(self.weights), shapes, aliases(model), self.weights)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def check_layout(self, model: Any) -> None:
        """Refuse sizes that the model cannot be divided by, before there are processes.

        Raises:
            ValueError: says what does not divide it.
        """
        stages, ranks = self.sizes["pipeline_parallel_size"], self.sizes["tensor_parallel_size"]
        if stages > 1:
            make_partition(model, make_schedule("1f1b", stages, 1))
        explain(model, ranks)

    def requests(self, model: Any) -> Requests:
        """The prompts, checked."""
        stages = self.sizes["pipeline_parallel_size"]
        return Requests(model, self.ids, self.batch, self.seed, self.options, stages, self.tokenizer, self.prefill)


class Completer(pl.LightningModule):
    """Continues the prompts of a job; a batch is the numbers of some of its batches.

    Args:
        job: what is to be generated.

    Attributes:
        remaining: how many of the job's batches this replica is to do.
        finished: called with what follows the prompts of a batch, by number of the prompt.
    """

    remaining = 0
    finished: Callable[[dict[int, list[int]]], None]

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.model: Any = None
        self.allow_zero_length_dataloader_with_multiple_devices = True  # a replica that there is nothing left for

    def configure_model(self) -> None:
        """Build the model; its weights are read once it is divided."""
        if self.model is None:
            self.model = self.job.build()
            self.requests = self.job.requests(self.model)
            load_hf_weights(self, self.job.weights)

    def predict_dataloader(self) -> Any:
        """Numbers of this replica's batches that are still to be done."""
        strategy: Any = self.trainer.strategy
        out = self.job.out
        done = strategy.broadcast(None if out is None or not strategy.is_global_zero else files.done(out)) or set()
        batches = [number for number in range(len(self.requests)) if not done.issuperset(self.requests.rows(number))]
        replica = strategy.distributed_sampler_kwargs
        own = batches[replica["rank"] :: replica["num_replicas"]]
        self.remaining = len(own)
        step = self.job.groups * _ROUNDS if self.job.groups > 1 else 1
        steps: Any = [torch.tensor(own[at : at + step]) for at in range(0, len(own), step)]
        return DataLoader(steps, batch_size=None)

    def predict_step(self, batch: Tensor, batch_idx: int) -> None:
        """Continue the prompts of some batches."""
        tasks = [lambda number=number: self._continue(number) for number in batch.tolist()]  # type: ignore[misc]
        run_tasks(self, tasks, self.job.groups)

    def _continue(self, number: int) -> None:
        tokens = self.model.generate(**self.requests.prefilled(self.model, number, self.device))
        self.finished(self.requests.found(number, tokens))


class _Writer(pl.Callback):
    """Writes what comes, on one rank of each replica, and says on a terminal how far it is."""

    def __init__(self, job: Job) -> None:
        self._job, self._writes = job, False
        self._waiting: dict[int, dict[str, Any]] = {}
        self._printed = 0
        self._part: files.PartFile | None = None
        self._progress: _Bar | None = None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        module: Any = pl_module
        place = strategy.mesh.layout.coordinates(strategy.global_rank)
        last = strategy.mesh.layout.coordinates(0).pipeline
        self._writes = place.tensor == 0 and place.pipeline == last
        if self._writes and self._job.out is not None:
            self._part = files.PartFile(files.part_of(self._job.out, place.data), self._job.asked)
        if trainer.is_global_zero and sys.stderr.isatty():
            self._progress = _progress(module.remaining)
        prepare_tasks(module, min(self._job.groups, module.remaining))
        module.finished = self._finished

    def _finished(self, found: dict[int, list[int]]) -> None:
        if self._writes:
            self._write([self._line(row, tokens) for row, tokens in found.items()])
        if self._progress is not None:
            self._progress.step(sum(map(len, found.values())))

    def _line(self, row: int, tokens: list[int]) -> dict[str, Any]:
        text = self._job.tokenizer.decode(tokens, skip_special_tokens=True)
        return {"index": row, "prompt": self._job.prompts[row], "completion": text, "tokens": tokens}

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._part is not None:
            self._part.add(lines)
            return
        self._waiting |= {line["index"]: line for line in lines}  # a later batch may be through earlier
        while line := self._waiting.pop(self._printed, None):
            self._printed += 1
            print(json.dumps(line) if self._job.as_json else line["prompt"] + line["completion"], flush=True)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._part is not None:
            self._part.close()
        if self._progress is not None:
            self._progress.stop()


class _Bar:
    """A line on the terminal: batches of this replica, and tokens a second."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task, self._tokens = bar, task, 0

    def step(self, tokens: int) -> None:
        """Another batch is done."""
        self._tokens += tokens
        elapsed = self._bar.tasks[self._task].elapsed or 1e-9
        self._bar.update(self._task, advance=1, speed=f"{self._tokens / elapsed:,.1f} tokens/s")

    def stop(self) -> None:
        """Leave the line as it is."""
        self._bar.stop()


def _progress(total: int) -> _Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("batches"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}")
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), redirect_stdout=False)
    bar.start()
    return _Bar(bar, bar.add_task("", total=total, speed=""))


def complete(job: Job, **trainer: Any) -> None:
    """Generate what a job asks for; starts the other ranks of this machine.

    Args:
        job: checked.
        trainer: further arguments of the Trainer.
    """
    sizes: dict[str, Any] = dict(job.sizes)
    devices = math.prod(sizes.values())
    settings: dict[str, Any] = {
        "accelerator": "gpu" if torch.cuda.device_count() >= devices else "cpu",
        "devices": devices,
        "strategy": MegatronStrategy(**sizes, weight_streaming=job.stream),
        "callbacks": [_Writer(job)],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    with _quiet():
        made = pl.Trainer(**{**settings, **trainer})
        made.predict(Completer(job), return_predictions=False)
    made.strategy.barrier()
    strategy: Any = made.strategy
    if job.stream is not None and made.is_global_zero:
        print(strategy.run.assembled.streamed.report(), file=sys.stderr)
    if job.out is not None and made.is_global_zero:
        files.put_together(job.out)
    made.strategy.barrier()


_ASIDE = (
    ".*does not have many workers",
    ".*total length of .*DataLoader.* is zero",
    "predict returned None",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what a Trainer tells of itself: it is no news to who generates."""
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in _ASIDE:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
