"""Modules in pieces of the tokens: the gradients of the whole, less memory, and none that are not token by token."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.activations.mlp_pieces import MlpPieces, check_chunks
from tests.activations import layers as kinds
from tests.activations.host_scenarios import train
from tests.harness import one_process, run_trainers

WIDTH, TOKENS = kinds.WIDTH, 19
PP, DP, TP, CP = (f"{axis}_parallel_size" for axis in ("pipeline", "data", "tensor", "context"))
wide = pytest.mark.wide


class Gated(nn.Module):
    """A gated MLP with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.RMSNorm(WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TwoMatrices(nn.Module):
    """What the modules below have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


class Averaging(TwoMatrices):
    """Reads all tokens; says nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.two.weight)
        nn.init.zeros_(self.two.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).cumsum(1))


class Placed(TwoMatrices):
    """Knows where a token is, by a table of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x) + self.table[: x.shape[1]])


class Dropping(TwoMatrices):
    """Dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


class Counting(TwoMatrices):
    """A count of its calls."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Writing(TwoMatrices):
    """Writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


class Borrowing(TwoMatrices):
    """Uses a weight of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.borrowed = [torch.ones(WIDTH, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.borrowed[0]


class Halving(TwoMatrices):
    """The first token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :1])


REFUSED = {
    "`cumsum` reads other tokens": Averaging,
    "others without the rest": Placed,
    "draws random numbers": Dropping,
    "writes buffers or attributes": Counting,
    "writes into what it is given": Writing,
    "not its own": Borrowing,
    "a row for each token": Halving,
}


class Layer(nn.Module):
    """Attention and an MLP, each a module of its own."""

    def __init__(self, mlp: type[nn.Module] = Gated) -> None:
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(WIDTH, 4, batch_first=True), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(x * 1.0)


class Words(nn.Module):
    """A language model."""

    def __init__(self, mlp: type[nn.Module] = Gated) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.layers = nn.ModuleList(Layer(mlp) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def gradients(model: nn.Module, chunks, dtype=torch.float64):
    """Of two steps, and what ran in pieces."""
    model = copy.deepcopy(model).to(dtype)
    pieces = None if chunks is None else MlpPieces(model, ["layers.0", "layers.1"], chunks)
    if pieces is not None:
        pieces.open()
    tokens = torch.randint(0, 50, (3, TOKENS), generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        run = model if pieces is None else lambda batch: pieces.run(model, batch)
        F.cross_entropy(run(tokens).flatten(0, 1).double(), tokens.flatten()).backward()
    if pieces is not None:
        pieces.close()
        assert all("forward" not in vars(part) for part in model.modules())
    return {name: p.grad for name, p in model.named_parameters()}, pieces


@pytest.mark.parametrize("chunks", [1, 3, 100, {"*.mlp": 4}], ids=str)
def test_gradients_are_those_of_the_whole_module(chunks):
    torch.manual_seed(0)
    model = Words()
    wanted, (found, pieces) = gradients(model, None)[0], gradients(model, chunks)
    assert pieces.done == {"layers.0.mlp", "layers.1.mlp"}
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_gradients_of_16_bit_weights_are_added_up_in_32_bits():
    torch.manual_seed(0)
    model = Words().bfloat16()
    exact = gradients(model, None)[0]["layers.0.mlp.up.weight"]
    whole, pieces = (gradients(model, chunks, torch.bfloat16)[0]["layers.0.mlp.up.weight"] for chunks in (None, 19))
    error, wanted = ((found - exact).norm() / exact.norm() for found in (pieces.double(), whole.double()))
    assert error <= 1.2 * wanted


@pytest.mark.parametrize("said", REFUSED)
def test_a_module_that_is_not_token_by_token_is_refused_by_name(said):
    with pytest.raises(RuntimeError, match=f"runs `layers.0.mlp` in pieces of the tokens, but .*{said}"):
        gradients(Words(REFUSED[said]), {"*.mlp": 4})


@pytest.mark.parametrize("said", REFUSED)
def test_a_number_leaves_such_modules_whole_and_says_so_where_there_are_no_others(said):
    with pytest.raises(RuntimeError, match=f"found no module inside of the layers.*`layers.0.mlp`: .*{said}"):
        gradients(Words(REFUSED[said]), 4)


class Largest(TorchDispatchMode):
    """The largest result of a function with more features than the model's width."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.ndim > 1 and found.shape[-1] == 4 * WIDTH and "view" not in str(func):
            self.most = max(self.most, found.numel() // (4 * WIDTH))
        return found


def test_what_is_inside_of_an_mlp_is_never_whole():
    model = Words()
    tokens = torch.zeros(2, 480, dtype=torch.long)
    rows = {}
    for chunks in (1, 8):
        pieces = MlpPieces(model, ["layers.0", "layers.1"], chunks)
        pieces.open()
        with Largest() as largest:
            model(tokens).sum().backward()
        pieces.close()
        rows[chunks] = largest.most
    assert rows == {1: 2 * 480, 8: 2 * 60}


@pytest.mark.parametrize(
    ("value", "said"), [(0, "must be None"), ("some", "must be None"), ({}, "must be None"), ({"*.mlp": 0}, "must be")]
)
def test_a_value_that_cannot_be_meant_is_refused(value, said):
    with pytest.raises(ValueError, match=said):
        check_chunks(value)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"names '\*.ffn', which matches no module in layers: layers.0.attention"):
        MlpPieces(Words(), ["layers.0"], {"*.ffn": 2})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"compile_layers": True}, "`compile_layers=True`"),
        ({"weight_sharding": True}, "`weight_sharding=True`"),
        ({TP: 2, "sequence_parallel": True}, "`sequence_parallel=True`"),
        ({PP: 2, "pipeline_schedule": "zb-h1"}, "may split"),
        ({DP: 2, "expert_parallel_size": 2}, "`expert_parallel_size=2`"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        MegatronStrategy(mlp_chunks=4, **arguments)


LAYOUTS = [
    {PP: 2},
    {CP: 2},
    *(
        pytest.param(row, marks=wide)
        for row in (
            {},
            {TP: 2},
            {DP: 2, "optimizer_sharding": True},
            {CP: 2, TP: 2},
            {CP: 2, PP: 2, "micro_batch_size": 2},
            {"activation_recompute": "full"},
            {"activation_offload": "all"},
            {"activation_offload": {"tokens": 0.4}, PP: 2},
            {"micro_batch_size": 1, "loss_chunks": 3},
        )
    ),
]


@pytest.mark.parametrize("arguments", LAYOUTS, ids=str)
def test_a_layout_with_modules_in_pieces_gives_what_one_process_gives(arguments):
    wanted = one_process(train, "modules", None, {})
    devices = 1
    for name in (PP, DP, TP, CP):
        devices *= arguments.get(name, 1)
    outcomes = run_trainers(train, "modules", {"mlp_chunks": 3, **arguments}, {}, devices=devices)
    for outcome in outcomes:
        for name in set(wanted) - {"weights"}:
            assert outcome.value[name] == pytest.approx(wanted[name], rel=1e-9), name
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(outcomes[0].value["weights"][name], value, rtol=1e-9, atol=1e-9)
