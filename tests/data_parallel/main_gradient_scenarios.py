"""Gradients of 16-bit linears after a step, beside the products of the factors that the module itself saw."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_megatron.strategy.hooks import whole_hooks
from tests.harness import RankInfo
from tests.parity.train import make_trainer

PLAN = {"layers.*.up.linear": "colwise", "layers.*.down.linear": "rowwise"}


class Tap(nn.Module):
    """A linear that keeps the factors of its weight's gradient, ``(x, gradient of the output)`` per micro-batch."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.factors: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad and type(y) is Tensor:
            y.register_hook(partial(self._keep, x.detach().bfloat16()))  # as autocast does
        return y

    def _keep(self, x: Tensor, grad: Tensor) -> None:
        self.factors.append((x, grad.detach().clone()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), Tap(16, 32), Tap(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tapped(LightningModule):
    """Blocks of taps, one step of SGD at a learning rate of one.

    Args:
        looks: whether a hook looks at gradients before the update.
    """

    def __init__(self, looks: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.seen: dict[str, Tensor] = {}
        if looks:
            self.on_before_optimizer_step = self._look  # type: ignore[method-assign]

    def _look(self, optimizer: Any) -> None:
        self.seen = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}

    def taps(self) -> dict[str, Tap]:
        """Those of this stage."""
        return {
            name: module for name, module in self.named_modules() if isinstance(module, Tap) and [*module.parameters()]
        }

    def on_train_epoch_start(self) -> None:
        for tap in self.taps().values():
            tap.factors = []
        self.before = self._masters()

    def on_train_epoch_end(self) -> None:
        self.after = self._masters()

    def _masters(self) -> dict[str, Tensor]:
        with torch._C.DisableTorchFunctionSubclass():  # of this rank's parts, though a hook sees whole weights
            whole = self.trainer.strategy.run.engine.model_gradients.weights.whole()
        return {name: weight.clone() for name, weight in whole.items()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.float().square().mean()

    def train_dataloader(self) -> Any:
        rows = torch.randn(8, 4, 6, 16, generator=torch.Generator().manual_seed(5))
        if self.trainer.precision == "bf16-true":
            rows = rows.bfloat16()
        return torch.utils.data.DataLoader(list(rows), batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _sum(tap: Tap, name: str, mesh: Any, rounded: bool) -> Tensor:
    """Sum of a tap's products, or its bias's gradients, over micro-batches and replicas; each ``rounded``."""
    total = torch.zeros(getattr(tap.linear, name).shape)
    for factors in tap.factors:
        x, grad = factors
        if grad.shape[1] < x.shape[1]:  # split along the sequence: a row-parallel linear multiplies the whole
            parts = [torch.empty_like(grad) for _ in range(mesh.layout.tensor)]
            dist.all_gather(parts, grad.contiguous(), group=mesh.group("tensor_parallel"))
            grad = torch.cat(parts, 1)
        rows = grad.flatten(0, -2).float()
        found = rows.t() @ x.flatten(0, -2).float() if name == "weight" else rows.sum(0)
        total += found.bfloat16() if rounded else found
    if mesh.layout.data > 1:
        dist.all_reduce(total, group=mesh.group("data_parallel"))
    return total


def products(
    info: RankInfo, sizes: tuple[int, int, int], precision: str, options: dict[str, Any], accumulate: int
) -> dict[str, tuple[float, float]]:
    """By parameter: how far its gradient is from the sum of float32 products, and how far that of rounded ones is."""
    from lightning_megatron import MegatronStrategy

    split: dict[str, Any] = {"tensor_parallel_plan": PLAN} if sizes[2] > 1 else {}
    strategy = MegatronStrategy(*sizes, micro_batch_size=2, whole_batch_loss=False, **split, **options)
    module = Tapped(looks=precision == "bf16-true")
    steps = {"max_steps": 1, "accumulate_grad_batches": accumulate, "limit_val_batches": 0}
    with mock.patch.object(whole_hooks, "refuse_on_tokens"):  # a tap knows that it is given some tokens
        make_trainer(info, strategy, precision=precision, **steps).fit(module)
    distances = {}
    for (path, tap), name in itertools.product(module.taps().items(), ("weight", "bias")):
        full = f"{path}.linear.{name}"
        found = module.seen[full] if module.seen else module.before[full] - module.after[full]
        assert found.dtype == torch.float32 and len(tap.factors) == 2 * accumulate
        wanted, rough = (_sum(tap, name, strategy.mesh, r) for r in (False, True))
        distances[full] = tuple(float((each - wanted).norm() / wanted.norm()) for each in (found, rough))
    return distances  # type: ignore[return-value]
