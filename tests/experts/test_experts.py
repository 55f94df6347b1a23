"""Experts shared out over replicas train as in one process, and what cannot be is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers import MoE, router_losses
from tests.experts.expert_scenarios import fit
from tests.experts.families import FAMILIES, IN_FLOAT32, UNSPLIT
from tests.experts.strangers import EXACT, PER_BATCH
from tests.harness import one_process, run_trainers

WIDE = pytest.mark.wide
TWO: dict[str, Any] = {"expert_parallel_size": 2}
SPREAD = {"weight_sharding": True}
LATE = {"overlap_parameter_gather": True}
GATHERS = {"expert_dispatch": "all_gather"}
PIPE: dict[str, Any] = {"expert_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batch_size": 2}
ROWS: list[Any] = [
    ("words", 2, {**TWO, "micro_batch_size": 3}, {"accumulate_grad_batches": 1}),
    ("starved", 2, TWO, {}),
    ("starved", 4, {"expert_parallel_size": 2, "tensor_parallel_size": 2, **GATHERS}, {}),
    ("watched", 2, {**TWO, "optimizer_sharding": False}, {}),
    ("strange_starved", 2, TWO, {}),
    ("strange_sequences", 2, {}, {}),
    ("strange_sure", 2, {"micro_batch_size": 4}, {}),
    ("strange_filled", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 1}, {}),
    ("drop_in", 2, TWO, {}),
    ("encoded", 4, PIPE, {}),
    ("words", 4, {**TWO, **SPREAD}, {"accumulate_grad_batches": 2}),
    (
        "uneven",
        4,
        {**PIPE, "pipeline_schedule": "zb-v", "activation_recompute": "full", "pipeline_layers": "layers"},
        {},
    ),
    *(
        pytest.param(*row, marks=WIDE)
        for row in (
            *((f"strange_{name}", 2, TWO, {}) for name in EXACT),
            *((f"strange_{name}", 4, PIPE, {}) for name in EXACT if name != "bytoken"),
            ("strange_starved", 4, TWO, {"accumulate_grad_batches": 2}),
            ("strange_sorted", 4, {"expert_parallel_size": 4, "optimizer_sharding": False}, {}),
            ("strange_masked", 4, {**PIPE, "pipeline_schedule": "zb-v", "activation_recompute": "full"}, {}),
            *((family, 2, {}, {}) for family in UNSPLIT),
            *((family, 2, {"pipeline_parallel_size": 2, "micro_batch_size": 4}, {}) for family in UNSPLIT),
            ("starved_rectified", 2, TWO, {}),
            ("starved_rectified", 4, PIPE, {}),
            ("some_samples", 2, TWO, {}),
            ("some_samples", 4, {**PIPE, "activation_recompute": "full"}, {}),
            ("some_samples", 2, {**TWO, **GATHERS, "activation_recompute": "full"}, {}),
            ("some_samples_list", 4, PIPE, {}),
            ("penalised", 2, TWO, {}),
            ("penalised", 4, {**TWO, "tensor_parallel_size": 2}, {}),
            ("sharing", 2, TWO, {}),
            ("sharing", 4, PIPE, {}),
            ("sharing_list", 2, TWO, {}),
            ("sharing_list", 4, PIPE, {}),
            ("encoded", 4, {**PIPE, "optimizer_sharding": False}, {}),
            ("encoded", 8, {**PIPE, "pipeline_schedule": "zb-v"}, {"accumulate_grad_batches": 2}),
            ("strange_nested", 2, TWO, {}),
            ("strange_nested", 4, PIPE, {}),
            ("encoded", 4, {**PIPE, **SPREAD}, {}),
            ("encoded_list", 4, {**PIPE, "activation_recompute": "full"}, {}),
            ("encoded", 4, {**PIPE, "tensor_parallel_size": 2}, {}),
            ("words", 2, {**TWO, **GATHERS, "micro_batch_size": 3}, {"accumulate_grad_batches": 2}),
            ("uneven", 4, {**TWO, **GATHERS, **SPREAD}, {}),
            ("starved", 4, {"expert_parallel_size": 4, **GATHERS, "activation_recompute": "full"}, {}),
            ("drop_in", 4, {**PIPE, **GATHERS, "pipeline_schedule": "zb-v"}, {}),
            ("drop_in", 4, {**TWO, **GATHERS, "expert_tensor_parallel_size": 2}, {}),
            ("Mixtral", 2, {**TWO, **GATHERS, "tensor_parallel_size": 2, "sequence_parallel": True}, {}),
            ("GptOss", 4, {**PIPE, **GATHERS}, {}),
            ("words", 4, {**PIPE, **GATHERS, "pipeline_schedule": "interleaved"}, {}),
            ("switching", 2, TWO, {}),
            ("switching", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 4}, {}),
            ("Llama4Text", 4, {**PIPE, "activation_recompute": "full"}, {}),
            ("JetMoe", 4, {"expert_parallel_size": 4, **SPREAD}, {}),
            ("Dbrx", 2, {**TWO, **GATHERS}, {}),
            *((family, 2, {"micro_batch_size": 2}, {}) for family in list(FAMILIES)[::3]),
            ("strange_sure", 2, {}, {}),
            *((f"strange_{name}", 2, {"micro_batch_size": 4}, {}) for name in EXACT if name != "sure"),
            *((f"balanced_{family}", 2, TWO, {}) for family in FAMILIES),
            ("balanced_Qwen3Moe", 2, {}, {"accumulate_grad_batches": 2}),
            ("balanced_Olmoe", 2, {"micro_batch_size": 2}, {}),
            ("balanced_GptOss", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 2}, {}),
            (
                "balanced_Mixtral",
                4,
                {**PIPE, "pipeline_schedule": "zb-v", "activation_recompute": "full"},
                {"accumulate_grad_batches": 2},
            ),
            ("balanced_Qwen2Moe", 4, {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"}, {}),
            ("balanced_passed", 2, TWO, {}),
            ("balanced_Mixtral", 2, {"context_parallel_size": 2}, {}),
            ("drop_in", 2, {}, {"accumulate_grad_batches": 2}),
            ("drop_in", 2, {"micro_batch_size": 2}, {}),
            ("drop_in", 4, PIPE, {}),
            ("drop_in", 4, {**PIPE, "pipeline_schedule": "zb-v", "activation_recompute": "full"}, {}),
            ("drop_in", 4, {"expert_parallel_size": 4}, {}),
            ("drop_in", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 4}, {}),
            ("Qwen3Moe", 4, {**PIPE, "pipeline_schedule": "zb-h1", "activation_recompute": "full"}, {}),
            ("words", 2, TWO, {"accumulate_grad_batches": 2}),
            ("words", 2, {**TWO, "optimizer_sharding": False}, {"accumulate_grad_batches": 2}),
            ("words", 2, {**TWO, "activation_recompute": "full"}, {}),
            ("words", 2, {**TWO, **SPREAD, "activation_recompute": "full"}, {}),
            ("starved", 4, {"expert_parallel_size": 4, **SPREAD}, {}),
            ("Mixtral", 4, {**PIPE, **SPREAD}, {}),
            ("strange_sorted", 4, {**PIPE, **SPREAD, "pipeline_schedule": "zb-v"}, {}),
            ("balanced_Qwen3Moe", 4, {**TWO, **SPREAD}, {}),
            ("drop_in", 4, {**PIPE, **SPREAD, "activation_recompute": "full"}, {}),
            ("watched", 4, {**TWO, **SPREAD}, {}),
            ("starved", 4, {"expert_parallel_size": 4, **LATE}, {}),
            ("strange_starved", 4, {**TWO, **LATE}, {"accumulate_grad_batches": 2}),
            ("some_samples_list", 4, {**TWO, **LATE}, {}),
            ("Mixtral", 4, {**TWO, **LATE, "tensor_parallel_size": 2}, {}),
            ("words", 8, {**PIPE, **LATE, "pipeline_schedule": "zb-v"}, {}),
            ("gathered", 2, {}, {}),
            ("gathered", 2, TWO, {}),
            ("words", 4, TWO, {}),
            ("words", 4, {"expert_parallel_size": 4}, {}),
            ("words", 4, {**TWO, "optimizer_sharding": False}, {}),
            ("words", 4, {**TWO, "optimizer_sharding": {"shard": 2}}, {}),
            ("starved", 4, {"expert_parallel_size": 4}, {}),
            ("watched", 4, TWO, {}),
            ("uneven", 4, TWO, {}),
            *(
                ("words", 4, {**PIPE, "pipeline_schedule": name}, {"accumulate_grad_batches": 1 + index % 2})
                for index, name in enumerate(("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v"))
            ),
            ("words", 4, {**PIPE, "pipeline_schedule": "dualpipe-v", "micro_batch_size": 1}, {}),
            ("starved", 4, {**PIPE, "optimizer_sharding": False, "activation_recompute": "full"}, {}),
        )
    ),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("name", "devices", "options", "trainer"), ROWS, ids=str)
def test_training_is_that_of_one_process(name, devices, options, trainer):
    expected = one_process(fit, name, None, trainer)
    found = [outcome.value for outcome in run_trainers(fit, name, options, trainer, devices=devices)]
    for value in found:
        within = 1e-6 if name.startswith("balanced") or name in IN_FLOAT32 else 1e-10  # Hugging Face counts in float32
        assert value["losses"] == pytest.approx(expected["losses"], rel=within)
        if name in ("words", "starved", "watched", "strange_starved"):
            stages, ranks = options.get("pipeline_parallel_size", 1), options.get("expert_parallel_size", 1)
            assert value["share"] == 1 / (ranks * stages)
    assert set(found[0]["weights"]) == set(expected["weights"])
    near = 1e-6 if name in IN_FLOAT32 else 1e-9
    for key, value in found[0]["weights"].items():
        torch.testing.assert_close(value, expected["weights"][key], rtol=near, atol=near, msg=key)


def _first_wide(rows: list[Any]) -> list[Any]:
    return [row if not place else pytest.param(*row, marks=WIDE) for place, row in enumerate(rows)]


PARTS: list[Any] = _first_wide(
    [
        ("balanced", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 4}),
        *((name, 1, {"micro_batch_size": 4}) for name in PER_BATCH),
        *((name, 2, {"pipeline_parallel_size": 2, "micro_batch_size": 4}) for name in PER_BATCH if name != "balanced"),
        ("returned", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 2, "pipeline_schedule": "zb-v"}),
    ]
)


@pytest.mark.parametrize(("name", "devices", "options"), PARTS, ids=str)
def test_a_small_loss_of_the_whole_batch_is_found_in_float32(name, devices, options):
    trainer = {"precision": "32-true"}
    expected = one_process(fit, f"strange_{name}", None, trainer)
    for outcome in run_trainers(fit, f"strange_{name}", options, trainer, devices=devices):
        for key, value in outcome.value["weights"].items():
            torch.testing.assert_close(value, expected["weights"][key], rtol=1e-6, atol=1e-7, msg=key)


def test_gathered_tokens_are_refused_where_experts_get_rows_of_their_own():
    for outcome in run_trainers(fit, "strange_loop", {**TWO, **GATHERS}, {}, devices=2, check=False, grace=20.0):
        assert "the experts of `layers.0.mixture.experts` are called with the rows" in str(outcome.error)
    with pytest.raises(ValueError, match="distribute them by `expert_parallel_size`, or leave it out"):
        MegatronStrategy(**GATHERS)
    with pytest.raises(ValueError, match="'deepep'` must be 'all_to_all' or 'all_gather'"):
        MegatronStrategy(**TWO, expert_dispatch="deepep")


@pytest.mark.parametrize("name", _first_wide([(name,) for name in PER_BATCH]), ids=str)
def test_a_loss_of_each_replica_is_refused_by_the_name_of_its_router(name):
    name = name if isinstance(name, str) else name[0]
    outcomes = run_trainers(fit, f"strange_{name}", {}, {}, devices=2, check=False, grace=20.0)
    said = str(outcomes[0].error)
    assert isinstance(outcomes[0].error, ValueError) or "ValueError" in said, said
    assert "`layers.0.mixture." in said, said
    assert "`data_parallel_size=2`" in said, said
    assert "`expert_balance='replica'`" in said, said


@pytest.mark.wide
@pytest.mark.parametrize("name", _first_wide([(name,) for name in PER_BATCH]), ids=str)
def test_experts_shared_out_give_each_replica_its_own_loss_where_it_is_wanted(name):
    name = name if isinstance(name, str) else name[0]
    own, trained = {"expert_balance": "replica"}, {"limit_val_batches": 0}  # validation says whose loss it logs
    whole = run_trainers(fit, f"strange_{name}", own, trained, devices=2)[0].value
    split = run_trainers(fit, f"strange_{name}", {**own, **TWO}, trained, devices=2)[0].value
    for key, value in split["weights"].items():
        torch.testing.assert_close(value, whole["weights"][key], rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "precision", "within"),
    [
        ("built_later", "64-true", 1e-9),
        ("words", "bf16-true", 2e-2),
        ("drop_in", "32-true", 1e-4),
        ("words", "bf16-mixed", 5e-2),
        ("balanced_Mixtral", "bf16-mixed", 2e-2),
    ],
)
def test_experts_shared_out_train_as_experts_on_every_replica(name, precision, within):
    trainer = {"precision": precision, "gradient_clip_val": None}
    whole = run_trainers(fit, name, {}, trainer, devices=2)[0].value
    split = run_trainers(fit, name, TWO, trainer, devices=2)[0].value
    assert split["losses"] == pytest.approx(whole["losses"], rel=within)
    for key, value in split["weights"].items():
        assert value.dtype == whole["weights"][key].dtype
        far = float((value - whole["weights"][key]).double().norm() / whole["weights"][key].double().norm())
        assert far <= within, key


CHAINS: list[Any] = [
    [(2, TWO), (2, TWO), (1, {})],
    [(4, {"expert_parallel_size": 4}), (4, TWO), (2, {**TWO, "optimizer_sharding": False})],
    [(1, {}), (4, PIPE), (4, TWO)],
    [(2, {}), (4, {"expert_parallel_size": 4}), (4, {**PIPE, "pipeline_schedule": "zb-v"})],
]


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        ("strange_starved", CHAINS[0]),
        *(pytest.param("words", chain, marks=WIDE) for chain in CHAINS[1:]),
        *(pytest.param("encoded", chain, marks=WIDE) for chain in (CHAINS[0], CHAINS[3])),
        pytest.param("strange_starved", CHAINS[2], marks=WIDE),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_with_its_experts_shared_out_otherwise(name, chain, tmp_path):
    expected = one_process(fit, name, None, {}, 2 * len(chain))
    before = ""
    for part, (devices, options) in enumerate(chain):
        saved = str(tmp_path / f"{part}.ckpt")
        steps = 2 * part + 2
        found = run_trainers(fit, name, options, {}, steps, before, saved, devices=devices)[0].value
        before = saved
    for key, value in found["weights"].items():
        torch.testing.assert_close(value, expected["weights"][key], rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"experts": 4, "top_k": 5}, "`top_k=5` must lie between 1 and `experts=4`"),
        ({"experts": 1, "top_k": 1}, "`experts=1` must be at least 2"),
        ({"experts": 4, "router": "hash"}, "`router='hash'` must be one of 'softmax', 'sigmoid'"),
    ],
)
def test_mixtures_of_sizes_that_do_not_fit_are_refused(arguments, wanted):
    with pytest.raises(ValueError, match=re.escape(wanted)):
        MoE(8, 4, **arguments)


def test_losses_of_routers_that_have_not_run_are_refused():
    with pytest.raises(ValueError, match="found 1 `MoE` in Sequential, of which 1 have not been called"):
        router_losses(torch.nn.Sequential(MoE(8, 4, 2)), balance=0.1)


def test_a_mixture_is_the_weighted_sum_of_its_experts():
    mixture, x = MoE(8, 4, 3, 2, shared=6).double(), torch.randn(5, 8, dtype=torch.double)
    shares = mixture.router(x).softmax(-1)
    kept = torch.where(shares >= shares.topk(2).values[:, 1:], shares, 0.0)
    bank, expected = mixture.experts, mixture.shared(x)
    for expert in range(3):
        inner = F.silu(x @ bank.gate[expert]) * (x @ bank.up[expert])
        expected = expected + inner @ bank.down[expert] * (kept / kept.sum(-1, keepdim=True))[:, expert, None]
    torch.testing.assert_close(mixture(x), expected)


OPTIONS: list[Any] = [
    ({"expert_parallel_size": 0}, "`expert_parallel_size=0` must be an integer"),
    ({"expert_parallel_size": True}, "must be an integer"),
    ({"expert_parallel_size": 2, "compile_layers": True}, "`compile_layers=False`"),
    ({"expert_parallel_size": 1, "expert_balance": "batch"}, "`expert_balance='batch'`"),
    ({"expert_tensor_parallel_size": 0}, "`expert_tensor_parallel_size=0` must be an integer"),
    ({"expert_tensor_parallel_size": 2, "compile_layers": True}, "`compile_layers=False`"),
    ({"expert_tensor_parallel_size": 2, "mlp_chunks": 2}, "`expert_tensor_parallel_size=1`"),
]


@pytest.mark.parametrize(("arguments", "wanted"), OPTIONS, ids=str)
def test_options_that_do_not_go_together_are_refused_at_once(arguments, wanted):
    with pytest.raises(ValueError, match=re.escape(wanted)):
        MegatronStrategy(**arguments)


REFUSED: list[Any] = [
    ("one_less", 2, TWO, {}, "has 3 experts, not divisible by `expert_parallel_size=2`"),
    *(
        pytest.param(*row, marks=WIDE)
        for row in (
            ("mixed", 2, TWO, {}, "not the weighted sum of what each expert makes of a token by itself"),
            ("strange_chained", 2, TWO, {}, "depends on what another one has answered"),
            ("strange_balanced", 2, TWO, {}, "keeps `balance`, which is no mean or sum over samples"),
            ("strange_dropped", 2, TWO, {}, "depends on the others of the batch"),
            ("balanced_Mixtral", 4, {"context_parallel_size": 2}, {}, "or `data_parallel_size=1`"),
            ("balanced_rewritten", 2, {}, {}, "a batch is no combination of its gradients"),
            (
                "balanced_passed",
                2,
                {"pipeline_parallel_size": 2},
                {},
                "`net.model` was called with `output_router_logits=True`",
            ),
            ("strange_noisy", 2, TWO, {}, "on each row by itself, as it draws random numbers (noise, dropout): set"),
            ("strange_returned", 2, TWO, {}, "a batch is no combination of its gradients"),
            ("strange_logits", 2, TWO, {}, "a batch is no combination of its gradients"),
            ("strange_choosing", 2, TWO, {}, "depends on the others of the batch"),
            *((family, 2, TWO, {}, "none were found that can be") for family in UNSPLIT),
            ("dense", 2, TWO, {}, "none were found that can be"),
            ("by_hand", 2, TWO, {"gradient_clip_val": None}, "`automatic_optimization=False`"),
            ("words", 2, {"expert_parallel_size": 4}, {}, "does not divide the 2 ranks of a stage"),
            ("whole_updates", 2, TWO, {}, "use an optimizer that updates every element"),
            ("uneven_batches", 2, {**TWO, "micro_batch_size": 2}, {}, "need equally many"),
            ("left_out", 4, PIPE, {}, "and another one has ended its step"),
            ("left_out", 2, TWO, {}, "expert_scenarios.py:131"),
            ("uneven_validation", 2, TWO, {}, "limit_val_batches"),
            ("uneven_predictions", 2, TWO, {}, "limit_predict_batches"),
        )
    ),
]


@pytest.mark.parametrize(("name", "devices", "options", "trainer", "wanted"), REFUSED, ids=str)
def test_what_cannot_be_shared_out_is_refused_on_every_rank(name, devices, options, trainer, wanted):
    for outcome in run_trainers(fit, name, options, trainer, devices=devices, check=False, grace=20.0):
        assert wanted in str(outcome.error), outcome
