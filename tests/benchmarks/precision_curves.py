"""Training loss of the example's model and corpus in float32 and in both mixed precisions, as a picture.

``python -m tests.benchmarks.precision_curves --svg docs/images/precision_curves.svg`` trains the same small GPT for 200
steps on two replicas: in float32, in float32 with another order of the same blocks (which shows what noise is), and in
mixed precision.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh.lazy import figure, save_figure
from tests.harness import RankInfo, ReusedProcesses, run_job

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"vocabulary": 1024, "sequence": 64, "layers": 3, "hidden": 64, "heads": 4}
BATCH = 16
COLORS = {"32-true": "#4477aa", "32-true, other seed": "#bbbbbb", "bf16-mixed": "#228833", "16-mixed": "#ee6677"}


class Losses(L.Callback):
    """The loss of every step, over all replicas."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"].detach().clone()
        self.values.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))


def curve(info: RankInfo, name: str, steps: int, cache: str) -> tuple[list[float], int]:
    """Losses of one run, and how many updates were skipped."""
    sys.path.insert(0, str(EXAMPLES))
    from corpus import CorpusDataModule, Recipe  # type: ignore[import-not-found]
    from pretrain_gpt import LanguageModel  # type: ignore[import-not-found]

    L.seed_everything(1, verbose=False)
    module = LanguageModel(lr=3e-3, steps=steps, **SIZES)
    seed = 2 if "seed" in name else 1
    recipe = Recipe(source="stdlib", sequence=SIZES["sequence"], vocabulary=SIZES["vocabulary"], seed=1)

    class Blocks(CorpusDataModule):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            super().setup(stage)
            self.train_blocks = self.train_blocks.shuffle(seed=seed)

    data = Blocks(recipe, Path(cache), BATCH, info.world_size, 16)
    losses, strategy = Losses(), MegatronStrategy()
    precision: Precision | None = MixedPrecision("16-mixed", "cpu") if name == "16-mixed" else None
    trainer = L.Trainer(
        accelerator="cpu",
        devices=info.world_size,
        strategy=strategy,
        plugins=[ReusedProcesses(info), *([precision] if precision is not None else [])],
        precision=None if precision is not None else ("32-true" if "32" in name else name),  # type: ignore[arg-type]
        max_steps=steps,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[losses],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=info.directory,
    )
    trainer.fit(module, data)
    return losses.values, strategy.skipped_steps


def picture(curves: dict[str, list[float]]) -> str:
    """An SVG document: the losses above, and how far each run is from the first below."""
    drawn = figure(8.0, 5.0)
    above, below = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    plain = torch.tensor(curves["32-true"])
    for name, values in curves.items():
        above.plot(values, color=COLORS[name], linewidth=1.2, label=name)
        if name != "32-true":
            below.plot(torch.tensor(values) - plain, color=COLORS[name], linewidth=1.0)
    above.set_ylabel("loss in nats")
    above.legend(frameon=False)
    below.set_ylabel("loss minus that\nof 32-true")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return save_figure(drawn, "svg").decode()


def main() -> None:
    """Runs the curves one after the other, prints how far apart they are, and draws them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cache", default="runs/corpus")
    parser.add_argument("--svg")
    arguments = parser.parse_args()
    curves, cache = {}, str(Path(arguments.cache).resolve())
    for name in COLORS:
        outcomes = run_job(curve, 2, name, arguments.steps, cache, deadline=1800.0)
        curves[name], skipped = outcomes[0].value
        apart = torch.tensor(curves[name]) - torch.tensor(curves["32-true"])
        last = torch.tensor(curves[name][-20:]).mean()
        print(
            f"{name:20s} mean of the last 20 losses {last:.3f}; from 32-true: mean {apart.mean():+.4f}, "
            f"root mean square {apart.square().mean().sqrt():.4f}; {skipped} updates skipped",
            flush=True,
        )
    if arguments.svg:
        Path(arguments.svg).write_text(picture(curves), encoding="utf-8")


if __name__ == "__main__":
    from tests.benchmarks import precision_curves  # workers import what they run by name

    precision_curves.main()
