"""Train a small GPT on real text with pipeline and data parallelism; nothing in the model is written for either.

This is the main job of the repository and its shortest complete tour. Read it from top to bottom: the network is a
plain ``nn.Module``, the training code a plain ``LightningModule`` (both would train unchanged under a Trainer without
any strategy), and the only line that speaks of parallelism is the ``MegatronStrategy`` in ``make_trainer``.

    python examples/pretrain_gpt.py                                  # Python's standard library, 2 stages x 2 replicas
    python examples/pretrain_gpt.py --data my_texts/ --layers 8 --hidden 256 --steps 2000
    python examples/pretrain_gpt.py --resume last --steps 1000       # go on from the newest checkpoint

It ends by printing the loss on held-out documents beside the unigram entropy of the same tokens (what a model that
ignores context could reach at best), a sample of generated text, where the checkpoint is, and a report of the run.
"""

import argparse
import math
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.nn.functional as F
from corpus import STANDARD_LIBRARY, CorpusDataModule, Recipe, end_of_text
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tokenizers import Tokenizer
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.callbacks import RunReport

PROMPT = "    def __init__(self"  # no space at the end: to the tokenizer a space begins the next word

say = rank_zero_only(print)


class Attention(nn.Module):
    """Causal self-attention. x: [batch, seq, hidden] -> [batch, seq, hidden]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def split_heads(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, heads, seq, head_size]"""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.split_heads(project(x)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One pre-norm transformer layer. x: [batch, seq, hidden] -> [batch, seq, hidden]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Decoder-only transformer as in GPT-2, embeddings tied. tokens [batch, seq] -> logits [batch, seq, vocabulary]."""

    def __init__(self, vocabulary: int, sequence: int, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.token_embedding = nn.Embedding(vocabulary, hidden)
        self.position_embedding = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.apply(self.initialise)
        self.head.weight = self.token_embedding.weight

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.05)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageModel(L.LightningModule):
    """Next-token prediction with AdamW, linear warm-up and cosine decay.

    Args:
        lr: Peak learning rate.
        steps: Optimizer steps until the learning rate is down to a tenth of its peak.
        model: Arguments of ``GPT``.
    """

    def __init__(self, lr: float, steps: int, **model: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(**model)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"]
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("validation_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def learning_rate_factor(self, step: int) -> float:
        steps = self.hparams["steps"]
        warm_up = max(1, steps // 20)
        progress = min(1.0, step / steps)
        return min((step + 1) / warm_up, 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, with the speed written out and without the logger's version number."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        if "tokens/s" in metrics:
            metrics["tokens/s"] = f"{metrics['tokens/s']:,.0f}"
        return metrics


class TokensPerSecond(Callback):
    """Shows the training speed over the last steps in the progress bar; validation and checkpoints don't count."""

    def __init__(self, tokens_per_step: int, window: int = 20) -> None:
        self.tokens_per_step = tokens_per_step
        self.ends: deque[float] = deque(maxlen=window)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) > 1:
            seconds = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
            pl_module.log("tokens/s", self.tokens_per_step / seconds, prog_bar=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ends.clear()


class SaveAtEnd(Callback):
    """Saves the weights of the very last step, whichever step that is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path, weights_only=False)  # with the optimizer, to be resumed


@torch.no_grad()
def generate(model: GPT, prompt: list[int], length: int, temperature: float = 0.8, top: int = 40) -> list[int]:
    """Continue ``prompt`` by ``length`` tokens, each drawn from the ``top`` likeliest ones.

    Returns:
        The token numbers, prompt included.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = list(prompt)
    for _ in range(length):
        logits = model(torch.tensor([tokens[-model.sequence :]]))[0, -1] / temperature
        values, choices = logits.topk(min(top, len(logits)))
        drawn = torch.multinomial(values.softmax(-1), 1, generator=generator)
        tokens.append(int(choices[drawn]))
    return tokens


def sample(weights: dict[str, Tensor], module: LanguageModel, tokenizer: Tokenizer, prompt: str, length: int) -> str:
    """Text written by the trained model, rebuilt whole on this one process from its full ``weights``."""
    module = LanguageModel(**module.hparams)
    module.load_state_dict(weights)
    start = tokenizer.encode(prompt).ids or [end_of_text(tokenizer)]
    return tokenizer.decode(generate(module.model.eval(), start, length), skip_special_tokens=True)


def option(group: Any, name: str, default: Any, text: str, kind: type = int) -> None:
    """Add an option whose help ends with its default in brackets."""
    placeholder = {int: "N", float: "X", Path: "FOLDER", str: "TEXT"}[kind]
    shown = "" if default is None else f" [{default}]"
    group.add_argument(name, type=kind, default=default, metavar=placeholder, help=text + shown)


def parse_arguments() -> argparse.Namespace:
    """The command line; ``--help`` shows it in groups with defaults."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT on text, with pipeline x data (x tensor) parallelism.",
        usage="%(prog)s [--data SOURCE] [--steps N] [--pipeline N] [--data-parallel N] [other options]",
    )
    text = parser.add_argument_group("text")
    sources = "folder, file, Hugging Face dataset (name or name:configuration), or stdlib, which is Python's own source"
    option(text, "--data", STANDARD_LIBRARY, sources, str)
    option(text, "--vocabulary", 2048, "entries of the byte-level BPE tokenizer")
    option(text, "--sequence", 128, "tokens that the model reads at once")
    option(text, "--cache", Path("runs/corpus"), "where prepared text is kept", Path)
    layout = parser.add_argument_group("layout", "processes = pipeline x data-parallel x tensor")
    option(layout, "--pipeline", None, "stages that the layers are cut into [2; on one GPU 1]")
    option(layout, "--data-parallel", None, "replicas [2; on GPUs as many as there is room for]")
    option(layout, "--tensor", 1, "processes that share each layer")
    option(layout, "--nodes", 1, "machines, when started by torchrun or SLURM")
    option(layout, "--schedule", "1f1b", "pipeline schedule", str)
    layout.add_argument("--accelerator", default="auto", choices=["auto", "cpu", "gpu"], help="what computes [auto]")
    model = parser.add_argument_group("model")
    option(model, "--layers", 4, "transformer layers")
    option(model, "--hidden", 128, "width of a layer")
    option(model, "--heads", 4, "attention heads")
    training = parser.add_argument_group("training")
    option(training, "--batch", 16, "sequences per step, over all replicas")
    option(training, "--micro-batch", 4, "sequences that a stage computes at once")
    option(training, "--steps", 500, "optimizer steps")
    option(training, "--lr", 3e-3, "peak learning rate", float)
    option(training, "--precision", "32-true", "the Trainer's precision", str)
    option(training, "--seed", 1, "for weights, order of blocks and held-out documents")
    results = parser.add_argument_group("results")
    option(results, "--output", Path("runs/pretrain_gpt"), "for logs and checkpoints", Path)
    option(results, "--resume", None, "checkpoint to go on from; 'last': the newest, if any", str)
    option(results, "--validations", 5, "validation runs during training")
    option(results, "--validation-blocks", 256, "sequences per validation run")
    option(results, "--prompt", None, f"what the sample starts with [for Python's own source {PROMPT.strip()!r}]", str)
    option(results, "--sample-length", 120, "tokens that the sample goes on for")
    return parser.parse_args()


def choose_layout(args: argparse.Namespace) -> tuple[str, int, int]:
    """Accelerator, pipeline stages and data-parallel replicas: what was asked for, else what fits this machine."""
    gpus = 0 if args.accelerator == "cpu" else torch.cuda.device_count() * args.nodes
    if not gpus:
        return "cpu", args.pipeline or 2, args.data_parallel or 2
    pipeline = args.pipeline or (2 if gpus >= 2 * args.tensor else 1)
    return "gpu", pipeline, args.data_parallel or max(1, gpus // (pipeline * args.tensor))


def make_data(args: argparse.Namespace, replicas: int) -> CorpusDataModule:
    """The text, cut so that all replicas together read ``--batch`` sequences per step."""
    if args.batch % replicas:
        raise ValueError(
            f"`--batch {args.batch}` cannot be shared by {replicas} replicas; use a multiple of {replicas}."
        )
    recipe = Recipe(source=args.data, sequence=args.sequence, vocabulary=args.vocabulary, seed=args.seed)
    return CorpusDataModule(recipe, args.cache, args.batch, replicas, args.validation_blocks)


def make_module(args: argparse.Namespace) -> LanguageModel:
    """The LightningModule with the sizes that the command line asks for."""
    if args.hidden % args.heads:
        raise ValueError(f"`--hidden {args.hidden}` is not a multiple of `--heads {args.heads}`; change one of them.")
    sizes = {name: getattr(args, name) for name in ("vocabulary", "sequence", "layers", "hidden", "heads")}
    return LanguageModel(lr=args.lr, steps=args.steps, **sizes)


def make_trainer(args: argparse.Namespace, accelerator: str, pipeline: int, replicas: int) -> L.Trainer:
    """An ordinary Trainer; the strategy is all that this example adds to one."""
    checkpoints = args.output / "checkpoints"
    return L.Trainer(
        strategy=MegatronStrategy(
            pipeline_parallel_size=pipeline,
            data_parallel_size=replicas,
            tensor_parallel_size=args.tensor,
            micro_batch_size=args.micro_batch,
            pipeline_schedule=args.schedule,
            record_timeline=pipeline > 1,
        ),
        accelerator=accelerator,
        devices=pipeline * replicas * args.tensor // args.nodes,
        num_nodes=args.nodes,
        precision=args.precision,
        max_steps=args.steps,
        val_check_interval=max(1, args.steps // args.validations),
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=CSVLogger(args.output),
        enable_model_summary=False,  # RunReport begins with one
        callbacks=[
            ProgressBar(refresh_rate=5),
            TokensPerSecond(args.batch * args.sequence),
            LearningRateMonitor(),
            RunReport(args.output),
            ModelCheckpoint(checkpoints, monitor="validation_loss", save_last=True),
            SaveAtEnd(checkpoints / "last.ckpt"),
        ],
    )


def report(trainer: L.Trainer, module: LanguageModel, data: CorpusDataModule, args: argparse.Namespace) -> None:
    """Print what the training came to. Runs on every rank: the weights have to be collected from all of them."""
    loss = trainer.validate(module, data, verbose=False)[0]["validation_loss"]
    weights = cast(MegatronStrategy, trainer.strategy).full_state_dict()
    if not trainer.is_global_zero:
        return
    prompt = (PROMPT if args.data == STANDARD_LIBRARY else "") if args.prompt is None else args.prompt
    text = sample(weights, module, data.tokenizer, prompt, args.sample_length)
    print(f"\nSample of the trained model:\n{'-' * 60}\n{text}\n{'-' * 60}")
    print(f"Validation loss  {loss:.3f} nats per token")
    print(f"Unigram entropy  {data.held_out_entropy():.3f} nats, of the same tokens: what counting tokens reaches")
    print(f"Checkpoint       {args.output / 'checkpoints' / 'last.ckpt'}")
    print(f"Report           {args.output / 'report.html'}")


def silence_advice() -> None:
    """Turn off warnings of Lightning's that do not apply here, each for the reason beside it."""
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # blocks are mapped memory, not computed
    warnings.filterwarnings(
        "ignore", message="Using `DistributedSampler` with"
    )  # the blocks are a multiple of the replicas


def main() -> None:
    args = parse_arguments()
    silence_advice()
    L.seed_everything(args.seed, verbose=False)
    accelerator, pipeline, replicas = choose_layout(args)
    try:
        data, module = make_data(args, replicas), make_module(args)
    except ValueError as problem:
        raise SystemExit(f"error: {problem}") from None
    trainer = make_trainer(args, accelerator, pipeline, replicas)
    trainer.fit(module, data, ckpt_path=args.resume)
    report(trainer, module, data, args)


if __name__ == "__main__":
    main()
