"""Training with the weights of layers spread over the replicas, and what a rank holds of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.windows.step_windows import StepWindows
from lightning_megatron.data_parallel.windows.window import Window
from lightning_megatron.strategy.saving.saving import Saving
from tests.data_parallel.sharing_scenarios import Setup, SharedTask, Unfreeze
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.parity.zoo.data import VOCABULARY


class Layer(nn.Module):
    """A linear layer that does what a stranger's may do.

    Args:
        number: of the layer.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.aside: Any = None

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            self.up.weight.clamp_(-0.3, 0.3)
        inner = checkpoint(self._inner, x["h"], use_reentrant=False)
        self.aside = self.down.weight.square().mean() + inner.square().mean()
        return {"h": x["h"] + inner * self.scale, "weight": self.up.weight.detach()}

    def _inner(self, h: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(h)))


class Strange(SharedTask):
    """Uses weights in layers, outside of them, and in the losses; one layer is frozen in part, and two are tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(Layer(number) for number in range(4))
        self.layers[1].up.requires_grad_(False)
        self.layers[3].down.weight = self.layers[2].down.weight
        self.net, self.branch = nn.Embedding(64, 8), nn.Linear(8, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch[0] % 64, batch[1] % 64
        x = {"h": self.net(tokens)}
        given = 0.0
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number == 2 else layer(x)
            given = given + x["weight"].sum()
        loss = F.cross_entropy(self.branch(x["h"]).flatten(0, 1), targets.flatten())
        loss = loss + 0.1 * sum(layer.aside for layer in self.layers) + 1e-3 * given
        if batch_idx % 2:
            loss = loss + 0.01 * sum(p.square().sum() for p in self.layers[0].parameters())
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss


class Counts(Callback):
    """Looks at no weights, by its source."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.batches += 1
        pl_module.log("batches", self.batches)


class Renaming(SharedTask):
    """Changes what is saved."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        name = "net.transformer.h.0.ln_1.weight"
        checkpoint["state_dict"][name] = checkpoint["state_dict"][name] * 2


class Dropping(SharedTask):
    """Leaves out a layer at random, on each replica another."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        left_out = random.Random(self.global_rank).randrange(4)
        whole = self.net.transformer.h
        self.net.transformer.h = nn.ModuleList(layer for i, layer in enumerate(whole) if i != left_out)
        loss: Tensor = self.net(*batch)[1]
        self.net.transformer.h = whole
        return loss


class Writing(SharedTask):
    """Changes weights between steps, in place and by giving them anew."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.net.transformer.h[1].parameters():
                parameter.clamp_(-0.05, 0.05)
            for parameter in self.net.transformer.h[2].parameters():
                parameter.data = parameter.data * 0.9
        self.net.transformer.h[3].ln_1.weight.detach().numpy()  # after which torch does not let go of the memory

    def on_before_backward(self, loss: Tensor) -> None:
        assert not any(bool(parameter.isnan().any()) for parameter in self.parameters())


class Adapted(SharedTask):
    """Trains the first norms of its layers and a branch; all else is frozen, as under an adapter."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.net.requires_grad_(False)
        for layer in self.net.transformer.h:
            layer.ln_1.requires_grad_(True)


class Tailed(SharedTask):
    """Has a second list of layers, of fewer weights."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.tail = nn.ModuleList(nn.Linear(VOCABULARY, VOCABULARY) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, loss = self.net(*batch)
        for layer in self.tail:
            logits = layer(logits).tanh()
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss + logits.square().mean()


class Tied(SharedTask):
    """Two pairs of layers share matrices; code outside of a head's forward reads its weight."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        layers = self.net.transformer.h
        layers[2].ln_1, layers[3].mlp, layers[0].attn = layers[1].ln_1, layers[1].mlp, layers[3].attn
        self.tower = nn.Sequential(nn.Linear(VOCABULARY, 64), nn.GELU(), nn.Linear(64, VOCABULARY))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, loss = self.net(*batch)
        aside = F.linear(F.gelu(self.tower[0](logits)), self.tower[2].weight).square().mean()
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss + aside


class Chosen(nn.Module):
    """A layer's MLP, beside experts of which each sample chooses one."""

    def __init__(self, mlp: nn.Module, width: int) -> None:
        super().__init__()
        self.mlp, self.experts = mlp, nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x)
        index = x[:, 0, :4].argmax(-1)
        for number, expert in enumerate(self.experts):
            rows = (index == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


class Routed(SharedTask):
    """Has weights in its layers that get no gradient on some replicas, others on each."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        for layer in self.net.transformer.h:
            layer.mlp = Chosen(layer.mlp, layer.ln_1.weight.numel())


class Choosy(SharedTask):
    """Its second layer fails on few samples of the first replica's, as norms do on one, which only a trial gives it."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.net.transformer.h[1].register_forward_pre_hook(self._refuse)

    def _refuse(self, layer: nn.Module, args: tuple[Tensor]) -> None:
        if len(args[0]) < 4 and self.global_rank == 0:
            raise ValueError(f"expected more than {len(args[0])} samples")


class _Extension(torch.autograd.Function):
    """A product in C++, of which torch's functions know nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with torch._C.DisableTorchFunction():
            return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, ctx.saved_tensors[0].flatten(0, 1).t() @ gradient.flatten(0, 1)


class Unreported(SharedTask):
    """Hands a weight outside of layers to a function of its own."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.tower = nn.Linear(VOCABULARY, VOCABULARY, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, loss = self.net(*batch)
        result: Tensor = loss + _Extension.apply(logits.detach(), self.tower.weight).square().mean()
        return result


class Hooked(SharedTask):
    """Gradient hooks of parameters read weights, and write them."""

    def on_fit_start(self) -> None:
        layers = self.net.transformer.h
        weight, bias = layers[1].ln_1.weight, layers[2].ln_1.bias
        weight.register_hook(lambda gradient: gradient * (1 + weight.detach().norm()))
        bias.register_post_accumulate_grad_hook(_shrink)


@torch.no_grad()
def _shrink(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(parameter, alpha=0.1)
    parameter.mul_(0.9)


class Validated(SharedTask):
    """Validates in the middle of an epoch."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(*batch)[1], sync_dist=True)


class ValidatedTwice(Validated):
    """Calls the model as often as its batch says."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(1 + self.global_rank):
            loss = self.net(*batch)[1]
        self.log("val", loss, sync_dist=True)


class ValidatedUnevenly(Validated):
    """Replicas validate on batches of other sizes."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.net(*batch)[1].isfinite()

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        return super().collate(samples if self.trainer.training or self.global_rank == 0 else samples[:1])


class Failing(SharedTask):
    """Fails in the second step.

    Args:
        where: in its forward behind a layer, in its backward, or in a hook.
        **others: of `SharedTask`.
    """

    def __init__(self, where: str = "forward", **others: Any) -> None:
        super().__init__(**others)
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.where == "forward":
            self.net.transformer.h[1].register_forward_pre_hook(_fail)
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.where == "backward":
            loss.register_hook(_fail)
        return loss

    def on_before_zero_grad(self, *_: Any) -> None:
        if self.global_step == 1 and self.where == "hook":
            _fail()


def _fail(*_: Any) -> None:
    raise ArithmeticError("as it was meant to")


def failed(info: RankInfo, setup: Setup) -> dict[str, Tensor]:
    """The weights that this rank has of a module whose second step has failed."""
    strategy: Any = "auto"
    if setup.layout is not None:
        from lightning_megatron import MegatronStrategy

        strategy = MegatronStrategy(*setup.layout, **setup.strategy)
    trainer = make_trainer(info, strategy, max_epochs=1, limit_val_batches=0, **setup.trainer)
    task = Failing(**setup.module)
    try:
        trainer.fit(task)
    except (ArithmeticError, RuntimeError):  # the latter repeats what another replica has told
        return {name: p.detach().clone() for name, p in task.named_parameters() if not p.is_meta and p.stride() != ()}
    raise AssertionError("it did not fail")


MODULES: dict[str, Any] = {
    "plain": SharedTask,
    "strange": Strange,
    "dropping": Dropping,
    "renaming": Renaming,
    "writing": Writing,
    "hooked": Hooked,
    "adapted": Adapted,
    "tied": Tied,
    "tailed": Tailed,
    "routed": Routed,
    "choosy": Choosy,
    "unreported": Unreported,
    "validated": Validated,
    "validated twice": ValidatedTwice,
    "validated unevenly": ValidatedUnevenly,
}
CALLBACKS: dict[str, Any] = {
    "counts": Counts,
    "saves": lambda: ModelCheckpoint(filename="{step}", every_n_train_steps=3, save_top_k=-1),
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "unfreeze": Unfreeze,
}


@dataclass
class Count:
    """What windows held.

    Attributes:
        between: bytes of whole weights after each step.
        most: the most bytes of whole weights at any time in a step.
        largest: bytes of the largest layer's weights.
        opened: windows opened.
        gradients: the most bytes of whole gradients at any time.
        ahead: windows whose gather was under way when they were opened.
        whole: bytes of all weights that are spread.
        kept: bytes of this rank's shards.
        saving: bytes of whole weights whenever a checkpoint was written.
        evaluating: the most bytes of whole weights in each step of evaluation that opens layers one by one.
    """

    between: list[int] = field(default_factory=list)
    most: int = 0
    opened: int = 0
    gradients: int = 0
    ahead: int = 0
    whole: int = 0
    kept: int = 0
    largest: int = 0
    saving: list[int] = field(default_factory=list)
    evaluating: list[int] = field(default_factory=list)


def spread(
    info: RankInfo,
    setup: Setup,
    module: str = "plain",
    callback: str | None = None,
    precision: str = "64-true",
    resume: str | None = None,
) -> dict[str, Any]:
    """Trains; reports whole weights (on rank 0) and what the windows held."""
    strategy: Any = "auto"
    if setup.layout is not None:
        from lightning_megatron import MegatronStrategy

        strategy = MegatronStrategy(*setup.layout, **setup.strategy)
    callbacks: list[Callback] = [] if callback is None else [CALLBACKS[callback]()]
    options = {"max_epochs": 2, "limit_val_batches": 0, "precision": precision, **setup.trainer}
    trainer = make_trainer(info, strategy, callbacks=callbacks, **options)
    task = MODULES[module](**setup.module)
    if precision != "64-true":
        task = task.float()
    count, opens, ends, starts = Count(), Window.open, StepWindows.end_step, Window.start
    found: dict[int, Window] = {}
    allocates, flats, saves = Bucket.allocate, dict[int, Bucket](), Saving.save
    now = [0]

    def opening(self: Window) -> None:
        count.opened += not self.is_open
        count.ahead += self.coming
        opens(self)
        note(self)

    def starting(self: Window) -> None:
        starts(self)
        note(self)

    def allocating(self: Bucket) -> None:
        allocates(self)
        flats[id(self)] = self
        count.gradients = max(count.gradients, sum(b.flat.untyped_storage().nbytes() for b in flats.values()))

    def note(window: Window) -> None:
        found[id(window)] = window
        now[0] = max(now[0], sum(window.live_bytes for window in found.values()))

    def ending(self: StepWindows) -> str:
        said = ends(self)
        count.most, now[0] = max(count.most, now[0]), 0
        count.between.append(sum(window.live_bytes for window in self.windows))
        sizes = [sum(p.numel() * p.element_size() for p in window.parameters) for window in self.windows]
        count.whole, count.largest = sum(sizes), max(sizes)
        count.kept = sum(window.kept_bytes for window in self.windows)
        return said

    def saving(self: Saving, *arguments: Any) -> None:
        count.saving.append(sum(window.live_bytes for window in found.values()))
        saves(self, *arguments)

    evaluates = StepWindows.evaluation

    @contextmanager
    def evaluating(self: StepWindows) -> Iterator[None]:
        now[0] = 0
        with evaluates(self):
            yield
            count.evaluating.append(now[0])
        assert not any(window.live_bytes for window in self.windows), "nothing is whole behind it"

    with (
        mock.patch.multiple(Window, open=opening, start=starting),
        mock.patch.multiple(StepWindows, end_step=ending, evaluation=evaluating),
        mock.patch.object(Saving, "save", saving),
        mock.patch.object(Bucket, "allocate", allocating),
    ):
        trainer.fit(task, ckpt_path=resume)
    whole = trainer.strategy.full_state_dict() if setup.layout is not None else task.state_dict()
    own = {name: bool(p.isnan().any()) for name, p in task.named_parameters() if not p.is_meta}
    return {
        "weights": {name: value.detach().clone() for name, value in whole.items()},
        "lost": [name for name, lost in own.items() if lost],
        "metrics": {n: float(v) for n, v in trainer.callback_metrics.items()},
        "count": vars(count),
    }
