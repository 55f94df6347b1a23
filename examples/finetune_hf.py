"""Fine-tune a Hugging Face causal language model over pipeline stages and tensor ranks, without touching the model.

What differs from ``pretrain_gpt.py``: the network comes from ``transformers``, and examples are rows of different
length that a collator pads. Two things follow, and both are shown here. The model computes its own loss from
``labels=``, so the training step is one line. And the mean over a batch's tokens is no longer the mean of its
micro-batches' means, because padding gives them different numbers of tokens: ``micro_batch_loss_weight`` says how many
each has, which makes the step exact again.

    python examples/finetune_hf.py                                # a tiny Llama built on the spot, no download
    python examples/finetune_hf.py --model path/to/model --data notes.jsonl --pipeline 4 --tensor 1

It ends with the loss on held-out rows before and after, and a folder that ``AutoModelForCausalLM.from_pretrained``
loads.
"""

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from corpus import (
    END_OF_TEXT,
    STANDARD_LIBRARY,
    find_files,
    load_documents,
    split_documents,
    train_tokenizer,
)
from datasets import Dataset, load_from_disk
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast
from tuning import (
    IGNORED,
    TINY,
    add_layout,
    add_training,
    count_targets,
    load_model,
    make_parser,
    make_trainer,
    save,
)

from lightning_megatron import MegatronStrategy, data

TINY_VOCABULARY = 512


def build_tiny_model() -> PreTrainedModel:
    """A Llama with random weights, small enough for any machine: 4 layers of width 64, grouped-query attention."""
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=TINY_VOCABULARY,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
        )
    )


class FineTuning(L.LightningModule):
    """Any model whose call with ``labels=`` returns a loss; the batch holds its keyword arguments.

    Args:
        model: The network.
        lr: Learning rate of AdamW.
    """

    def __init__(self, model: PreTrainedModel, lr: float) -> None:
        super().__init__()
        self.model = model
        self.lr = lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.model(**batch, use_cache=False).loss
        self.log("validation_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Rows(L.LightningDataModule):
    """Documents as rows of at most ``sequence`` tokens, padded per batch: "input_ids", "attention_mask", "labels".

    With ``--pack`` documents are laid end to end in rows of exactly ``sequence`` tokens, and nothing is padded; their
    positions tell the model where one ends.

    Args:
        args: The command line.
        folder: Where the tokenised rows and the tokenizer are kept between runs.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        super().__init__()
        self.args = args
        self.folder = folder

    def prepare_data(self) -> None:
        data.build_once(self.folder, partial(make_rows, self.args))

    def setup(self, stage: str) -> None:
        rows = load_from_disk(str(self.folder))
        self.rows, self.held_out = rows["train"], rows["validation"]
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    def train_dataloader(self) -> DataLoader:
        batch = self.args.batch * self.args.data_parallel
        return data.deal(self.rows, batch, self.trainer, shuffle=True, seed=self.args.seed, collate_fn=self.collate())

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=self.args.batch, collate_fn=self.collate())

    def collate(self) -> Callable[[list[Any]], dict[str, Tensor]]:
        return data.CollatePacked() if self.args.pack else self.pad

    def pad(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        """Pad on the right to the longest row; padding is neither attended to nor a target. All [batch, seq]."""
        longest = max(len(row["input_ids"]) for row in rows)

        def padded(filler: int, values: list[list[int]]) -> Tensor:
            return torch.tensor([row + [filler] * (longest - len(row)) for row in values])

        tokens = [row["input_ids"] for row in rows]
        return {
            "input_ids": padded(0, tokens),
            "attention_mask": padded(0, [[1] * len(row) for row in tokens]),
            "labels": padded(IGNORED, tokens),
        }


def make_rows(args: argparse.Namespace, scratch: Path, result: Path) -> None:
    """Tokenise ``--examples`` documents; ``result`` gets their Arrow files and the tokenizer."""
    documents = load_documents(args.data, scratch, by_paragraph=True).shuffle(seed=args.seed)
    parts = split_documents(documents.select(range(min(args.examples, len(documents)))), 0.1, args.seed)
    tokenizer = load_tokenizer(args.model, parts["train"])
    files = {name: str(scratch / f"{name}.arrow") for name in parts}
    if args.pack:
        end = tokenizer.eos_token_id
        rows = data.tokenise(parts, tokenizer, end=end, cache_file_names=files)
        rows = data.pack(rows, args.sequence, filler=end, cache_dir=str(scratch))
    else:
        rows = data.tokenise(parts, tokenizer, longest=args.sequence, cache_file_names=files)
        rows = rows.filter(lambda row: len(row["input_ids"]) > 1, desc="Dropping rows without a target")
    rows.save_to_disk(str(result))
    tokenizer.save_pretrained(result)


def load_tokenizer(model: str, documents: Dataset) -> Any:
    """The model's own tokenizer; the tiny model gets one trained on the documents."""
    if model != TINY:
        return AutoTokenizer.from_pretrained(model)
    return PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(documents, TINY_VOCABULARY), eos_token=END_OF_TEXT)


def cache_folder(args: argparse.Namespace) -> Path:
    """A folder per combination of text, model and row options."""
    described = [args.data, args.model, args.examples, args.sequence, args.seed, args.pack]
    return args.cache / f"rows-{data.cache_key(described, find_files(args.data))}"


def parse_arguments() -> argparse.Namespace:
    """The command line; ``--help`` shows it in groups with defaults."""
    parser, task = make_parser(
        "Fine-tune a Hugging Face causal language model with pipeline x data (x tensor) parallelism.",
        builds="a small Llama",
    )
    task.add_argument("--data", default=STANDARD_LIBRARY, metavar="SOURCE", help="folder, file or hub dataset")
    task.add_argument("--examples", type=int, default=4000, help="rows to use, a tenth of them held out")
    task.add_argument("--sequence", type=int, default=64, help="longest row in tokens")
    task.add_argument("--pack", action="store_true", help="lay documents end to end instead of padding them")
    task.add_argument("--cache", type=Path, default=Path("runs/corpus"), help="where prepared text is kept")
    add_layout(parser, data_parallel=1, tensor=2)
    training = add_training(parser, micro_batch=4, steps=200, output="runs/finetune_hf")
    training.add_argument("--batch", type=int, default=16, help="rows per step and replica")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    L.seed_everything(args.seed, verbose=False)
    rows = Rows(args, cache_folder(args))
    module = FineTuning(load_model(args.model, build_tiny_model), args.lr)
    weight = {"micro_batch_loss_weight": count_targets}
    trainer = make_trainer(args, weight, gradient_clip_val=1.0, log_every_n_steps=10)
    before = trainer.validate(module, rows, verbose=False)[0]["validation_loss"]
    trainer.fit(module, rows)
    after = trainer.validate(module, rows, verbose=False)[0]["validation_loss"]
    weights = cast(MegatronStrategy, trainer.strategy).full_state_dict()
    if trainer.is_global_zero:
        print(f"\nLoss on held-out rows  {before:.3f} nats per token before, {after:.3f} after")
        model = load_model(args.model, build_tiny_model)
        print(f"Model                  {save(model, weights, 'model.', rows.tokenizer, args.output)}")


if __name__ == "__main__":
    main()
