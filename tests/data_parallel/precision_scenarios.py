"""Runs in 16 bits, runs that overflow, and the bytes that a rank holds."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_megatron.models import CausalLanguageModel, DecoderConfig
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack
from tests.data_parallel.sharing_scenarios import SharedTask, Watch
from tests.harness import RankInfo, ReusedProcesses
from tests.harness.memory import live_storages
from tests.models.scenarios import Losses
from tests.parity.train import make_trainer

Sizes = tuple[int, int, int]


def _trainer(
    info: RankInfo, sizes: Sizes | None, precision: str, options: dict[str, Any], scale: float = 2.0**16, **more: Any
) -> Trainer:
    if sizes is None:
        return make_trainer(info, "auto", precision=precision, limit_val_batches=0, **more)
    from lightning_megatron import MegatronStrategy

    strategy = MegatronStrategy(*sizes, **options)
    if precision != "16-mixed":
        return make_trainer(info, strategy, precision=precision, limit_val_batches=0, **more)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    plugins = [
        ReusedProcesses(info),
        MixedPrecision("16-mixed", "cpu", scaler),
    ]  # the flag is for GPUs in Lightning 2.6
    return make_trainer(info, strategy, precision=None, plugins=plugins, limit_val_batches=0, **more)


def losses(info: RankInfo, sizes: Sizes | None, precision: str, options: dict[str, Any]) -> dict[str, Any]:
    """Losses of sixteen steps, and the dtypes that layers and optimizer hold."""
    watch = Watch()
    trainer = _trainer(info, sizes, precision, options, 2.0**10, max_epochs=4, callbacks=[watch])
    module = SharedTask().float()
    trainer.fit(module)
    state = [value for entries in trainer.optimizers[0].state.values() for value in entries.values()]
    return {
        "losses": watch.losses,
        "layers": {str(p.dtype) for p in module.parameters()},
        "norms": {str(p.dtype) for m in module.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()},
        "state": {str(value.dtype) for value in state},
        "scale": getattr(getattr(trainer.strategy, "loss_scale", None), "scale", None),
    }


class Burst(LightningModule):
    """Four linears; in one batch the loss of one sample is not finite.

    Args:
        batch: index of the batch.
        rank: data-parallel replica it happens on.
        value: what one weight's gradient is multiplied by.
    """

    def __init__(self, batch: int, rank: int, value: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.batch, self.rank, self.value = batch, rank, value

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        own = self.trainer.strategy.mesh.coordinates.data
        burst = batch_idx == self.batch and own == self.rank and bool((batch[:, 0].numpy() > 100).any())
        return x.square().mean() * (self.value if burst else 1.0)

    def train_dataloader(self) -> Any:
        rows = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(5))
        rows[:, 5, 0] = 101.0
        return torch.utils.data.DataLoader(list(rows), batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def burst(
    info: RankInfo,
    sizes: Sizes,
    precision: str,
    options: dict[str, Any],
    value: float,
    path: str | None = None,
    resumed: bool = False,
) -> dict[str, Any]:
    """Trains over a batch that overflows on replica 1; reports the weights around it. Saves at ``path``, or resumes."""
    trainer = _trainer(info, sizes, precision, {"micro_batch_size": 2, **options}, max_epochs=2 if resumed else 1)
    module = Burst(2, sizes[1] - 1, value)
    weights: list[dict[str, Tensor]] = []

    def note(*_: Any) -> None:
        weights.append({name: p.detach().clone() for name, p in module.named_parameters()})

    module.on_train_batch_start = note  # type: ignore[method-assign, assignment]
    module.on_train_epoch_end = note  # type: ignore[method-assign]
    trainer.fit(module, ckpt_path=path if resumed else None)
    if path is not None and not resumed:
        trainer.save_checkpoint(path)
    scale = trainer.strategy.loss_scale
    return {
        "moved": [
            any(not torch.equal(before[n], after[n]) for n in before) for before, after in itertools.pairwise(weights)
        ],
        "finite": all(bool(p.isfinite().all()) for p in module.parameters()),
        "skipped": trainer.strategy.skipped_steps,
        "scale": None if scale is None else scale.state_dict(),
    }


class Bulk(LightningModule):
    """Linears only, so that sizes are easy to count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(8)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.float().square().mean()

    def train_dataloader(self) -> Any:
        rows = torch.randn(2, 4, 128, generator=torch.Generator().manual_seed(5))
        return torch.utils.data.DataLoader(list(rows), batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def bytes_held(
    info: RankInfo, sizes: Sizes, precision: str, options: dict[str, Any], accumulate: int
) -> dict[str, Any]:
    """Bytes of all live tensors that belong to training, by storage, after a step; activations are gone by then."""
    earlier = live_storages()  # of tests that this process has run; kept, so that no address is given out again
    trainer = _trainer(info, sizes, precision, options, max_epochs=2, accumulate_grad_batches=accumulate)
    module = Bulk()
    found: dict[str, int] = {}

    def count(*_: Any) -> None:
        data = sum(batch.nbytes for batch in module.trainer.train_dataloader.dataset)
        found["bytes"] = sum(s.nbytes() for place, s in live_storages().items() if place not in earlier) - data

    module.on_train_batch_start = lambda *_: None  # type: ignore[method-assign, assignment]
    module.on_train_epoch_end = count  # type: ignore[method-assign]
    trainer.fit(module)
    return {**found, "parameters": sum(p.numel() for p in module.parameters())}


def eight_bits(info: RankInfo, precision: str, sizes: dict[str, Any], allowed: bool = True) -> dict[str, Any]:
    """Losses of a small decoder, and how many linears are set to 8 bits; ``allowed`` leaves out the question what the
    device can do, as torch emulates such products on CPUs.
    """
    from lightning_megatron import MegatronMixedPrecision, MegatronStrategy
    from lightning_megatron.pipeline.forwards import low_precision_linears as float8

    losses = Losses()
    torch.manual_seed(5)
    rows = torch.randint(0, 53, (4, 17), generator=torch.Generator().manual_seed(2)).repeat(16, 1, 1)
    batches: Any = torch.utils.data.DataLoader(list(rows), batch_size=None)  # type: ignore[arg-type]
    strategy = MegatronStrategy(**sizes, precision_plugin=MegatronMixedPrecision(precision, "cpu"))
    trainer = make_trainer(info, strategy, precision=None, max_epochs=1, callbacks=[losses], limit_val_batches=0)
    config = DecoderConfig(vocabulary=53, hidden=32, layers=2, heads=2, intermediate=64, norm="layer")
    module = CausalLanguageModel(config, lr=1e-2)
    with mock.patch.object(float8, "_lack", lambda device: None) if allowed else nullcontext():
        trainer.fit(module, batches, batches)
    eight = sum(
        "products" in child.__dict__ or ForwardStack.of(child).get(ForwardSlot.PRODUCTS) is not None
        for child in module.modules()
    )
    return {"losses": losses.seen, "eight": eight}
