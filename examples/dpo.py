"""Direct preference optimisation (DPO, arXiv 2305.18290) of a Hugging Face model beside a frozen copy of it.

Two models are in one LightningModule: the policy, which is cut over the pipeline stages and trained, and the reference,
which is what the policy began as and has no gradients. The chosen and the rejected answers go through the policy in one
call, so the step runs by the pipeline's schedule, in micro-batches; the loss is a mean over pairs, so micro-batches and
replicas change no number. The reference is used after the policy, so the last stage holds it.

    python examples/dpo.py                                   # a tiny GPT-2 that learns to count up rather than down
    python examples/dpo.py --model path/to/model --data preferences.jsonl --pipeline 4 --data-parallel 2

A line of the data is ``{"prompt": ..., "chosen": ..., "rejected": ...}``. It ends with the margin on held-out pairs
before and after, the log-probability of the chosen answers against the rejected ones, beyond what the reference gives
them, and a folder that ``AutoModelForCausalLM.from_pretrained`` loads.
"""

import argparse
import json
import random
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, PreTrainedModel
from tuning import TINY, add_layout, add_training, load_model, make_loaders, make_parser, make_trainer, parse, save

from lightning_megatron import MegatronStrategy

Pair = dict[str, list[int]]
"""Token ids of "prompt", "chosen" and "rejected"."""


def build_tiny_model() -> PreTrainedModel:
    """A GPT-2 of bytes with random weights, small enough for any machine: 4 layers of width 32."""
    return AutoModelForCausalLM.from_config(
        GPT2Config(
            vocab_size=256,
            n_positions=64,
            n_embd=32,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class DirectPreference(L.LightningModule):
    """Trains ``policy`` to prefer the chosen answers; a batch holds "tokens" and "answers" ``[pairs, 2, seq]``.

    "answers" is True where a token belongs to an answer, False in prompts and padding; index 0 of dim 1 is the chosen
    answer and 1 the rejected one. Padding is on the right, so causal attention needs no mask.

    Args:
        policy: The network that is trained.
        beta: How strongly the policy is held to the reference.
        lr: Learning rate of AdamW.
    """

    def __init__(self, policy: PreTrainedModel, beta: float = 0.1, lr: float = 1e-3) -> None:
        super().__init__()
        self.policy = policy.eval()  # no dropout, which would be most of the margin; its weights train all the same
        self.reference = deepcopy(policy).requires_grad_(False)
        self.beta, self.lr = beta, lr

    def margin(self, batch: dict[str, Tensor]) -> Tensor:
        """By pair, log-probability of the chosen answer against the rejected, beyond the reference's. ``[pairs]``."""
        rows, wanted = batch["tokens"].flatten(0, 1), batch["answers"].flatten(0, 1)
        policy = log_probability(self.policy(input_ids=rows, use_cache=False).logits, rows, wanted)
        with torch.no_grad():
            reference = log_probability(self.reference(input_ids=rows, use_cache=False).logits, rows, wanted)
        chosen, rejected = (policy - reference).view(-1, 2).unbind(1)
        return chosen - rejected

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        margin = self.margin(batch)
        loss = -F.logsigmoid(self.beta * margin).mean()
        self.log_dict({"loss": loss, "margin": margin.detach().mean()}, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        margin = self.margin(batch)
        found = {"held_out_margin": margin.mean(), "held_out_accuracy": (margin > 0).double().mean()}
        self.log_dict(found, sync_dist=True, batch_size=len(margin))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.parameters(), lr=self.lr, weight_decay=0.0)


def log_probability(logits: Tensor, rows: Tensor, wanted: Tensor) -> Tensor:
    """Sum over the wanted tokens of their log-probabilities.

    Args:
        logits: ``[rows, seq, vocabulary]``.
        rows: Token ids ``[rows, seq]``.
        wanted: True for the tokens that count, ``[rows, seq]``.

    Returns:
        ``[rows]``
    """
    each = -F.cross_entropy(logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none")
    return (each * wanted[:, 1:]).sum(1)


def counting(count: int, seed: int) -> list[dict[str, str]]:
    """A preference set: after "3 4 5", "6 7 8" is chosen and "4 3 2" rejected, for starts of one or two digits."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        start = draw.randrange(3, 90)
        up = [str(start + step) for step in range(6)]
        down = [str(start + 2 - step) for step in range(1, 4)]
        found.append({"prompt": " ".join(up[:3]), "chosen": " " + " ".join(up[3:]), "rejected": " " + " ".join(down)})
    return found


def load_pairs(args: argparse.Namespace) -> tuple[list[Pair], Any]:
    """Tokenised pairs, shuffled, and the tokenizer; ``None`` for the tiny model's bytes.

    Raises:
        ValueError: a line of the data has not the three fields, or a pair is longer than ``--sequence``.
    """
    texts = counting(args.pairs, args.seed)
    if args.data is not None:
        texts = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines() if line.strip()]
        random.Random(args.seed).shuffle(texts)
    tokenizer = None if args.model == TINY else AutoTokenizer.from_pretrained(args.model)
    return [tokenised(number, text, tokenizer, args.sequence) for number, text in enumerate(texts, start=1)], tokenizer


def tokenised(number: int, text: dict[str, str], tokenizer: Any, longest: int) -> Pair:
    """Token ids of a pair; bytes where there is no tokenizer."""
    missing = {"prompt", "chosen", "rejected"} - text.keys()
    if missing:
        raise ValueError(f"pair {number} has no {', '.join(map(repr, sorted(missing)))}; it has {sorted(text)}.")

    def ids(part: str) -> list[int]:
        if tokenizer is None:
            return list(text[part].encode())
        return cast(list[int], tokenizer(text[part], add_special_tokens=part == "prompt")["input_ids"])

    pair = {part: ids(part) for part in ("prompt", "chosen", "rejected")}
    length = len(pair["prompt"]) + max(len(pair["chosen"]), len(pair["rejected"]))
    if length > longest:
        raise ValueError(f"pair {number} has {length} tokens and `--sequence` is {longest}; raise it or drop the pair.")
    return pair


def collate(pairs: list[Pair]) -> dict[str, Tensor]:
    """Pad on the right to the longest row of the batch. Both ``[pairs, 2, seq]``."""
    rows = [(pair["prompt"], pair[answer]) for pair in pairs for answer in ("chosen", "rejected")]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens, answers = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest).bool()
    for index, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[index, :end] = torch.tensor(prompt + answer)
        answers[index, len(prompt) : end] = True
    return {"tokens": tokens.view(len(pairs), 2, -1), "answers": answers.view(len(pairs), 2, -1)}


def parse_arguments() -> argparse.Namespace:
    """The command line; ``--help`` shows it in groups with defaults."""
    parser, task = make_parser(
        "Direct preference optimisation with pipeline x data (x tensor) parallelism.", builds="a small GPT-2"
    )
    task.add_argument("--data", type=Path, metavar="FILE", help="JSON lines; without it, counting up is preferred")
    task.add_argument("--pairs", type=int, default=240, help="pairs to make up without --data")
    task.add_argument("--sequence", type=int, default=64, help="longest prompt and answer together, in tokens")
    add_layout(parser, data_parallel=2, tensor=1)
    training = add_training(parser, micro_batch=2, steps=60, output="runs/dpo")
    training.add_argument("--batch", type=int, default=16, help="pairs per step, over all replicas")
    training.add_argument("--beta", type=float, default=0.1, help="how strongly the reference holds the policy")
    return parse(parser)


def main() -> None:
    args = parse_arguments()
    warnings.filterwarnings("ignore", message=".*does not have many workers|.*in eval mode at the start of training")
    L.seed_everything(args.seed, verbose=False)
    pairs, tokenizer = load_pairs(args)
    training, held_out = make_loaders(pairs, collate, args)
    module = DirectPreference(load_model(args.model, build_tiny_model), args.beta, args.lr)
    trainer = make_trainer(args, max_epochs=-1, log_every_n_steps=1, check_val_every_n_epoch=None)
    before = trainer.validate(module, held_out, verbose=False)[0]
    trainer.fit(module, training)
    after = trainer.validate(module, held_out, verbose=False)[0]
    weights = cast(MegatronStrategy, trainer.strategy).full_state_dict()
    if trainer.is_global_zero:
        print(f"\nMargin before  {before['held_out_margin']:.3f} nats on held-out pairs")
        print(f"Margin after   {after['held_out_margin']:.3f}")
        print(f"Accuracy       {after['held_out_accuracy']:.3f} of the pairs have a margin above 0")
        model = load_model(args.model, build_tiny_model)
        print(f"Model          {save(model, weights, 'policy.', tokenizer, args.output)}")


if __name__ == "__main__":
    main()
