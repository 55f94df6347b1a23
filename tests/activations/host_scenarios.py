"""A module whose layers keep their activations in host memory, as each layout has them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron import MegatronStrategy
from lightning_megatron.data_parallel.buckets import host_memory
from tests.activations.layers import WIDTH, Block, ByHand, Convolution, Heads, Modules, RotatedWindow
from tests.harness import RankInfo
from tests.parity import compare
from tests.parity.train import make_trainer
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.registry import STRICT, build
from tests.parity.zoo.tasks import TokenTask

KINDS = {
    **{"block": Block, "rotary": RotatedWindow, "by hand": ByHand, "modules": Modules},
    **{"heads": Heads, "convolution": Convolution},
}


class Decoder(nn.Module):
    """A decoder."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(KINDS[kind.removeprefix("checkpointed ")]() for _ in range(4))
        self.checkpointed = kind.startswith("checkpointed ")
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(self.norm(x))


def tolerances(kind: str, arguments: dict[str, Any]) -> tuple[float, float]:
    """What losses and weights may differ by from those of one process."""
    if not kind.startswith("hf_"):
        return STRICT, STRICT
    return compare.tolerances(kind, *(arguments.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "context")))


def one_budget(
    info: RankInfo, kind: str, arguments: dict[str, Any], options: dict[str, Any], megabytes: float
) -> tuple[dict[str, Any], float]:
    """The same on a host with so much free memory; and the share of the tokens that was chosen."""
    with mock.patch.object(host_memory, "free_bytes", lambda folder: int(1e6 * megabytes)):
        found = train(info, kind, arguments, options)
    return found, float(found["told"].split("a share of ")[1].split()[0])


def train(info: RankInfo, kind: str, arguments: dict[str, Any] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Metrics and weights of a run; a plain one without arguments."""
    torch.manual_seed(7)
    module = build(kind) if kind.startswith("hf_") else TokenTask(Decoder(kind))
    strategy: Any = "auto" if arguments is None else MegatronStrategy(**arguments)
    trainer = make_trainer(info, strategy, max_epochs=1, limit_val_batches=2, **options)
    trainer.fit(module)
    found: dict[str, Any] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if arguments is None:
        return found | {"weights": {name: value.detach() for name, value in module.state_dict().items()}}
    told = strategy.activation_report
    assert ("activation_offload" in arguments) == ("bytes in host memory" in (told or ""))
    return found | {"weights": strategy.full_state_dict(), "told": told}
