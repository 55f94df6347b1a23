"""Steps that write their optimizer's state do so once per batch, or are refused by name."""

from __future__ import annotations

import collections
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.train import make_trainer
from tests.strategy.test_phases import START, VOCABULARY, Net

WIDE = pytest.mark.wide


class Halves(Net):
    """Halves its momenta at one step, behind the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.hidden(batch[0])
        if self.is_time(batch_idx):
            for state in self.optimizers().state.values():
                self.write(state, x)
        return self.tokens(x, batch[1])

    def is_time(self, batch_idx: int) -> bool:
        return batch_idx == START

    def write(self, state: dict[str, Any], x: Tensor) -> None:
        state["exp_avg"].mul_(0.5)


class EachStep(Halves):
    """Lets them shrink in each step."""

    def is_time(self, batch_idx: int) -> bool:
        return True


class Unread(Halves):
    """Does so at a step that is not read in the code."""

    def is_time(self, batch_idx: int) -> bool:
        return batch_idx in {START}


class Others(Halves):
    """Puts other tensors in their place."""

    def write(self, state: dict[str, Any], x: Tensor) -> None:
        state["exp_avg"], state["step"] = state["exp_avg"] * 0.5, torch.ones_like(state["step"])


class OfSamples(Halves):
    """Scales them by what it sees."""

    def write(self, state: dict[str, Any], x: Tensor) -> None:
        state["exp_avg"].mul_(x.detach().square().mean())


class Forgets(Net):
    """Forgets them, before the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        if batch_idx == 1:
            optimizer.state.clear()
        if batch_idx == START:
            optimizer.optimizer.state = collections.defaultdict(dict)
        return self.tokens(self.hidden(batch[0]), batch[1])


class InHook(Halves):
    """Does so in a hook."""

    def is_time(self, batch_idx: int) -> bool:
        return False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == START:
            for state in self.optimizers().state.values():
                state["exp_avg"].mul_(0.5)


class Reads(Halves):
    """Reads how large they are."""

    def write(self, state: dict[str, Any], x: Tensor) -> None:
        self.log("size", state["exp_avg"].square().sum())


KINDS = {kind.__name__: kind for kind in (Halves, EachStep, Unread, Others, OfSamples, Forgets, InHook, Reads)}
MICRO: dict[str, Any] = {"micro_batch_size": 2}
STAGES = {**MICRO, "pipeline_parallel_size": 2}
EITHER: list[Any] = [(1, MICRO), (2, {}), pytest.param(2, MICRO, marks=WIDE)]
EITHER.append(pytest.param(2, {"optimizer_sharding": False}, marks=WIDE))


def fit(info: RankInfo, name: str, options: dict[str, Any] | None) -> tuple[dict[str, Tensor], list[str]]:
    """Weights and warnings of an epoch of five batches."""
    torch.manual_seed(2)
    module = KINDS[name]().double()
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(*(torch.randint(0, VOCABULARY, (40, 6), generator=generator) for _ in range(2)))
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    trainer = make_trainer(info, strategy, max_epochs=1, precision="64-true")
    sizes = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if options is not None else None
    sampler = DistributedSampler(data, **sizes, shuffle=False) if sizes is not None else None
    loader = DataLoader(data, batch_size=8 // (sizes or {"num_replicas": 1})["num_replicas"], sampler=sampler)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, loader)
    weights = trainer.strategy.full_state_dict() if options is not None else module.state_dict()
    return {key: value.detach().clone() for key, value in weights.items()}, [str(each.message) for each in said]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("devices", "options"), EITHER)
@pytest.mark.parametrize("name", ["Halves", "EachStep", "Others", "Forgets", pytest.param("InHook", marks=WIDE)])
def test_a_step_writes_its_optimizers_state_once_per_batch(name: str, devices: int, options: Any) -> None:
    _compare(name, devices, options)


def test_a_hook_writes_the_state_of_all_stages() -> None:
    _compare("InHook", 2, STAGES)


def _compare(name: str, devices: int, options: Any) -> None:
    wanted = one_process(fit, name, None)[0]
    for outcome in run_trainers(fit, name, options, devices=devices):
        for key, value in outcome.value[0].items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize(
    ("name", "devices", "options", "wanted"),
    [
        ("Unread", 1, MICRO, "state `optimizers.0.state.0.exp_avg`, and would again in each of the 4 micro-batches"),
        ("Halves", 2, STAGES, "state `optimizers.0.state.0.exp_avg`, and of the 2 pipeline stages each has"),
        ("Forgets", 2, {**STAGES, "pipeline_schedule": "zb-v"}, "state `optimizers.0.state`, and of the 2 pipeline"),
        pytest.param("Others", 2, STAGES, "is read in a step, or in a hook that lists one pipeline stage", marks=WIDE),
        pytest.param("Reads", 2, {}, "['exp_avg']` is read in a step, or in a hook that lists one", marks=WIDE),
        pytest.param("Reads", 2, STAGES, "['exp_avg']` is read in a step, or in a hook that lists one", marks=WIDE),
    ],
)
def test_what_would_be_written_otherwise_is_refused_by_name(name: str, devices: int, options: Any, wanted: str) -> None:
    for outcome in run_trainers(fit, name, options, devices=devices, check=False, grace=20, deadline=60):
        assert outcome.error is not None, f"rank {outcome.rank} trained on"
        assert wanted in f"{outcome.error}\n{outcome.output}", f"{outcome.error}\n{outcome.output}"


def test_replicas_say_that_they_write_from_their_own_samples() -> None:
    for name, told in (("OfSamples", True), ("Halves", False)):
        said = run_trainers(fit, name, {}, devices=2)[0].value[1]
        assert any("`optimizers.0.state.0.exp_avg`" in each for each in said) == told, said
