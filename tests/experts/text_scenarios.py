"""Mixtures that call themselves again and again in evaluation, on each replica as often as its own samples ask for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from tests.experts.expert_scenarios import VOCABULARY, Pretrained, Strange, Words
from tests.harness import RankInfo
from tests.parity.train import make_trainer


class Loops(Words):
    """Continues its batch by as many tokens as the first one says."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens = batch
        for _ in range(1 + 4 * (int(batch[0, 0]) % 2)):
            tokens = torch.cat((tokens, self.next(tokens)), 1)
        self.seen.append(tokens.tolist())
        self.log("mean", tokens.double().mean())

    @property
    def seen(self) -> list[Any]:
        """What has been continued."""
        return self.__dict__.setdefault("_seen", [])  # type: ignore[no-any-return]

    def next(self, tokens: Tensor) -> Tensor:
        """The likeliest tokens, [batch, 1]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.cumsum(1))[:, -1:].argmax(-1)  # type: ignore[no-any-return]


class LoopsOverList(Strange):
    """The same with a list of experts."""

    validation_step, seen, next = Loops.validation_step, Loops.seen, Loops.next


class Generates(Pretrained):
    """Lets Hugging Face continue its batch, twice, and once more at the end of the epoch."""

    seen = Loops.seen

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for turn in range(2):
            self._continue(batch, 1 + 4 * (int(batch[0, turn]) % 2))
        self.log("mean", torch.tensor(self.seen[-1]).double().mean())

    def on_validation_epoch_end(self) -> None:
        for batch in self.trainer.val_dataloaders:
            self._continue(batch, 1 + 4 * (int(batch[0, 0]) % 2))

    def _continue(self, batch: Tensor, tokens: int) -> None:
        self.seen.append(self.net.generate(batch, max_new_tokens=tokens, do_sample=False).tolist())


class Depends(Words):
    """Leaves a layer out where its samples say so."""

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        for number, layer in enumerate(self.layers):
            if number != 1 + int(batch[0][0, 0]) % 2:
                x = layer(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


class Ends(Words):
    """Ends early where its samples say so."""

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        for layer in list(self.layers)[: 3 + int(batch[0][0, 0]) % 2]:
            x = layer(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def _module(name: str) -> Any:
    torch.manual_seed(3)
    if name == "list":
        return LoopsOverList("masked")
    made: Any = (
        {"loop": Loops, "depends": Depends, "ends": Ends}[name]() if name != "generate" else Generates("Mixtral")
    )
    if name == "generate":
        made.net.generation_config.eos_token_id = None
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(6.0)
        return made
    return {"loop": Loops, "depends": Depends, "ends": Ends}[name]()


def _batches(replica: int) -> Tensor:
    """[batches, samples, tokens]; the first token of a batch is odd on one replica and even on the other."""
    tokens = torch.randint(1, VOCABULARY, (2, 2, 2, 5), generator=torch.Generator().manual_seed(5))
    for number in range(2):
        tokens[number, :, 0, 0] = 1 + torch.tensor([number, 1 - number])
        tokens[number, :, 0, 1] = 1 + number
    return tokens[replica].flatten(0, 1)


def continued(info: RankInfo, name: str, options: dict[str, Any] | None, replica: int = 0) -> Any:
    """What was continued on a replica, batch by batch, and the mean that was logged.

    Args:
        info: of the job.
        name: of the module.
        options: of the strategy; ``None`` for Lightning's own.
        replica: with Lightning's own: whose samples.
    """
    module, strategy = _module(name), "auto" if options is None else MegatronStrategy(**options)
    runner = make_trainer(info, strategy, max_steps=1)
    own = replica if options is None else info.rank % 2
    logged = runner.validate(module, DataLoader(_batches(own), batch_size=2), verbose=False)
    return module.seen, logged[0]["mean"]


def trained(info: RankInfo, name: str, options: dict[str, Any]) -> None:
    """Train a step whose layers depend on the samples of a replica."""
    batches = _batches(info.rank % 2).view(2, 2, 5)[:1].flatten(0, 1)
    loader = DataLoader(torch.utils.data.TensorDataset(batches, batches), batch_size=2)
    make_trainer(info, MegatronStrategy(**options), max_steps=1, limit_val_batches=0, num_sanity_val_steps=0).fit(
        _module(name), loader, loader
    )
