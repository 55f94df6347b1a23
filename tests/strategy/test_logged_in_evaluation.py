"""What validation logs over replicas is what one process logs for all samples, or the user is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trainer_for
from tests.strategy.loss_modules import BATCH, STEPS, Task, tokens

WIDE = pytest.mark.wide


class Validated(Task):
    """Logs a mean over targets, of which samples have unlike numbers, and functions and counts of them."""

    padded_from = 0
    runs_in = "64-true"

    def val_dataloader(self) -> DataLoader[Any]:
        samples = TensorDataset(*tokens(BATCH * STEPS, padded_from=self.padded_from, seed=3))
        options = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        own = BATCH // options["num_replicas"]
        chosen = [at for at in range(len(samples)) if at % BATCH // own == options["rank"]]
        return DataLoader(Subset(samples, chosen), batch_size=own)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        loss, kept = self.each(x, y), (y != -100).sum()
        self.log("mean", loss)
        self.log("perplexity", loss.exp())
        self.log("total", self.each(x, y, reduction="sum"))
        self.log("most", kept.double(), reduce_fx="max")
        self.log("samples", float(len(x)), reduce_fx="sum")
        self.log("worst", self.each(x, y, reduction="none").max(), reduce_fx="max")
        self.log("lowest_mean", loss, reduce_fx="min")


class PaddedLater(Validated):
    """The first batches have no target that is ignored."""

    padded_from = BATCH


class LogsLater(Validated):
    """Another number is logged from the second batch on."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if batch_idx:
            self.log("later", self.each(*batch, reduction="sum"))


class Spread(Validated):
    """Logs what is not made of what parts of a batch give."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("spread", self(batch[0]).std())


class Counting(Validated):
    """Its step counts its calls, which a trial leaves alone."""

    calls = 0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.calls += 1
        self.log("calls", float(self.calls), reduce_fx="max")
        self.log("mean", self.each(*batch))


class Narrow(Validated):
    """Logs means that the processor rounds to bfloat16, which has eight bits."""

    runs_in = "bf16-true"

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("mean", self.each(*batch))
        self.log("size", self(batch[0]).abs().mean())


class Draws(Validated):
    """Notes the state of torch's generator behind each batch; nothing in it draws."""

    def on_validation_batch_end(self, *_: Any) -> None:
        STATES.append(torch.get_rng_state())


STATES: list[Tensor] = []

MODULES: dict[str, type[Validated]] = {
    kind.__name__: kind for kind in (Validated, PaddedLater, LogsLater, Spread, Counting, Narrow, Draws)
}


def validated(info: RankInfo, layout: Layout | None, name: str, arguments: Mapping[str, Any]) -> Any:
    """What a validation has logged."""
    torch.manual_seed(0)
    trainer = trainer_for(info, layout, arguments, max_epochs=1, precision=MODULES[name].runs_in)
    trainer.validate(MODULES[name](), verbose=False)
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    ((1, 2), {}),
    ((1, 4), {}),
    ((1, 8), {}),  # a sample on each
    ((2, 2), {"micro_batch_size": 2}),
    ((2, 2), {"micro_batch_size": 2, "evaluation_micro_batch_size": 1}),
    ((1, 2), {"evaluation_micro_batch_size": 2}),
    ((1, 2), {"tensor_parallel_size": 2}),
    ((1, 2), {"context_parallel_size": 2}),
    ((1, 2), {"weight_sharding": True}),
    ((1, 2), {"random_streams": "layout"}),
]
EVERYDAY = [("Validated", 0), ("PaddedLater", 0), ("Validated", 3)]
ROWS = [
    pytest.param(name, layout, arguments, marks=() if (name, number) in EVERYDAY else WIDE)
    for name in ("Validated", "PaddedLater", "LogsLater", "Counting")
    for number, (layout, arguments) in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("name", "layout", "arguments"), ROWS, ids=str)
def test_replicas_log_what_one_process_logs(name: str, layout: Layout, arguments: Mapping[str, Any]) -> None:
    expected = one_process(validated, None, name, {})
    ranks = arguments.get("tensor_parallel_size", 1) * arguments.get("context_parallel_size", 1)
    for found in run_trainers(validated, layout, name, arguments, devices=layout[0] * layout[1] * ranks):
        assert found.value.keys() == expected.keys()
        assert not list(differences("logged", found.value, expected, 1e-9)), found.output


@pytest.mark.parametrize("layout", [pytest.param((1, 2), id="dp2"), pytest.param((2, 2), id="pp2xdp2", marks=WIDE)])
def test_numbers_that_are_not_made_of_parts_are_named(layout: Layout) -> None:
    found = run_trainers(validated, layout, "Spread", {}, devices=layout[0] * layout[1], check=False, grace=20.0)
    said = r"`spread` \(.*test_logged_in_evaluation.py:\d+\) for a batch of `validation_step` is not made of what its"
    assert re.search(said, f"{found[0].error}{found[0].output}"), found[0].error


def test_means_of_sixteen_bits_are_known_as_means_but_for_their_rounding() -> None:
    expected = one_process(validated, None, "Narrow", {})
    for found in run_trainers(validated, (1, 2), "Narrow", {}, devices=2):
        assert not list(differences("logged", found.value, expected, 2**-7)), found.output


def test_each_replicas_own_is_logged_where_the_user_means_it() -> None:
    found = run_trainers(validated, (1, 2), "Validated", {"whole_batch_loss": False}, devices=2)
    expected = one_process(validated, None, "Validated", {})
    assert abs(found[0].value["mean"] - expected["mean"]) > 1e-6


def generators_behind_batches(info: RankInfo, layout: Layout) -> int:
    """How many batches have left torch's generator as the first one has."""
    STATES.clear()
    validated(info, layout, "Draws", {})
    return sum(bool(torch.equal(state, STATES[0])) for state in STATES)


def test_a_trial_leaves_the_generators_of_later_batches_alone() -> None:
    found = run_trainers(generators_behind_batches, (1, 2), devices=2)
    assert [each.value for each in found] == [STEPS, STEPS]
