"""Draws from counters: what parts of a batch draw, joined, is what the whole batch draws, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.mesh.draws import counters
from lightning_megatron.mesh.draws.answers import ALL_ANSWERS
from lightning_megatron.mesh.draws.global_rows import Batched, Deal, Rows, Slice, global_indices
from lightning_megatron.mesh.draws.mode import LayoutDraws
from lightning_megatron.mesh.draws.places import Lesson

BATCH = 8


def run(draws: LayoutDraws, function: Callable[..., Tensor], seed: int, rows: Rows, x: Tensor) -> Tensor:
    torch.manual_seed(seed)
    draws.rows = rows
    draws.enter(0, 0)
    draws.begin("step")
    with draws:
        return function(x)


def whole_and_parts(function: Callable[..., Tensor], *shape: int) -> tuple[Tensor, Tensor]:
    """What a batch gives, and what its four parts give, joined; learned from its first samples."""
    draws, generator = LayoutDraws(ALL_ANSWERS, splits=True), torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)
    whole = run(draws, function, 3, Rows(0, BATCH, BATCH), x)
    draws.lesson = lesson = Lesson(2)
    run(draws, function, 5, Rows(0, 2, 2), x[:2])
    lesson.run = 1
    run(draws, function, 5, Rows(0, 4, 4), torch.cat([x[:2], x[:2]]))
    draws.lesson = None
    assert not lesson.left_over()
    draws.learn("step", lesson)
    parts = [run(draws, function, 3, Rows(at, 2, BATCH), x[at : at + 2]) for at in range(0, BATCH, 2)]
    return whole, torch.cat(parts)


def by_samples(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.transpose(0, 1)).transpose(0, 1)


def attention(**options: Any) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(1)
    layer, weights = nn.MultiheadAttention(4, 2, dropout=0.3, dtype=torch.float64), options.pop("need_weights", False)
    return by_samples(lambda x: layer(x, x, x, need_weights=weights)[0])


ALIKE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "dropout": (lambda x: F.dropout(x, 0.3), (3, 4)),
    "in place": (lambda x: F.dropout(x.clone(), 0.3, inplace=True), (3, 4)),
    "channels": (lambda x: F.dropout2d(x, 0.3), (3, 4, 4)),
    "alpha": (lambda x: F.alpha_dropout(x, 0.3, True), (3, 4)),
    "samples second": (by_samples(lambda x: F.dropout(x, 0.3)), (3, 4)),
    "flattened": (lambda x: F.dropout(x.flatten(0, 1), 0.3).view(x.shape), (3, 4)),
    "tokens and samples": (by_samples(lambda x: F.dropout(x.flatten(0, 1), 0.3).view(x.shape)), (3, 4)),
    "for all": (lambda x: x + torch.randn(2, 4, dtype=x.dtype), (2, 4)),
    "noise": (lambda x: x + torch.randn_like(x), (3, 4)),
    "integers": (lambda x: x + torch.randint(0, 1000, (len(x),))[:, None], (4,)),
    "depth": (lambda x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.5), (3, 4)),
    "gumbel": (lambda x: F.gumbel_softmax(x, hard=True), (3, 4)),
    "order of features": (lambda x: x[:, torch.randperm(3)], (3,)),
    "multinomial": (lambda x: torch.multinomial(x.softmax(-1), 2).double(), (5,)),
    "replaced": (lambda x: torch.multinomial(x.softmax(-1), 2, replacement=True).double(), (5,)),
    "normal": (lambda x: torch.normal(x, x.abs() + 0.1), (3,)),
    "distribution": (lambda x: torch.distributions.Normal(x, 1.0).rsample(), (3,)),
    "exponential": (lambda x: x + torch.empty_like(x).exponential_(), (3,)),
    "geometric": (lambda x: x + torch.empty_like(x).geometric_(0.2), (3,)),
    "init": (lambda x: x @ nn.init.xavier_uniform_(torch.empty(3, 3, dtype=x.dtype)), (3,)),
    "fused attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True),
        (2, 3, 4),
    ),
    "grouped attention": (
        lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], dropout_p=0.3, enable_gqa=True),
        (2, 3, 4),
    ),
    "attention layer": (attention(), (3, 4)),
    "attention weights": (attention(need_weights=True), (3, 4)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_parts_of_a_batch_draw_what_the_whole_batch_draws(name: str) -> None:
    whole, parts = whole_and_parts(*[ALIKE[name][0]], *ALIKE[name][1])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "order of samples": (lambda x: x[torch.randperm(len(x))], "an order of all samples"),
    "one by one": (lambda x: torch.stack([row * torch.rand(()) for row in x]), "depends on the number of samples"),
    "flattened": (lambda x: x * torch.rand(len(x) * 3).view(-1, 3), "nothing shows in which order"),
    "gamma": (lambda x: torch.distributions.Gamma(x.exp(), 1.0).sample(), "has no counters"),
    "recurrent": (lambda x: nn.LSTM(3, 3, 2, dropout=0.3)(x.float()[None])[0][0], "has no counters"),
    "rrelu": (lambda x: F.rrelu(x, training=True), "has no counters"),
    "own generator": (lambda x: x * torch.rand(x.shape, generator=torch.Generator()), "`generator=` is the user's own"),
    "some of them": (lambda x: F.dropout(x[x[:, 0] > 1e3], 0.3).sum() + x, "does not tell what it is otherwise"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_draws_that_parts_would_make_unlike_are_refused_with_their_line(name: str) -> None:
    function, why = REFUSED[name]
    with pytest.raises(
        RuntimeError, match=r"test_draws.py:\d+\) draws numbers that `random_streams='layout'`"
    ) as error:
        whole_and_parts(function, 3)
    assert why in str(error.value)


def test_every_function_of_torch_that_draws_is_answered() -> None:
    """By its name; functions that draw within others are those that other names here contain."""
    inside = {"_fused_dropout", "cauchy", "exponential", "geometric", "log_normal", "uniform", "normal_functional"}
    names = {str(getattr(function, "__name__", function)) for function in ALL_ANSWERS} | inside
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not hasattr(packet, "overloads"):
            continue
        tags = [getattr(packet, overload).tags for overload in packet.overloads()]
        seen = any(torch.Tag.nondeterministic_seeded in tag for tag in tags)
        if seen and not any(part in name for part in ("attention", "cudnn", "miopen", "rrelu_with_noise")):
            assert name in names, name


def test_numbers_are_spread_as_they_should_be() -> None:
    count = 1 << 18
    numbers = counters.uniform(torch.arange(count), 77, torch.float64)
    assert float(numbers.mean()) == pytest.approx(0.5, abs=3e-3)
    assert float(numbers.var()) == pytest.approx(1 / 12, abs=1e-3)
    assert float(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]) == pytest.approx(0.0, abs=8e-3)
    normals = counters.normal(torch.arange(count), 77, torch.float32).double()
    assert float(normals.mean()) == pytest.approx(0.0, abs=8e-3)
    assert float((normals**4).mean()) == pytest.approx(3.0, abs=0.08)
    assert float(counters.below(torch.arange(count), 77, 0.1).double().mean()) == pytest.approx(0.1, abs=3e-3)


def test_a_number_does_not_depend_on_where_in_a_tensor_it_is() -> None:
    for numbers in (counters.uniform, counters.normal, counters.exponential):
        whole = numbers(torch.arange(100_003), 5, torch.float32)
        assert torch.equal(numbers(torch.arange(40_001, 40_078), 5, torch.float32), whole[40_001:40_078])


def test_rows_of_a_replica_are_counted_in_the_global_batch() -> None:
    assert Deal(1, 2).rows([2, 2]) == [Rows(4, 2, 8), Rows(6, 2, 8)]
    assert Deal(1, 2, in_turns=True).rows([2, 2]) == [Rows(1, 2, 8, 2), Rows(5, 2, 8, 2)]
    whole = torch.arange(8 * 3 * 4).view(8, 3, 4)
    cpu = torch.device("cpu")
    assert torch.equal(global_indices((2, 3, 4), cpu, Rows(5, 2, 8, 2), Batched(0)), whole[5:8:2])
    part = global_indices((2, 3, 2), cpu, Rows(4, 2, 8), Batched(0), Slice(2, 2, 4))
    assert torch.equal(part, whole[4:6, :, 2:])
    flat = torch.arange(3 * 8 * 4).view(3, 8, 4)
    assert torch.equal(
        global_indices((6, 4), cpu, Rows(4, 2, 8), Batched(0, 3, inner=True)).view(3, 2, 4), flat[:, 4:6]
    )
