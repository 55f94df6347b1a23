"""Activations in host memory in every layout: the numbers of one process without."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron import MegatronStrategy
from tests.activations.host_scenarios import tolerances, train
from tests.harness import one_process, run_trainers

PP, DP, TP, CP = (f"{axis}_parallel_size" for axis in ("pipeline", "data", "tensor", "context"))
TOKENS, ALL = {"activation_offload": {"tokens": 0.4}}, {"activation_offload": "all"}
RING, HEADS = ({"context_parallel_options": {"method": method}} for method in ("ring", "ulysses"))
ZERO_BUBBLE = {"pipeline_schedule": "zb-h1", "micro_batch_size": 2}
wide = pytest.mark.wide
LAYOUTS = [
    ("block", {PP: 2, **TOKENS}, {}),
    ("rotary", {CP: 2, **RING, **TOKENS}, {}),
    ("by hand", {DP: 2, "weight_sharding": True, **ALL}, {}),
    ("hf_gemma2", {PP: 2, **TOKENS}, {}),
    ("checkpointed block", {CP: 2, **RING, **ALL}, {}),
    ("rotary", {PP: 2, **ZERO_BUBBLE, **TOKENS}, {}),
    ("block", {PP: 2, "activation_recompute": "full", **ALL}, {}),
    *(
        pytest.param(*row, marks=wide)
        for row in (
            ("block", {**TOKENS}, {}),
            *(
                (kind, {PP: 2, "pipeline_schedule": schedule, **TOKENS, **more}, {})
                for kind, schedule, more in (
                    ("block", "zb-h1", {"micro_batch_size": 1, TP: 2}),
                    ("by hand", "zb-v", {"micro_batch_size": 2}),
                    ("rotary", "zb-h2", {"micro_batch_size": 2}),
                    ("modules", "dualpipe-v", {"micro_batch_size": 1}),
                    ("rotary", "zb-h1", {"micro_batch_size": 2, CP: 2, **RING}),
                    ("block", "zb-h1", {"micro_batch_size": 2, "activation_offload": "auto"}),
                    ("hf_llama", "zb-h1", {"micro_batch_size": 2}),
                    ("hf_gpt2", "zb-v", {"micro_batch_size": 2}),
                )
            ),
            *(
                (kind, {"activation_recompute": recompute, **ALL, **more}, {})
                for kind, recompute, more in (
                    ("block", "selective", {PP: 2}),
                    ("rotary", {"every": 2}, {PP: 2}),
                    ("modules", ["*.mlp"], {TP: 2}),
                    ("block", "full", {PP: 2, **ZERO_BUBBLE}),
                    ("block", "full", {DP: 2, "weight_sharding": True}),
                    ("hf_llama", "full", {PP: 2, "pipeline_schedule": "interleaved"}),
                    ("hf_gpt2", "full", {"activation_offload": {"every": 2}}),
                )
            ),
            ("by hand", {CP: 2, **TOKENS}, {}),
            ("by hand", {CP: 3, PP: 2, **TOKENS}, {}),
            *(
                (kind, {axis: 2, **TOKENS}, {})
                for kind in ("hf_llama", "hf_gemma2", "hf_mistral", "hf_gpt2", "hf_opt", "hf_bert", "hf_gpt_bigcode")
                for axis in (PP, DP, TP, CP)
                if (kind, axis) != ("hf_gemma2", PP)
            ),
            ("hf_qwen2", {PP: 2, "pipeline_schedule": "interleaved", **TOKENS}, {}),
            ("block", {TP: 2, **TOKENS}, {}),
            ("modules", {PP: 2, "mlp_chunks": 3, **TOKENS}, {}),
            ("block", {TP: 2, **ALL}, {}),
            ("block", {DP: 2, "weight_sharding": True, **TOKENS}, {}),
            ("block", {CP: 3, **TOKENS}, {}),
            ("block", {CP: 2, **HEADS, **TOKENS}, {}),
            ("block", {CP: 2, TP: 2, **TOKENS}, {}),
            ("rotary", {CP: 2, PP: 2, **TOKENS, "micro_batch_size": 2}, {}),
            ("rotary", {PP: 2, "pipeline_schedule": "interleaved", **TOKENS}, {}),
            ("block", {PP: 2, "pipeline_schedule": "zb-h1", **ALL}, {}),
            ("block", {PP: 2, "loss_chunks": 3, **TOKENS}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
            ("by hand", {CP: 2, PP: 2, **ALL}, {}),
            ("checkpointed block", {CP: 2, **HEADS, **TOKENS}, {}),
            ("checkpointed block", {CP: 2, PP: 2, **ALL}, {}),
            ("checkpointed block", {**ALL}, {}),
            ("rotary", {"activation_recompute": "full"}, {}),
            ("rotary", {"micro_batch_size": 1, "optimizer_offload": True, **TOKENS}, {}),
        )
    ),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("kind", "arguments", "options"), LAYOUTS, ids=str)
def test_a_layout_with_activations_in_host_memory_gives_what_one_process_gives(kind, arguments, options):
    wanted = one_process(train, kind, None, options)
    devices = 1
    for name in (PP, DP, TP, CP):
        devices *= arguments.get(name, 1)
    outcomes = run_trainers(train, kind, arguments, options, devices=devices)
    losses, close = tolerances(kind, arguments)
    for outcome in outcomes:
        found = outcome.value
        for name in set(wanted) - {"weights"}:
            assert found[name] == pytest.approx(wanted[name], rel=losses), name
    weights = outcomes[0].value["weights"]
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=close, atol=close)


def test_a_layer_that_is_not_token_by_token_is_refused_on_every_rank():
    for outcome in run_trainers(train, "convolution", {PP: 2, **TOKENS}, {}, devices=2, check=False, grace=20.0):
        assert "there `conv1d` reads other tokens" in f"{outcome.error}\n{outcome.output}", outcome


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({**TOKENS, "activation_recompute": "full"}, "`activation_recompute='full'`; use `activation_offload='all'`"),
        ({"activation_offload": "auto", "activation_recompute": ["*.mlp"]}, "decides by itself which tokens"),
        ({**ALL, "activation_recompute": "full", CP: 2}, "`activation_recompute='full'` over context ranks"),
        ({**ALL, "compile_layers": True}, "`compile_layers=True`"),
        ({**ALL, "layout": "auto"}, "`layout='auto'`"),
        ({**TOKENS, TP: 2, "sequence_parallel": True}, "`sequence_parallel=True`.*`activation_offload='all'`"),
        ({**TOKENS, "random_streams": "layout"}, "`random_streams='layout'`"),
        ({"activation_offload": "some"}, "must be None, 'all'"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        MegatronStrategy(**arguments)
