"""Hooks that are registered on layers in the middle of training: what they keep and change is that of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.strategy.hooks.added_later import RegisteredHooks
from tests.harness import RankInfo, run_trainers
from tests.parity.scenario import Layout, differences, trainer_for
from tests.parity.train import Recorder, Trace
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask

WIDE = pytest.mark.wide
AT = 2  # step
GLOBAL: dict[int, Tensor] = {}


class KeptLater(TokenTask):
    """What hooks keep is a part of the loss, and logged, as soon as there are some."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.kept: dict[int, Any] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept.clear()
        GLOBAL.clear()
        if self.global_step == AT:
            for place, block in enumerate(self.net.blocks):
                self.put(place, block)

    def put(self, place: int, block: nn.Module) -> None:
        block.register_forward_hook(lambda _, inputs, output: self.kept.update({place: output.pow(2).mean()}))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, kept = self.loss(batch), [*self.kept.values(), *GLOBAL.values()]
        if kept:
            total = torch.stack(kept).sum()
            self.log("kept", total.detach())
            loss = loss + 0.1 * total
        return loss


class Elsewhere(KeptLater):
    """In a global, without a gradient."""

    def put(self, place: int, block: nn.Module) -> None:
        def keep(_: nn.Module, inputs: Any, output: Tensor) -> None:
            GLOBAL[place] = output.detach().abs().mean()

        block.register_forward_hook(keep)


class Extremes(KeptLater):
    """Of the whole batch."""

    def put(self, place: int, block: nn.Module) -> None:
        block.register_forward_hook(
            lambda _, inputs, output: self.kept.update({place: float(output.detach().abs().max())})
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.kept:
            self.log("kept", max(self.kept.values()))
        return loss


class ChangedLater(KeptLater):
    """Outputs are scaled by a number of the whole batch."""

    def put(self, place: int, block: nn.Module) -> None:
        block.register_forward_hook(lambda _, inputs, output: output * (1 + 0.1 * output.detach().pow(2).mean()))


class Anew(KeptLater):
    """The same hooks are registered for each batch, and removed behind it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept.clear()
        self.handles = [
            block.register_forward_hook(
                lambda _, i, output, place=place: self.kept.update({place: output.pow(2).mean()})
            )
            for place, block in enumerate(self.net.blocks)
        ]

    def on_train_batch_end(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


class Announced(KeptLater):
    """The first rank says so."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.trainer.is_global_zero and self.global_step == AT:
            print("hooks are registered")


class OnFirstRank(KeptLater):
    """Only the first rank has them, and prints what it sees."""

    def put(self, place: int, block: nn.Module) -> None:
        if self.trainer.is_global_zero:
            block.register_forward_hook(lambda _, inputs, output: print(place, float(output.detach().mean())))


def run(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: type[KeptLater]) -> dict[str, Any]:
    """Losses, logged numbers and all weights."""
    torch.manual_seed(7)
    trace = Trace()
    trainer = trainer_for(
        info, layout, arguments, max_epochs=2, limit_val_batches=0, callbacks=[Recorder(trace)], log_every_n_steps=1
    )
    module = kind()
    trainer.fit(module)
    state = trainer.strategy.full_state_dict() if layout is not None else module.state_dict()
    weights = {name: value.double().clone() for name, value in state.items()} if info.rank == 0 else {}
    alone = layout is None or layout[1] == 1  # a replica's loss is that of its samples
    return {"losses": trace.losses if alone else [], "logged": trace.metrics, "weights": weights}


def check(kind: type[KeptLater], layout: Layout, **arguments: Any) -> None:
    """All of these are those of one process."""
    wanted = run_trainers(run, None, {}, kind, devices=1)[0].value
    ranks = layout[0] * layout[1] * arguments.get("tensor_parallel_size", 1)
    for outcome in run_trainers(run, layout, arguments, kind, devices=ranks):
        found = outcome.value
        expected = {name: value if found[name] else type(value)() for name, value in wanted.items()}
        assert not list(differences(kind.__name__, found, expected, 1e-9)), outcome.output
        assert found["weights"] or outcome.rank > 0


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (KeptLater, {}),
        (Elsewhere, {"pipeline_schedule": "interleaved"}),
        (Extremes, {}),
        (ChangedLater, {"pipeline_schedule": "zb-v", "micro_batch_size": 1}),
        (Anew, {}),
        (Announced, {}),
        (OnFirstRank, {}),
    ],
)
def test_hooks_that_come_later_are_those_of_one_process_from_their_first_step_on(
    kind: type[KeptLater], arguments: dict[str, Any]
) -> None:
    check(kind, (2, 1), **arguments)


@WIDE
@pytest.mark.parametrize("kind", [KeptLater, Elsewhere, Extremes, ChangedLater, Anew, Announced, OnFirstRank])
@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ((2, 1), {}),
        ((4, 1), {"micro_batch_size": 1}),
        ((2, 1), {"pipeline_schedule": "zb-v"}),
        ((2, 1), {"pipeline_schedule": "interleaved"}),
        ((2, 1), {"tensor_parallel_size": 2}),
        ((2, 1), {"activation_recompute": "full"}),
        ((1, 1), {}),
    ],
)
def test_hooks_that_come_later_in_every_layout(
    kind: type[KeptLater], layout: Layout, arguments: dict[str, Any]
) -> None:
    check(kind, layout, **arguments)


def test_hooks_of_code_that_was_met_before_are_nothing_new() -> None:
    def put(at: int) -> Any:
        return model[at].register_forward_hook(lambda *_: None)

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    hooks = RegisteredHooks(model)
    assert not hooks.look()
    handle = put(0)
    assert hooks.look() and hooks.others
    assert not hooks.look() and not hooks.others
    handle.remove()
    put(0)
    assert not hooks.look() and hooks.others  # another function of the same code
    put(1)
    assert hooks.look()
    nn.Linear(2, 2).register_forward_hook(lambda *_: None)
    assert not hooks.look() and not hooks.others
