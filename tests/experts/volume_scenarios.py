"""What a training step sends to experts, counted."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.experts.exchange import sending
from tests.experts.expert_scenarios import TOKENS, Data, Words
from tests.experts.strangers import WIDTH, Attending, Stacked, feed_forward
from tests.harness import RankInfo
from tests.parity.train import make_trainer

CHOICES, EXPERTS = 2, 2 * TOKENS
STEP = 5


class Even(nn.Module):
    """Each expert gets one row of each sequence: token n goes to experts n and n + 6 of 12.

    Args:
        listed: whether its experts are a list.
    """

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.router, self.listed = nn.Linear(WIDTH, EXPERTS), listed
        self.experts = nn.ModuleList(feed_forward() for _ in range(EXPERTS)) if listed else Stacked(EXPERTS)

    def forward(self, x: Tensor, place: Tensor | None = None) -> Tensor:
        weights = self.router(x).sigmoid()
        first = self.router.weight.new_tensor(range(x.shape[1])).long() % TOKENS
        index = torch.stack([first, first + TOKENS], -1).expand(*x.shape[:-1], -1)
        weights = weights.gather(-1, index)
        if not self.listed:
            return self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1)).view_as(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = index == number
            out[mine.any(-1)] += expert(x[mine.any(-1)]) * weights[mine, None]
        return out


class Evenly(Words):
    """Two layers of such mixtures behind an attention."""

    def __init__(self, listed: bool) -> None:
        super().__init__([Attending(lambda: Even(listed)) for _ in range(2)])


class Counter(Callback):
    """Counts the numbers that a rank sends to others in its sixth step, in which nothing is tried."""

    def __init__(self) -> None:
        self.sent, self._plain, self._counts = 0, sending.start_all_to_all_rows, False

    def counting(self, x: Tensor, outgoing: list[int], incoming: list[int], group: Any) -> Tensor:
        """In the place of the function that sends rows."""
        if self._counts:
            self.sent += (sum(outgoing) - outgoing[group.rank()]) * x.shape[1]
        return self._plain(x, outgoing, incoming, group)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._counts = trainer.global_step == STEP

    def on_train_batch_end(self, *_: Any) -> None:
        self._counts = False


def sent(info: RankInfo, listed: bool, options: dict[str, Any]) -> int:
    """How many numbers this rank has sent in a training step."""
    torch.manual_seed(3)
    counter, module = Counter(), Evenly(listed)
    limits: dict[str, Any] = {"max_steps": STEP + 1, "max_epochs": 5, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    runner = make_trainer(info, MegatronStrategy(**options), callbacks=[counter], **limits)
    with mock.patch.object(sending, "start_all_to_all_rows", counter.counting):
        runner.fit(module, datamodule=Data())
    return counter.sent
