"""Who trains the Llama on one GPU: this strategy, plain Lightning, Hugging Face's Trainer; each bf16, AdamW fused."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.models import CausalLanguageModel, DecoderConfig

WARM_UP, STEPS = 8, 10


@dataclass(frozen=True)
class Workload:
    """What everybody trains on; random tokens, as the time does not depend on them.

    Attributes:
        model: size of ``DecoderConfig.llama``, or ``"tiny"``.
        sequence: tokens per row.
        batch: rows per step.
        recompute: whether every layer's activations are computed again in backward.
    """

    model: str = "1b"
    sequence: int = 4096
    batch: int = 4
    recompute: bool = False

    @classmethod
    def tiny(cls) -> Workload:
        """Something that runs anywhere."""
        return cls("tiny", 32, 2)

    @property
    def config(self) -> DecoderConfig:
        """Dimensions."""
        if self.model == "tiny":
            return DecoderConfig(vocabulary=128, hidden=32, layers=2, heads=4, key_value_heads=2, intermediate=64)
        return DecoderConfig.llama(self.model, sequence=self.sequence)

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.sequence * self.batch

    @property
    def flops(self) -> float:
        """Model FLOPs per step."""
        return self.tokens * self.config.flops_per_token(self.sequence)

    def rows(self) -> list[Tensor]:
        """One batch per step: [batch, sequence + 1]."""
        generator, config = torch.Generator().manual_seed(0), self.config
        size = (self.batch, self.sequence + 1)
        return [torch.randint(0, config.vocabulary, size, generator=generator) for _ in range(WARM_UP + STEPS)]


class Stopwatch(Callback):
    """Seconds per step, the device idle at both ends."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            _wait()
            self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP + STEPS - 1:
            _wait()
            self.seconds = (time.perf_counter() - self.start) / STEPS


class WholeCompiled(CausalLanguageModel):
    """What a user of plain Lightning does: compile the network."""

    def configure_model(self) -> None:
        super().configure_model()
        self.decoder.compile()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _lightning(workload: Workload, strategy: Any, task: type[CausalLanguageModel] = CausalLanguageModel) -> Any:
    watch = Stopwatch()
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-true",
        max_steps=WARM_UP + STEPS,
        logger=False,
        callbacks=[watch],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1_000_000,
    )
    rows: Any = workload.rows()
    trainer.fit(task(workload.config), DataLoader(rows, batch_size=None, pin_memory=torch.cuda.is_available()))
    return watch.seconds, float(trainer.callback_metrics["train_loss"])


def _ours(workload: Workload, **options: Any) -> Any:
    recompute = "full" if workload.recompute else None
    return _lightning(workload, MegatronStrategy(activation_recompute=recompute, **options))


def _hugging_face(workload: Workload, compiled: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
    from transformers import Trainer as TheirTrainer
    from transformers import TrainerCallback as TheirCallback

    ours = workload.config
    config = LlamaConfig(
        vocab_size=ours.vocabulary,
        hidden_size=ours.hidden,
        num_hidden_layers=ours.layers,
        num_attention_heads=ours.heads,
        num_key_value_heads=ours.kv_heads,
        intermediate_size=ours.inner,
        rope_theta=ours.rotary_base,
        tie_word_embeddings=ours.tied,
        max_position_embeddings=workload.sequence,
        use_cache=False,
    )

    class Watch(TheirCallback):
        seconds, start = 0.0, 0.0

        def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM_UP:
                _wait()
                self.start = time.perf_counter()

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM_UP + STEPS:
                _wait()
                self.seconds = (time.perf_counter() - self.start) / STEPS

    rows = [{"input_ids": row[:-1], "labels": row[:-1]} for batch in workload.rows() for row in batch]
    watch = Watch()
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=workload.batch,
            max_steps=WARM_UP + STEPS,
            bf16=torch.cuda.is_available(),
            optim="adamw_torch_fused",
            max_grad_norm=0.0,
            torch_compile=compiled,
            gradient_checkpointing=workload.recompute,
            logging_steps=WARM_UP + STEPS,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        trained = TheirTrainer(model, arguments, train_dataset=rows, callbacks=[watch]).train()
    return watch.seconds, trained.training_loss


CONTESTANTS: dict[str, Callable[[Workload], tuple[float, float]]] = {
    "ours": _ours,
    "ours-compiled": lambda workload: _ours(workload, compile_layers=True),
    "lightning": lambda workload: _lightning(workload, "auto"),
    "lightning-compiled": lambda workload: _lightning(workload, "auto", WholeCompiled),
    "hugging-face": lambda workload: _hugging_face(workload, compiled=False),
    "hugging-face-compiled": lambda workload: _hugging_face(workload, compiled=True),
}


def run(name: str, workload: Workload) -> dict[str, Any]:
    """One contestant, here and now."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    cuda = torch.cuda.is_available()
    seconds, loss = CONTESTANTS[name](workload)
    return {
        "name": name,
        "workload": asdict(workload),
        "seconds": seconds,
        "loss": loss,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
    }


if __name__ == "__main__":
    print("\n" + json.dumps(run(sys.argv[1], Workload(**json.loads(sys.argv[2])))))
