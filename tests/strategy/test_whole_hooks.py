"""Hooks see weights and gradients that tensor-parallel ranks split as one process sees them."""

from __future__ import annotations

import pytest

from tests.harness import run_trainers
from tests.parity.scenario import differences
from tests.strategy import whole_scenarios as hooks

WIDE = pytest.mark.wide
LAYOUTS = {
    "tp2": ((1, 1), {"tensor_parallel_size": 2}),
    "tp2xpp2": ((2, 1), {"tensor_parallel_size": 2, "micro_batch_size": 2}),
    "sp": ((1, 1), {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "tp2xdp2": ((1, 2), {"tensor_parallel_size": 2}),
}
ROWS = [
    ("Normalised", "tp2"),
    ("Normalised", "tp2xpp2"),
    pytest.param("Normalised", "sp", marks=WIDE),
    pytest.param("Normalised", "tp2xdp2", marks=WIDE),
    ("Adversary", "tp2"),
    ("Afresh", "sp"),
    pytest.param("Afresh", "tp2", marks=WIDE),
]


@pytest.mark.parametrize(("kind", "layout"), ROWS)
def test_hooks_do_what_they_do_in_one_process(kind: str, layout: str) -> None:
    sizes, arguments = LAYOUTS[layout]
    reference = run_trainers(hooks.run, None, {}, kind, devices=1)[0].value
    arguments = {"micro_batch_size": "auto", **arguments}
    devices = sizes[0] * sizes[1] * arguments["tensor_parallel_size"]
    for outcome in run_trainers(hooks.run, sizes, arguments, kind, devices=devices):
        expected = {name: reference[name] for name in outcome.value if outcome.rank == 0 or name in reference}
        assert expected and not list(differences("", outcome.value, expected, 1e-9)), outcome.rank


@pytest.mark.parametrize(
    ("kind", "complaint", "sequence"),
    [
        (
            "OnOneRank",
            "`on_train_batch_end` changed parameters or gradients that are split over 2 ranks on some",
            False,
        ),
        ("LatePenalty", "the loss differs between tensor-parallel ranks", False),
        ("OwnBatches", "the tensor-parallel ranks of one replica loaded different batches", False),
        ("Pruned", "ModelPruning puts masks in the place of weights", False),
        pytest.param("Keeps", "`on_fit_start` keeps a view of the whole `net.", False, marks=WIDE),
        pytest.param("OwnBackward", "`on_after_backward` runs a backward of its own", True, marks=WIDE),
    ],
)
def test_what_would_differ_from_one_process_is_refused(kind: str, complaint: str, sequence: bool) -> None:
    arguments = {"tensor_parallel_size": 2, "micro_batch_size": "auto", "sequence_parallel": sequence}
    for outcome in run_trainers(hooks.refused, (1, 1), arguments, kind, devices=2, check=False, grace=20.0):
        assert complaint in f"{outcome.error}{outcome.trace}{outcome.output}", outcome.rank
