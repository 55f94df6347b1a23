"""Rows of the tensor-parallel parity table: which module, split how, trained how, against one process."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo, run_trainers
from tests.harness.links import linked
from tests.harness.remember import remembered
from tests.parallelize.models import ARCHITECTURES, FLOAT32_NORMS, FURTHER, Encoder, NanoGPT, enlarged, hugging_face
from tests.parity.compare import compare
from tests.parity.covering import covering_rows
from tests.parity.custom_functions import custom_loss
from tests.parity.row import CLIPS, EPOCH, STEPS
from tests.parity.train import Recorder, Trace, local_weights, make_trainer
from tests.parity.zoo.tasks import Task

STRICT = 1e-9
# A Hugging Face model that is given labels= computes its loss, and so its gradients, in float32 whatever its weights
# are: over ranks that hold parts of the vocabulary, weights differ by up to 6e-7 after six steps.
FLOAT32_LOSS = 2e-6
FLOAT32_WEIGHTS = 5e-7  # of `FLOAT32_NORMS`; measured up to 2.7e-7
FLOAT32_BOTH = 4e-6  # of these with such a loss; measured up to 2.5e-6, and 3e-14 with both patched to float64


class TensorTask(Task):
    """Tokens spread over a vocabulary of which every rank holds a part; loss outside the network.

    A key's bias has no gradient but rounding noise, which Adam would blow up to full steps: ``eps`` is large enough.
    """

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        batch = default_collate(samples)  # two labels ignored per row: token means of micro-batches stay exact
        return batch["tokens"] * 10 + 5, (batch["labels"] * 10 + 7).where(batch["labels"] >= 0, -100)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).transpose(1, 2), batch[1], label_smoothing=0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, eps=1e-6)


class GPTTask(TensorTask):
    """The network computes its loss; the step logs an accuracy, which needs whole logits."""

    def loss(self, batch: Any) -> Tensor:
        logits, _ = self.net(batch[0])
        if self.training:
            self.log("accuracy", (logits.argmax(-1) == batch[0]).double().mean(), sync_dist=True)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), batch[1].reshape(-1))


class PretrainedTask(TensorTask):
    """A Hugging Face model with its own loss, or with the step's loss on its logits."""

    def __init__(self, name: str, labels: bool) -> None:
        super().__init__(hugging_face(name))
        self.labels = labels

    def loss(self, batch: Any) -> Tensor:
        if self.labels:
            return self.net(input_ids=batch[0], labels=batch[1]).loss
        logits = self.net(input_ids=batch[0]).logits[..., :-1, :]
        losses = F.cross_entropy(logits.flatten(0, 1), batch[1][:, 1:].flatten(), reduction="none")
        return losses.sum() / (batch[1][:, 1:] >= 0).sum()


def _encoder(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return enlarged(Encoder(**options).double())


def _gpt(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return enlarged(NanoGPT(layers=layers).double())


class CustomTask(GPTTask):
    """The loss has gradients of its own: ``autograd.Function``s of the logits, one of them with a trained operand."""

    def __init__(self) -> None:
        super().__init__(_gpt())
        self.temperature = nn.Parameter(torch.full((1,), 1.5, dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        logits, _ = self.net(batch[0])
        return custom_loss(logits, batch[1], self.temperature)


class NormedTable(nn.Embedding):
    """Rows divided by norms over all of the table, which take no gradient."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / self.weight.norm(dim=0).detach()


class AroundTable(nn.Module):
    """The same in a module around the table."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(*sizes)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids)
        return rows / self.table.weight.norm(dim=0).detach()


class TableTask(GPTTask):
    """A network whose table of tokens is read as a whole.

    Args:
        kind: of the table.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(_gpt())
        sizes = self.net.transformer["wte"].weight.shape
        self.net.transformer["wte"] = kind(*sizes).double()


class CompiledTask(GPTTask):
    """Compiles each of its layers, as users of large models do.

    Args:
        backend: of ``torch.compile``.
        wrapped: replace layers by what ``torch.compile`` returns, instead of compiling them in place.
        recomputed: checkpoint each layer inside the network.
    """

    def __init__(self, backend: str = "aot_eager", wrapped: bool = False, recomputed: bool = False) -> None:
        super().__init__(_gpt(4))
        torch._dynamo.reset()  # workers are reused, and their rows would add up to torch's limit of compiled versions
        layers = self.net.transformer["h"]
        for index, layer in enumerate(layers):
            if recomputed:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
            if wrapped:
                layers[index] = torch.compile(layer, backend=backend)
            else:
                layer.compile(backend=backend)

    def on_fit_start(self) -> None:
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # the compiler's own, at graph breaks


OWN = {
    "custom": CustomTask,
    "nanogpt": lambda: GPTTask(_gpt()),
    "gpt": lambda: GPTTask(_gpt(4)),
    "table": functools.partial(TableTask, NormedTable),
    "around_table": functools.partial(TableTask, AroundTable),
    "compiled": CompiledTask,
    "compiled_wrapped": functools.partial(CompiledTask, wrapped=True),
    "compiled_recomputed": functools.partial(CompiledTask, recomputed=True),
    "compiled_inductor": functools.partial(CompiledTask, backend="inductor"),
    "encoder": lambda: TensorTask(_encoder()),
    "encoder_seq_first": lambda: TensorTask(_encoder(batch_first=False, norm_first=True)),
}
PRETRAINED = {**ARCHITECTURES, **FURTHER}
# Encoder and decoder are two lists of layers, and ALBERT's layers are one: neither a pipeline nor sequence shards.
ONE_STAGE = {"t5", "bart", "albert"}


@dataclass(frozen=True)
class TensorRow:
    """A training run over tensor ranks.

    Attributes:
        module: key of `OWN` or `PRETRAINED`; a trailing ``+`` lets a Hugging Face model compute its loss.
        tensor: tensor-parallel size, or 0 for the plain one-process Trainer.
        stages: pipeline size.
        replicas: data-parallel size.
        sequence: whether sequence parallelism is on.
        clip: key of `CLIPS`.
        accumulate: batches per optimizer step.
        schedule: name of the pipeline schedule.
        others: further arguments of the strategy, as an expression.
    """

    module: str
    tensor: int = 2
    stages: int = 1
    replicas: int = 1
    sequence: bool = False
    clip: str = "norm"
    accumulate: int = 1
    schedule: str = "1f1b"
    others: str = "{}"

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return (EPOCH if self.module.removesuffix("+") in PRETRAINED else STEPS)[self.accumulate]

    @property
    def devices(self) -> int:
        return max(1, self.tensor * self.stages * self.replicas)

    @property
    def reference(self) -> TensorRow:
        """The same training on one process."""
        return replace(self, tensor=0, stages=1, replicas=1, sequence=False, schedule="1f1b", others="{}")

    @property
    def tolerance(self) -> float:
        if self.module.endswith("+"):
            return FLOAT32_BOTH if self.module.startswith(FLOAT32_NORMS) else FLOAT32_LOSS
        return FLOAT32_WEIGHTS if self.module.startswith(FLOAT32_NORMS) else STRICT

    def __str__(self) -> str:
        layout = f"tp{self.tensor}xpp{self.stages}xdp{self.replicas}" + ("-sequence" if self.sequence else "")
        rest = "" if self.schedule == "1f1b" else f"-{self.schedule}"
        rest += "" if self.others == "{}" else f"-{self.others}"
        return f"{self.module}-{layout}-{self.clip}-acc{self.accumulate}{rest}"


def build(name: str) -> LightningModule:
    """The module of a row, from a fixed seed."""
    if name in OWN:
        return OWN[name]()
    return PretrainedTask(name.removesuffix("+"), labels=name.endswith("+"))


def train_row(info: RankInfo, row: TensorRow) -> Trace:
    """Fits the row's module with validation, and returns what this rank saw; weights are gathered."""
    trace, clip, strategy = Trace(), CLIPS[row.clip], "auto"
    if row.tensor:
        strategy = MegatronStrategy(
            tensor_parallel_size=row.tensor,
            pipeline_parallel_size=row.stages,
            data_parallel_size=row.replicas,
            sequence_parallel=row.sequence,
            pipeline_schedule=row.schedule,
            micro_batch_size=2 if row.stages > 1 else "auto",
            **eval(row.others),
        )
        strategy = linked(strategy, scatter_from=1)  # so that these small tensors travel in parts too
    trainer = make_trainer(
        info,
        strategy,
        max_steps=row.steps,
        accumulate_grad_batches=row.accumulate,
        gradient_clip_val=clip[0] if clip else None,
        gradient_clip_algorithm=clip[1] if clip else None,
        num_sanity_val_steps=1,
        callbacks=[Recorder(trace)],
    )
    module = build(row.module)
    trainer.fit(module)
    trace.weights = trainer.strategy.full_state_dict() if row.tensor else local_weights(module)
    trace.steps = trainer.global_step
    return trace


@remembered
def reference(row: TensorRow) -> Trace:
    """The one-process run, made once."""
    trace: Trace = run_trainers(train_row, row, devices=1)[0].value
    return trace


def check_row(row: TensorRow) -> None:
    """Runs ``row`` and its reference.

    Raises:
        AssertionError: listing every difference beyond the module's tolerance.
    """
    outcomes = run_trainers(train_row, row, devices=row.devices, deadline=420.0, grace=20.0)
    traces = [outcome.value for outcome in outcomes]
    names = set(reference(row.reference).weights)
    for trace in traces:  # buffers are part of a state, not of this comparison
        trace.weights = {name: value.double() for name, value in trace.weights.items() if name in names}
    found = list(compare(traces, reference(row.reference), row.tolerance))
    assert not found, f"{row}: {len(found)} differences\n" + "\n".join(found[:12])


PRETRAINED_WIDELY = ("llama", "gpt2+", "bloom+", "gptj+", "falcon", "gemma3")
WIDELY = ("nanogpt", "encoder", "encoder_seq_first", *PRETRAINED_WIDELY)


def everyday() -> list[TensorRow]:
    """Every pair of (tensor size, stages, replicas, sequence shards), over different modules."""
    return [
        TensorRow("nanogpt", tensor=2, stages=2, replicas=1, sequence=True, accumulate=2),
        TensorRow("encoder", tensor=4, stages=1, replicas=1, sequence=True, clip="value"),
        TensorRow("encoder_seq_first", tensor=2, stages=1, replicas=2, sequence=True),
        TensorRow("llama", tensor=4, stages=2, replicas=1, sequence=False),
        TensorRow("gpt2+", tensor=2, stages=1, replicas=2, sequence=False, accumulate=2),
        TensorRow("bloom", tensor=2, stages=2, replicas=1, sequence=False, clip="value"),
        TensorRow("custom"),
        TensorRow("around_table"),
    ]


def options() -> list[TensorRow]:
    """Custom functions, compiled layers, recomputation and every schedule, one row each."""
    recompute = ("'full'", "'selective'", "{'every': 2}", "['*.mlp']")
    compiled = ("compiled", "compiled_wrapped", "compiled_recomputed")
    schedules = ("gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
    other_orders = ("1f1b", "zb-v")  # the others call the same pieces
    custom = [TensorRow("custom", 4), TensorRow("custom", 2, 2), TensorRow("custom", 2, 1, 2, sequence=True)]
    return [
        *custom,
        TensorRow("table"),
        TensorRow("table", 2, 2),
        *(TensorRow(name, sequence=sequence) for name in compiled for sequence in (False, True)),
        TensorRow("compiled_inductor"),
        *(TensorRow("compiled_wrapped", stages=2, schedule=name) for name in other_orders),
        TensorRow("compiled_wrapped", stages=2, sequence=True, others="{'activation_recompute': 'full'}"),
        *(TensorRow("gpt", stages=2, schedule=name, sequence=bool(i % 2)) for i, name in enumerate(schedules)),
        *(
            TensorRow("gpt", stages=1 + i % 2, sequence=i < 2, others=f"{{'activation_recompute': {kind}}}")
            for i, kind in enumerate(recompute)
        ),
    ]


def everything() -> Iterator[TensorRow]:
    """Each main module in any two of (tensor size, stages, replicas, sequence shards); every other architecture twice.

    All 16 layouts occur: module n shows the covering rows with those values exchanged that are ones in n as a binary
    number. What is left out is a module in three or four such values together.
    """
    settings = itertools.cycle(itertools.product(CLIPS, (1, 2)))
    columns = ((2, 4), (1, 2), (1, 2), (False, True))
    for turn, module in enumerate(WIDELY):
        turned = [column[::-1] if turn >> at & 1 else column for at, column in enumerate(columns)]
        rows = {layout: _row(module, layout, next(settings)) for layout in itertools.product(*columns)}
        yield from (rows[layout] for layout in covering_rows(turned, 2))
    rest = [name for name in PRETRAINED if not {name, f"{name}+"} & set(WIDELY)]
    for index, name in enumerate(rest):
        if name not in ONE_STAGE:
            yield _row(name, (2, 2, 1, False), next(settings))
        yield _row(f"{name}+", (4 if index % 2 else 2, 1, 1 + index % 2, name not in ONE_STAGE), next(settings))


def _row(module: str, layout: tuple[Any, ...], setting: tuple[str, int]) -> TensorRow:
    tensor, stages, replicas, sequence = layout
    return TensorRow(module, tensor, stages, replicas, sequence, *setting)
