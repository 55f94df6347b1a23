"""Pipelines whose stages sleep, with several groups of requests at once and one after the other."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.generation.lists import run_tasks
from tests.harness import RankInfo
from tests.parity.train import make_trainer

ROWS, NEW = 2, 8


class _Slow(nn.Module):
    """A layer's feed-forward part, which takes its time.

    Args:
        part: the part.
        seconds: of a call.
        by_tokens: whether a call of more than one token takes so long for each row and token.
    """

    def __init__(self, part: nn.Module, seconds: float, by_tokens: bool) -> None:
        super().__init__()
        self.part, self.seconds, self.by_tokens = part, seconds, by_tokens

    def forward(self, x: Tensor) -> Any:
        rows, tokens = x.shape[:2]
        time.sleep(self.seconds * (rows * tokens if self.by_tokens and tokens > 1 else 1))
        return self.part(x)


class Decoder(pl.LightningModule):
    """One layer per stage, which sleeps."""

    def __init__(self, stages: int, seconds: float, by_tokens: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=32, num_hidden_layers=stages, pad_token_id=0, eos_token_id=None, **sizes)
        self.model = LlamaForCausalLM(config).eval()
        for layer in self.model.model.layers:
            layer.mlp = _Slow(layer.mlp, seconds, by_tokens)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model(batch).logits


def decoder(info: RankInfo, stages: int, seconds: float, by_tokens: bool = False) -> Any:
    """A strategy whose module has been set up, with a layer on each stage."""
    strategy = MegatronStrategy(pipeline_parallel_size=stages, pipeline_split=[1] * stages)
    trainer = make_trainer(info, strategy)
    trainer.predict(Decoder(stages, seconds, by_tokens), DataLoader(torch.ones(2, 3, dtype=torch.long), batch_size=2))  # type: ignore[arg-type]
    return strategy


class Timed(NamedTuple):
    """Seconds for all batches.

    Attributes:
        alone: one after the other.
        together: as many at once as there are stages.
        computed: of ``together``, what this process's threads computed; the rest it slept and waited.
    """

    alone: float
    together: float
    computed: float


def timed(info: RankInfo, stages: int, seconds: float, batches: int) -> Timed:
    """Lists of prompts on stages that sleep."""
    strategy = decoder(info, stages, seconds)
    prompts = [[1, 2, 3 + at % 7] for at in range(ROWS * batches)]
    found = []
    for groups in (stages, 1, stages):  # the first one connects
        begun, computed = time.perf_counter(), time.process_time()
        strategy.generate(prompts, batch_size=ROWS, groups=groups, max_new_tokens=NEW, do_sample=False)
        found.append((time.perf_counter() - begun, time.process_time() - computed))
    return Timed(found[1][0], *found[2])


def filled(info: RankInfo, stages: int, seconds: float) -> tuple[float, float]:
    """Seconds to the first token of as many batches of four prompts as there are stages, where a row of a prompt's
    tokens takes ``seconds``: whole batches, and one prompt at a time."""
    strategy, longest = decoder(info, stages, seconds / 8, by_tokens=True), 9
    prompts = [[1 + (row + at) % 7 for at in range(longest)] for row in range(4 * stages)]
    found = []
    for size in (None, None, 1):  # the first one connects
        begun = time.perf_counter()
        strategy.generate(prompts, batch_size=4, prefill_batch_size=size, max_new_tokens=1, do_sample=False)
        found.append(time.perf_counter() - begun)
    return found[1], found[2]


def counted(info: RankInfo, stages: int, batches: int, groups: int) -> tuple[int, int] | None:
    """Waves, and those in which this stage computes; ``None`` for one group."""
    strategy = decoder(info, stages, 0.0)
    model: Any = strategy.run.module.model
    prompt = torch.tensor([[1, 2, 3]] * ROWS)
    tasks = [partial(model.generate, prompt, max_new_tokens=NEW, do_sample=False) for _ in range(batches)]
    with torch.no_grad():
        found = run_tasks(strategy.run.module, tasks, groups)
    return None if found is None else (found.waves, found.busy)


def failing(info: RankInfo, fails: str) -> str:
    """What one of three groups raises; at once, at its fourth token, or on the stage of the last layer only."""
    strategy = decoder(info, 2, 0.0)
    model: Any = strategy.run.module.model
    prompt, tokens = torch.tensor([[1, 2, 3]] * ROWS), 0

    def counts(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        nonlocal tokens
        tokens += 1
        if tokens > 3 and (fails == "later" or (fails == "one stage" and info.rank == 0)):
            raise RuntimeError("too much")
        return torch.zeros(len(ids), dtype=torch.bool)

    def at_once() -> None:
        raise RuntimeError("too much")

    tasks = [partial(model.generate, prompt, max_new_tokens=NEW, stopping_criteria=[counts]) for _ in range(3)]
    if fails == "at once":
        tasks.append(at_once)
    with torch.no_grad():
        try:
            run_tasks(strategy.run.module, tasks, 3)
        except RuntimeError as error:
            if fails == "one stage":
                raise
            return str(error)
    return "nothing"


def own_ends(info: RankInfo, groups: int) -> list[Any]:
    """What lists are continued by whose criterion draws numbers of each rank's own."""
    strategy, draws = decoder(info, 2, 0.0), {row: random.Random(10 * row + info.rank) for row in range(3)}

    def ends(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((len(ids),), draws[int(ids[0, 0]) - 1].random() < 0.4)

    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "stopping_criteria": [ends]}
    found: list[Any] = strategy.generate([[1, 5], [2, 4, 5], [3, 3]], batch_size=1, groups=groups, **options)
    return found
