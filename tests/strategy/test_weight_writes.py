"""Steps that write weights, and layers that remember the batch before, train as in one process or are refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.harness import one_process, run_trainers
from tests.parity.scenario import differences
from tests.strategy import weight_write_scenarios as writes

WIDE = pytest.mark.wide
LAYOUTS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "stages": ((2, 1), {}),
    "alone": ((1, 1), {}),
    "replicas": ((1, 2), {}),
    "whole": ((2, 1), {"micro_batch_size": "auto", "whole_batch_loss": True}),
    "tensor": ((1, 1), {"tensor_parallel_size": 2}),
    "grid": ((2, 2), {}),
}
KINDS = (
    "weights",
    "target",
    "data",
    "set",
    "blend",
    "init",
    "layer",
    "memory",
    "mean",
    "max_norm",
    "late",
    "late_data",
)
KINDS += ("late_set", "carried")
QUICK = {
    *(("stages", "weights"), ("stages", "target"), ("stages", "memory"), ("stages", "layer"), ("whole", "target")),
    *(("tensor", "blend"), ("tensor", "init"), ("stages", "blend")),
    *(("stages", "late"), ("stages", "carried"), ("alone", "data"), ("stages", "set"), ("replicas", "max_norm")),
}
REFUSED = {(layout, "mean") for layout in ("replicas", "grid")}  # a mean over a replica's samples, as in DDP
REFUSED |= {(layout, "carried") for layout in ("replicas", "grid", "tensor")}  # warned; and a whole layer on each rank
ROWS = [
    pytest.param(*row, marks=[] if row in QUICK else [WIDE])
    for row in itertools.product(LAYOUTS, KINDS)
    if row not in REFUSED
]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("layout", "kind"), ROWS)
def test_a_step_that_writes_weights_or_remembers_trains_as_in_one_process(layout: str, kind: str) -> None:
    plain = one_process(writes.train, None, {}, kind)
    found = list(differences("", _run(layout, kind)[0].value, plain, 1e-9))
    assert not found, "\n".join(found[:10])


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("layout", "kind", "arguments", "wanted"),
    [
        ("stages", "behind", {}, "writes a weight or buffer of `net.embed` after layers"),
        (
            "stages",
            "of_layers",
            {},
            "into the weight `net.target.weight` depends on `net.layers.0`",
        ),
        ("whole", "tied_data", {}, "`net.embed.weight` is a weight that several pipeline stages have"),
        (
            "stages",
            "unread_tied_late",
            {},
            "the step writes the weight `net.embed.weight`, and would again in each of the 2",
        ),
        pytest.param(
            "stages",
            "unread_late_data",
            {},
            "the step writes the weight `net.layers.1.up.weight`, and would again in each",
            marks=WIDE,
        ),
        ("stages", "unread_late_set", {}, "the step writes the weight `net.head.weight`, and would again in each"),
        ("stages", "unread_late", {}, "would again in each of the 2 micro-batches"),
        ("whole", "unread_late", {}, "would again in each of the 4 micro-batches"),
        pytest.param("whole", "unread_late_set", {}, "would again in each of the 8 micro-batches", marks=WIDE),
        pytest.param("whole", "unread_late_data", {}, "would again in each of the 8 micro-batches", marks=WIDE),
        ("stages", "weights", {"pipeline_schedule": "zb-v"}, "its code runs once for each virtual stage"),
        ("replicas", "tied", {}, "`net.head.weight` is the same weight"),
        ("replicas", "functional", {}, "`net.embed.weight` differs between the replicas"),
        ("replicas", "max_norm", {"weight_sharding": True}, "that weight is a copy, which is given back"),
        ("alone", "layer", {"activation_recompute": "full"}, "writes its weight `up.weight`"),
    ],
)
def test_writes_that_one_process_would_do_otherwise_are_refused_by_name(
    layout: str, kind: str, arguments: dict[str, Any], wanted: str
) -> None:
    for outcome in _run(layout, kind, arguments, check=False, grace=20, deadline=60):
        assert outcome.error is not None, f"rank {outcome.rank} trained on"
        assert wanted in f"{outcome.error}\n{outcome.output}", f"{outcome.error}\n{outcome.output}"


def _run(layout: str, kind: str, more: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    sizes, arguments = LAYOUTS[layout]
    devices = sizes[0] * sizes[1] * arguments.get("tensor_parallel_size", 1)
    return run_trainers(writes.train, sizes, arguments | (more or {}), kind, devices=devices, **options)


SHARED: list[Any] = [{}, pytest.param({"optimizer_sharding": False}, marks=WIDE)]


@pytest.mark.parametrize("kind", ["backward", "gathered"])
@pytest.mark.parametrize("arguments", SHARED)
def test_gradients_that_a_step_projects_on_each_other_are_those_of_all_replicas(
    kind: str, arguments: dict[str, Any]
) -> None:
    plain = one_process(writes.project, None, {}, kind)
    outcomes = run_trainers(writes.project, (1, 2), arguments, kind, devices=2)
    found = list(differences("", outcomes[0].value, plain, 1e-9))
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize("arguments", SHARED)
def test_gradients_of_one_replica_are_refused_where_a_step_sets_them(arguments: dict[str, Any]) -> None:
    for outcome in run_trainers(writes.project, (1, 2), arguments, "grad", devices=2, check=False, grace=20):
        assert outcome.error is not None, f"rank {outcome.rank} trained on"
        assert "the step sets `.grad` of" in outcome.error
        assert "`self.all_gather(gradient).mean(0)`" in outcome.error
