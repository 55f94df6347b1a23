"""Hooks and steps see weights and gradients that ranks have parts or terms of as one process sees them."""

from __future__ import annotations

import pytest

from tests.harness import run_trainers
from tests.parity.scenario import compare_scenario, differences
from tests.strategy import layer_hook_scenarios as layers
from tests.strategy import whole_scenarios as hooks

WIDE = pytest.mark.wide
LAYOUTS = {
    "tp2": ((1, 1), {"tensor_parallel_size": 2}),
    "tp2xpp2": ((2, 1), {"tensor_parallel_size": 2, "micro_batch_size": 2}),
    "sp": ((1, 1), {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "tp2xdp2": ((1, 2), {"tensor_parallel_size": 2}),
}
LAYOUTS |= {
    "pp2": ((2, 1), {"micro_batch_size": 2}),
    "zb-v": ((2, 1), {"micro_batch_size": 2, "pipeline_schedule": "zb-v"}),
    "dp2": ((1, 2), {}),
    "micro": ((1, 1), {"micro_batch_size": 2}),
    "tp2micro": ((1, 1), {"tensor_parallel_size": 2, "micro_batch_size": 2}),
    "tp2xzb-v": ((2, 1), {"tensor_parallel_size": 2, "micro_batch_size": 2, "pipeline_schedule": "zb-v"}),
}
EVERYDAY = [
    *(("Normalised", "tp2"), ("Normalised", "tp2xpp2"), ("Adversary", "tp2"), ("Afresh", "sp")),
    *(("Penalised", "tp2"), ("Smooth", "tp2"), ("Scales", "sp"), ("Hooked", "pp2"), ("Drawn", "tp2xpp2")),
    *(("Iterated", "tp2"), ("Fast", "tp2"), ("Curious", "tp2"), ("Trusted", "tp2")),
]
FARTHER = [
    *((kind, layout) for kind in ("Normalised", "Penalised") for layout in ("sp", "tp2micro")),
    ("Normalised", "tp2xdp2"),
    *(("Iterated", layout) for layout in ("sp", "tp2xdp2")),
    *((kind, layout) for kind in ("ByHand", "Curious") for layout in ("sp", "tp2xdp2")),
    *(("Trusted", layout) for layout in ("sp", "tp2xpp2", "tp2xdp2")),
    ("Fast", "sp"),
    ("ByHand", "tp2"),
    *(
        ("Afresh", "tp2"),
        ("Scales", "tp2"),
        ("Scales", "tp2xdp2"),
        ("Normalised", "tp2xzb-v"),
        ("Drawn", "pp2"),
    ),
    *(("Hooked", layout) for layout in ("tp2", "sp", "micro", "dp2", "zb-v", "tp2xpp2", "tp2xdp2", "tp2xzb-v")),
]
ROWS = [*EVERYDAY, *(pytest.param(*row, marks=WIDE) for row in FARTHER)]


def compare(kind: str, layout: str, batches: int = 1) -> None:
    sizes, arguments = LAYOUTS[layout]
    reference = run_trainers(hooks.run, None, {}, kind, batches, devices=1)[0].value
    arguments = {"micro_batch_size": "auto", **arguments}
    devices = sizes[0] * sizes[1] * arguments.get("tensor_parallel_size", 1)
    for outcome in run_trainers(hooks.run, sizes, arguments, kind, batches, devices=devices):
        expected = {name: reference[name] for name in outcome.value if outcome.rank == 0 or name in reference}
        assert expected and not list(differences("", outcome.value, expected, 1e-9)), outcome.rank


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("kind", "layout"), ROWS)
def test_hooks_and_steps_do_what_they_do_in_one_process(kind: str, layout: str) -> None:
    compare(kind, layout)


@pytest.mark.parametrize("layout", ["dp2", *(pytest.param(name, marks=WIDE) for name in ("pp2", "tp2", "micro"))])
def test_gradient_hooks_are_given_the_gradient_of_each_batch_that_is_accumulated(layout: str) -> None:
    compare("Hooked", layout, batches=2)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("kind", "complaint", "sequence"),
    [
        (
            "OnOneRank",
            "`on_train_batch_end` changed parameters or gradients that are split over 2 ranks on some",
            False,
        ),
        ("OwnBatches", "the tensor-parallel ranks of one replica loaded different batches", False),
        ("Aside", "is read in a thread of its own while a step or a hook runs", False),
        pytest.param("TooEarly", "layers that run after this line wait for this rank", False, marks=WIDE),
        ("Pruned", "ModelPruning replaces weights by masked ones", False),
        pytest.param("Keeps", "`on_fit_start` keeps a view of the whole `net.", False, marks=WIDE),
        pytest.param("OwnBackward", "`on_after_backward` runs a backward of its own", True, marks=WIDE),
    ],
)
def test_what_would_differ_from_one_process_is_refused(kind: str, complaint: str, sequence: bool) -> None:
    arguments = {"tensor_parallel_size": 2, "micro_batch_size": "auto", "sequence_parallel": sequence}
    for outcome in run_trainers(hooks.refused, (1, 1), arguments, kind, devices=2, check=False, grace=20.0):
        assert complaint in f"{outcome.error}{outcome.trace}{outcome.output}", outcome.rank


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("kind", "tensor"), [("removed", 2), ("around", 2), ("shaped", 2), pytest.param("centred", 2, marks=WIDE)]
)
def test_hooks_on_split_layers_do_what_they_do_in_one_process(kind: str, tensor: int) -> None:
    expected = run_trainers(layers.run, None, {}, kind, devices=1)[0].value
    arguments = {"tensor_parallel_size": tensor, "micro_batch_size": "auto"}
    for outcome in run_trainers(layers.run, (1, 1), arguments, kind, devices=tensor):
        wanted = expected if outcome.rank == 0 else {}
        assert not list(differences("", outcome.value, wanted, 1e-9)), outcome.rank


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("late", "a forward hook (layer_hook_scenarios.py:18) was registered on `net.blocks.0.mlp.0` after"),
        pytest.param("late pre", "was registered on `net.blocks.0.mlp.2` after", marks=WIDE),
        pytest.param("late backward", "was registered on `net.blocks.0.mlp.0` after", marks=WIDE),
        ("in a step", "was registered on `net.blocks.1.mlp.1` after"),
        ("reads", "the forward hook of `net.blocks.0.mlp.0` (layer_hook_scenarios.py:18) computes with"),
        ("around, backward", "the backward hook of `net.blocks.3.mlp` (layer_hook_scenarios.py:34) computes with"),
    ],
)
def test_hooks_that_would_be_given_parts_are_refused(kind: str, complaint: str) -> None:
    arguments = {"tensor_parallel_size": 2, "micro_batch_size": "auto"}
    for outcome in run_trainers(layers.run, (1, 1), arguments, kind, devices=2, check=False, grace=20.0):
        assert complaint in f"{outcome.error}{outcome.trace}{outcome.output}", outcome.rank


@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(name, marks=WIDE) for name in ("sp", "tp2xpp2"))])
def test_numbers_that_hooks_on_layers_keep_for_a_log_are_of_all_features(layout: str) -> None:
    compare_scenario(layers.watched, LAYOUTS[layout][0], **{"micro_batch_size": "auto", **LAYOUTS[layout][1]})
