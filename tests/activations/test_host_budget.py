"""``activation_offload="auto"``: the share of the tokens by MEMO's formula, of what layers save and what is free.

The device is counted, and the host's memory and its link are made up.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

from lightning_megatron.data_parallel.buckets import host_memory
from lightning_megatron.data_parallel.buckets.host_memory import GIB
from lightning_megatron.mesh.messages.host_link import HostLink
from lightning_megatron.pipeline.schedules.by_name import make_schedule
from lightning_megatron.strategy.activations.host_budget import (
    LEFT,
    CallSizes,
    HeldCalls,
    HostBudget,
    HostFull,
    Neighbours,
    layers_of_stages,
)
from lightning_megatron.strategy.activations.host_copies import Traffic
from lightning_megatron.strategy.activations.host_request import host_request
from tests.activations import layers as kinds
from tests.activations.host_scenarios import one_budget, tolerances, train
from tests.activations.test_host_calls import LAYERS, TOKENS, TOKENWISE, built, double, same  # noqa: F401
from tests.activations.test_host_calls import train as steps
from tests.harness import one_process, run_trainers

WIDE = pytest.mark.wide
LAYER = "layers.1"


@functools.cache
def measured(kind=kinds.Block) -> tuple[int, int]:
    """Bytes that a call of a layer always keeps, and those of everything else."""
    rows = TOKENS - 2
    least, most = (sum(steps(built(kind), {"tokens": share})[2].kept[LAYER].values()) for share in (0, rows / TOKENS))
    return least, (most - least) * TOKENS // rows


def has_free(monkeypatch, size: float) -> None:
    """A host with so much free memory, of which what is kept there takes some."""
    made: list[Traffic] = []
    start = Traffic.__init__
    monkeypatch.setattr(Traffic, "__init__", lambda self, *given: (made.append(self), start(self, *given))[1])
    monkeypatch.setattr(host_memory, "free_bytes", lambda folder: math.ceil(size) - sum(each.held for each in made))


@pytest.mark.everyday(2)
@pytest.mark.parametrize("wanted", [pytest.param(0.0, marks=WIDE), 0.3, pytest.param(0.7, marks=WIDE), 1.0])
@pytest.mark.parametrize("name", TOKENWISE)  # rows of a kind beside each other: it is measured once for them
def test_the_largest_share_that_fits_is_taken_and_the_numbers_stay(name, wanted, monkeypatch):
    always, other = measured(TOKENWISE[name])
    room = LAYERS * (always + wanted * other) + 64
    has_free(monkeypatch, room / LEFT)
    model = built(TOKENWISE[name])
    found = steps(model, "auto")
    same(found, steps(model, None), exactly=False)
    traffic, chosen = found[2], found[2].budget.share
    assert chosen == pytest.approx(0.9 if wanted == 1 > chosen else wanted, abs=0.01)
    assert LAYERS * always <= traffic.most <= room + LAYERS * other / TOKENS + always + 2 * other  # one layer whole
    kept, rows = sum(traffic.kept[LAYER].values()), math.ceil(chosen * TOKENS)
    rows -= rows == TOKENS - 1  # a single token is not run by itself
    assert kept <= always + 1.01 * other if chosen == 1 else kept == always + rows * other // TOKENS
    assert f"a share of {chosen:.3g} of the tokens" in traffic.report()


def test_no_more_than_one_layer_is_ever_kept_whole():
    always, other = measured()
    traffic = steps(built(kinds.Block), {"tokens": 0}, steps=1)[2]
    assert traffic.most <= LAYERS * always + 2 * other


def test_a_share_that_does_not_fit_is_refused_in_the_first_layer_with_the_largest_that_does(monkeypatch):
    always, other = measured()
    has_free(monkeypatch, LAYERS * (always + 0.505 * other) / LEFT)
    said = r"keeps .* GiB in host memory \(4 calls of layers.* has .* GiB for this rank of 1: use {'tokens': 0.5}, the"
    with pytest.raises(HostFull, match=said):
        steps(built(kinds.Block), {"tokens": 0.8})
    steps(built(kinds.Block), {"tokens": 0.5})


@pytest.mark.parametrize("offload", ["auto", "all", {"tokens": 0.1}], ids=str)
def test_inputs_and_attention_that_do_not_fit_are_refused(offload, monkeypatch):
    has_free(monkeypatch, 0)
    with pytest.raises(HostFull, match="use 'auto'" if offload == "all" else "alone do not fit; use `activation_rec"):
        steps(built(kinds.Block), offload)


class Slow(HostLink):
    """A link whose copies the device waits for."""

    bytes_per_second = 1e6


def budget(given=None, link: HostLink | None = None, calls=(4,), stages=(0,), mine=0) -> HostBudget:
    return HostBudget(given, "'auto'", Neighbours(mine, stages, lambda: calls), 1, link or HostLink())


@pytest.mark.parametrize(("seconds", "wanted"), [(1.0, 0.0), (2.5, 0.5), (4.0, 1.0)])
def test_no_more_is_kept_than_is_copied_while_a_layer_computes(seconds, wanted):
    found = budget(link=Slow())
    found.measured("a", 100, CallSizes(1.5e6, 2e6, seconds), 0)
    assert found.share == pytest.approx(wanted)
    assert f"0.001 GB/s × {seconds:.3g} s" in found.report()


def test_the_shortest_forward_and_the_mean_of_bytes_decide(monkeypatch):
    has_free(monkeypatch, 4 * GIB / LEFT)
    found = budget(link=Slow())
    found.measured("a", 100, CallSizes(GIB / 2, GIB, 1e9), 0)
    assert found.share == pytest.approx(0.5)
    found.measured("b", 100, CallSizes(GIB / 4, GIB / 2, 1e9), 0)
    assert found.share == pytest.approx((1 - 3 / 8) / (3 / 4))
    found.measured("c", 100, CallSizes(0, 0, 0.0), 0)
    assert found.share == 0.0


def test_a_longer_sequence_is_measured_again(monkeypatch):
    has_free(monkeypatch, 4.1 * GIB / LEFT)
    found = budget()
    found.measured("a", 100, CallSizes(GIB / 2, GIB), 0)
    assert not found.wants("a", 110) and found.wants("a", 200) and found.wants("b", 100)
    found.measured("a", 200, CallSizes(GIB, 2 * GIB), 0)
    assert found.share < 0.1
    with pytest.raises(HostFull):
        found.measured("a", 300, CallSizes(1.5 * GIB, 3 * GIB), 0)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_early_stages_get_as_much_more_as_they_keep(name, chunks, monkeypatch):
    schedule = make_schedule(name, 2, 4, chunks=chunks)
    owners = [schedule.owner(part)[0] for part in range(2 * chunks)]
    layers = layers_of_stages([(part, part + 1) for part in range(2 * chunks)], owners, range(2 * chunks))
    calls = HeldCalls(layers, lambda: schedule)
    assert calls() == {"1f1b": [2, 1], "gpipe": [4, 4], "interleaved": [5, 3]}[name] and calls() is calls()
    has_free(monkeypatch, 12 * GIB / LEFT)
    rooms = []
    for mine in (0, 1):
        one = HostBudget(None, "'auto'", Neighbours(mine, (0, 1), calls), 1, HostLink())
        one.measured("a", 1, CallSizes(GIB / 4, GIB), 0)
        rooms.append(one.room / GIB)
    assert rooms == pytest.approx([12 * each / sum(calls()) for each in calls()])


def test_a_step_with_more_micro_batches_settles_the_share_again(monkeypatch):
    has_free(monkeypatch, 4 * GIB / LEFT)
    schedules = [make_schedule("gpipe", 1, 2)]
    found = HostBudget(None, "'auto'", Neighbours(0, (0,), HeldCalls([1], lambda: schedules[-1])), 1, HostLink())
    found.measured("a", 100, CallSizes(GIB / 2, 4 * GIB), 0)
    assert found.share == pytest.approx(1.5 / 4)
    schedules.append(make_schedule("gpipe", 1, 4))
    assert not found.wants("a", 100) and found.share == pytest.approx(0.5 / 4)


def test_values_say_what_they_are():
    for value in ("auto", "all", {"tokens": 0.4}, {"every": 2}, {"tokens": "auto", "layers": ["*.1"]}):
        assert host_request(value).words == repr(value)
    assert host_request("auto").splits and not host_request("all").splits


PP, TP, CP = (f"{axis}_parallel_size" for axis in ("pipeline", "tensor", "context"))
AUTO = {"activation_offload": "auto"}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "arguments", "megabytes"),
    [
        ("block", {PP: 2, **AUTO}, 0.3),
        *(
            pytest.param(*row, marks=pytest.mark.wide)
            for row in (
                ("block", {TP: 2, **AUTO}, 0.3),
                ("block", {PP: 2, **AUTO}, 50),
                ("rotary", {CP: 2, **AUTO}, 0.2),
                ("rotary", {PP: 2, "pipeline_schedule": "interleaved", **AUTO}, 0.3),
                ("hf_llama", {PP: 2, TP: 2, **AUTO}, 0.3),
                ("block", {PP: 2, "pipeline_schedule": "gpipe", "micro_batch_size": 1, **AUTO}, 1.0),
            )
        ),
    ],
    ids=str,
)
def test_a_layout_that_chooses_by_itself_gives_what_one_process_gives(kind, arguments, megabytes):
    wanted = one_process(train, kind, None, {})
    devices = arguments.get(PP, 1) * arguments.get(TP, 1) * arguments.get(CP, 1)
    outcomes = run_trainers(one_budget, kind, arguments, {}, megabytes, devices=devices)
    losses, close = tolerances(kind, arguments)
    for outcome in outcomes:
        found, share = outcome.value
        assert share == 1.0 if megabytes == 50 else 0.0 <= share < 1.0
        for name in set(wanted) - {"weights"}:
            assert found[name] == pytest.approx(wanted[name], rel=losses), name
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(outcomes[0].value[0]["weights"][name], value, rtol=close, atol=close)


def test_too_little_host_memory_is_an_error_on_every_rank():
    for outcome in run_trainers(one_budget, "block", {PP: 2, **AUTO}, {}, 0, devices=2, check=False, grace=20.0):
        assert "keeps" in (text := f"{outcome.error}\n{outcome.output}") and "GiB in host memory" in text, outcome
