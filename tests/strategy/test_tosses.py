"""What a step draws from torch's generators for a batch falls alike in all of its micro-batches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh.draws.batch_draws import lines_that_draw
from lightning_megatron.mesh.draws.same_draws import SameDraws
from lightning_megatron.mesh.other_generators import OtherDraws
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step
from lightning_megatron.pipeline.forwards.compiled import CompiledCall, has_compiled, is_given_compiled
from tests.harness import RankInfo, run_trainers
from tests.parity.train import make_trainer
from tests.strategy.test_phases import VOCABULARY, Net

WIDE = pytest.mark.wide
STEPS = 3


class Deep(nn.Module):
    """A layer that is left out now and then."""

    def __init__(self, layer: nn.Module, *, again: bool) -> None:
        super().__init__()
        self.layer, self.again = layer, again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        mask = F.dropout(self.layer[2].bias, 0.5) * torch.rand(1, dtype=x.dtype)
        if torch.rand((), dtype=x.dtype) < 0.5:  # a backward has another default dtype
            return x * (0.5 + torch.rand((), dtype=x.dtype))
        return self.layer(x) + mask


class Tosses(Net):
    """Draws for the batch before, in and behind its layers."""

    def __init__(self) -> None:
        super().__init__()
        for place, layer in enumerate(self.layers):
            self.layers[place] = Deep(layer, again=self.again and place % 2 == 1)
        self.places = nn.Parameter(torch.zeros(6, self.embed.weight.shape[1]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        share = Beta(2.0, 2.0).sample() if self.mixes else torch.rand(())
        x = self.embed(batch[0]) * (1 + share) + self.places.clone().normal_(std=0.1)
        x = x + torch.randn(6, 1, dtype=x.dtype) * self.places.exp()
        for layer in self.layers:
            x = x + layer(x)
        mask = torch.empty(x.shape[-1], dtype=x.dtype).bernoulli_(0.8)
        if torch.randint(0, 2, (1,)):
            x = x * mask
        return self.tokens(x[:, torch.randperm(6)[:4]], batch[1][:, :4])

    mixes, again = False, True


class Mixed(Tosses):
    """Draws for the samples in between."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        noise = torch.randn_like(x)  # which must not move what is drawn for the batch
        x = x + 0.0 * noise * torch.rand(()) + torch.rand(())
        for layer in self.layers:
            x = F.dropout(x, 0.0) + layer(x) + 0.0 * torch.rand_like(x)
        return self.tokens(x * torch.rand(()), batch[1])


class Shares(Tosses):
    """Mixes by a share that is drawn for the batch."""

    mixes = True


class Once(Tosses):
    """Computes nothing again."""

    again = False


class Coins(Tosses):
    """Its layers toss Python's and NumPy's coins, and so does the code between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Tossing(layer) for layer in self.layers])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0]) * (1 + random.random())
        picked = 0.0
        for layer in self.layers:
            x = x + layer(x)
            picked += random.random()
        return self.tokens(x * (picked + np.random.rand()), batch[1])


class Tossing(nn.Module):
    """A layer that tosses."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            return x * np.random.rand()
        return self.layer(x) * random.random()


class Sometimes(Net):
    """Does something to a batch that few batches meet, and none that is tried before."""

    batches = 12

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, coin = self.embed(batch[0]), float(torch.rand(()))
        if 0.3 < coin < 0.6:
            x = self.changed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.tokens(x, batch[1])

    def changed(self, x: Tensor) -> Tensor:
        return x * torch.rand((), dtype=x.dtype)


class Mixup(Sometimes):
    """Mixes the samples of a batch."""

    def changed(self, x: Tensor) -> Tensor:
        order, share = torch.randperm(len(x)), torch.rand((), dtype=x.dtype)
        return share * x + (1 - share) * x[order]


class Vector(Sometimes):
    """Masks features for all samples alike."""

    def changed(self, x: Tensor) -> Tensor:
        return x * torch.empty(x.shape[-1], dtype=x.dtype).bernoulli_(0.8)


class Each(Sometimes):
    """Draws a number for each sample, one after the other."""

    def changed(self, x: Tensor) -> Tensor:
        return torch.stack([row * torch.rand((), dtype=x.dtype) for row in x])


class Shuffled(Sometimes):
    """Mixes the samples of a batch, in an order of Python's."""

    def changed(self, x: Tensor) -> Tensor:
        order = list(range(len(x)))
        random.shuffle(order)
        return 0.7 * x + 0.3 * x[order]


class Permuted(Sometimes):
    """The same, in an order of NumPy's."""

    def changed(self, x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[np.random.permutation(len(x))]


class EachOther(Sometimes):
    """Draws a number of Python's for each sample, one after the other."""

    def changed(self, x: Tensor) -> Tensor:
        return torch.stack([row * random.random() for row in x])


class LateCoins(Coins):
    """Its layers, and the code around them, begin to toss behind the steps that are tried."""

    batches = 7

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LateTossing(layer.layer) for layer in self.layers])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for layer in self.layers:
            layer.late = batch_idx > 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.layers[0].late:
            return super().training_step(batch, batch_idx)
        return self.tokens(self.hidden(batch[0]), batch[1])


class LateTossing(Tossing):
    """A layer that begins to toss."""

    late = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.late else self.layer(x)


_FOR_BATCHES = (Tosses, Mixed, Shares, Once, Coins, LateCoins, Sometimes, Vector)
KINDS = {kind.__name__: kind for kind in (*_FOR_BATCHES, Mixup, Shuffled, Permuted, Each, EachOther)}


def fit(info: RankInfo, name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after a few steps."""
    torch.manual_seed(2)
    module = KINDS[name]().double()
    generator = torch.Generator().manual_seed(5)
    samples = 8 * getattr(module, "batches", STEPS)
    data = TensorDataset(*(torch.randint(0, VOCABULARY, (samples, 6), generator=generator) for _ in range(2)))
    trainer = make_trainer(info, MegatronStrategy(**options), max_epochs=1, precision="64-true", limit_val_batches=0)
    trainer.fit(module, DataLoader(data, batch_size=8))
    return {key: value.detach().clone() for key, value in trainer.strategy.full_state_dict().items()}


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        ("Tosses", 1, {"micro_batch_size": 2}),
        ("Tosses", 2, {"micro_batch_size": 2, "pipeline_parallel_size": 2}),
        ("Mixed", 1, {"micro_batch_size": 2}),
        ("Coins", 2, {"micro_batch_size": 2, "pipeline_parallel_size": 2}),
        pytest.param("Coins", 1, {"micro_batch_size": 2}, marks=WIDE),
        pytest.param("Coins", 4, {"micro_batch_size": 2, "pipeline_parallel_size": 4}, marks=WIDE),
        pytest.param(
            "Coins",
            2,
            {"micro_batch_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"},
            marks=WIDE,
        ),
        ("LateCoins", 2, {"micro_batch_size": 2, "pipeline_parallel_size": 2}),
        pytest.param("LateCoins", 1, {"micro_batch_size": 2}, marks=WIDE),
        pytest.param("LateCoins", 4, {"micro_batch_size": 1, "pipeline_parallel_size": 4}, marks=WIDE),
        pytest.param(
            "LateCoins",
            2,
            {"micro_batch_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "zb-v"},
            marks=WIDE,
        ),
        ("Shuffled", 1, {"micro_batch_size": 2}),
        pytest.param("Shuffled", 2, {"micro_batch_size": 2, "pipeline_parallel_size": 2}, marks=WIDE),
        ("Permuted", 2, {"micro_batch_size": 2, "pipeline_parallel_size": 2}),
        ("Shares", 1, {"micro_batch_size": 2}),
        ("Sometimes", 1, {"micro_batch_size": 2}),
        ("Mixup", 1, {"micro_batch_size": 2}),
        ("Mixup", 2, {"micro_batch_size": 2, "pipeline_parallel_size": 2}),
        pytest.param("Sometimes", 2, {"micro_batch_size": 1, "pipeline_parallel_size": 2}, marks=WIDE),
        pytest.param(
            "Mixup",
            2,
            {"micro_batch_size": 1, "pipeline_parallel_size": 2, "pipeline_schedule": "zb-v"},
            marks=WIDE,
        ),
        pytest.param(
            "Mixup",
            2,
            {"micro_batch_size": 2, "pipeline_parallel_size": 2, "activation_recompute": "full"},
            marks=WIDE,
        ),
        pytest.param("Tosses", 1, {"micro_batch_size": 1}, marks=WIDE),
        pytest.param("Tosses", 1, {"micro_batch_size": 2, "activation_recompute": "full"}, marks=WIDE),
        pytest.param("Mixed", 2, {"micro_batch_size": 2, "pipeline_parallel_size": 2}, marks=WIDE),
        pytest.param(
            "Mixed",
            2,
            {"micro_batch_size": 1, "pipeline_parallel_size": 2, "pipeline_schedule": "zb-v"},
            marks=WIDE,
        ),
        pytest.param(
            "Tosses",
            2,
            {"micro_batch_size": 1, "pipeline_parallel_size": 2, "activation_recompute": "full"},
            marks=WIDE,
        ),
    ],
)
def test_what_is_drawn_for_a_batch_does_not_depend_on_its_micro_batches(name: str, devices: int, options: Any) -> None:
    wanted = run_trainers(fit, name, {"micro_batch_size": 4}, devices=1)[0].value
    for outcome in run_trainers(fit, name, options, devices=devices):
        for key, value in outcome.value.items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-9, atol=1e-9, msg=key)


def test_what_each_micro_batch_has_drawn_for_the_batch_is_refused() -> None:
    options = {"micro_batch_size": 2, "pipeline_parallel_size": 2}
    for outcome in run_trainers(fit, "Vector", options, devices=2, check=False, grace=20.0):
        said = " ".join(f"{outcome.error}\n{outcome.output}".split())
        assert outcome.error is not None and "killed" not in outcome.error, f"rank {outcome.rank}: {outcome.error}"
        assert "`bernoulli_` in" in said and "which each micro-batch has drawn for itself" in said, said


@pytest.mark.parametrize(("name", "function"), [("Each", "rand"), ("EachOther", "random.random")])
def test_numbers_that_samples_of_micro_batches_have_shared_are_said(name: str, function: str) -> None:
    (outcome,) = run_trainers(fit, name, {"micro_batch_size": 2}, devices=1, check=False, grace=20.0)
    said = " ".join(f"{outcome.error}\n{outcome.output}".split())  # a warning is an error here
    assert f"`{function}` in" in said and "all micro-batches had the same" in said, said


def test_lines_that_draw_are_found_in_what_a_step_calls() -> None:
    found = lines_that_draw(function.__code__ for function in functions_of_step(Mixup()))
    assert {name for _, name in found} == {"rand", "randperm"}
    assert not lines_that_draw(function.__code__ for function in functions_of_step(Net()))


def test_lines_that_draw_from_other_generators_are_found_however_they_name_them() -> None:
    def draws() -> list[Any]:
        from random import uniform

        import numpy.random as others

        own = random.Random(0)
        return [own.random(), uniform(0, 1), others.rand(2), np.random.rand(3), [random.randint(0, 1) for _ in "ab"]]

    found, noted = OtherDraws([draws]), list[tuple[str, tuple[int, ...]]]()
    assert sorted(name for _, name in found.lines) == ["numpy.random.rand", "random.randint", "random.uniform"]
    assert len({line for line, _ in found.lines}) == 1
    with found.noting(lambda *drawn: noted.append(drawn)):
        draws()
    wanted = [("random.uniform", ()), ("numpy.random.rand", (2,)), ("numpy.random.rand", (3,))]
    assert noted == [*wanted, ("random.randint", ()), ("random.randint", ())]
    assert not hasattr(random.uniform, "__wrapped__")


def test_batches_stay_whole_where_compiled_code_draws_for_them() -> None:
    given = {"compile_layers": {"backend": "eager"}}
    found = [
        run_trainers(fit, "Once", {**given, "micro_batch_size": micro_batch}, devices=1)[0].value
        for micro_batch in (4, 2)
    ]
    for key, value in found[0].items():
        torch.testing.assert_close(value, found[1][key], rtol=1e-9, atol=1e-9, msg=key)


def test_draws_for_a_batch_are_told_from_those_for_samples() -> None:
    draws = SameDraws({2: (0, 1)})
    for index, size in enumerate((2, 2, 4)):
        with draws.run(index):
            torch.rand(())
            torch.rand(size)
            torch.rand((), generator=torch.Generator().manual_seed(1))
            for _ in range(size):
                torch.randn(3)
            torch.multinomial(torch.ones(9), size)
            F.dropout(torch.ones(2, 16), 0.0)
            F.dropout2d(torch.ones(2, 16, 2, 2), 0.5, training=False)
    assert [(function, shape) for (_, function, _), shape in draws.of_batch] == [("rand", ())]


def test_layers_that_an_earlier_run_compiled_are_not_taken_for_the_users_own() -> None:
    module = Once()
    assert not has_compiled(module)
    CompiledCall(module.layers[0], lambda layer, *args: layer(*args)).install()
    assert has_compiled(module) and not is_given_compiled(module)
    module.layers[1].compile(backend="eager")
    assert is_given_compiled(module)
