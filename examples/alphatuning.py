"""AlphaTuning (arXiv 2210.03858) of a Hugging Face model: its weights become signs with scales, and only scales train.

Each row of a weight is a sum of ``--bits`` rows of signs, each times a scale (binary-coding quantisation, equation 1).
Signs and all scales but those of the first bit are frozen and shared between tasks; what a task trains, keeps and has
optimizer state for is one number per row of each layer. Stages and replicas need to know nothing of it: frozen weights
have no gradients, so nothing is reduced or updated for them on any rank. Tensor ranks have slices of the signs and the
scales, which are found by what they do: features of a layer's output, or of its input, go with a dim of each.

    python examples/alphatuning.py                            # a tiny Llama with random weights, 2 stages x 2 replicas
    python examples/alphatuning.py --model path/to/model --data texts.jsonl --pipeline 4 --data-parallel 2 --bits 3

A line of the data is ``{"text": ...}``. It ends with the loss on held-out texts before and after, how much was trained,
the scales of the task (``scales.safetensors``), and a folder with the weights that they make, which
``AutoModelForCausalLM.from_pretrained`` loads.
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.nn.functional as F
from dpo import counting
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel
from tuning import (
    IGNORED,
    TINY,
    add_layout,
    add_training,
    count_targets,
    load_model,
    make_loaders,
    make_parser,
    make_trainer,
    parse,
    save,
)

from lightning_megatron import MegatronStrategy


def build_tiny_model() -> PreTrainedModel:
    """A Llama of bytes with random weights, small enough for any machine: 4 layers of width 32."""
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class Coded(nn.Module):
    """A linear layer whose weight is ``sum over bits of scale[row] * signs[row, column]``.

    Args:
        linear: The layer that it stands for; its weight is coded greedily, bit by bit (section 3.1).
        bits: Rows of signs for each row of the weight.
    """

    signs: Tensor

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        rest, signs, scales = linear.weight.detach(), [], []
        for _ in range(bits):
            signs.append(torch.where(rest < 0, -1, 1).to(torch.int8))
            scales.append(rest.abs().mean(1))
            rest = rest - scales[-1][:, None] * signs[-1]
        self.register_buffer("signs", torch.stack(signs))
        self.scale = nn.Parameter(scales[0])
        self.others = nn.Parameter(torch.stack(scales)[1:], requires_grad=False)
        self.bias = linear.bias

    def weight(self) -> Tensor:
        """``[out, in]``."""
        scales = torch.cat((self.scale[None], self.others))
        return (scales[:, :, None] * self.signs).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(), self.bias)


def coded(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """The model with its layers' linear modules coded; only their first scales train."""
    model.requires_grad_(False)
    layers = next(child for child in model.modules() if isinstance(child, nn.ModuleList))
    for layer in layers:
        linears = [(name, child) for name, child in layer.named_modules() if isinstance(child, nn.Linear)]
        for name, child in linears:
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, Coded(child, bits))
    return model


def decoded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A coded model's weights as those of the model itself."""
    found = {}
    for name, value in weights.items():
        start, _, own = name.rpartition(".")
        if own == "signs":
            scales = torch.cat((weights[f"{start}.scale"][None], weights[f"{start}.others"]))
            found[f"{start}.weight"] = (scales[:, :, None] * value).sum(0)
        elif f"{start}.signs" not in weights or own == "bias":
            found[name] = value
    return found


class AlphaTuning(L.LightningModule):
    """Trains the scales of a coded model on texts; a batch holds its keyword arguments.

    Args:
        model: The coded network.
        lr: Learning rate of AdamW.
    """

    def __init__(self, model: PreTrainedModel, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.model(**batch, use_cache=False).loss
        self.log("held_out_loss", loss, sync_dist=True, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, weight_decay=0.0)


def collate(rows: list[list[int]]) -> dict[str, Tensor]:
    """Pad on the right to the longest row; padding is no target. Both ``[rows, seq]``."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [IGNORED] * (longest - len(row)) for row in rows])
    return {"input_ids": tokens, "labels": labels}


def load_rows(args: argparse.Namespace) -> tuple[list[list[int]], Any]:
    """Token ids of each text, at most ``--sequence``, and the tokenizer; ``None`` for the tiny model's bytes."""
    texts = [pair["prompt"] + pair["chosen"] for pair in counting(args.texts, args.seed)]
    if args.data is not None:
        texts = [json.loads(line)["text"] for line in args.data.read_text(encoding="utf-8").splitlines() if line]
    tokenizer = None if args.model == TINY else AutoTokenizer.from_pretrained(args.model)
    ids = [list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"] for text in texts]
    return [row[: args.sequence] for row in ids], tokenizer


def parse_arguments() -> argparse.Namespace:
    """The command line; ``--help`` shows it in groups with defaults."""
    parser, task = make_parser(
        "Training of the scales of a quantised model with tensor x pipeline x data parallelism.", builds="a small Llama"
    )
    task.add_argument("--data", type=Path, metavar="FILE", help="JSON lines; without it, texts count up")
    task.add_argument("--texts", type=int, default=240, help="texts to make up without --data")
    task.add_argument("--sequence", type=int, default=64, help="longest text, in tokens")
    task.add_argument("--bits", type=int, default=3, help="rows of signs for each row of a weight")
    add_layout(parser, data_parallel=2, tensor=1)
    training = add_training(parser, micro_batch=4, steps=60, output="runs/alphatuning")
    training.set_defaults(lr=1e-2)
    training.add_argument("--batch", type=int, default=16, help="texts per step, over all replicas")
    return parse(parser)


def main() -> None:
    args = parse_arguments()
    warnings.filterwarnings("ignore", message=".*does not have many workers|.*in eval mode at the start of training")
    L.seed_everything(args.seed, verbose=False)
    rows, tokenizer = load_rows(args)
    training, held_out = make_loaders(rows, collate, args)
    module = AlphaTuning(coded(load_model(args.model, build_tiny_model), args.bits).train(), args.lr)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    sizes += [(buffer.numel(), False) for buffer in module.buffers()]
    strategy = {"micro_batch_loss_weight": count_targets}
    options = {"max_epochs": -1, "log_every_n_steps": 1, "check_val_every_n_epoch": None}
    trainer = make_trainer(args, strategy, **options)
    before = trainer.validate(module, held_out, verbose=False)[0]
    trainer.fit(module, training)
    after = trainer.validate(module, held_out, verbose=False)[0]
    weights = cast(MegatronStrategy, trainer.strategy).full_state_dict()
    if trainer.is_global_zero:
        scales = {name.removeprefix("model."): value for name, value in weights.items() if name.endswith(".scale")}
        save_file({name: value.contiguous() for name, value in scales.items()}, args.output / "scales.safetensors")
        trained, everything = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
        print(f"\nTrained        {trained:,} of {everything:,} numbers")
        print(f"Loss before    {before['held_out_loss']:.3f} on held-out texts")
        print(f"Loss after     {after['held_out_loss']:.3f}")
        model = load_model(args.model, build_tiny_model)
        print(f"Model          {save(model, decoded(weights), 'model.', tokenizer, args.output)}")


if __name__ == "__main__":
    main()
