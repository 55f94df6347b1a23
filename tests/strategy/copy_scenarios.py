"""Copies of the model that hooks update from it: averages, teachers, momentum encoders, as people write them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trained_state, trainer_for
from tests.parity.zoo.blocks import HIDDEN
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask


def by_name(module: Any) -> None:
    sources = dict(module.net.named_parameters())
    for name, average in module.ema.named_parameters():
        if name in sources:
            average.lerp_(sources[name], 0.1)


def by_every_name(module: Any) -> None:
    sources = dict(module.net.named_parameters())
    for name, average in module.ema.named_parameters():
        average.mul_(0.9).add_(sources[name], alpha=0.1)


def zipped(module: Any) -> None:
    for average, source in zip(module.ema.parameters(), module.net.parameters(), strict=True):
        average.data = average.data * 0.9 + source.data * 0.1


def data_in_place(module: Any) -> None:
    for average, source in zip(module.ema.parameters(), module.net.parameters(), strict=False):
        average.data.mul_(0.9).add_(source.data, alpha=0.1)


def state_dicts(module: Any) -> None:
    for average, source in zip(module.ema.state_dict().values(), module.net.state_dict().values(), strict=True):
        average.copy_(0.9 * average + 0.1 * source)


def loaded(module: Any) -> None:
    if module.trainer.global_step % 2:
        module.ema.load_state_dict(module.net.state_dict())
        return
    average, source = module.ema.state_dict(), module.net.state_dict()
    module.ema.load_state_dict({name: 0.9 * value + 0.1 * source[name] for name, value in average.items()})
    for one, other in zip(module.ema.blocks, module.net.blocks, strict=True):
        one.load_state_dict(other.state_dict())


def sliced(module: Any) -> None:
    for one, other in zip(module.ema.blocks[1:3].parameters(), module.net.blocks[1:3].parameters(), strict=True):
        one.lerp_(other, 0.1)


def layer_by_layer(module: Any) -> None:
    for average, source in zip(module.ema.blocks, module.net.blocks, strict=True):
        for one, other in zip(average.parameters(), source.parameters(), strict=True):
            one.lerp_(other, 0.1)


class Averaged(TokenTask):
    """Trains against the average of its own weights, as a mean teacher, and validates it.

    Args:
        update: writes the average, in a hook.
        frozen: whether the copy needs no gradients; otherwise the optimizer just does not get it.
    """

    def __init__(self, update: Callable[[Any], None], frozen: bool = True) -> None:
        super().__init__(Walker())
        self.ema = copy.deepcopy(self.net).requires_grad_(not frozen)
        self.update = update

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        logits = self.net(tokens)
        with torch.no_grad():
            taught = self.ema(tokens).softmax(-1)
        own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return own - 0.5 * (taught * logits.log_softmax(-1)).sum(-1).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        logits = self.ema(batch[0])
        self.log("ema_loss", torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.update(self)


class Claimed(Averaged):
    """Gives the optimizer the average too, which never gets a gradient, and trains a part that is named like one."""

    def __init__(self) -> None:
        super().__init__(zipped, frozen=False)
        self.target_head = copy.deepcopy(self.net.head)

    def loss(self, batch: Any) -> Tensor:
        codes = torch.nn.functional.one_hot(batch[1] % HIDDEN, HIDDEN).to(self.target_head.weight.dtype)
        return super().loss(batch) + self.target_head(codes).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        for parameter in self.target_head.parameters():
            parameter.clamp_(max=0.1)


class Library(Averaged):
    """Averages with torch's own class, which wraps the copy and does not freeze it."""

    def __init__(self) -> None:
        super().__init__(lambda module: module.ema.update_parameters(module.net))
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))


class Buffers(Averaged):
    """Keeps the average in buffers, named after the parameters."""

    def __init__(self) -> None:
        super().__init__(self.write)
        del self.ema
        self.names = {name: name.replace(".", "_") for name, _ in self.net.named_parameters()}
        for name, parameter in self.net.named_parameters():
            self.register_buffer(self.names[name], parameter.detach().clone())

    @staticmethod
    def write(module: Any) -> None:
        for name, parameter in module.net.named_parameters():
            module.get_buffer(module.names[name]).lerp_(parameter, 0.1)

    def loss(self, batch: Any) -> Tensor:
        average = torch.stack([buffer.square().mean() for buffer in self.buffers()]).mean()
        return TokenTask.loss(self, batch) * (1 + average)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        TokenTask.validation_step(self, batch, batch_idx)


class Keys(Averaged):
    """Trains against copies of single parts, which have no name of a copy."""

    def __init__(self) -> None:
        super().__init__(_parts)
        del self.ema
        self.first = copy.deepcopy(self.net.embed).requires_grad_(False)
        self.last = copy.deepcopy(self.net.head).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        keys = self.last(self.first(batch[0]))
        return TokenTask.loss(self, batch) + (self.net(batch[0]) - keys).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        TokenTask.validation_step(self, batch, batch_idx)


def _parts(module: Any) -> None:
    for average, source in ((module.first, module.net.embed), (module.last, module.net.head)):
        for one, other in zip(average.parameters(), source.parameters(), strict=True):
            one.lerp_(other, 0.1)


class InAList(Averaged):
    """Copies single parts into a list, where each has another place than in the model, beside parts like the first."""

    def __init__(self) -> None:
        super().__init__(self.write)
        del self.ema
        self.net.predict = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN))
        self.net.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.copies = torch.nn.ModuleList(copy.deepcopy(self.sources())).requires_grad_(False)

    def sources(self) -> list[Any]:
        """The parts that are copied."""
        return [self.net.first, *self.net.blocks]

    @staticmethod
    def write(module: Any) -> None:
        for average, source in zip(module.copies, module.sources(), strict=True):
            for one, other in zip(average.parameters(), source.parameters(), strict=True):
                one.lerp_(other, 0.1)

    def loss(self, batch: Any) -> Tensor:
        hidden, targets = self.net.embed(batch[0]), batch[1]
        with torch.no_grad():
            taught = hidden
            for part in self.copies:
                taught = part(taught)
        own = self.net.walk(self.net.first(hidden))
        logits = self.net.head(self.net.predict(own)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten()) + (own - taught).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class InCallback(Callback):
    """Updates the average from outside of the module."""

    @torch.no_grad()
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        zipped(pl_module)


def _nothing(module: Any) -> None:
    return None


KINDS: dict[str, Callable[[], LightningModule]] = {
    "by_name": lambda: Averaged(by_name),
    "by_every_name": lambda: Averaged(by_every_name),
    "zipped": lambda: Averaged(zipped),
    "data_in_place": lambda: Averaged(data_in_place, frozen=False),
    "state_dicts": lambda: Averaged(state_dicts),
    "layer_by_layer": lambda: Averaged(layer_by_layer),
    "loaded": lambda: Averaged(loaded),
    "sliced": lambda: Averaged(sliced),
    "claimed": Claimed,
    "library": Library,
    "buffers": Buffers,
    "callback": lambda: Averaged(_nothing),
    "parts": Keys,
    "in_a_list": InAList,
}


def averaged(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str = "by_name") -> Any:
    """Metrics, and the averages after training as this rank holds them."""
    torch.manual_seed(7)
    module = KINDS[kind]()
    callbacks: list[Callback] = [InCallback()] if kind == "callback" else []
    trainer = trainer_for(info, layout, arguments, max_epochs=2, callbacks=callbacks)
    trainer.fit(module)
    held = {name: value.clone() for name, value in module.state_dict().items() if not name.startswith("net.")}
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, held


def averaged_whole(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    """The whole state after training, on the first rank."""
    torch.manual_seed(7)
    return trained_state(info, layout, arguments, KINDS[kind]().double(), max_epochs=2)


class Apart(Averaged):
    """A hook that writes something of its own on each rank."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.ema.embed._parameters.values():
            assert parameter is not None
            parameter.data.add_(1.0 + self.global_rank)


def apart(info: RankInfo, layout: Layout, arguments: Mapping[str, Any]) -> None:
    torch.manual_seed(7)
    trainer_for(info, layout, arguments, max_epochs=1).fit(Apart(_nothing))
