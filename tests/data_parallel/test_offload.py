"""Optimizers step in host memory, or in files, to the bit as on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import MegatronStrategy
from tests.data_parallel.offload_scenarios import USUAL, Around, offloaded
from tests.data_parallel.sharing_scenarios import Setup, SharedTask
from tests.harness import JobFailed, run_trainers

WIDE = pytest.mark.wide
CLIPPED = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
SMALL = {"bucket_size_mb": 0.002}


def row(*values: Any, wide: bool = True) -> Any:
    return pytest.param(*values, marks=[WIDE] if wide else [])


def run(
    setup: Setup, resume: str | None = None, save: str | None = None, around: Around = USUAL
) -> list[dict[str, Any]]:
    return [o.value for o in run_trainers(offloaded, setup, resume, save, around, devices=setup.devices)]


def same_bits(setup: Setup, offload: Any) -> list[dict[str, Any]]:
    """Compares a run with the same one without offload."""
    wanted, found = run(setup), run(replace(setup, strategy={**setup.strategy, "optimizer_offload": offload}))
    for value, other in zip(found, wanted, strict=True):
        assert value["losses"] == other["losses"]
        assert value["rates"] == other["rates"]
        for name, weight in value["weights"].items():
            assert torch.equal(weight, other["weights"][name]), name
        assert value["hosted"] > 0
    return found


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("layout", "options", "trainer", "offload"),
    [
        row((1, 1, 1), {}, CLIPPED, True),
        row((1, 2, 1), SMALL, {}, {"interleave": 2}, wide=False),
        row((1, 2, 1), SMALL, {}, {"interleave": 1, "keep": 0.5}),
        row((1, 2, 1), SMALL, CLIPPED, {"interleave": 3}),
        row((1, 2, 1), {"overlap_parameter_gather": True}, {}, True),
        row((1, 2, 1), {"weight_sharding": True}, CLIPPED, {"interleave": 2}),
        row((1, 2, 1), {"nonfinite": "skip"}, {}, {"interleave": False}),
        row((1, 4, 1), {"optimizer_sharding": {"shard": 2}}, {}, True),
        row((2, 2, 1), {"micro_batch_size": 2, **SMALL}, CLIPPED, {"interleave": 2}, wide=False),
        row((2, 1, 1), {"micro_batch_size": 2, "pipeline_schedule": "gpipe"}, {}, True),
        row((2, 2, 1), {"micro_batch_size": 2, "pipeline_schedule": "interleaved"}, {}, True),
        row((2, 1, 1), {"micro_batch_size": 2, "pipeline_schedule": "zb-h1"}, CLIPPED, True),
        row((2, 1, 1), {"micro_batch_size": 2, "pipeline_schedule": "zb-v"}, {}, {"interleave": 2}),
        row((1, 1, 2), {}, {}, {"interleave": 2}),
        row((1, 2, 2), {}, {}, True),
    ],
)
def test_weights_are_to_the_bit_those_of_steps_on_the_device(
    layout: tuple[int, int, int], options: dict[str, Any], trainer: dict[str, Any], offload: Any
) -> None:
    same_bits(Setup(layout, options, trainer), offload)


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw_fused",
        *(pytest.param(n, marks=WIDE) for n in ("sgd", "adam_foreach", "nadam", "rmsprop", "adagrad", "lion")),
    ],
)
def test_any_optimizer_that_updates_every_element_by_itself_steps_bucket_by_bucket(optimizer: str) -> None:
    same_bits(Setup((1, 1, 1), SMALL, {}, {"optimizer": optimizer}), {"interleave": 2})


@pytest.mark.wide
@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("bf16-true", marks=WIDE)])
def test_sixteen_bits_are_the_same(precision: str) -> None:
    same_bits(Setup((1, 2, 1), SMALL, {"precision": precision}), {"interleave": 2})


@pytest.mark.wide
def test_optimizers_of_whole_matrices_step_in_host_memory(tmp_path: Path) -> None:
    same_bits(Setup((1, 2, 1), SMALL, {}, {"optimizer": "muon"}), True)
    with pytest.raises(JobFailed, match="Muon in files: it needs whole matrices; use `optimizer_offload=True`"):
        setup = Setup((1, 2, 1), {"optimizer_offload": {"to": str(tmp_path)}}, {}, {"optimizer": "muon"})
        run(setup)


def test_files_hold_the_state_and_leave_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    values = same_bits(Setup((1, 2, 1), SMALL, CLIPPED), {"to": str(folder), "interleave": 2})
    for value in values:  # weights, two averages and two buffers of gradients, in float64
        assert value["hosted"] >= 12 * value["state_elements"], "the state lies in files, too"
    assert list(folder.iterdir()) == []


@pytest.mark.wide
@pytest.mark.parametrize("offload", [True, pytest.param({"keep": 0.5, "interleave": 2}, marks=WIDE)])
def test_a_run_goes_on_from_a_checkpoint_with_offload_or_without(offload: Any, tmp_path: Path) -> None:
    plain, hosted = Setup((1, 2, 1), SMALL), Setup((1, 2, 1), {**SMALL, "optimizer_offload": offload})
    longer = {"max_epochs": 3}
    wanted = run(replace(plain, trainer=longer))[0]
    for number, (first, second) in enumerate([(hosted, hosted), (hosted, plain), (plain, hosted)]):
        path = str(tmp_path / f"{number}.ckpt")
        run(first, None, path)
        value = run(replace(second, trainer=longer), path)[0]
        for name, weight in value["weights"].items():
            assert torch.equal(weight, wanted["weights"][name]), name


def test_weights_that_code_writes_between_steps_are_stepped_on() -> None:
    setup = Setup((1, 2, 1), SMALL)
    wanted = run(setup, around=Around(writes=True))[0]
    hosted = replace(setup, strategy={**SMALL, "optimizer_offload": True})
    value = run(hosted, around=Around(writes=True))[0]
    assert all(torch.equal(weight, wanted["weights"][name]) for name, weight in value["weights"].items())


def test_copies_go_on_while_the_processor_steps() -> None:
    """Every copy sleeps on a thread of its own; each is waited for, and few are on the device at a time."""
    setup = Setup((1, 2, 1), SMALL)
    wanted = run(setup)[0]
    hosted = replace(setup, strategy={**SMALL, "optimizer_offload": {"interleave": 2}})
    for value in run(hosted, around=Around(sleeps=0.002)):
        assert all(torch.equal(weight, wanted["weights"][name]) for name, weight in value["weights"].items())
        assert value["copies"] > 100
        assert value["together"] > 1, "copies are under way at the same time"
        assert value["near"] <= 2 * value["largest"], "one steps, and one comes"


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("layout", "options", "trainer", "least"),
    [
        row((1, 1, 1), SMALL, CLIPPED, 50, wide=False),
        row((1, 2, 1), SMALL, {**CLIPPED, "gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}, 50),
        row((2, 2, 1), {"micro_batch_size": 2, **SMALL}, CLIPPED, 20, wide=False),
        row((1, 2, 1), {**SMALL, "weight_sharding": {"sum": "micro_batch"}, "micro_batch_size": 2}, CLIPPED, 20),
        row((1, 2, 1), {**SMALL, "nonfinite": "skip"}, {"precision": "bf16-mixed"}, 50),
        row((1, 2, 1), SMALL, {"precision": "bf16-true"}, 40),
        row((1, 2, 1), SMALL, {**CLIPPED, "precision": "bf16-true"}, 1),
    ],
)
def test_gradients_leave_during_the_backward_and_are_clipped_where_they_arrive(
    layout: tuple[int, int, int], options: dict[str, Any], trainer: dict[str, Any], least: int
) -> None:
    setup = Setup(layout, options, trainer)
    wanted = run(setup)
    hosted = replace(setup, strategy={**options, "optimizer_offload": {"interleave": False}})
    for value, other in zip(run(hosted, around=Around(sleeps=0.002)), wanted, strict=True):
        assert value["in_backwards"] >= least
        if setup.devices == 1:
            assert value["copies"] == value["in_backwards"], "each once, though they were clipped"
        assert value["losses"] == other["losses"]
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in value["weights"].items())


def test_a_failed_step_leaves_the_optimizer_whole() -> None:
    setup = Setup((1, 1, 1), {**SMALL, "optimizer_offload": {"interleave": 1}})
    assert run(setup, around=Around(fails=True))[0]["failed"]


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        (3, "`optimizer_offload=3` must be True, False or a dict"),
        ({"path": "/x"}, "`optimizer_offload` has 'path'; it knows 'to', 'keep', 'interleave'"),
        ({"to": "nvme"}, "must be 'cpu', or a folder"),
        ({"keep": 2}, "must be the fraction that stays on the device, from 0 to 1"),
        ({"keep": True}, "must be the fraction"),
        ({"interleave": 0}, "must be 'auto', False, or a whole number"),
        ({"interleave": True}, "must be 'auto', False, or a whole number"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(offload: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronStrategy(optimizer_offload=offload)


def test_what_does_not_go_together_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be combined with `layout='auto'`"):
        MegatronStrategy(optimizer_offload=True, layout="auto")
    with pytest.raises(ValueError, match="a rehearsal counts a device's memory, not its host's"):
        MegatronStrategy(optimizer_offload=True).rehearse(SharedTask(), world_size=1)
    file = tmp_path / "file"
    file.touch()
    for to, message in ((str(file), "cannot be written to"), ("/proc/nowhere", "/proc/nowhere cannot be written to")):
        with pytest.raises(JobFailed, match=message):
            run(Setup((1, 2, 1), {"optimizer_offload": {"to": to}}))
    for to in ("cpu", str(tmp_path / "folder")):
        with pytest.raises(JobFailed, match=r"2 ranks need .* GiB for weights and state, and .*has 9.31e-10 GiB free"):
            run(Setup((1, 2, 1), {"optimizer_offload": {"to": to}}), around=Around(free=1))


def test_a_disk_that_is_full_says_so(tmp_path: Path) -> None:
    setup = Setup((1, 2, 1), {"optimizer_offload": {"to": str(tmp_path)}})
    with pytest.raises(JobFailed, match=r"finds no room for .* GiB in .*: No space left on device"):
        run(setup, around=Around(full=True))
    assert list(tmp_path.iterdir()) == []
