"""A small GPT trained in a layout, and on processes, that the planner chose."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.options.recipes import recipe_of_run
from lightning_megatron.strategy.planning import precision_of
from lightning_megatron.tools.rehearsal.paper import Ledger
from tests.harness import RankInfo, ReusedProcesses
from tests.harness.links import linked
from tests.tools.rehearsal_scenarios import SEQUENCE, VOCABULARY, Overheard, SmallGPT


class Late(LightningModule):
    """Builds its layers in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = None

    def configure_model(self) -> None:
        if self.inner is None:
            torch.manual_seed(2)
            self.inner = nn.ModuleDict({"embed": nn.Embedding(VOCABULARY, 32), "head": nn.Linear(32, VOCABULARY)})
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(4))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.inner["embed"](batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.inner["head"](x).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


MODULES = {"whole": SmallGPT, "late": Late}


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


def loader(samples: int, batch: int) -> DataLoader[Any]:
    tokens = torch.arange(samples * SEQUENCE).view(samples, SEQUENCE) * 7 % VOCABULARY
    return DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=batch)


def train(info: RankInfo, kind: str, settings: dict[str, Any] | None, batch: int, steps: int = 2) -> dict[str, Any]:
    """Train a few steps; with ``settings`` None in one process without a strategy."""
    ledger, losses = Ledger(), Losses()
    torch.manual_seed(1)
    module = MODULES[kind]()
    strategy: Any = "auto"
    if settings is not None:
        strategy = linked(MegatronStrategy(**settings), through_memory=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=info.world_size,
        strategy=strategy,
        plugins=[ReusedProcesses(info)],
        callbacks=[losses],
        max_steps=steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = loader(batch * steps * info.world_size, batch)
    if settings is None:
        trainer.fit(module, data)
        return {"losses": losses.values}
    with Overheard(ledger):
        trainer.fit(module, data)
    layout, numbers = strategy.mesh.layout, strategy._processes.numbers or list(range(info.world_size))
    return {
        "losses": losses.values,
        "rank": strategy.global_rank,
        "place": strategy.mesh.coordinates,
        "sizes": (layout.pipeline, layout.data, layout.tensor),
        "micro_batch": strategy.options.micro_batch_size,
        "recipe": recipe_of_run(strategy.options, layout, batch, precision_of(module)),
        "plan": strategy.plan.explanation if strategy.plan is not None else "",
        "numbers": numbers,
        "layers": [] if strategy.partition is None else [b - a for a, b in strategy.partition.bounds],
        "sent": list(itertools.chain.from_iterable(_sent(ledger, numbers))),
    }


def _sent(ledger: Ledger, numbers: list[int]) -> Any:
    """(process on the other side, bytes) of every transfer of a step."""
    for entry, count in ledger.counts.items():
        if entry.operation == "send":
            yield [(numbers.index(entry.peer), entry.bytes * count)]
