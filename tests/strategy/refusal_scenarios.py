"""Things that a pipeline cannot do, each as a user would write it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.harness import RankInfo
from tests.parity.scenario import trainer_for
from tests.parity.train import make_trainer
from tests.parity.zoo.blocks import HIDDEN, Block
from tests.parity.zoo.data import BATCH, VOCABULARY
from tests.parity.zoo.huggingface import PretrainedTask
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask


class Twice(TokenTask):
    """Calls the trunk two times, from the third step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + self.loss(batch) if self.is_late(batch_idx) else loss

    def is_late(self, number: int) -> bool:
        """Asks in a way that is not read in the code."""
        return number not in {0, 1}


class TwiceByNumber(Twice):
    """Asks so that the step is tried where it happens first."""

    def is_late(self, number: int) -> bool:
        return number > 1


class LatePenalty(TokenTask):
    """Adds the weights of one layer to the loss, from the second step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        weights = self.net.layers[0].parameters() if batch_idx else ()
        return loss + 0.01 * sum(parameter.square().sum() for parameter in weights)


class SlicePenalty(TokenTask):
    """Adds the weights of some layers, which a container of its own lists."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(parameter.square().sum() for parameter in self.net.layers[:2].parameters())


class Never(TokenTask):
    """Has a trunk and does not call it."""

    def loss(self, batch: Any) -> Tensor:
        return self.net.final_norm(self.net.token_embedding(batch[0])).square().mean()


class Trunkless(nn.Module):
    """No repeated layers anywhere, but lists that are not a trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.activations = nn.ModuleList([nn.GELU(), nn.Tanh()])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


class LogsLayers(TokenTask):
    """Validates layer by layer, and logs a number of what each gives."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = self.net.token_embedding(batch[0])
        for number, layer in enumerate(self.net.layers):
            x = layer(x)
            self.log(f"layer {number}", x.mean(1).square().mean())


class HalfTrunk(LearnedPositions):
    """Skips the second half of its layers."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)
        for layer in self.layers[: len(self.layers) // 2]:
            x = layer(x)
        return torch.nn.functional.linear(self.final_norm(x), self.token_embedding.weight)


class SharedLayer(nn.Module):
    """One layer object listed four times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList([Block()] * 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class InputGradient(TokenTask):
    """Penalises the gradient with respect to what goes into the layers, or what comes out of them.

    Args:
        network: its layers are listed as ``layers``.
        late: whether to take the gradient with respect to what the layers gave.
    """

    def __init__(self, network: nn.Module, late: bool = False) -> None:
        super().__init__(network)
        self.late = late

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = x = self.net.token_embedding(batch[0])
        for layer in self.net.layers:
            x = layer(x)
        logits = self.net.head(self.net.final_norm(x))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        (gradient,) = torch.autograd.grad(loss, x if self.late else first, create_graph=True, allow_unused=True)
        return loss if gradient is None else loss + gradient.square().sum()


class GradientInValidation(TokenTask):
    """Takes the gradient of its loss with respect to what goes into the layers, in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            first = x = self.net.token_embedding(batch[0]).detach().requires_grad_()
            for layer in self.net.layers:
                x = layer(x)
            loss = self.net.final_norm(x).square().mean()
            torch.autograd.grad(loss, first, allow_unused=True)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class OwnBackward(TokenTask):
    """Runs a backward in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        (0.1 * loss).backward(retain_graph=True)
        return loss


class NowAndThen(TokenTask):
    """Logs, in some steps only, a number of the first layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net.token_embedding(batch[0])
        states = []
        for layer in self.net.layers:
            states.append(x := layer(x))
        if batch_idx:
            self.log("first", states[0].detach().norm())
        return torch.nn.functional.linear(self.net.final_norm(x), self.net.token_embedding.weight).square().mean()


class LateMask(TokenTask):
    """From the second step on, scales the layers by numbers of the embedding that take no gradient.

    First and last stage hold the embedding, which is the head too; a stage between them does not.
    """

    def loss(self, batch: Any) -> Tensor:
        net, x = self.net, self.net.token_embedding(batch[0])
        mask = (x.detach().mean(-1, keepdim=True) > 0).to(x) if self.trainer.global_step else torch.ones_like(x)
        for layer in net.layers:
            x = layer(x * (1 + mask))
        return torch.nn.functional.linear(net.final_norm(x), net.token_embedding.weight).square().mean()


class LateNumber(TokenTask):
    """From the second step on, scales its loss by the size of the first layer's output."""

    def loss(self, batch: Any) -> Tensor:
        net, x = self.net, self.net.token_embedding(batch[0])
        scale = 1.0
        for index, layer in enumerate(net.layers):
            x = layer(x)
            if index == 0 and self.trainer.global_step:
                scale = float(x.detach().abs().mean())
        return scale * torch.nn.functional.linear(net.final_norm(x), net.token_embedding.weight).square().mean()


class KeepingBlock(Block):
    """Keeps its output; or, when told, a number."""

    keeps = "output"

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out = super().forward(x)
        if self.keeps == "output":
            self.kept = out.detach().repeat(1, 1, 30)
        elif self.keeps == "later" and self.told.trainer.global_step:
            self.kept = out.square().mean()
        return out


class Keeping(TokenTask):
    """Uses what its layers kept."""

    def __init__(self, keeps: str) -> None:
        super().__init__(LearnedPositions())
        self.net.layers = nn.ModuleList([KeepingBlock() for _ in range(4)])
        for block in self.net.layers:
            block.keeps, block.kept = keeps, torch.zeros(())
            object.__setattr__(block, "told", self)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(block.kept.mean() for block in self.net.layers)


class Loads(TokenTask):
    """Loads a copy of the model from it.

    Args:
        where: the copy is not frozen ("unfrozen"), it is loaded in the step ("step"), or made after the start ("late").
    """

    def __init__(self, where: str) -> None:
        super().__init__(LearnedPositions())
        self.where = where
        if where != "late":
            self.other = copy.deepcopy(self.net).requires_grad_(where == "unfrozen")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        if self.where == "late":
            self.other = copy.deepcopy(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.where == "step":
            self.other.load_state_dict(self.net.state_dict())
        return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

    def on_train_batch_end(self, *args: Any) -> None:
        if self.where == "unfrozen":
            self.other.load_state_dict(self.net.state_dict())


class Rebuilds(TokenTask):
    """Puts modules of its own making into the network, when that is divided already."""

    def __init__(self, what: str) -> None:
        super().__init__(LearnedPositions())
        self.what = what

    def on_fit_start(self) -> None:
        net: Any = self.net
        if self.what == "layers":
            earlier = net.layers.state_dict()
            net.layers = nn.ModuleList(type(layer)() for layer in net.layers)
            net.layers.load_state_dict(earlier)
        elif self.what == "layer":
            net.layers[1] = type(net.layers[1])()
        elif self.what == "compiled":
            self.net = torch.compile(net, backend="eager")
        elif self.what == "compiles":
            net.compile(backend="eager")
        elif self.what == "linear":
            net.layers[0].mlp[0] = nn.Linear(HIDDEN, 2 * HIDDEN, dtype=torch.float64)
        elif self.what == "side":
            split: Any = net.layers[0].mlp[0]
            split.side = nn.Linear(HIDDEN, 2 * HIDDEN, dtype=torch.float64)
            split.register_forward_hook(lambda module, given, output: output + module.side(given[0]))
        elif self.what == "norm":
            net.final_norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
            nn.init.constant_(net.final_norm.weight, 0.5)


class Renews(TokenTask):
    """Trains what the module did not have, or had under another name, when the fit began.

    Args:
        what: a new norm before the second batch ("added"), a number that no module registers ("listed"), or another
            module's norm in the place of the first one ("renamed").
    """

    def __init__(self, what: str) -> None:
        super().__init__(LearnedPositions())
        self.what, self.scale = what, [nn.Parameter(torch.ones((), dtype=torch.float64))]
        if what == "renamed":
            self.second = nn.LayerNorm(HIDDEN, dtype=torch.float64)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *(self.scale if self.what == "listed" else ())], lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.what == "added":
            self.net.final_norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
            self.trainer.optimizers[0].add_param_group({"params": list(self.net.final_norm.parameters())})
        elif batch_idx == 1 and self.what == "renamed":
            self.net.final_norm = self.second

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * self.scale[0] if self.what == "listed" else loss


def _input_gradient(late: bool) -> InputGradient:
    network = LearnedPositions()
    network.head = nn.Linear(HIDDEN, VOCABULARY)
    return InputGradient(network, late)


def _pretrained(name: str, **options: Any) -> PretrainedTask:
    """A model of Hugging Face's, with other options set on its configuration."""
    task = PretrainedTask(name, labels=True)
    for name, value in options.items():
        setattr(task.model.config, name, value)
    return task


MODULES: dict[str, Callable[[], Any]] = {
    "balanced": lambda: _pretrained("llama", output_router_logits=True),
    "grouped": lambda: _pretrained("mixtral", _experts_implementation="grouped_mm"),
    "twice": lambda: Twice(LearnedPositions()),
    "never": lambda: Never(LearnedPositions()),
    "logs_layers": lambda: LogsLayers(LearnedPositions()),
    "slice_penalty": lambda: SlicePenalty(LearnedPositions()),
    "late_penalty": lambda: LatePenalty(LearnedPositions()),
    "trunkless": lambda: TokenTask(Trunkless()),
    "half": lambda: TokenTask(HalfTrunk()),
    "shared": lambda: TokenTask(SharedLayer()),
    "short": lambda: TokenTask(LearnedPositions(layers=2)),
    "input_gradient": lambda: _input_gradient(late=False),
    "validation_gradient": lambda: GradientInValidation(LearnedPositions()),
    "own_backward": lambda: OwnBackward(LearnedPositions()),
    "late_number": lambda: LateNumber(LearnedPositions()),
    "large_kept": lambda: Keeping("output"),
    "late_kept": lambda: Keeping("later"),
    "now_and_then": lambda: NowAndThen(LearnedPositions()),
    "plain": lambda: TokenTask(LearnedPositions()),
    **{f"loads_{where}": partial(Loads, where) for where in ("unfrozen", "step", "late")},
    **{what: partial(Renews, what) for what in ("added", "listed", "renamed")},
    **{
        f"rebuilt_{what}": partial(Rebuilds, what)
        for what in ("layers", "layer", "compiled", "compiles", "linear", "side")
    },
}


def fit(info: RankInfo, layout: tuple[int, int], arguments: dict[str, Any], module: str, options: str = "") -> None:
    """Fits ``module``; ``options`` names Trainer callbacks that do not fit."""
    callbacks = {"swa": [StochasticWeightAveraging(1e-3)], "": []}[options]
    trainer = trainer_for(info, layout, arguments, max_epochs=1, callbacks=callbacks)
    trainer.fit(MODULES[module]())


def late(info: RankInfo, layout: tuple[int, int] | None, module: str) -> dict[str, Tensor]:
    """Fits a module that does something new in its second step; the weights of this rank."""
    torch.manual_seed(7)
    kinds = {"mask": LateMask, "twice": TwiceByNumber}
    built: Any = _input_gradient(True) if module == "gradient" else kinds[module](LearnedPositions())
    trainer_for(info, layout, {"micro_batch_size": BATCH if module == "gradient" else 2}, max_epochs=1).fit(built)
    return {name: parameter.detach().clone() for name, parameter in built.named_parameters() if not parameter.is_meta}


def rebuilt(info: RankInfo, layout: tuple[int, int] | None) -> dict[str, Tensor]:
    """Fits a module whose last norm a hook builds anew; the weights of this rank."""
    torch.manual_seed(7)
    built = Rebuilds("norm")
    trainer_for(info, layout, {}, max_epochs=1).fit(built)
    return {name: parameter.detach().clone() for name, parameter in built.named_parameters() if not parameter.is_meta}


def strategy_with(info: RankInfo, arguments: dict[str, Any]) -> None:
    """Only builds strategy and Trainer, then fits an ordinary module."""
    from lightning_megatron import MegatronStrategy

    trainer = make_trainer(info, MegatronStrategy(**arguments), max_epochs=1)
    trainer.fit(MODULES["plain"]())


class Shuffled(TokenTask):
    """Each rank shuffles by its own rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(LearnedPositions())
        self.rank = rank

    def train_dataloader(self) -> Any:
        loader: Any = super().train_dataloader()
        order = torch.randperm(len(loader.dataset), generator=torch.Generator().manual_seed(self.rank)).tolist()
        subset: Any = Subset(loader.dataset, order)
        return DataLoader(subset, batch_size=loader.batch_size, collate_fn=loader.collate_fn)


def unequal_batches(info: RankInfo, layout: tuple[int, int]) -> None:
    """Stages of one replica load different batches."""
    trainer_for(info, layout, {}, max_epochs=1).fit(Shuffled(info.rank))


def old_callback(info: RankInfo) -> None:
    """A callback of the ``pytorch_lightning`` namespace, which Lightning would call as if it were its own."""
    import pytorch_lightning

    callback: Any = pytorch_lightning.callbacks.LearningRateMonitor()
    trainer_for(info, (2, 1), {}, max_epochs=1, callbacks=[callback]).fit(MODULES["plain"]())
