"""Training steps that call the layers more than once, as people write them."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_megatron import MegatronStrategy
from tests.generation.scenarios import tiny
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.strategy.loss_modules import STEPS, Task, tokens


class Unpadded(Task):
    """No target is ignored, so that a batch's loss is the mean of its samples'."""

    padded_from = 1000


class TwoViews(Unpadded):
    """The loss of one view, and how far another is from it; sample by sample, so that replicas make a batch."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = self(x), self(x.flip(1))
        return F.cross_entropy(one.flatten(0, 1), y.flatten()) + (one - other).pow(2).mean()


class Distilled(Unpadded):
    """Its own view without gradients is the target, and comes first."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self(x.flip(1)).softmax(-1)
        return F.kl_div(self(x).log_softmax(-1).flatten(0, 1), target.flatten(0, 1), reduction="batchmean")


class Recycled(Unpadded):
    """What the layers gave goes through them again."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for _ in range(3):
            for layer in self.layers:
                h = layer(h)
        logits: Tensor = self.head(h)
        return logits


class Tied(TwoViews):
    """Embedding and head are one, on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Gated(TwoViews):
    """Parameters are used by themselves: before, between and behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.rand(6, 8).double())
        self.gates = nn.Parameter(torch.rand(4).double())
        self.scale = nn.Parameter(torch.rand(8).double())

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.positions
        for gate, layer in zip(self.gates, self.layers, strict=True):
            h = layer(h) * gate
        logits: Tensor = self.head(h * self.scale.exp())
        return logits


class Checkpointed(TwoViews):
    """Recomputes by torch's own checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        logits: Tensor = self.head(h)
        return logits


class Contrasted(Unpadded):
    """Pairs against all others of the batch; a temperature is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5).double())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = (F.normalize(self(view).mean(1), dim=-1) for view in (x, y))
        return F.cross_entropy(self.temperature.exp() * one @ other.T, torch.arange(len(one)))


class Dropped(TwoViews):
    """R-drop: two passes with masks of their own."""

    drop = 0.2

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = self(x), self(x)
        apart = F.kl_div(one.log_softmax(-1), other.softmax(-1), reduction="batchmean")
        return F.cross_entropy(one.flatten(0, 1), y.flatten()) + apart


class Sometimes(Unpadded):
    """Every other batch has a second pass."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Any:
        x, y = batch
        loss = self.loss(x, y)
        if batch_idx % 2 == 0:
            loss = loss + self(x.flip(1)).pow(2).mean()
        return {"loss": loss}


class Preferring(Unpadded):
    """DPO: a Llama, and the frozen one that it began as."""

    def __init__(self) -> None:
        super().__init__()
        del self.embed, self.layers, self.head
        self.policy = tiny("llama")
        self.reference = deepcopy(self.policy).requires_grad_(False)

    def margin(self, x: Tensor, y: Tensor) -> Tensor:
        """Log-probability of ``x`` against ``y``, more than the reference's."""
        chosen, rejected = (_log_probability(self.policy, ids) for ids in (x, y))
        with torch.no_grad():
            before = _log_probability(self.reference, x) - _log_probability(self.reference, y)
        return chosen - rejected - before

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return -F.logsigmoid(0.1 * self.margin(x, y)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.policy.parameters(), lr=0.01)


def _log_probability(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).sum((1, 2))


class Continued(Preferring):
    """Goes on from the keys and values of what came before, and learns by them alone what came before."""

    def __init__(self) -> None:
        super().__init__()
        del self.reference

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        past = None
        for part in x.split(2, 1):
            given = self.policy(input_ids=part, past_key_values=past, use_cache=True)
            past = given.past_key_values
        return F.cross_entropy(given.logits.flatten(0, 1), y[:, -2:].flatten())


class Disabled(Preferring):
    """DPO of a Llama with an adapter; without it, it is its own reference."""

    def __init__(self) -> None:
        super().__init__()
        import peft

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
            self.policy = peft.get_peft_model(self.reference.requires_grad_(True), config).double()
        del self.reference

    def margin(self, x: Tensor, y: Tensor) -> Tensor:
        chosen, rejected = (_log_probability(self.policy, ids) for ids in (x, y))
        with torch.no_grad(), self.policy.disable_adapter():
            before = _log_probability(self.policy, x) - _log_probability(self.policy, y)
        return chosen - rejected - before

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Rolling(Preferring):
    """Generates in its training step, and trains on what it gave."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Any:
        rolled = self.policy.generate(batch[0], max_new_tokens=3, do_sample=False)
        return {"loss": -_log_probability(self.policy, rolled).mean()}


class Sampling(Preferring):
    """Trains on what it has sampled, by `generate` and token by token, with masks drawn meanwhile."""

    drop = 0.0

    def __init__(self) -> None:
        super().__init__()
        for layer in self.policy.model.layers:
            layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(self.drop))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Any:
        rolled = self.policy.generate(batch[0], max_new_tokens=3, do_sample=True)
        for _ in range(2):
            with torch.no_grad():
                odds = self.policy(input_ids=rolled).logits[:, -1].softmax(-1)
            rolled = torch.cat([rolled, torch.multinomial(odds, 1)], 1)
        self.log("rolled", rolled.double().mean())
        return {"loss": -_log_probability(self.policy, rolled).mean()}

    def on_train_batch_end(self, *_: Any) -> None:
        """What is drawn behind the step is that of one process too."""
        with torch.no_grad():
            self.policy.lm_head.weight.add_(1e-4 * torch.rand(()))


class DroppedSampling(Sampling):
    """Layers that drop out, also while it samples."""

    drop = 0.2


class Kept(Unpadded):
    """What it keeps on itself between two calls it reads behind the second one."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.view = self(x)
        self.far = float(self.view.detach().norm())
        other = self(x.flip(1))
        self.log("far", self.view.detach().square().mean())
        loss = F.cross_entropy(self.view.flatten(0, 1), y.flatten()) + (self.view - other).pow(2).mean()
        del self.view, self.far
        return loss


class Scaling(nn.Module):
    """Another layer in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * (1.5 if self.training else 0.5)


class Moded(Unpadded):
    """Its target comes from an evaluation, and from frozen weights; both are taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Scaling()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.layers[1].eval()
        self.embed.requires_grad_(False)
        target = self(x.flip(1))
        self.embed.requires_grad_(True)
        again = self(x)
        self.layers[1].train()
        return F.cross_entropy(again.flatten(0, 1), y.flatten()) + (again - 0.3 * target).pow(2).mean()


class Listed(TwoViews):
    """A list on it is filled in the middle of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[Tensor] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.views.append(self(x))
        self.views.append(self(x.flip(1)))
        one, other = self.views
        self.views.clear()
        return F.cross_entropy(one.flatten(0, 1), y.flatten()) + (one - other).pow(2).mean()


class Counting(TwoViews):
    """It counts its calls, and goes by the count."""

    calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().loss(x, y) * (1 + 0.1 * self.calls)


class Padded(Task):
    """A mean over targets, as many in each micro-batch as it has."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((self(x) + self(x.flip(1))).flatten(0, 1), y.flatten())


class Paired(Unpadded):
    """Two loaders' batches of unlike sizes, which no micro-batches are cut from, each go through one method."""

    def train_dataloader(self) -> Any:
        other = DataLoader(TensorDataset(*tokens(6 * STEPS, seed=4)), batch_size=6)
        return CombinedLoader([super().train_dataloader(), other], "min_size")

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        return self.surprise(*batch[0]) + 0.1 * self.surprise(*batch[1])

    def surprise(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())


class Summed(Unpadded):
    """A sum over samples; the values of a metric are logged between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one = self(x)
        self.log("mean", self.mean(one.detach().mean()))
        return 1e-2 * F.cross_entropy((one + self(x.flip(1))).flatten(0, 1), y.flatten(), reduction="sum")


class Renormed(TwoViews):
    """Code runs in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        return h


class Keeps(nn.Module):
    """A layer whose output stays on it, gradient and all."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner(x)
        return self.kept


class Keeping(TwoViews):
    """Its layers' outputs are penalised from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeps(layer) for layer in self.layers)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + sum(layer.kept.pow(2).mean() for layer in self.layers)


class Writes(nn.Module):
    """A layer that writes into its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        x += 1.0
        return self.inner(x)


class Writing(TwoViews):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writes(layer) for layer in self.layers)


class Penalised(TwoViews):
    """Takes a gradient of its own."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        (slope,) = torch.autograd.grad(self.head(h).sum(), h, create_graph=True)
        return super().loss(x, y) + slope.pow(2).mean()


MODULES: dict[str, type[Task]] = {
    "two_views": TwoViews,
    "distilled": Distilled,
    "recycled": Recycled,
    "tied": Tied,
    "gated": Gated,
    "checkpointed": Checkpointed,
    "contrasted": Contrasted,
    "dropped": Dropped,
    "sometimes": Sometimes,
    "kept": Kept,
    "moded": Moded,
    "listed": Listed,
    "counting": Counting,
    "padded": Padded,
    "paired": Paired,
    "summed": Summed,
    "renormed": Renormed,
    "preferring": Preferring,
    "continued": Continued,
    "disabled": Disabled,
    "rolling": Rolling,
    "sampling": Sampling,
    "dropped_sampling": DroppedSampling,
}
ALONE = ("contrasted", "dropped", "rolling", "sampling", "dropped_sampling", "counting", "renormed")
"""What differs between replicas as it should: losses of all samples, random numbers, lengths."""
WHOLE = {
    "contrasted": "as the mean of their losses. So that the step is that of one process, each batch runs whole",
    "dropped": "the step draws random numbers",
    "sampling": "the step draws random numbers",
    "dropped_sampling": "the step draws random numbers",
    "listed": "`views` is written into between two calls of layers",
    "counting": "the step writes `calls`",
    "renormed": "its code runs in backwards, or takes gradients itself",
}
"""Those whose batches run whole, and why; the micro-batches of all others take turns."""
DRAWING = ("dropped", "sampling", "dropped_sampling")

REFUSALS: dict[str, tuple[type[Task], str]] = {
    "keeping": (Keeping, "leaves a tensor with a gradient behind"),
    "writing": (Writing, "writes into its input"),
    "penalised": (Penalised, "takes a gradient through `head` itself"),
}


class _Losses(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs["loss"]))


def trained(info: RankInfo, name: str, options: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a run, and all weights after it; with ``options=None``, of Lightning alone."""
    pl.seed_everything(7, verbose=False)
    module = MODULES[name]() if name in MODULES else REFUSALS[name][0]()
    losses = _Losses()
    strategy = "auto" if options is None else MegatronStrategy(**options)
    trainer = make_trainer(info, strategy, max_epochs=2, callbacks=[losses], limit_val_batches=0)
    trainer.fit(module)
    state = module.state_dict() if options is None else trainer.strategy.full_state_dict()
    return losses.found, {key: value.detach().clone() for key, value in state.items()}
