"""Logits in pieces in every layout: the numbers of one process with whole logits."""

from __future__ import annotations

import pytest
import torch

from tests.harness import one_process, run_trainers
from tests.strategy.chunk_scenarios import train

PP, DP, TP, CP = (f"{axis}_parallel_size" for axis in ("pipeline", "data", "tensor", "context"))
wide = pytest.mark.wide
LAYOUTS = [
    ("tied", {PP: 2}),
    ("own", {TP: 2}),
    ("table", {CP: 2}),
    *(
        pytest.param(*row, marks=wide)
        for row in (
            ("own", {}),
            ("tied", {TP: 2}),
            ("tied", {TP: 2, "sequence_parallel": True}),
            ("own", {CP: 3}),
            ("frozen", {CP: 2}),
            ("tied", {CP: 2, TP: 2}),
            ("tied", {PP: 2, "pipeline_schedule": "zb-h1"}),
            ("own", {PP: 2, CP: 2}),
            ("table", {PP: 2, DP: 2, "optimizer_sharding": True}),
            ("own", {"activation_recompute": "full", CP: 2}),
            ("own", {"micro_batch_size": 1, PP: 2}),
        )
    ),
]


@pytest.mark.parametrize(("head", "arguments"), LAYOUTS, ids=str)
def test_a_layout_with_logits_in_pieces_gives_what_one_process_gives(head, arguments):
    wanted = one_process(train, head, None)
    devices = 1
    for name in (PP, DP, TP, CP):
        devices *= arguments.get(name, 1)
    outcomes = run_trainers(train, head, {"loss_chunks": 3, **arguments}, devices=devices)
    for outcome in outcomes:
        found = outcome.value
        assert set(found) == set(wanted)
        for name in set(wanted) - {"weights", "predicted"}:
            assert found[name] == pytest.approx(wanted[name], rel=1e-9), name
    weights = outcomes[0].value["weights"]
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-9)


def test_a_head_that_is_not_known_is_refused_on_every_rank():
    for outcome in run_trainers(train, "einsum", {"loss_chunks": 3, PP: 2}, devices=2, check=False, grace=20.0):
        assert "`loss_chunks=3` found no head" in f"{outcome.error}\n{outcome.output}", outcome
