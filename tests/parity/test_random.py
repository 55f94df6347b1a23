"""With ``random_streams="layout"`` what a step draws is what it draws with the same option in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.train import Recorder, Trace, make_trainer
from tests.parity.zoo.random_numbers import make

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "mb2": (1, {"micro_batch_size": 2}),
    "recompute": (1, {"activation_recompute": "full"}),
    "pp2": (2, {"pipeline_parallel_size": 2, "micro_batch_size": 8}),
    "pp2-mb2": (2, {"pipeline_parallel_size": 2, "micro_batch_size": 2}),
    "pp2-recompute": (2, {"pipeline_parallel_size": 2, "micro_batch_size": 2, "activation_recompute": "full"}),
    "pp2-mb3": (2, {"pipeline_parallel_size": 2, "micro_batch_size": 3}),
    "pp4": (4, {"pipeline_parallel_size": 4, "micro_batch_size": 1}),
    "interleaved": (2, {"pipeline_parallel_size": 2, "micro_batch_size": 2, "pipeline_schedule": "interleaved"}),
    "zb-v": (2, {"pipeline_parallel_size": 2, "micro_batch_size": 2, "pipeline_schedule": "zb-v"}),
    "dp2": (2, {"data_parallel_size": 2}),
    "dp2xpp2": (4, {"data_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batch_size": 1}),
    "dp2-recompute": (2, {"data_parallel_size": 2, "activation_recompute": "full"}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "sp-whole-attention": (
        2,
        {
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "tensor_parallel_plan": {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"},
        },
    ),
    "tp2xpp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batch_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "zero3": (2, {"data_parallel_size": 2, "weight_sharding": True}),
}
EVERYDAY = {
    "dropouts": ("pp2-mb2", "zb-v", "dp2xpp2", "sp", "sp-whole-attention", "cp2", "recompute"),
    "diffusion": ("mb2", "pp2-recompute", "pp2-mb3", "interleaved", "dp2"),
}


def fit(info: RankInfo, name: str, arguments: dict[str, Any], options: dict[str, Any]) -> Trace:
    """Train a module, and validate it."""
    seed_everything(5, verbose=False)
    trace = Trace()
    strategy = MegatronStrategy(random_streams="layout", **arguments)
    settings = {"max_steps": 4, "callbacks": [Recorder(trace)], **options}
    trainer = make_trainer(info, strategy, **settings)
    trainer.fit(make(name))
    trace.weights = strategy.full_state_dict()
    return trace


def compare(name: str, layout: str, options: dict[str, Any]) -> None:
    devices, arguments = LAYOUTS[layout]
    if name == "diffusion" and "dp2" in layout:  # its validation draws, which is refused where replicas share samples
        options = {**options, "limit_val_batches": 0}
    wanted = one_process(fit, name, {}, options)
    assert len(set(wanted.losses)) == len(wanted.losses)
    outcomes = run_trainers(fit, name, arguments, options, devices=devices)
    losses = zip(*(outcome.value.losses for outcome in outcomes), strict=True)  # without stages: of a replica
    assert [sum(row) / devices for row in losses] == pytest.approx(wanted.losses, abs=1e-9)
    for key, weight in wanted.weights.items():  # which rank 0 gathers
        torch.testing.assert_close(outcomes[0].value.weights[key], weight, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, rows in EVERYDAY.items() for layout in rows])
def test_a_layout_draws_what_one_process_draws(name: str, layout: str) -> None:
    compare(name, layout, {})


@pytest.mark.wide
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in EVERYDAY["dropouts"]])
def test_every_layout_drops_what_one_process_drops(layout: str) -> None:
    compare("dropouts", layout, {})


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["pp2", "pp4", "zb-v", "dp2xpp2", "dp2-recompute", "recompute", "cp2"])
def test_every_layout_adds_the_noise_of_one_process(layout: str) -> None:
    compare("diffusion", layout, {})


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["pp2-mb2", "dp2"])
def test_batches_of_one_update_draw_as_in_one_process(layout: str) -> None:
    compare("dropouts", layout, {"accumulate_grad_batches": 2})


@pytest.mark.wide
def test_a_loss_of_the_whole_batch_draws_for_each_sample_what_one_process_draws() -> None:
    compare("by_sample", "pp2-mb2", {})


REFUSED = [
    ("diffusion", "dp2", "only steps of training are tried"),
    ("mixup", "pp2-mb2", "it is an order of all samples, of which some are here"),
    pytest.param("pythons", "pp2-mb2", "it may draw for every sample, and has no counters", marks=pytest.mark.wide),
]


@pytest.mark.parametrize(("name", "layout", "wanted"), REFUSED)
def test_draws_that_layouts_would_make_unlike_are_refused_in_the_first_step(name: str, layout: str, wanted: str):
    devices, arguments = LAYOUTS[layout]
    for outcome in run_trainers(fit, name, arguments, {}, devices=devices, check=False, grace=20.0):
        assert outcome.error is not None and wanted in f"{outcome.error}\n{outcome.output}", outcome


def resumed(info: RankInfo, arguments: dict[str, Any], folder: str, steps: int) -> Trace:
    """Train up to a step, from a checkpoint if there is one, and leave one."""
    seed_everything(5 if steps < 4 else 6, verbose=False)
    trace = Trace()
    strategy = MegatronStrategy(random_streams="layout", **arguments)
    trainer = make_trainer(info, strategy, max_steps=steps, callbacks=[Recorder(trace)], limit_val_batches=0)
    trainer.fit(make("dropouts"), ckpt_path=folder if steps == 4 else None)
    if steps < 4:
        trainer.save_checkpoint(folder)
    trace.weights = strategy.full_state_dict()
    return trace


def test_a_run_that_goes_on_in_another_layout_draws_what_would_have_come(tmp_path) -> None:
    folder = str(tmp_path / "half")
    run_trainers(resumed, LAYOUTS["pp2-mb2"][1], folder, 2, devices=2)
    wanted = one_process(fit, "dropouts", {}, {"limit_val_batches": 0})
    (outcome,) = run_trainers(resumed, {}, folder, 4, devices=1)
    assert outcome.value.losses == pytest.approx(wanted.losses[2:], abs=1e-9)
    for key, weight in wanted.weights.items():
        torch.testing.assert_close(outcome.value.weights[key], weight, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"random_streams": "process"}, "must be 'torch' or 'layout'"),
        ({"random_streams": "layout", "compile_layers": True}, "`compile_layers=False`"),
    ],
)
def test_options_that_do_not_go_together_are_refused_at_once(arguments: dict[str, Any], wanted: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match="random_streams") as error:
        MegatronStrategy(**arguments)
    assert wanted in str(error.value)
