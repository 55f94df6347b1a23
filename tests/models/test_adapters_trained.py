"""PEFT's adapters train as in one process where layers are cut unlike plain linear layers, or are given prefixes."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import peft
import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.harness import RankInfo, one_process, run_trainers
from tests.parallelize.models import VOCABULARY, hugging_face
from tests.parity.scenario import Layout, differences, trained_state

wide = pytest.mark.wide
_low_rank = partial(peft.LoraConfig, r=4, init_lora_weights=False)
KINDS: dict[str, Any] = {
    "lora": partial(_low_rank, target_modules="all-linear", use_rslora=True),
    "saved": partial(_low_rank, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "vocabulary": partial(_low_rank, target_modules=["o_proj", "lm_head", "embed_tokens"]),
    "dora": partial(_low_rank, target_modules="all-linear", use_dora=True),
    "ia3": partial(
        peft.IA3Config,
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
    "prompt": partial(peft.PromptTuningConfig, num_virtual_tokens=3),
    "p-tuning": partial(peft.PromptEncoderConfig, num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix": partial(peft.PrefixTuningConfig, num_virtual_tokens=3),
}
ROWS_OF_A_BATCH = 4


class Adapted(LightningModule):
    """A tiny Llama with an adapter.

    Args:
        kind: key of `KINDS`.
        rounded: whether the weights of the Llama are numbers of bfloat16.
        exact: whether all is in float64, which norms of Llama round to float32; else the Llama is in bfloat16.
    """

    def __init__(self, kind: str, rounded: bool = False, exact: bool = True) -> None:
        super().__init__()
        base: Any = hugging_face("llama", num_hidden_layers=4, num_key_value_heads=4, use_cache=False)
        base = base.bfloat16() if rounded else base
        with warnings.catch_warnings(action="ignore"):  # of names that PEFT reads from Transformers, deprecated there
            self.model: nn.Module = peft.get_peft_model(base, KINDS[kind](task_type="CAUSAL_LM")).train()
        if exact:
            self._make_exact()

    def _make_exact(self) -> None:
        for part in list(self.model.modules()):
            for name, child in part.named_children():
                if isinstance(child, LlamaRMSNorm):
                    norm = nn.RMSNorm(child.weight.shape, 1e-6)
                    norm.weight = child.weight
                    setattr(part, name, norm)
        self.model.double()

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        logits = self.model(input_ids=ids).logits[:, -ids.shape[1] :]
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        shares = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        rows, rank = ROWS_OF_A_BATCH // shares["num_replicas"], shares["rank"]
        ids = torch.randint(VOCABULARY, (12, 8), generator=torch.Generator().manual_seed(3))
        mine = ids.view(-1, ROWS_OF_A_BATCH, 8)[:, rows * rank : rows * (rank + 1)].flatten(0, 1)
        return DataLoader(mine, batch_size=rows)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(info: RankInfo, layout: Layout | None, arguments: dict[str, Any], kind: str) -> dict[str, Tensor]:
    return trained_state(info, layout, arguments, Adapted(kind), max_epochs=1, gradient_clip_val=0.5)


TWO = {"tensor_parallel_size": 2}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tp2": ((1, 1), TWO),
    "pp2": ((2, 1), {}),
    "pp2-tp2": ((2, 1), TWO),
    "dp2": ((1, 2), {}),
}
SHARDS = {**TWO, "sequence_parallel": True}
ROWS: list[Any] = [
    pytest.param("ia3", (2, 1), SHARDS, id="ia3-pp2-sp", marks=wide),
    pytest.param("prefix", (4, 1), {"micro_batch_size": 1}, id="prefix-pp4"),
    pytest.param("dora", (2, 1), SHARDS, id="dora-pp2-sp", marks=wide),
    pytest.param("ia3", (1, 1), SHARDS, id="ia3-sp", marks=wide),
    pytest.param("prefix", (2, 1), {"pipeline_schedule": "zb-v", "micro_batch_size": 1}, id="prefix-zb-v", marks=wide),
    *(
        pytest.param(kind, *layout, id=f"{kind}-{name}", marks=wide)
        for kind in KINDS
        for name, layout in LAYOUTS.items()
        if (kind, name) != ("dora", "pp2-tp2")  # with split tokens, above
    ),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("kind", "layout", "arguments"), ROWS)
def test_training_is_that_of_one_process(kind: str, layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(fit, None, {}, kind)
    devices = layout[0] * layout[1] * arguments.get("tensor_parallel_size", 1)
    found = run_trainers(fit, layout, arguments, kind, devices=devices)[0].value
    assert expected and not list(differences("", found, expected, 1e-9))


class OneStep(Adapted):
    """Its weights move by their gradients."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0)


def moved(
    info: RankInfo, layout: Layout | None, arguments: dict[str, Any], kind: str, exact: bool
) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """Gradients of a batch by name, and the dtypes of what has none; the Llama's weights are numbers of bfloat16."""
    module, precision = OneStep(kind, rounded=True, exact=exact), "64-true" if exact else "32-true"
    before = {name: weight.detach().double() for name, weight in module.named_parameters() if weight.requires_grad}
    state = trained_state(info, layout, arguments, module, max_steps=1, precision=precision)
    gradients = {name: value - state[name].double() for name, value in before.items() if name in state}
    return gradients, {value.dtype for name, value in state.items() if name not in before}


def _distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return float(sum((found[name] - value).square().sum() for name, value in wanted.items()) ** 0.5)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["tp2", *(name for name in LAYOUTS if name != "tp2")])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_over_a_base_in_bfloat16_are_those_of_one_process(kind: str, name: str) -> None:
    """Ranks that split a layer add its halves in bfloat16, which rounds as often as one process, but elsewhere; so do
    the gradients of copies in bfloat16 (`modules_to_save`), which are the sums of those of micro-batches or replicas.
    """
    layout, arguments = LAYOUTS[name]
    exact, _ = one_process(moved, None, {}, kind, True)
    alone, dtypes = one_process(moved, None, {}, kind, False)
    devices = layout[0] * layout[1] * arguments.get("tensor_parallel_size", 1)
    found, held = run_trainers(moved, layout, arguments, kind, False, devices=devices)[0].value
    assert held == dtypes and torch.bfloat16 in held and found.keys() == exact.keys()
    if arguments or kind == "saved":
        assert _distance(found, exact) < 1.5 * _distance(alone, exact)
    else:
        assert _distance(found, alone) < 1e-5 * _distance(alone, {name: value * 0 for name, value in alone.items()})
