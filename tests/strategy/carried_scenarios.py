"""Steps that go on from what they have written from the samples of a batch; what strangers bring."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.strategy.loss_modules import VOCABULARY, Rows

KEYS = 24
CODES = 6


class Carries(Rows):
    """Keeps something under :attr:`kept`."""

    kept: tuple[str, ...] = ()

    def features(self, x: Tensor) -> Tensor:
        """One vector for each sample."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)

    def words(self, features: Tensor, y: Tensor) -> Tensor:
        """How well the features tell the first word."""
        return F.cross_entropy(self.head(features), y[:, 0])


class Codebook(Carries):
    """A VQ-VAE's, that follows its vectors: each code is a quotient of two moving sums."""

    kept = ("codes", "used", "sums")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", 0.1 * torch.randn(CODES, 8, dtype=torch.float64))
        self.register_buffer("used", torch.ones(CODES, dtype=torch.float64))
        self.register_buffer("sums", self.codes.clone())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.features(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        codes = self.codes[nearest]
        with torch.no_grad():
            chosen = F.one_hot(nearest, CODES).to(z)
            self.used.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
            self.codes.copy_(self.sums / self.used[:, None])
        return F.mse_loss(z, codes) + self.words(z + (codes - z).detach(), y)


class Queue(Carries):
    """MoCo's, of the keys of earlier batches."""

    kept = ("queue", "at")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(8, KEYS, dtype=torch.float64), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        queries, keys = self.features(x), F.normalize(self.embed.weight[y[:, 0]].detach(), dim=1)
        others = queries @ self.queue.clone()
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), others], 1)
        start = int(self.at)
        self.queue[:, start : start + len(keys)] = keys.t()
        self.at[0] = (start + len(keys)) % KEYS
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)) + self.words(queries, y)


class Peak(Carries):
    """The largest number so far, of Python's."""

    kept = ("peak",)
    peak = 0.1

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.features(x) / self.peak
        self.peak = max(self.peak, z.detach().abs().max().item())
        return self.words(z, y)


class SetBack(Peak):
    """And layers add to sums, of which the step takes its share and sets them back; and go on from what they were."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.sums, layer.largest = {"size": 1.0}, 1.0  # type: ignore[assignment]
            layer.register_forward_hook(self.add)

    @staticmethod
    def add(layer: Any, inputs: Any, output: Tensor) -> None:
        layer.sums["size"] = layer.sums["size"] + output.square().mean() / layer.largest
        if torch.is_grad_enabled() and layer.training:
            layer.largest = float(output.detach().abs().max())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        for layer in self.layers:
            sums: Any = layer.sums
            loss = loss + 0.1 * sums["size"]
            sums["size"] = 0.0
        return loss


class Frequencies(Carries):
    """Counts words in a dictionary, whose keys come as they come."""

    kept = ("seen",)

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, int] = {}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        rare = torch.tensor([1.0 / (1 + self.seen.get(word, 0)) for word in y[:, 0].tolist()], dtype=torch.float64)
        for word in y[:, 0].tolist():
            self.seen[word] = self.seen.get(word, 0) + 1
        return (rare * F.cross_entropy(self.head(self.features(x)), y[:, 0], reduction="none")).mean()


class BySource(Carries):
    """Counts texts that come with the samples, and numbers of an array."""

    kept = ("sources", "numbers")

    def __init__(self) -> None:
        super().__init__()
        self.sources, self.numbers = Counter[str](), Counter[int]()

    def train_dataloader(self) -> DataLoader[Any]:
        loader = super().train_dataloader()
        return DataLoader(loader.dataset, batch_size=loader.batch_size, collate_fn=_with_sources)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        x, y, sources, numbers = batch
        seen = [(self.sources[source], self.numbers[number]) for source, number in zip(sources, numbers, strict=True)]
        rare = torch.tensor([1.0 / (1 + source + number) for source, number in seen], dtype=torch.float64)
        self.sources.update(sources)
        self.numbers.update(numbers.tolist())
        each = F.cross_entropy(self.head(self.features(x)), y[:, 0], reduction="none")
        loss = (rare * each).mean()
        self.log("loss", loss.detach())
        return loss


def _with_sources(samples: list[tuple[Tensor, Tensor]]) -> Any:
    x, y = (torch.stack(tensors) for tensors in zip(*samples, strict=True))
    return x, y, [f"{word % 3}" for word in y[:, 0].tolist()], y[:, 1].numpy()


class Replay(Carries):
    """Trains on samples of earlier batches, too."""

    kept = ()

    def __init__(self) -> None:
        super().__init__()
        self.memory: deque[tuple[Tensor, Tensor]] = deque(maxlen=12)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.words(self.features(x), y)
        if self.memory:
            earlier = torch.stack([kept for kept, _ in self.memory])
            loss = loss + self.embed(earlier).pow(2).mean()
        self.memory.extend(zip(x, y, strict=True))
        return loss


class Centre(Carries):
    """DINO's: a moving mean of what the head gives, which the next batches are compared with."""

    kept = ("centre",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, VOCABULARY, dtype=torch.float64))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.head(self.features(x))
        loss = F.cross_entropy(z - self.centre, y[:, 0])
        self.centre = 0.9 * self.centre + 0.1 * z.detach().mean(0, keepdim=True)
        return loss


class Counts(Carries):
    """How often each word has come, and which ones; and of right answers, of which the first batches may have none."""

    kept = ("counts", "right", "words_seen")
    right = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.ones(VOCABULARY, dtype=torch.float64))
        self.words_seen = set[int]()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z, first = self.head(self.features(x)), y[:, 0]
        weights = (self.counts.sum() / self.counts)[first] + self.right + len(self.words_seen)
        self.counts += torch.bincount(first, minlength=VOCABULARY)
        self.right += int((z.argmax(1) == first).sum())
        self.words_seen.update(first.tolist())
        return (weights * F.cross_entropy(z, first, reduction="none")).mean()


class Steered(Carries):
    """A penalty's weight, which a hook adjusts before each step by what the one before has kept."""

    kept = ("rate", "last")

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.last = 0.1, torch.zeros((), dtype=torch.float64)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.features(x)
        self.last = features.detach().square().mean()
        return self.words(features, y) + self.rate * features.square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rate = max(0.0, self.rate + 0.5 * (float(self.last) - 0.05))


class SteeredByForward(Steered):
    """By what the forward has kept, which the step calls as `self(x)`."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        self.last = features.detach().square().mean()
        return features

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        features = self(x)
        return self.words(features, y) + self.rate * features.square().mean()


class SteeredByLayer(Steered):
    """By what a hook on a layer has kept, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].register_forward_hook(
            lambda layer, args, output: setattr(self, "last", output.detach().square().mean())
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.features(x)
        return self.words(features, y) + self.rate * features.square().mean()


class SteeredByOutputs(Steered):
    """By what the step has returned."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return {**super().training_step(batch, batch_idx), "last": self.last}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rate = max(0.0, self.rate + 0.5 * (float(outputs["last"]) - 0.05))


class Stopwatch(Rows):
    """Has a clock, whose time is each process's own."""

    began, slow = 0.0, 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        now = time.perf_counter()
        if self.began and now - self.began > 1e6:
            self.slow += 1
        self.began = now
        return super().loss(x, y)


class Remembers(Codebook):
    """Keeps, besides, a vector of each sample, which the next batch's samples find."""

    hidden: Any = None

    def features(self, x: Tensor) -> Tensor:
        z = super().features(x)
        if self.hidden is not None:
            z = z + 0.1 * self.hidden
        self.hidden = z.detach()
        return z


class Several(Carries):
    """Grows harder where many samples of a batch are hard: more than a part of it has."""

    kept = ("level",)
    level = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(self.head(self.features(x)), y[:, 0], reduction="none") * (1 + self.level)
        hard = int((each.detach() > 3).sum())
        if hard >= 3 or (each.numel() > 4 and len(self.kept) > 9):
            self.level += 1
        return each.mean()


class OfClass(Carries):
    """Keeps the largest number so far on its class."""

    peak = 0.0

    def on_fit_start(self) -> None:
        type(self).peak = 0.0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.features(x)
        before = type(self).peak
        type(self).peak = max(before, float(z.detach().abs().max()))
        return self.words(z, y) * (1 + before)


class Rare(Carries):
    """Counts a word behind a condition that none of the first batches meets; as late as a word may come."""

    kept = ("seen",)
    word, late = 5, 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(VOCABULARY, dtype=torch.float64))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.head(self.features(x)) + self.seen, y[:, 0])
        if self.met(y[:, 0]):
            self.seen[self.word] += 1
        return loss

    def met(self, words: Tensor) -> bool:
        """Whether the word is among those of a batch."""
        return self.global_step >= self.late and bool((words == self.word).any())


class RareGathered(Rare):
    """The same, and the replicas ask each other."""

    def met(self, words: Tensor) -> bool:
        return self.global_step >= self.late and bool((self.all_gather(words) == self.word).any())


class FirstRank(Rare):
    """The first rank keeps something for itself."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.head(self.features(x)), y[:, 0])
        if self.global_rank == 0 and self.met(y[:, 0]):
            self.seen[self.word] = loss.item()
        if self.seen[self.word] > 0:
            self.seen[0] += 1
        return loss


class ByHand(Centre):
    """Updates its centre in a step of manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        z = self.head(self.features(batch[0]))
        loss = F.cross_entropy(z - self.centre, batch[1][:, 0])
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)
        self.centre.mul_(0.9).add_(self.mean_of(z.detach()), alpha=0.1)

    def mean_of(self, z: Tensor) -> Tensor:
        """Of a batch's samples."""
        return z.mean(0, keepdim=True)


class ByHandGathered(ByHand):
    """The same, from what the replicas have gathered."""

    def mean_of(self, z: Tensor) -> Tensor:
        return super().mean_of(self.all_gather(z).reshape(-1, VOCABULARY))  # type: ignore[union-attr]


class Plateau(Carries):
    """Lowers its rate itself where a loss is no better than the best so far."""

    kept = ("best", "worse", "rate")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return optimizer

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.plateau.step(loss.item())
        return loss

    @property
    def best(self) -> float:
        """The lowest loss."""
        return float(self.plateau.best)

    @property
    def worse(self) -> float:
        """Steps since then."""
        return float(self.plateau.num_bad_epochs)

    @property
    def rate(self) -> float:
        """The rate of learning."""
        return float(self.plateau.get_last_lr()[0])


_KINDS = (
    Codebook,
    Queue,
    Peak,
    SetBack,
    Frequencies,
    BySource,
    Replay,
    Centre,
    Counts,
    Several,
    Steered,
    SteeredByForward,
    SteeredByLayer,
    Plateau,
    OfClass,
    Stopwatch,
    Remembers,
)
_UNLIKE = (Rare, RareGathered, FirstRank, ByHand, ByHandGathered)
CARRIES: dict[str, type[Rows]] = {kind.__name__: kind for kind in _KINDS}
WRITES_UNLIKE: dict[str, type[Rows]] = {kind.__name__: kind for kind in _UNLIKE}


def carried(info: RankInfo, layout: Layout | None, name: str, arguments: Mapping[str, Any]) -> Any:
    """What every rank keeps behind two epochs, the losses that were logged, and the weights."""
    trainer, module = trainer_for(info, layout, arguments, max_epochs=2), {**CARRIES, **WRITES_UNLIKE}[name]()
    losses: list[float] = []
    module.on_train_batch_end = lambda *_: losses.append(float(trainer.callback_metrics["loss"]))  # type: ignore
    trainer.fit(module)
    kept = {each: getattr(module, each) for each in getattr(module, "kept", ())}
    kept = {each: value.clone() if isinstance(value, Tensor) else value for each, value in kept.items()}
    weights = module.state_dict() if layout is None else trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    whole = {key: value.clone() for key, value in weights.items() if isinstance(value, Tensor)}
    return {"losses": losses, "kept": kept, "weights": {} if info.rank else whole}
