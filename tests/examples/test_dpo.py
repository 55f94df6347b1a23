"""The preference example: the margin grows, and every number is that of one process."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_megatron import MegatronStrategy
from tests.examples.script import EXAMPLES, run_in_workers
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.train import Recorder, Trace, make_trainer

wide = pytest.mark.wide
Found = tuple[list[float], list[dict[str, float]], dict[str, Tensor]]


def preferring(info: RankInfo, options: dict[str, Any] | None) -> Found:
    """Losses, metrics and weights of a few steps in float64; with ``options=None``, of Lightning alone."""
    sys.path.insert(0, str(EXAMPLES))
    import dpo

    replicas, tensor = ((options or {}).get(size, 1) for size in ("data_parallel_size", "tensor_parallel_size"))
    args = SimpleNamespace(model="tiny", data=None, pairs=40, seed=1, sequence=64)
    torch.manual_seed(1)
    module = dpo.DirectPreference(dpo.build_tiny_model(), lr=2e-3).double()
    pairs = dpo.load_pairs(args)[0][info.rank // tensor % replicas :: replicas]  # a step has the same in any layout
    training, held_out = (
        DataLoader(part, batch_size=8 // replicas, collate_fn=dpo.collate)
        for part in (pairs[: 32 // replicas], pairs[32 // replicas :])
    )
    trace = Trace()
    strategy = "auto" if options is None else MegatronStrategy(**options)
    trainer = make_trainer(info, strategy, max_epochs=3, precision="64-true", callbacks=[Recorder(trace)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in eval mode at the start of training")
        trainer.fit(module, training, held_out)
    weights = module.state_dict() if options is None else trainer.strategy.full_state_dict()
    return trace.losses, trace.metrics, {name: weight.detach().clone() for name, weight in weights.items()}


def margins(metrics: list[dict[str, float]]) -> list[float]:
    return [found["margin"] for found in metrics if "margin" in found]


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2, "data_parallel_size": 2, "micro_batch_size": 2},
        *(
            pytest.param(options, marks=wide)
            for options in (
                {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "micro_batch_size": 2},
                {"pipeline_parallel_size": 4, "micro_batch_size": 1},
                {"data_parallel_size": 2},
                {"tensor_parallel_size": 2},
                {"pipeline_parallel_size": 2, "pipeline_schedule": "zb-h1", "micro_batch_size": 2},
                {"pipeline_parallel_size": 2, "activation_recompute": "full", "micro_batch_size": 4},
            )
        ),
    ],
    ids=str,
)
def test_losses_margins_and_weights_are_those_of_one_process(options: dict[str, Any]) -> None:
    sizes = ("pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size")
    devices = torch.Size(options.get(size, 1) for size in sizes).numel()
    losses, metrics, weights = one_process(preferring, None)
    outcomes = [outcome.value for outcome in run_trainers(preferring, options, devices=devices)]
    for found, seen, _ in outcomes:
        if options.get("data_parallel_size", 1) == 1:
            assert found == pytest.approx(losses, rel=1e-9)
            assert margins(seen) == pytest.approx(margins(metrics), rel=1e-9)
        assert seen[-1]["held_out_margin"] == pytest.approx(metrics[-1]["held_out_margin"], rel=1e-9)
    means = [sum(step) / devices for step in zip(*(found for found, _, _ in outcomes), strict=True)]
    assert means == pytest.approx(losses, rel=1e-9)
    whole = outcomes[0][2]
    assert whole.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(whole[name], weight, rtol=1e-9, atol=1e-9, msg=name)
    assert metrics[-1]["held_out_margin"] > 0.5 and losses[-1] < losses[0]
    start, end = weights["reference.lm_head.weight"], weights["policy.lm_head.weight"]
    assert not torch.equal(start, end)


@pytest.mark.wide
def test_the_margin_grows_and_the_policy_is_saved(tmp_path: Path) -> None:
    run = run_in_workers("dpo.py", tmp_path, processes=4)
    assert run.code == 0, run.output
    assert run.number("Margin before") == 0.0 and run.number("Margin after") > 1.0
    assert run.number("Accuracy") > 0.8
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "dpo" / "model", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert model.config.n_layer == 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "chosen": "b"}', "pair 1 has no 'rejected'"),
        ('{"prompt": "a", "chosen": "b", "rejected": "cccccccccc"}', "has 11 tokens and `--sequence` is 8"),
    ],
)
def test_pairs_that_are_none_are_refused(line: str, words: str, tmp_path: Path) -> None:
    import dpo

    file = tmp_path / "pairs.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=words):
        dpo.load_pairs(SimpleNamespace(model="tiny", data=file, pairs=0, seed=1, sequence=8))  # type: ignore[arg-type]
