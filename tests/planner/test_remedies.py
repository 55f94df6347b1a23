"""What messages of the planner advise, followed to the letter: a layout is found, or a run is predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_megatron.planner import Cluster, Limits, ModelShape, Recipe, plan, predict

A100, H100 = Cluster.named("A100-80"), Cluster.named("H100")
SMALL = ModelShape(layers=24, hidden=2048, heads=16, vocab=50304, seq=1024)
LARGE = ModelShape(layers=96, hidden=12288, heads=96, vocab=51200, seq=2048, positions=2048)
ODD = ModelShape(layers=1, hidden=64, heads=1, vocab=64, seq=8, ffn=63)
RUN = Recipe(tensor=2, pipeline=2, data=2, context=1, micro_batch=1, global_batch=8)


def _plans(gpus: int = 8, batch: int = 64, shape: ModelShape = SMALL, cluster: Cluster = A100, **limits: Any) -> Any:
    return lambda: plan(shape, cluster, gpus, batch, limits=Limits(**limits)).best.fits


def _predicts(**changes: Any) -> Callable[[], Any]:
    return lambda: predict(SMALL, replace(RUN, **changes), A100).iteration_seconds > 0


def _shapes(**changes: Any) -> Callable[[], Any]:
    return lambda: replace(SMALL, **changes).parameters > 0


REMEDIES = [
    (_plans(16, 64, LARGE), "let host memory be used (`offload`)", _plans(16, 64, LARGE, offload=True)),
    (_plans(7, 3, ODD), "choose a number of GPUs that divides `global_batch`", _plans(3, 3, ODD)),
    (_plans(7, 3, ODD), "or `global_batch` as a multiple of `gpus`", _plans(7, 7, ODD)),
    (_plans(precision="fp8"), "use bf16 or a Hopper GPU", _plans(cluster=H100, precision="fp8")),
    (_plans(expert=2), "the model has none; leave it out", _plans()),
    (_predicts(chunks=2), "use `schedule=interleaved`", _predicts(chunks=2, schedule="interleaved")),
    (_predicts(schedule="zb-v"), "set it to 2", _predicts(schedule="zb-v", chunks=2)),
    (_predicts(global_batch=1), "raise `global_batch`", _predicts(global_batch=2)),
    (_predicts(weight_offload=True), "use `sharding=fsdp`", _predicts(weight_offload=True, sharding="fsdp")),
    (
        _predicts(activation_offload=0.5, recompute="full"),
        "goes with `recompute=none`",
        _predicts(activation_offload=0.5, recompute="none"),
    ),
    (
        _predicts(activation_offload="inputs"),
        "goes with `recompute=full`",
        _predicts(activation_offload="inputs", recompute="full"),
    ),
    (_predicts(sharding="none", shard=2), "leave `shard` out", _predicts(sharding="none")),
    (_shapes(hidden=2050), "or give `head_dim`", _shapes(hidden=2050, head_dim=128)),
    (_shapes(top_k=2), "are about `experts`; give it too", _shapes(top_k=2, experts=8)),
    (
        lambda: Cluster.from_mapping({"gpu": "Z9"}),
        "describe it in a YAML file",
        lambda: Cluster.from_mapping({"gpu": {"name": "Z9", "peak_16": 300, "bandwidth": 2000, "memory": 80}}),
    ),
]


@pytest.mark.parametrize(("refused", "words", "advised"), REMEDIES, ids=[row[1] for row in REMEDIES])
def test_what_a_message_advises_can_be_planned(
    refused: Callable[[], Any], words: str, advised: Callable[[], Any]
) -> None:
    with pytest.raises(ValueError) as told:
        refused()
    assert words in str(told.value)
    assert advised()
