"""Trains mixtures of experts beside a dense model of equal FLOPs per token, and draws their losses.

    python examples/moe.py                     # one process, a few minutes for each
    python examples/moe.py --replicas 2        # experts shared out over two processes
    python examples/moe.py --models dense MoE  # without PR-MoE

In every second layer of ``MoE`` a token goes through two of 16 experts, and in those of ``PR-MoE`` through the
feed-forward block and one of 4, 4, 8 and 8 experts; the dense model's blocks are half as wide again, so that a token
costs all the same. Same text, same order, same seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
from corpus import STANDARD_LIBRARY, CorpusDataModule, Recipe
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.models import CausalLanguageModel, DecoderConfig


class LanguageModel(CausalLanguageModel):
    """The reference decoder on blocks of the corpus."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch["input_ids"])


class Curve(Callback):
    """Keeps the losses of training, which are means over all replicas."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def configurations(args: argparse.Namespace) -> dict[str, DecoderConfig]:
    """The models, by name."""
    common = {"vocabulary": args.vocabulary, "hidden": args.hidden, "layers": 8, "heads": 4, "sequence": args.sequence}
    # The usual deviation, 0.02, is meant for wide models.
    own = {**common, "gated": False, "activation": "gelu", "initial_deviation": args.hidden**-0.5}
    models = {
        "dense": DecoderConfig(**own, intermediate=6 * args.hidden),
        "PR-MoE": DecoderConfig(**own, experts=(4, 4, 8, 8), residual_expert=True),
        "MoE": DecoderConfig(**own, experts=16, top_k=2),
    }
    return {name: models[name] for name in args.models}


def train(name: str, config: DecoderConfig, args: argparse.Namespace) -> tuple[list[float], float]:
    """Losses of the steps, and that of held-out text afterwards."""
    L.seed_everything(args.seed, verbose=False)
    recipe = Recipe(source=args.data, sequence=args.sequence, vocabulary=args.vocabulary, seed=args.seed)
    data = CorpusDataModule(recipe, args.cache, args.batch, args.replicas, args.validation_blocks)
    curve, shares = Curve(), args.replicas if config.experts else 1
    trainer = L.Trainer(
        strategy=MegatronStrategy(data_parallel_size=args.replicas, expert_parallel_size=shares),
        accelerator="cpu",
        devices=args.replicas,
        max_steps=args.steps,
        callbacks=[curve],
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = LanguageModel(config, lr=args.lr, warm_up=max(1, args.steps // 20), balance=args.balance)
    trainer.fit(module, data)
    trainer.limit_val_batches = 1.0
    return curve.losses, trainer.validate(module, data, verbose=False)[0]["val_loss"]


def smoothed(losses: list[float], steps: int) -> list[float]:
    """Means over the latest steps."""
    return [sum(losses[max(0, at - steps + 1) : at + 1]) / min(at + 1, steps) for at in range(len(losses))]


def draw(found: dict[str, list[float]], path: Path) -> None:
    """The losses over the steps, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per token (mean of 20 steps)")
    for name, losses in found.items():
        axes.plot(range(1, len(losses) + 1), smoothed(losses, 20), label=name)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train mixtures beside a dense model of equal FLOPs per token.")
    names = ["dense", "PR-MoE", "MoE"]
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="which to train [all]")
    parser.add_argument("--data", default=STANDARD_LIBRARY, help="folder or file of texts [Python's own source]")
    parser.add_argument("--cache", type=Path, default=Path("runs/corpus"), help="where prepared text is kept")
    parser.add_argument("--output", type=Path, default=Path("runs/moe/losses.svg"), help="the picture")
    sizes = {"--vocabulary": 512, "--sequence": 64, "--hidden": 64, "--batch": 32, "--steps": 600}
    for name, default in (sizes | {"--replicas": 1, "--seed": 1, "--validation-blocks": 256}).items():
        parser.add_argument(name, type=int, default=default, help=f"[{default}]")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate [3e-3]")
    parser.add_argument("--balance", type=float, default=0.01, help="factor of the balancing loss [0.01]")
    return parser.parse_args()


def main() -> None:
    args, curves = parse_arguments(), dict[str, list[float]]()
    lines = [f"{'':10}{'weights':>12}{'FLOPs/token':>14}{'training':>10}{'held out':>10}"]
    for name, config in configurations(args).items():
        curves[name], held_out = train(name, config, args)
        flops, last = config.flops_per_token(args.sequence), smoothed(curves[name], 20)[-1]
        lines.append(f"{name:10}{config.parameters:12,}{flops:14,.0f}{last:10.3f}{held_out:10.3f}")
    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        draw(curves, args.output)
        print("\n".join(["", *lines, f"Picture    {args.output}"]))


if __name__ == "__main__":
    main()
