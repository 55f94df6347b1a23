"""Steps that draw from generators they seed themselves, or order their samples, draw as in one process."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.draws.same_draws import SameDraws
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.train import make_trainer
from tests.strategy.test_phases import VOCABULARY, Net

WIDE = pytest.mark.wide


class Noise(Net):
    """Adds noise to the embeddings of each sample, of a generator that is seeded by the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.change(self.embed(batch[0]), batch_idx)
        for layer in self.layers:
            x = x + layer(x)
        return self.tokens(x, batch[1])

    def change(self, x: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch_idx)
        return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = self.hidden(batch[0])
        self.log("off", self.tokens(self.change(x, batch_idx), batch[1]))


class SeedsAll(Noise):
    """Seeds torch's generator."""

    def change(self, x: Tensor, batch_idx: int) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(batch_idx)
            return x + 0.1 * torch.randn_like(x)


class Levels(Noise):
    """Draws one of few levels for each sample."""

    def change(self, x: Tensor, batch_idx: int) -> Tensor:
        levels = torch.randint(0, 2, (len(x),), generator=torch.Generator().manual_seed(batch_idx))
        return x * (1 + levels)[:, None, None]


class Mixes(Noise):
    """Mixes samples, in an order that is the same in small parts at first."""

    def change(self, x: Tensor, batch_idx: int) -> Tensor:
        order = torch.rand(len(x), generator=torch.Generator().manual_seed(batch_idx)).argsort()
        return 0.7 * x + 0.3 * x[order]


class ForAll(Noise):
    """Draws for the batch, and for its features."""

    def change(self, x: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch_idx)
        order = torch.randperm(x.shape[-1], generator=generator)
        return x[..., order] * (1 + torch.rand((), generator=generator))


KINDS = {kind.__name__: kind for kind in (Noise, SeedsAll, Levels, Mixes, ForAll)}
ONE: dict[str, Any] = {"micro_batch_size": 1}
STAGES = {"micro_batch_size": 2, "pipeline_parallel_size": 2}
LAYOUTS: list[Any] = [
    pytest.param(1, ONE, id="single samples"),
    pytest.param(2, STAGES, id="stages"),
    pytest.param(1, {"micro_batch_size": 4}, marks=WIDE, id="halves"),
    pytest.param(2, {**STAGES, "pipeline_schedule": "zb-v"}, marks=WIDE, id="zb-v"),
    pytest.param(1, {"evaluation_micro_batch_size": 2}, id="evaluation"),
]


def fit(info: RankInfo, name: str, options: dict[str, Any] | None) -> tuple[dict[str, Tensor], list[str]]:
    """Weights, the last logged number, and warnings, of an epoch of three batches."""
    torch.manual_seed(2)
    module = KINDS[name]().double()
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(*(torch.randint(0, VOCABULARY, (24, 6), generator=generator) for _ in range(2)))
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    trainer = make_trainer(info, strategy, max_epochs=1, precision="64-true", limit_val_batches=2)
    sizes = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if options is not None else None
    sampler = DistributedSampler(data, **sizes, shuffle=False) if sizes is not None else None
    size = 8 // (sizes or {"num_replicas": 1})["num_replicas"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, *(DataLoader(data, batch_size=size, sampler=sampler) for _ in range(2)))
    weights = trainer.strategy.full_state_dict() if options is not None else module.state_dict()
    found = {key: value.detach().clone() for key, value in weights.items()}
    return found | {"off": trainer.callback_metrics["off"].clone()}, [str(each.message) for each in said]


@pytest.mark.parametrize("name", ["Noise", "SeedsAll", "Levels", "Mixes", pytest.param("ForAll", marks=WIDE)])
@pytest.mark.parametrize(("devices", "options"), LAYOUTS)
def test_what_a_step_draws_is_what_one_process_draws(name: str, devices: int, options: Any) -> None:
    wanted = one_process(fit, name, None)[0]
    for outcome in run_trainers(fit, name, options, devices=devices):
        for key, value in outcome.value[0].items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Noise", "`training_step` draws from a generator of its own (`generator=`) for every sample"),
        ("SeedsAll", "`training_step` draws from torch's generator, which it seeds itself, for every sample"),
        pytest.param("Levels", "(`generator=`) for every sample. Each of the 2 replicas draws", marks=WIDE),
        ("ForAll", ""),
    ],
)
def test_replicas_say_that_each_draws_for_its_own_samples(name: str, wanted: str) -> None:
    said = run_trainers(fit, name, {}, devices=2)[0].value[1]
    found = [each for each in said if "training_step" in each]
    assert (wanted and any(wanted in each for each in found)) or (not wanted and not found), said


@pytest.mark.parametrize(
    ("draw", "apart"),
    [
        (lambda n: torch.randn(n), ""),
        (lambda n: torch.randperm(3), ""),
        (lambda n: torch.randperm(n), "an order of the samples"),
        (lambda n: torch.rand(3, generator=torch.Generator().manual_seed(1)), ""),
        (lambda n: torch.rand(n, generator=torch.Generator().manual_seed(1)), "a generator of its own"),
        (lambda n: [random.random() for _ in range(n)], "Python's or NumPy's"),
        (lambda n: random.random(), ""),
    ],
)
def test_draws_that_parts_repeat_are_told_from_those_that_are_joined(draw: Any, apart: str) -> None:
    draws = SameDraws({2: (0, 1)})
    for index, size in enumerate((2, 2, 4)):
        random.seed(3)
        torch.manual_seed(3)
        with draws.run(index):
            draw(size)
    assert (apart in draws.apart) if apart else not draws.apart


@pytest.mark.parametrize("apart", [False, True])
def test_what_is_tossed_for_a_batch_falls_alike_in_all_of_its_micro_batches(apart: bool) -> None:
    streams = SegmentStreams(torch.device("cpu"), 0, 7, apart=apart)
    tosses, steps = [], 3
    for _ in range(steps):
        with streams.step(training=True):
            for micro_batch in range(4):
                streams.enter_micro_batch(micro_batch)
                tosses.append((random.random(), float(torch.rand(()))))
    assert len({python for python, _ in tosses}) == (4 * steps if apart else steps)
    assert len({drawn for _, drawn in tosses}) == 4 * steps, "torch's are those of each sample"
