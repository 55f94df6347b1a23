"""Code that reads the sizes of an attention elsewhere reads those of the model, whatever each rank has of its heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.parallelize.trial.split_views import SplitViews
from tests.harness import one_process, run_trainers
from tests.parallelize.size_scenarios import fit_methods, fit_sized

INSIDE = ("kept width", "width of the input", "width", "heads")
"""Code behind the projection, in the same forward: views between the projections alone get sizes of one rank."""

OUTSIDE = ("heads in the layer", "heads in the step", "rows in the step", "width in the optimizer", "heads in a hook")
"""Code of others."""

OF_WEIGHTS = ("norm of a weight", "rows of a weight", "norm in training")
"""Code that uses a weight beside its layer, without a gradient or for its size: the layer stays whole."""

LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"tensor_parallel_size": 2}),
    (2, {"tensor_parallel_size": 2, "sequence_parallel": True, "activation_recompute": "full"}),
    (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batch_size": 2}),
    (4, {"tensor_parallel_size": 2, "context_parallel_size": 2}),
)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=("tp2", "sequence", "tp2xpp2"))
@pytest.mark.parametrize("kind", (*INSIDE, *OUTSIDE, *OF_WEIGHTS, "rows of the head"))
def test_sizes_read_elsewhere_are_those_of_one_process(kind: str, layout: tuple[int, dict[str, Any]]) -> None:
    loss, weights, _ = one_process(fit_sized, kind, None)
    devices, options = layout
    outcomes = [each.value for each in run_trainers(fit_sized, kind, options, devices=devices)]
    for found, _, styles in outcomes:
        assert found == pytest.approx(loss, rel=1e-9)
        assert ("packed_colwise" in styles) == any("wise" in style for style in styles) == (kind not in OF_WEIGHTS)
    torch.testing.assert_close(outcomes[0][1], weights, rtol=1e-9, atol=1e-9)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("own", [False, True], ids=("a net", "the module"))
@pytest.mark.parametrize("kind", ("method", "heads", "forward"))
def test_sizes_are_local_in_methods_that_a_step_calls_in_place_of_their_module(kind: str, own: bool) -> None:
    loss, _ = one_process(fit_methods, kind, own, None)
    for outcome in run_trainers(fit_methods, kind, own, {"tensor_parallel_size": 2}, devices=2):
        found, styles = outcome.value
        assert found == pytest.approx(loss, rel=1e-9)
        assert "packed_colwise" in styles


@pytest.mark.everyday(1)
@pytest.mark.parametrize("layout", (LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]), ids=("tp2", "tp2xpp2", "tp2xcp2"))
@pytest.mark.parametrize("kind", ("split", "unbound", "merged", "groups"))
def test_an_attention_that_a_layer_computes_itself_is_split_by_heads(kind: str, layout: tuple[int, Any]) -> None:
    loss, weights, _ = one_process(fit_sized, kind, None, True)
    devices, options = layout
    outcomes = [each.value for each in run_trainers(fit_sized, kind, options, True, devices=devices)]
    split = "context_parallel_size" not in options
    for found, _, styles in outcomes:
        assert found == pytest.approx(loss, rel=1e-9)
        assert ("rowwise" in styles) == split
    torch.testing.assert_close(outcomes[0][1], weights, rtol=1e-9, atol=1e-9)


def test_a_view_that_no_trial_has_made_is_refused_with_its_line() -> None:
    views = SplitViews(2)

    def run(features: int, wide: bool = False) -> Tensor:
        y = views.show(torch.zeros(3, features))
        return y.reshape(3, 2, 4, 2) if wide else y.view(3, 4, -1)

    views.learn(lambda: run(16), lambda: run(8))
    assert run(8).shape == (3, 2, 4)
    with pytest.raises(RuntimeError, match=r"test_local_sizes.py:\d+ \(run\): `reshape` is called .* did not run"):
        run(8, wide=True)
