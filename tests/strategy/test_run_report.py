"""The report of a run says the same of the model at every layout, and holds everything itself."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron.callbacks import RunReport
from lightning_megatron.models import CausalLanguageModel
from lightning_megatron.planner.model.module_shape import shape_from_module
from tests.harness import run_trainers
from tests.models.scenarios import CONFIGS
from tests.strategy.report_scenarios import BATCH, SEQUENCE, report

LAYOUTS = [
    ("llama", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "micro_batch_size": 2, "record_timeline": True}),
    ("gpt", {"tensor_parallel_size": 2}),
    ("llama", {"pipeline_parallel_size": 2, "activation_recompute": "full", "micro_batch_size": 4}),
    pytest.param("gpt", {"tensor_parallel_size": 2, "data_parallel_size": 2}, marks=pytest.mark.wide),
    pytest.param(
        "llama",
        {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2, "pipeline_schedule": "interleaved",
         "micro_batch_size": 4},
        marks=pytest.mark.wide,
    ),
]  # fmt: skip


def _ranks(sizes: dict[str, Any]) -> int:
    ranks = 1
    for name, size in sizes.items():
        ranks *= size if name in ("pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size") else 1
    return ranks


@pytest.mark.wide
@pytest.mark.parametrize(("config", "sizes"), LAYOUTS)
def test_flops_of_a_step_are_those_of_one_process_and_nothing_is_computed_otherwise(
    config: str, sizes: dict[str, Any]
) -> None:
    alone = run_trainers(report, config, {}, devices=1)[0].value
    outcomes = run_trainers(report, config, sizes, devices=_ranks(sizes))
    without = run_trainers(report, config, sizes, False, devices=_ranks(sizes))
    assert all(outcome.value[0] == pytest.approx(alone[0], rel=1e-12) for outcome in outcomes)
    assert outcomes[0].value[1] == without[0].value[1]


def test_flops_are_those_of_the_formula() -> None:
    flops = run_trainers(report, "gpt", {}, devices=1)[0].value[0]
    module = CausalLanguageModel(CONFIGS["gpt"])
    module.configure_model()
    shape = shape_from_module(module, seq=SEQUENCE, heads=4)
    shape = type(shape)(**{name: getattr(shape, name) for name in shape.__dataclass_fields__} | {"vocab": 256})
    assert flops == pytest.approx(BATCH * SEQUENCE * shape.model_flops_per_token, rel=1e-9)


class _Reader(HTMLParser):
    """Tags that are open, and addresses that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.fetched += [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]
        self.fetched += [tag] if tag in ("script", "link") else []
        if tag not in ("meta", "path", "use", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass


def test_the_page_holds_layout_losses_speed_memory_timeline_and_each_warning_once() -> None:
    sizes = {"pipeline_parallel_size": 2, "micro_batch_size": 2, "record_timeline": True}
    outcomes = run_trainers(report, "llama", sizes, devices=2)
    _, _, page, has_curves = outcomes[0].value
    assert has_curves and not outcomes[1].value[2]
    reader = _Reader()
    reader.feed(page)
    assert not reader.open and not reader.fetched
    for said in (
        "2 ranks = pipeline 2",
        "1f1b, 4 micro-batches, bubble of equal stages",
        "train_loss",
        "tokens per second",
        "model FLOPs of a step",
        "give <code>RunReport(peak_tflops=...)</code>",
        "time (s)</text>",
        "MiB of weights and gradients on rank",
        "optimizer&#x27;s state comes with the first step",
        "; decoder.embed",
        "ideal: stages that take equally long",
        "pipeline_parallel_size",
    ):
        assert said in page, said
    assert page.count("mind the &lt;gap&gt;</td><td>all<") == page.count("mind the") == 1
    assert page.count("<svg") == 2
    assert "lightning_megatron" in outcomes[0].output and "stage 1   rank 0: " in outcomes[0].output
    assert "stage 1   rank" not in outcomes[1].output


def test_other_strategies_and_no_batches_are_refused() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[RunReport()], max_steps=1)
    rows = torch.utils.data.DataLoader([torch.zeros(13, dtype=torch.long)] * 4)  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="RunReport needs `Trainer\\(strategy=MegatronStrategy"):
        trainer.fit(CausalLanguageModel(CONFIGS["gpt"]), rows, rows)
    with pytest.raises(ValueError, match="`every=0` must be at least 1"):
        RunReport(every=0)
