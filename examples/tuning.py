"""What ``finetune_hf.py``, ``dpo.py`` and ``alphatuning.py`` share: layouts, Trainers, batches, folders of models.

Kept apart from them because none is about it. What makes each of them its own job, the loss, the batches and what is
trained, stands in the script.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_megatron import MegatronStrategy
from lightning_megatron.callbacks import RunReport

TINY = "tiny"
HELD_OUT = 0.2
IGNORED = -100  # the label that Hugging Face's losses leave out


def make_parser(description: str, builds: str) -> tuple[argparse.ArgumentParser, Any]:
    """A command line whose help shows defaults, and its first group, which takes a model and JSON lines.

    Args:
        description: Of the script.
        builds: What the tiny model is.
    """
    shows_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=shows_defaults)
    task = parser.add_argument_group("model and data")
    task.add_argument("--model", default=TINY, help=f"folder or hub name; {TINY!r} builds {builds} from scratch")
    return parser, task


def add_layout(parser: argparse.ArgumentParser, data_parallel: int, tensor: int) -> None:
    """Options for how many processes do what, with these defaults."""
    layout = parser.add_argument_group("layout", "processes = pipeline x data-parallel x tensor")
    layout.add_argument("--pipeline", type=int, default=2, help="stages that the layers are cut into")
    layout.add_argument("--data-parallel", type=int, default=data_parallel, help="replicas")
    layout.add_argument("--tensor", type=int, default=tensor, help="processes that share each layer")


def add_training(parser: argparse.ArgumentParser, micro_batch: int, steps: int, output: str) -> Any:
    """Options of the Trainer, with these defaults; returns the group, for further ones."""
    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch", type=int, default=micro_batch, help="rows that a stage computes at once")
    training.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    training.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    training.add_argument("--validation-batches", type=int, default=10, help="batches per validation")
    training.add_argument("--precision", default="32-true", help="the Trainer's precision")
    training.add_argument("--seed", type=int, default=1, help="for the tiny model's weights and the order of rows")
    training.add_argument("--output", type=Path, default=Path(output), help="for the trained model")
    return training


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with a ``--batch`` that replicas can share; ends the process otherwise."""
    args = parser.parse_args()
    if args.batch % args.data_parallel:
        parser.error(f"--batch {args.batch} must be divisible by --data-parallel {args.data_parallel}")
    return args


def make_loaders(rows: Sequence[Any], collate: Callable[..., Any], args: argparse.Namespace) -> tuple[DataLoader, ...]:
    """Of training rows and of those held out, in batches of one replica."""
    split = len(rows) - int(len(rows) * HELD_OUT)
    options: dict[str, Any] = {"batch_size": args.batch // args.data_parallel, "collate_fn": collate}
    training = DataLoader(cast(Any, rows[:split]), shuffle=True, drop_last=True, **options)
    return training, DataLoader(cast(Any, rows[split:]), **options)


def count_targets(batch: dict[str, Tensor]) -> int:
    """Tokens of a micro-batch that take part in the loss; the first of a row is never predicted."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def make_trainer(args: argparse.Namespace, strategy: dict[str, Any] | None = None, **options: Any) -> L.Trainer:
    """An ordinary Trainer with the strategy, on GPUs where there are enough of them.

    Args:
        args: The command line.
        strategy: Further arguments of the strategy.
        options: Further arguments of the Trainer.
    """
    devices = args.pipeline * args.data_parallel * args.tensor
    return L.Trainer(
        strategy=MegatronStrategy(
            pipeline_parallel_size=args.pipeline,
            data_parallel_size=args.data_parallel,
            tensor_parallel_size=args.tensor,
            micro_batch_size=args.micro_batch,
            **strategy or {},
        ),
        accelerator="gpu" if torch.cuda.device_count() >= devices else "cpu",
        devices=devices,
        precision=args.precision,
        max_steps=args.steps,
        limit_val_batches=args.validation_batches,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,  # RunReport begins with one
        callbacks=[TQDMProgressBar(refresh_rate=5), RunReport(args.output)],
        **options,
    )


def load_model(name: str, build_tiny_model: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """A model by path or name in float32, or the tiny one."""
    return build_tiny_model() if name == TINY else AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


def save(model: PreTrainedModel, weights: dict[str, Tensor], prefix: str, tokenizer: Any, folder: Path) -> Path:
    """Write a model as Hugging Face folders are; runs on the one process that has all ``weights``.

    Args:
        model: Of the same kind; it takes the weights.
        weights: Of the LightningModule.
        prefix: What the names of the model's own begin with.
        tokenizer: Goes into the folder too, unless ``None``.
        folder: Holds the folder ``model`` in the end.
    """
    model.load_state_dict({name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)})
    model.save_pretrained(folder / "model")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "model")
    return folder / "model"
