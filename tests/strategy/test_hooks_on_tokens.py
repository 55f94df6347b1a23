"""Forward hooks on layers whose tokens tensor ranks share are given the tokens of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import RankInfo, run_trainers
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.data import Items
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask

TOKENS: dict[str, Any] = {"tensor_parallel_size": 2, "sequence_parallel": True}
GLOBAL: dict[int, Tensor] = {}


class Keeps(TokenTask):
    """What hooks keep elsewhere than on their layer is a part of the loss, and logged."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.kept: dict[int, Tensor] = {}
        for place, block in enumerate(self.net.blocks):
            self.put(place, block)

    def put(self, place: int, block: Any) -> None:
        block.register_forward_hook(lambda _, inputs, output: self.keep(place, output))

    def keep(self, place: int, x: Tensor) -> None:
        self.kept[place] = x.pow(2).mean() + 0.1 * x.std()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept.clear()
        GLOBAL.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, kept = self.loss(batch), {**self.kept, **GLOBAL}
        total = torch.stack(list(kept.values())).sum()
        self.log("kept", total)
        return loss + 0.1 * total


class OfBranch(Keeps):
    """Of what a branch of the layer gives."""

    def put(self, place: int, block: Any) -> None:
        block.mlp[2].register_forward_hook(lambda _, inputs, output: self.keep(place, output))


class BeforeRegion(Keeps):
    """Of what is given to a linear layer, which has all tokens."""

    def put(self, place: int, block: Any) -> None:
        block.mlp[0].register_forward_pre_hook(lambda _, inputs: self.keep(place, inputs[0]))


class Weighted(Keeps):
    """With a weight of the layer."""

    def put(self, place: int, block: Any) -> None:
        block.register_forward_hook(lambda _, inputs, output: self.keep(place, output * block.ln_1.weight))


class Changes(Keeps):
    """And changes what the region is given."""

    def put(self, place: int, block: Any) -> None:
        def change(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            self.keep(place, inputs[0])
            return (inputs[0] * block.ln_2.weight * 1.1,)

        block.mlp.register_forward_pre_hook(change)


class Writes(Keeps):
    """And writes into the output."""

    def put(self, place: int, block: Any) -> None:
        def write(_: nn.Module, inputs: Any, output: Tensor) -> None:
            GLOBAL[place] = output.detach().abs().max()
            output.mul_(0.9)

        block.ln_1.register_forward_hook(write)


class Detached(Keeps):
    """Without a gradient."""

    def keep(self, place: int, x: Tensor) -> None:
        super().keep(place, x.detach())


class Late(Keeps):
    """Registers its hooks when the module is divided."""

    def put(self, place: int, block: Any) -> None:
        pass

    def on_fit_start(self) -> None:
        self.net.blocks[0].ln_1.register_forward_hook(lambda _, inputs, output: self.keep(0, output))


class Shorter(Detached):
    """Validates on batches whose tokens two ranks cannot share evenly."""

    def val_dataloader(self) -> Any:
        return DataLoader(Items(8, seed=1), 4, collate_fn=self.shorter)

    def shorter(self, samples: list[dict[str, Tensor]]) -> tuple[Tensor, ...]:
        return tuple(part[:, :7] for part in self.collate(samples))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.clear()
        loss = self.loss(batch)
        self.log_dict({"val_loss": loss, "kept": torch.stack(list(self.kept.values())).sum()})


class Logged(Callback):
    """Notes what is logged."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.found.append(float(trainer.callback_metrics["kept"]))


def run(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: type[Keeps]) -> dict[str, Any]:
    """Logged numbers and all weights after a few steps."""
    torch.manual_seed(7)
    module, logged = kind(), Logged()
    trainer = trainer_for(info, layout, arguments, max_epochs=1, limit_val_batches=0, callbacks=[logged])
    trainer.fit(module)
    state = trainer.strategy.full_state_dict() if layout is not None else module.state_dict()
    first = {name: value.double().clone() for name, value in state.items()} if info.rank == 0 else {}
    return {"logged": logged.found, "weights": first}


def validated(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """What a validation logs."""
    torch.manual_seed(7)
    return trainer_for(info, layout, arguments).validate(Shorter(), verbose=False)[0]


def check(kind: type[Keeps], layout: Layout) -> None:
    """Logged numbers and weights are those of one process."""
    wanted = run_trainers(run, None, {}, kind, devices=1)[0].value
    for outcome in run_trainers(run, layout, TOKENS, kind, devices=2 * layout[0]):
        assert outcome.value["logged"] == pytest.approx(wanted["logged"], abs=1e-9)
        for name, value in outcome.value["weights"].items():
            torch.testing.assert_close(value, wanted["weights"][name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("kind", [Keeps, OfBranch, BeforeRegion, Weighted, Changes, Writes])
def test_what_hooks_keep_and_change_under_sequence_parallelism_is_of_all_tokens(kind: type[Keeps]) -> None:
    check(kind, (1, 1))


@pytest.mark.wide
@pytest.mark.parametrize("kind", [Detached, Writes])
def test_what_hooks_keep_on_several_stages_is_of_all_tokens(kind: type[Keeps]) -> None:
    check(kind, (2, 1))


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("layout", "arguments"), [((1, 1), {}), ((2, 1), {}), ((2, 1), {"pipeline_schedule": "zb-v"})], ids=str
)
def test_tokens_that_ranks_cannot_share_evenly_are_validated_on_each(layout: Layout, arguments: dict[str, Any]) -> None:
    wanted = run_trainers(validated, None, {}, devices=1)[0].value
    for outcome in run_trainers(validated, layout, {**TOKENS, **arguments}, devices=2 * layout[0]):
        assert outcome.value == pytest.approx(wanted, rel=1e-6)


@pytest.mark.wide
def test_gradients_of_what_hooks_keep_on_several_stages_are_refused_with_their_line() -> None:
    for outcome in run_trainers(run, (2, 1), TOKENS, Keeps, devices=4, check=False, grace=20.0):
        said = f"{outcome.error}\n{outcome.output}"
        assert outcome.error is not None and "takes a gradient of what the forward hook" in said, outcome
        assert "test_hooks_on_tokens.py:" in said and "keep `x.detach()`" in said, outcome


def test_hooks_that_come_late_to_a_part_of_the_tokens_are_refused() -> None:
    for outcome in run_trainers(run, (1, 1), TOKENS, Late, devices=2, check=False, grace=20.0):
        said = f"{outcome.error}\n{outcome.output}"
        assert outcome.error is not None and "was registered on `net.blocks.0.ln_1` after" in said, outcome
