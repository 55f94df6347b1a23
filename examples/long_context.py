"""A needle at the start of a long sequence, found at its end: tokens shared over context ranks, on a CPU in minutes.

The first token of a sequence is one of eight needles, all others are hay, and every position has to name the needle. Of
a sequence of 32,768 tokens the last one finds it by attention alone, through keys that other ranks hold. Lengths double
from 512 on, as an attention that has found its needle among 500 tokens finds it among 1,000: most steps are cheap.

    python examples/long_context.py                                    # 32,768 tokens over 2 ranks
    python examples/long_context.py --tokens 4096 --ranks 4 --method ring

It prints the share of needles that the last token names, in sequences that were not trained on. ``memory.png`` shows
the bytes that a rank keeps for the backward at 1, 2, 4 and 8 context ranks, worked out by a rehearsal of each.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.tools.rehearsal import rehearse

NEEDLES, WORDS, WIDTH, SHORTEST = 8, 64, 32, 512
IN_ALL = (1, 2, 4, 8)
"""Context ranks of the picture."""


class Layer(nn.Module):
    """Causal attention of one head, and an MLP. x: [batch, tokens, WIDTH]"""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unsqueeze(1).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.mlp(self.norm_2(x))


class Finder(L.LightningModule):
    """Names the needle at every position; nothing in it knows of ranks."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, NEEDLES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        logits = self(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, :1].expand_as(tokens).flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.log("found", (self(tokens)[:, -1].argmax(-1) == tokens[:, 0]).float().mean(), batch_size=len(tokens))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


class Haystacks(Dataset[Tensor]):
    """Batches of equally long sequences, each drawn from its number, so that all ranks read the same.

    Args:
        lengths: of the batches' sequences, one after another.
        most: tokens in a batch.
        seed: of the numbers.
    """

    def __init__(self, lengths: list[int], most: int, seed: int) -> None:
        self.lengths, self.most, self.seed = lengths, most, seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        draws = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        length = self.lengths[index]
        tokens = torch.randint(NEEDLES, WORDS, (max(1, self.most // length), length), generator=draws)
        tokens[:, 0] = torch.randint(NEEDLES, (len(tokens),), generator=draws)
        return tokens


def doubling(longest: int, first: int, steps: int) -> Iterator[int]:
    """Lengths of the batches: ``first`` of the shortest, some of each doubled one, and ``steps`` of the longest."""
    length = min(SHORTEST, longest)
    yield from [length] * first
    while (length := 2 * length) < longest:
        yield from [length] * max(2, steps)
    yield from [longest] * steps


def kept_by_a_rank(tokens: int, ranks: int, method: str) -> int:
    """Bytes of activations that one of some context ranks keeps for the backward of one sequence."""
    options = {"method": method} if ranks > 1 else None
    strategy = MegatronStrategy(context_parallel_size=ranks, context_parallel_options=options)
    found = rehearse(strategy, Finder, torch.zeros(1, tokens, dtype=torch.long), world_size=ranks)
    return int(found.bytes_by_kind["activations"])


def draw(kept: dict[int, int], tokens: int, path: Path) -> None:
    """A bar for each number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar([str(ranks) for ranks in kept], [count / 2**20 for count in kept.values()], color="#4c72b0")
    axes.bar_label(bars, [f"{count / 2**20:.1f}" for count in kept.values()])
    axes.margins(y=0.1)
    axes.set(xlabel="context ranks", ylabel="MiB kept by a rank", title=f"Activations of {tokens:,} tokens")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train, count the needles found, and draw what a rank keeps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--method", choices=["gather", "ring"], default="gather")
    parser.add_argument("--first", type=int, default=70, help="steps at the shortest length")
    parser.add_argument("--steps", type=int, default=4, help="steps at the full length")
    parser.add_argument("--folder", type=Path, default=Path("runs") / "long_context")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")

    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":  # before processes are connected
        args.folder.mkdir(parents=True, exist_ok=True)
        kept = {ranks: kept_by_a_rank(args.tokens, ranks, args.method) for ranks in IN_ALL}
        draw(kept, args.tokens, args.folder / "memory.png")
        for ranks, count in kept.items():
            print(f"{ranks} ranks keep {count / 2**20:8.1f} MiB each, {count / kept[1]:.3f} of one process's")
    L.seed_everything(1, verbose=False)
    options = {"method": args.method} if args.ranks > 1 else None
    strategy = MegatronStrategy(context_parallel_size=args.ranks, context_parallel_options=options)
    trainer = L.Trainer(
        accelerator="cpu", devices=args.ranks, strategy=strategy, max_epochs=1, logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, gradient_clip_val=1.0, enable_model_summary=False,
    )  # fmt: skip
    lengths = list(doubling(args.tokens, args.first, args.steps))
    training = Haystacks(lengths, 16 * SHORTEST, seed=1)
    held_out = Haystacks([args.tokens] * 8, args.tokens, seed=2)
    trainer.fit(Finder(), DataLoader(training, batch_size=None), DataLoader(held_out, batch_size=None))
    if trainer.is_global_zero:
        found = float(trainer.callback_metrics["found"])
        print(f"tokens {args.tokens}\nneedles found {found:.3f}")


if __name__ == "__main__":
    main()
