"""Experts chosen by a text's source (DEMix layers, Gururangan et al., arXiv 2108.05036), mixed where it is unknown.

    python examples/demix.py                   # one process, a minute or two
    python examples/demix.py --replicas 2      # replica i reads source i and holds its experts: no token leaves it

The two sources are Python's own standard library, taken apart: its documentation, and its code without that. Training
knows which one a text is from, and sends all of its tokens to that source's experts. Held-out texts come from both,
and the model is not told from which. Bayes' rule says so from what has been read:

    p(source | x_<t) ∝ p(source) · Π_{s<t} p(x_s | x_<s, source)
    p(x_t) = Σ_source p(source | x_<t) · p(x_t | x_<t, source)
"""

from __future__ import annotations

import argparse
import ast
import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from corpus import STANDARD_LIBRARY, find_files
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers import Experts

SOURCES, BYTES = ("prose", "code"), 256
HOW = ("prose alone", "code alone", "halves", "posterior", "told")


class Layer(nn.Module):
    """Attention that all sources share, and a feed-forward block of each source."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.experts = Experts(hidden, 4 * hidden, len(SOURCES), gated=False)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        """``x: [batch, length, hidden]``, ``source: [batch]`` → the shape of ``x``."""
        batch, length, hidden = x.shape
        query, key, value = (
            each.view(batch, length, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        met = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(met.transpose(1, 2).reshape(batch, length, hidden))
        rows, index = self.norms[1](x).flatten(0, 1), source.repeat_interleave(length)[:, None]
        return x + self.experts(rows, index, torch.ones_like(index, dtype=x.dtype)).view_as(x)


class DemixModel(L.LightningModule):
    """A language model of bytes whose feed-forward blocks belong to sources."""

    def __init__(self, hidden: int, layers: int, length: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.embed, self.place = nn.Embedding(BYTES, hidden), nn.Embedding(length, hidden)
        self.layers = nn.ModuleList(Layer(hidden, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, BYTES)

    def forward(self, text: Tensor, source: Tensor) -> Tensor:
        """Log-probabilities of each byte after the first: ``[batch, length + 1]`` → ``[batch, length]``."""
        x = self.embed(text[:, :-1]) + self.place.weight
        for layer in self.layers:
            x = layer(x, source)
        scores = self.head(self.norm(x)).log_softmax(-1)
        return scores.gather(-1, text[:, 1:, None]).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = -self(*batch).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        text, source = batch
        each = torch.stack([self(text, torch.full_like(source, number)) for number in range(len(SOURCES))])
        told = each.gather(0, source[None, :, None].expand(1, -1, each.shape[-1]))[0]
        mixed = (posterior(each) + each).logsumexp(0)
        halves = each.logsumexp(0) - math.log(len(SOURCES))
        for how, found in zip(HOW, (*each, halves, mixed, told), strict=True):
            self.log(how, -found.mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def posterior(scores: Tensor) -> Tensor:
    """``log p(source | x_<t)`` of ``log p(x_t | x_<t, source)``, both ``[sources, batch, length]``; equal at first."""
    before = scores.cumsum(-1) - scores
    return before - before.logsumexp(0, keepdim=True)


def take_apart(text: str) -> Iterator[tuple[int, str]]:
    """The documentation and the rest of a Python file, with the numbers of their sources."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (found := ast.get_docstring(node)) is not None:
            yield 0, found + "\n\n"
            node.body = node.body[1:] or [ast.Pass()]
    yield 1, ast.unparse(tree) + "\n\n"


class Texts(L.LightningDataModule):
    """Blocks of bytes of both sources. A replica reads those of its own source; one process reads both."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args

    def setup(self, stage: str) -> None:
        texts: tuple[list[str], list[str]] = ([], [])
        for path in find_files(self.args.data):
            for source, text in take_apart(path.read_text(encoding="utf-8", errors="ignore")):
                texts[source].append(text)
        self.train, self.held_out = [], []
        for each in texts:
            data = torch.frombuffer(bytearray("".join(each).encode()), dtype=torch.uint8).long()
            blocks = data[: len(data) // (self.args.length + 1) * (self.args.length + 1)].view(-1, self.args.length + 1)
            blocks = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(self.args.seed))]
            wanted = self.args.held_out + self.args.steps * self.args.batch
            if len(blocks) < self.args.held_out + self.args.batch:
                raise ValueError(f"`--data {self.args.data}` gives {len(blocks)} blocks of a source, too few.")
            blocks = blocks.repeat(-(-wanted // len(blocks)), 1) if len(blocks) < wanted else blocks
            self.held_out.append(blocks[: self.args.held_out])
            self.train.append(blocks[self.args.held_out : wanted])

    def _loader(self, blocks: list[Tensor]) -> DataLoader[Any]:
        place = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[union-attr, attr-defined]
        mine = range(len(SOURCES)) if place["num_replicas"] == 1 else [place["rank"]]
        text = torch.stack([blocks[number] for number in mine], 1).flatten(0, 1)
        source = torch.tensor(list(mine)).repeat(len(text) // len(mine))
        return DataLoader(TensorDataset(text, source), batch_size=self.args.batch * len(mine))

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.held_out)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train experts of two sources and mix them where it is unknown.")
    parser.add_argument("--data", default=STANDARD_LIBRARY, help="folder of Python files [Python's own source]")
    for name, default in (("hidden", 64), ("layers", 2), ("length", 64), ("batch", 16), ("steps", 300)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"[{default}]; a batch is of each source")
    for name, default in (("replicas", 1), ("seed", 1), ("held-out", 128)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"[{default}]")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate [3e-3]")
    parser.add_argument("--precision", default="32-true", help="of weights and products [32-true]")
    args = parser.parse_args()
    if args.replicas not in (1, len(SOURCES)):
        parser.error(f"--replicas {args.replicas}: there are {len(SOURCES)} sources; use 1 or {len(SOURCES)}")
    return args


def main() -> None:
    args = parse_arguments()
    L.seed_everything(args.seed, verbose=False)
    trainer = L.Trainer(
        strategy=MegatronStrategy(expert_parallel_size=args.replicas),
        accelerator="cpu",
        devices=args.replicas,
        precision=args.precision,
        max_steps=args.steps,
        use_distributed_sampler=False,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    module, data = DemixModel(args.hidden, args.layers, args.length, args.lr), Texts(args)
    trainer.fit(module, data)
    last = float(trainer.callback_metrics["train_loss"])
    trainer.limit_val_batches = 1.0
    found = trainer.validate(module, data, verbose=False)[0]
    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        print(f"\ntrain loss {last:.9f}\nheld-out texts of both sources, perplexity per byte")
        print("\n".join(f"{how:12}{math.exp(found[how]):8.3f}" for how in HOW))


if __name__ == "__main__":
    main()
