"""Code of the user that runs in backwards: micro-batches where it treats samples one by one, else whole batches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.harness import run_trainers
from tests.parity.scenario import Layout, differences
from tests.strategy import backward_scenarios as backwards

PARTS = {"micro_batch_size": 2}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "stages": ((2, 1), {}),
    "alone": ((1, 1), PARTS),
    "interleaved": ((2, 1), PARTS | {"pipeline_schedule": "interleaved", "virtual_pipeline_parallel_size": 2}),
    "zb-v": ((2, 1), PARTS | {"pipeline_schedule": "zb-v"}),
    "tensor": ((2, 1), {"tensor_parallel_size": 2}),
    "tensor_alone": ((1, 1), PARTS | {"tensor_parallel_size": 2}),
    "recomputed": ((2, 1), PARTS | {"activation_recompute": "full"}),
    "said_whole": ((2, 1), PARTS | {"whole_batch_loss": True}),
}
QUICK = {("stages", kind) for kind in ("hook", "layer", "function", "taken", "watches", "reversal")}
QUICK |= {
    ("interleaved", "centred"),
    ("alone", "module_hook"),
    ("stages", "node"),
    ("zb-v", "negatives"),
    ("stages", "between"),
    ("stages", "weights_reversal"),
    ("tensor_alone", "logits"),
    ("alone", "weights_hook"),
    ("stages", "constants"),
    ("alone", "constants_twice"),
    ("zb-v", "constants"),
}
APART = ("reversal", "weights_reversal", "clamp", "between", "logits", "constants", "constants_twice")
WHOLE = "each batch runs whole"


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=() if (layout, kind) in QUICK else pytest.mark.wide)
        for layout in LAYOUTS
        for kind in backwards.KINDS
    ],
)
def test_backwards_are_those_of_one_process(layout: str, kind: str) -> None:
    (plain,) = run_trainers(backwards.train, None, {}, kind, devices=1)
    shape, arguments = LAYOUTS[layout]
    tensor = arguments.get("tensor_parallel_size", 1)
    outcomes = run_trainers(backwards.train, shape, arguments, kind, devices=shape[0] * shape[1] * tensor)
    for outcome in outcomes:
        wanted = plain.value if outcome is outcomes[0] else _python_of(plain.value)
        seen = outcome.value if outcome is outcomes[0] else _python_of(outcome.value)
        found = list(differences("", seen, wanted, 1e-9))
        assert not found, f"rank {outcome.rank}: " + "\n".join(found[:10])
    if layout in ("stages", "alone") and not kind.endswith("twice"):
        assert (WHOLE in outcomes[0].output) == (kind not in APART)


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    "kind", ["hook", "weights_hook", pytest.param("function", marks=pytest.mark.wide), "reversal", "weights_reversal"]
)
@pytest.mark.parametrize("arguments", [PARTS, {}])
def test_replicas_say_that_code_in_backwards_is_each_ones_own(kind: str, arguments: dict[str, Any]) -> None:
    first, _ = run_trainers(backwards.train, (1, 2), arguments, kind, devices=2, check=False)
    said = re.sub(r"\s+", " ", f"{first.error}\n{first.output}")  # a warning is an error here
    assert ("with its own samples, where one process has those of all" in said) == (kind not in APART)


def test_what_begins_later_and_mixes_is_refused() -> None:
    for outcome in run_trainers(backwards.train, (2, 1), PARTS, "later", devices=2, check=False, grace=20.0):
        assert outcome.error is not None and "killed" not in outcome.error, f"rank {outcome.rank}: {outcome.error}"
        assert "Step 3 ran it for the first time" in f"{outcome.error}\n{outcome.output}"


def test_gradients_that_activations_keep_are_refused_over_stages() -> None:
    for outcome in run_trainers(backwards.train, (2, 1), PARTS, "keeps", devices=2, check=False, grace=20.0):
        assert outcome.error is not None and "killed" not in outcome.error, f"rank {outcome.rank}: {outcome.error}"
        assert "only the stage that computes the activation has its gradient" in f"{outcome.error}\n{outcome.output}"


def test_gradients_of_some_tokens_are_refused_over_stages() -> None:
    arguments = PARTS | {"context_parallel_size": 2}
    for outcome in run_trainers(backwards.train, (2, 1), arguments, "logits", devices=4, check=False, grace=20.0):
        assert outcome.error is not None and "killed" not in outcome.error, f"rank {outcome.rank}: {outcome.error}"
        assert "`register_hook` was asked of a tensor" in f"{outcome.error}\n{outcome.output}"


@pytest.mark.parametrize("kind", ["layer", "logits"])
def test_gradients_of_some_tokens_are_refused_in_layers(kind: str) -> None:
    arguments = {"tensor_parallel_size": 2, "micro_batch_size": "auto", "sequence_parallel": True}
    for outcome in run_trainers(backwards.train, (1, 1), arguments, kind, devices=2, check=False, grace=20.0):
        said = re.sub(r"\s+", " ", f"{outcome.error}\n{outcome.output}")
        assert ("`register_hook` in `net.layers.1` would be given the gradient" in said) == (kind == "layer"), said
        assert (outcome.error is None) == (kind == "logits"), outcome.error


def _python_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith("python.")}
