"""A loss that changes with time is tried where it changes, by what the step's code asks about steps and epochs."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.hooks.phases import Phases
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.train import Recorder, Trace, make_trainer

WIDE = pytest.mark.wide
WIDTH, VOCABULARY, START = 16, 32, 3
Found = tuple[list[float], dict[str, Tensor], list[str]]


class Net(LightningModule):
    """Layers over tokens; after a while, samples are compared with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in range(4)]
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.example_input_array = torch.zeros(2, 6, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return x

    def tokens(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())

    def contrast(self, x: Tensor) -> Tensor:
        z = F.normalize(x.mean(1), dim=-1)
        return F.cross_entropy(z @ z.mT, torch.arange(len(z)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ByStep(Net):
    """Asks for the number of the step in a method, which is told a limit."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.hidden(batch[0])
        return self.total(x, batch[1], START)

    def total(self, x: Tensor, y: Tensor, start: int) -> Tensor:
        loss = self.tokens(x, y)
        if self.trainer.global_step >= start and len(x) > 1:
            loss = loss + 0.1 * self.contrast(x)
        return loss


class ByEpoch(Net):
    """Weighs by a factor of the epoch, which is nothing at first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = min(1.0, self.current_epoch / 4)
        x = self.hidden(batch[0])
        return self.tokens(x, batch[1]) + factor * self.contrast(x)


class ByBatch(Net):
    """Hides targets from some batch on."""

    def training_step(self, batch: Any, number: int) -> Tensor:
        return self.masked(self.hidden(batch[0]), batch, hides=number > 1)

    def masked(self, x: Tensor, batch: Any, hides: bool) -> Tensor:
        return self.tokens(x, batch[1].masked_fill(batch[0] < 12, -100) if hides else batch[1])


class Writes(Net):
    """Begins to keep a mean, in a module of its loss."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor, begun: bool) -> Tensor:
            if begun:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))  # type: ignore[operator]
            return x - self.mean

    def __init__(self) -> None:
        super().__init__()
        self.center, self.start = self.Mean(), START

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.tokens(self.center(self.hidden(batch[0]), begun=self.global_step >= self.start), batch[1])


class Switched(Net):
    """Has a switch, thrown on all ranks in a hook."""

    everywhere = True

    def __init__(self) -> None:
        super().__init__()
        self.late = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step >= START and (self.everywhere or self.global_rank == self.trainer.world_size - 1):
            self.late = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.hidden(batch[0])
        loss = self.tokens(x, batch[1])
        if self.late and self.everywhere:
            loss = loss + 0.1 * self.contrast(x)
        return loss


class SwitchedThere(Switched):
    """Its switch is thrown on the last rank only, where it tells nothing."""

    everywhere = False


class Inherits(ByStep):
    """Leaves the step to its base class, and asks by a property."""

    @property
    def warm(self) -> bool:
        return self.trainer.global_step > 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.contrast(self.embed(batch[0])) if self.warm else loss


class ByRank(Net):
    """Asks for a step that is another one on each rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2 == self.global_rank % 2 or not (batch_idx > 0 and self.global_rank == 0):
            self.trainer.logger  # noqa: B018
        return self.tokens(self.hidden(batch[0]), batch[1])


class Cuts(Net):
    """Sets learning rates: each step, once from a step on, and by a scheduler of its own."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW([{"params": self.parameters(), "lr": 1e-2}])
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["weight_decay"] += 0.1
        x = self.hidden(batch[0])
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9
            if self.global_step == START:
                group["betas"] = (0.8, 0.9)
        if batch_idx == 1:
            self.schedule.step()
        return self.tokens(x, batch[1])


class ByCase(Net):
    """Matches the number of a step, in a method."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.hidden(batch[0])
        match self.kind(), batch_idx:
            case "late", _:
                return self.tokens(x, batch[1].masked_fill(batch[0] < 12, -100))
            case _, 1:
                return self.tokens(x, batch[1]) + 0.1 * self.contrast(x)
            case _:
                return self.tokens(x, batch[1])

    def kind(self) -> str:
        match self.trainer.global_step:
            case 0 | 1:
                return "early"
            case number if number < START + 1:
                return "main"
            case _:
                return "late"


class ByTable(Net):
    """Takes its loss from tables: one of methods, one made in the step, one of words."""

    WORDS = ("mean", "mean", "sum")

    def __init__(self) -> None:
        super().__init__()
        self.table = {1: self.both}

    def both(self, x: Tensor, y: Tensor) -> Tensor:
        return self.tokens(x, y) + 0.1 * self.contrast(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, step = self.hidden(batch[0]), batch[1], self.global_step
        if self.current_epoch == 0:
            return self.table.get(batch_idx, self.tokens)(x, y) if step < 2 else self.added(x, y, batch_idx)
        hidden = y.masked_fill(batch[0] < 12, -100)
        return [lambda: self.tokens(x, y), lambda: self.tokens(x, hidden), lambda: self.both(x, y)][batch_idx]()

    def added(self, x: Tensor, y: Tensor, place: int) -> Tensor:
        return 0.01 * F.cross_entropy(self.head(x).flatten(0, 1), y.flatten(), reduction=self.WORDS[place])


class ByName(Net):
    """Takes its loss by a name that is made of a number; names of logged values are not asked for."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log(f"of {self.global_step}", 1.0)
        return getattr(self, f"loss_{min(self.global_step, START)}", self.first)(self.hidden(batch[0]), *batch)

    def first(self, x: Tensor, tokens: Tensor, y: Tensor) -> Tensor:
        return self.tokens(x, y)

    def loss_3(self, x: Tensor, tokens: Tensor, y: Tensor) -> Tensor:
        return self.tokens(x, y.masked_fill(tokens < 12, -100))


class Once(Net):
    """Asks for steps where only the first rank does something."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2 == 0 and self.global_rank == 0:
            self.trainer.logger  # noqa: B018  # where others would write a picture
        return self.tokens(self.hidden(batch[0]), batch[1])


_ALL = ByStep, ByEpoch, ByBatch, Writes, Switched, SwitchedThere, Inherits, ByRank, Cuts, Once, ByCase, ByTable, ByName
KINDS = {kind.__name__: kind for kind in _ALL}


def fit(info: RankInfo, name: str, options: dict[str, Any] | None) -> Found:
    """Losses, weights and warnings of two epochs of three batches."""
    torch.manual_seed(2)
    module, trace = KINDS[name]().double(), Trace()
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(*(torch.randint(0, VOCABULARY, (24, 6), generator=generator) for _ in range(2)))
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    trainer = make_trainer(info, strategy, max_epochs=2, precision="64-true", callbacks=[Recorder(trace)])
    sizes = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if options is not None else None
    sampler = DistributedSampler(data, **sizes, shuffle=False) if sizes is not None else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loader = DataLoader(data, batch_size=8 // (sizes or {"num_replicas": 1})["num_replicas"], sampler=sampler)
        trainer.fit(module, loader)
    weights = trainer.strategy.full_state_dict() if options is not None else module.state_dict()
    return trace.losses, {key: value.detach().clone() for key, value in weights.items()}, [str(w.message) for w in said]


def compare(outcomes: list[Any], wanted: Found) -> None:
    for outcome in outcomes:
        assert outcome.value[0] == pytest.approx(wanted[0], abs=1e-10)
        for key, value in outcome.value[1].items():
            torch.testing.assert_close(value, wanted[1][key], rtol=1e-9, atol=1e-9, msg=key)


PP: dict[str, Any] = {"pipeline_parallel_size": 2, "micro_batch_size": 2}
EXACT = "ByStep", "ByEpoch", "ByBatch", "Writes", "Inherits", "SwitchedThere", "ByRank", "Cuts", "Once"
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, PP),
    (1, {"micro_batch_size": 2}),
    (2, {**PP, "pipeline_schedule": "zb-v"}),
    (2, {"tensor_parallel_size": 2, "micro_batch_size": 4}),
]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        pytest.param(
            name, *layout, marks=[WIDE] if place and name not in ("ByStep", "Cuts") else [], id=f"{name}-{place}"
        )
        for name in (*EXACT, "ByCase", "ByTable", "ByName")
        for place, layout in enumerate(LAYOUTS)
    ],
)
def test_a_step_is_that_of_one_process_from_the_first_one_of_a_phase(name: str, devices: int, options: Any) -> None:
    outcomes = run_trainers(fit, name, options, devices=devices)
    compare(outcomes, one_process(fit, name, None))
    assert not any("may differ from the steps" in said for said in outcomes[0].value[2])


def test_a_switch_that_is_no_number_of_a_step_is_found_behind_its_first_step() -> None:
    found, wanted = run_trainers(fit, "Switched", PP, devices=2), one_process(fit, "Switched", None)
    assert found[0].value[0][:START] == pytest.approx(wanted[0][:START], abs=1e-10)
    assert any(said.startswith(f"up to step {START + 1} the micro-batches' losses") for said in found[0].value[2])


@pytest.mark.parametrize("name", ["ByStep", pytest.param("Switched", marks=WIDE), pytest.param("Writes", marks=WIDE)])
def test_replicas_say_what_begins_to_be_their_own(name: str) -> None:
    said = run_trainers(fit, name, {}, devices=2)[0].value[2]
    assert any("depends on which samples it sees" in each for each in said), said


@pytest.mark.parametrize("name", ["SwitchedThere", "ByRank", "Cuts", "Once"])
def test_replicas_go_on_where_one_of_them_asks_something_else_and_set_options_once(name: str) -> None:
    outcomes, wanted = run_trainers(fit, name, {}, devices=2), one_process(fit, name, None)
    for key, value in outcomes[0].value[1].items():
        torch.testing.assert_close(value, wanted[1][key], rtol=1e-9, atol=1e-9, msg=key)


def test_what_is_true_for_the_first_time_is_new() -> None:
    class Asks(ByStep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            every = 2
            seen = self.seen
            self.losses[batch_idx] = self.losses[batch_idx % every] = 0.0  # written, which asks nothing
            del self.losses[batch_idx]
            if batch_idx % every or self.trainer.current_epoch > self.hparams.epochs:
                self.seen = seen + 1
            if self.ready and self.global_step > self.seen:
                return batch
            return self.total(batch, batch, START) if self.global_rank == 0 else batch

    module = Asks()
    module.hparams.epochs, module.ready, module.seen = 1, False, 0
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=0))
    trainer = SimpleNamespace(fit_loop=loop, current_epoch=0, global_step=0, global_rank=0, world_size=1)
    module._trainer = trainer  # type: ignore[assignment]
    module._fabric = None
    phases = Phases(module)

    def looks(**now: int) -> tuple[bool, bool]:
        loop.epoch_loop.batch_idx = now.pop("batch", 0)
        vars(trainer).update(now)
        phases.look()
        seen = phases.changed, phases.switched
        phases.note()
        return seen

    assert looks() == (True, True)
    assert looks(batch=2) == (False, False) and looks(batch=1) == (True, False) and looks(batch=3) == (False, False)
    assert looks(current_epoch=1) == (False, False) and looks(current_epoch=2) == (True, False)
    assert looks(global_step=1) == (False, True)  # beside a value that steps set
    assert looks(global_step=START) == (True, False) and looks(global_step=START + 1) == (False, False)
    module.ready = True
    assert looks() == (False, True) and looks() == (False, False)
    trainer.global_rank = 1
    assert looks() == (False, True)


def test_cases_tables_and_names_are_new_when_they_choose_something_else() -> None:
    class Chooses(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.limit = [self.tokens, self.contrast, self.tokens], 2

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            print("step %d" % batch_idx, f"of {batch_idx}")  # noqa: UP031
            match (self.current_epoch, batch_idx):
                case (0, _):
                    return self.table[batch_idx](batch)
                case (_, number) if number > self.limit:
                    return getattr(self, "configure_optimizers" if batch_idx else "first")()
                case (_, (1 | 2) as number):
                    return {1: batch, 2: batch}[number]
            match batch_idx:
                case {"unlike": _}:
                    return None

    module = Chooses()
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=0))
    trainer = SimpleNamespace(fit_loop=loop, current_epoch=0, global_step=0, global_rank=0, world_size=1)
    module._trainer = trainer  # type: ignore[assignment]
    module._fabric = None
    module.table.append(module.contrast)
    phases = Phases(module)
    assert phases._times and not phases._switches

    def looks(epoch: int, batch: int) -> bool:
        trainer.current_epoch, loop.epoch_loop.batch_idx = epoch, batch
        phases.look()
        changed = phases.changed
        phases.note()
        return changed

    assert all(looks(0, batch) for batch in range(4)) and not any(looks(0, batch) for batch in range(4))
    assert looks(1, 0) and not looks(1, 3) and not looks(2, 1)
