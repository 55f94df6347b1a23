"""This package's mixtures: capacities, noise, biases and losses of sequences are those of one process in any layout."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.callbacks import ExpertBias
from lightning_megatron.experts.routers import mixtures_of
from lightning_megatron.layers import MoE, router_losses
from lightning_megatron.layers.mixture.experts import Experts, has_grouped_products
from lightning_megatron.layers.mixture.moe import places_in_queues
from tests.experts.expert_scenarios import fit
from tests.experts.strangers import BIASES
from tests.harness import one_process, run_trainers

WIDE = pytest.mark.wide
TWO: dict[str, Any] = {"expert_parallel_size": 2}
T2E2: dict[str, Any] = {**TWO, "tensor_parallel_size": 2}
PIPE: dict[str, Any] = {"pipeline_parallel_size": 2, "expert_parallel_size": 2, "micro_batch_size": 2}
ZB: dict[str, Any] = {**PIPE, "pipeline_schedule": "zb-v", "activation_recompute": "full"}
OWN: dict[str, Any] = {"whole_batch_loss": False}  # what a step writes is meant to be each replica's own
BUFFERS = ("ownbias", "biasbybuffer")
LAYOUT: dict[str, Any] = {"random_streams": "layout"}
BIAS: dict[str, Any] = {"callbacks": [ExpertBias(0.01)]}


def _compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found["weights"]) == set(expected["weights"])
    for key, value in found["weights"].items():
        torch.testing.assert_close(value, expected["weights"][key], rtol=1e-9, atol=1e-9, msg=key)


ROWS: list[Any] = [
    ("tight", 2, TWO, {}),
    ("biased", 4, PIPE, {**BIAS, "accumulate_grad_batches": 2}),
    *(
        pytest.param(*row, marks=WIDE)
        for row in (
            ("tight", 1, {"micro_batch_size": 4}, {}),
            ("tight", 2, {}, {"accumulate_grad_batches": 2}),
            ("tight", 2, {"activation_recompute": "full"}, {}),
            ("tight", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 4}, {}),
            ("tight", 2, {"context_parallel_size": 2}, {}),
            ("tight", 4, {"context_parallel_size": 2}, {}),
            ("tight", 4, {"expert_parallel_size": 4, "optimizer_sharding": {"shard": 2}}, {}),
            ("tight", 4, PIPE, {}),
            ("tight", 4, ZB, {}),
            ("dealt", 2, TWO, {}),
            ("dealt", 4, PIPE, {}),
            ("tight", 2, T2E2, {}),
            ("tight", 4, {**T2E2, "expert_parallel_size": 4}, {}),
            ("biased", 2, T2E2, BIAS),
            ("biased", 4, {**T2E2, **ZB}, BIAS),
            ("by_sequence", 2, T2E2, {}),
            ("drop_in", 4, T2E2, {}),
            ("biased", 2, {}, BIAS),
            ("biased", 2, TWO, BIAS),
            ("biased", 2, {"tensor_parallel_size": 2}, BIAS),
            ("biased", 2, {"micro_batch_size": 4}, BIAS),
            ("biased", 4, ZB, BIAS),
            ("DeepseekV3", 2, TWO, BIAS),
            ("Ernie4_5_Moe", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 2}, BIAS),
            ("moving_ownbias", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 4}, {}),
            *((f"moving_{name}", 2, {}, {}) for name in BUFFERS),
            ("moving_ownbias", 4, {"pipeline_parallel_size": 2}, {}),
            ("moving_ownbias", 4, {"tensor_parallel_size": 2}, {}),
            ("moving_ownbias", 2, {"micro_batch_size": 4}, {}),
            ("moving_biasbyattribute", 1, {"micro_batch_size": 4}, {}),
            ("moving_biasbyattribute", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 4}, {}),
            ("moving_biasbybuffer", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 4}, {}),
            ("moving_biasbyattribute", 4, {**PIPE, "expert_parallel_size": 1}, {}),
            ("gathering_biasbybuffer", 4, PIPE, {}),
            ("gathering_biasbybuffer", 4, {**PIPE, "pipeline_schedule": "zb-v"}, {}),
            ("gathering_biasbyattribute", 2, {}, {}),
            ("gathering_biasbybuffer", 2, {**TWO, **OWN}, {}),
            ("by_sequence", 2, {"pipeline_parallel_size": 2, "micro_batch_size": 4}, {}),
            ("by_sequence", 4, ZB, {}),
            ("by_sequence", 4, {"context_parallel_size": 2}, {}),
            ("drop_in", 4, {"context_parallel_size": 2}, {}),
        )
    ),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("name", "devices", "options", "trainer"), ROWS, ids=str)
def test_training_is_that_of_one_process(name, devices, options, trainer):
    expected = one_process(fit, name, None, trainer)
    within = 1e-6 if name in ("DeepseekV3", "Ernie4_5_Moe") else 1e-9
    for key, value in run_trainers(fit, name, options, trainer, devices=devices)[0].value["weights"].items():
        torch.testing.assert_close(value, expected["weights"][key], rtol=within, atol=within, msg=key)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, TWO),
        *(pytest.param(*row, marks=WIDE) for row in ((2, {}), (4, ZB), (2, T2E2), (2, {"context_parallel_size": 2}))),
    ],
    ids=str,
)
def test_noise_of_routers_is_that_of_one_process(devices, options):
    expected = one_process(fit, "jittery", LAYOUT)
    _compare(run_trainers(fit, "jittery", {**LAYOUT, **options}, devices=devices)[0].value, expected)


@pytest.mark.wide
def test_the_strategys_own_balance_is_that_of_the_callback():
    expected = one_process(fit, "biased", None, {"callbacks": [ExpertBias()]})
    found = run_trainers(fit, "biased", {**TWO, "expert_balance": "bias"}, devices=2)[0].value
    _compare(found, expected)
    biases = [value for key, value in found["weights"].items() if key.endswith("mixture.bias")]
    assert len(biases) == 3
    assert all(bias.dtype == torch.float32 and bool(bias.any()) for bias in biases)


def test_biases_go_on_from_a_checkpoint_in_another_layout(tmp_path):
    expected = one_process(fit, "biased", None, BIAS, 3)
    saved = str(tmp_path / "one.ckpt")
    run_trainers(fit, "biased", TWO, BIAS, 2, "", saved, devices=2)
    _compare(run_trainers(fit, "biased", {}, BIAS, 3, saved, devices=1)[0].value, expected)


def test_tokens_wait_in_queues_by_choice_and_place():
    index = torch.tensor([[0, 1], [0, 2], [1, 0]])
    place, tokens = places_in_queues(index, 3, torch.Size([1, 3]))
    assert place.tolist() == [[0, 1], [1, 0], [0, 2]]
    assert tokens == 3


@pytest.mark.parametrize("gated", [True, False])
def test_products_of_all_experts_at_once_are_those_of_one_after_the_other(gated):
    bank = Experts(16, 8, 6, gated=gated)
    hidden, weights = torch.randn(20, 16), torch.rand(20, 3)
    index = torch.arange(60).view(20, 3) % 4  # two experts get no rows
    index[3, 1] = index[5] = 6  # meant for none
    found = []
    for dtype in (torch.float32, torch.float64):  # which torch has no grouped products in
        own = bank.to(dtype)
        assert has_grouped_products(dtype, hidden.device, list(own.parameters())) is (dtype is torch.float32)
        given = hidden.to(dtype, copy=True).requires_grad_(), weights.to(dtype, copy=True).requires_grad_()
        out = own(given[0], index, given[1])
        (out * torch.arange(16)).sum().backward()
        found.append([out, *(each.grad for each in (*given, *own.parameters()))])
        own.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_tokens_beyond_the_capacity_are_dropped_in_training_only():
    torch.manual_seed(0)
    mixture = MoE(8, 4, 2, 1, capacity_factor=1.0, least_capacity=1).double()
    mixture.router.weight.data.zero_()
    mixture.router.weight.data[0, 0] = 1.0
    x = torch.rand(1, 8, 8, dtype=torch.double)  # all of them like expert 0, which takes four
    assert (mixture(x) != 0).any(-1).tolist() == [[*[True] * 4, *[False] * 4]]
    assert (mixture.eval()(x) != 0).any(-1).all()


def test_a_bias_changes_who_is_chosen_and_not_the_weights():
    torch.manual_seed(0)
    mixture, x = MoE(8, 4, 3, 1, biased=True).double(), torch.randn(5, 8, dtype=torch.double)
    assert mixture.bias is not None
    mixture.bias += torch.tensor([0.0, 2.0, 0.0])
    shares = mixture.router(x).softmax(-1)[:, 1:2]
    mine = mixture.experts(x, torch.ones(5, 1, dtype=torch.long), shares)
    torch.testing.assert_close(mixture(x), mine)
    assert mixture.to(torch.bfloat16).bias.dtype == torch.float32


def test_a_loss_of_sequences_is_the_mean_of_theirs():
    torch.manual_seed(0)
    mixture, x = MoE(8, 4, 4, 2).double(), torch.randn(3, 7, 8, dtype=torch.double)
    mixture(x)
    whole, apart = router_losses(mixture, balance=1.0, scope="sequence"), []
    for sequence in x:
        mixture(sequence[None])
        apart.append(router_losses(mixture, balance=1.0))
    torch.testing.assert_close(whole, torch.stack(apart).mean())


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"capacity_factor": 0.9}, "`capacity_factor=0.9` must be at least 1"),
        ({"least_capacity": 0}, "`least_capacity=0` must be at least 1"),
        ({"jitter": 1.0}, "`jitter=1.0` must be at least 0 and below 1"),
    ],
)
def test_mixtures_with_settings_that_are_none_are_refused(arguments, wanted):
    with pytest.raises(ValueError, match=re.escape(wanted)):
        MoE(8, 4, 4, **arguments)


def test_losses_of_sequences_that_are_not_known_are_refused():
    mixture = MoE(8, 4, 2)
    mixture(torch.randn(5, 8))
    with pytest.raises(ValueError, match=r"needs `MoE` to be called with `x: \[batch, sequence, hidden\]`"):
        router_losses(mixture, balance=1.0, scope="sequence")
    with pytest.raises(ValueError, match="`scope='layer'` must be one of 'batch', 'sequence'"):
        router_losses(mixture, balance=1.0, scope="layer")


def test_a_rate_below_zero_is_refused():
    with pytest.raises(ValueError, match="`rate=-1` must be at least 0"):
        ExpertBias(-1)


REFUSED: list[Any] = [
    ("words", 1, {"expert_balance": "bias"}, "found no mixture of experts that is chosen with a bias"),
    *(
        pytest.param(*row, marks=WIDE)
        for row in (
            ("biased", 1, {"expert_balance": "bias", "compile_layers": True}, "`compile_layers=False`"),
            *((f"moving_{name}", 2, OWN, "balance_bias` differs between replicas") for name in BIASES),
            ("flat", 2, {}, "must be that of the samples"),
            ("tight", 1, {"micro_batch_size": 4, "whole_batch_loss": False}, "leave `whole_batch_loss` at 'auto'"),
        )
    ),
]


@pytest.mark.parametrize(("name", "devices", "options", "wanted"), REFUSED, ids=str)
def test_what_cannot_be_as_in_one_process_is_refused_on_every_rank(name, devices, options, wanted):
    for outcome in run_trainers(fit, name, options, {}, devices=devices, check=False, grace=20.0):
        assert wanted in str(outcome.error), outcome


def test_an_unknown_balance_is_refused():
    with pytest.raises(ValueError, match="must be None, 'replica', 'bias' or"):
        MegatronStrategy(expert_balance="entropy")


def test_alike_layers_beside_a_kernel_as_wide_as_they_are_many_are_no_experts():
    """Three layers in a list, with a convolution of 3 x 3 beside it, have no router."""
    block = nn.Module()  # of a container, which calls nothing, none would be taken for a router
    block.layers, block.mix = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), nn.Conv2d(8, 8, 3)
    assert not list(mixtures_of(nn.ModuleDict({"block": block})))
    block.gate = nn.Conv2d(8, 3, 1)
    (mixture,) = mixtures_of(nn.ModuleDict({"block": block}))
    assert (mixture.path, mixture.count) == ("block.layers", 3)


class InTurn(nn.Module):
    """Four layers, one behind the other, and a head of four outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Beside(InTurn):
    """Four experts, and a router."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, weights = torch.zeros_like(x), self.head(x).softmax(-1)
        for index, expert in enumerate(self.layers):
            out = out + weights[..., index : index + 1] * expert(x)
        return out


class Over(InTurn):
    """Experts write over the rows that they were given, of which each has one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = self.head(x).argmax(-1)
        for number, expert in enumerate(self.layers):
            taken = index == number
            x[taken] = expert(x[taken])
        return x


class Chosen(InTurn):
    """And so do these."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = self.head(x).argmax(-1, keepdim=True)
        for number, expert in enumerate(self.layers):
            x = torch.where(index == number, expert(x), x)
        return x


class Around(nn.Module):
    """Goes over the layers of what it holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.inner.layers):
            x = layer(x * number)
        return self.inner.head(x)


def test_layers_that_run_one_behind_the_other_are_no_experts():
    held = nn.ModuleDict({"layers": InTurn().layers, "head": nn.Linear(8, 4)})
    assert not list(mixtures_of(InTurn())) and not list(mixtures_of(Around(held)))
    for kind in (Beside, Over, Chosen):
        (mixture,) = mixtures_of(kind())
        assert (mixture.path, mixture.count) == ("layers", 4)
