"""Mixtures that their structure does not give away, and the plan that says what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.experts.strangers import EXPERTS, WIDTH


class Turned(nn.Module):
    """Counts its experts along the second dim of one stack and the last of another, and takes its weights first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(WIDTH, EXPERTS, 24) * 0.2)
        self.down = nn.Parameter(torch.randn(24, WIDTH, EXPERTS) * 0.2)
        self.scale = nn.Parameter(torch.ones(EXPERTS))

    def forward(self, weights: Tensor, index: Tensor, hidden: Tensor) -> Tensor:
        chosen = F.one_hot(index, self.num_experts).to(hidden.dtype) * weights[..., None]
        inner = F.gelu(torch.einsum("th,hef->tef", hidden, self.up))
        return torch.einsum("tef,fhe,tke,e->th", inner, self.down, chosen, self.scale)


class Turns(nn.Module):
    """Calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.bank = nn.Linear(WIDTH, EXPERTS), Turned()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x.flatten(0, 1)).softmax(-1).topk(2)
        return self.bank(weights, index, x.flatten(0, 1)).view_as(x)


class Soft(nn.Module):
    """All experts take all tokens, in products that are written beside the router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(torch.einsum("bth,ehf->btef", x, self.up))
        return torch.einsum("btef,efh,bte->bth", inner, self.down, self.gate(x).softmax(-1))


class Listed(nn.Module):
    """Has a list of matrices, and leaves out those without tokens, of which there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, 24) * 0.2) for _ in range(EXPERTS)])
        self.down = nn.ParameterDict({f"of_{n}": nn.Parameter(torch.randn(24, WIDTH) * 0.2) for n in range(EXPERTS)})
        self.gate.bias.data = torch.tensor([0.0, 0.5, -50.0, 0.5])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weight, index = self.gate(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number in range(EXPERTS):
            mask = index == number
            if mask.any():
                made = F.gelu(rows[mask] @ self.up[number]) @ self.down[f"of_{number}"]
                out = out.index_add(0, mask.nonzero().view(-1), made * weight[mask, None])
        return out.view_as(x)


class Shelf(nn.Module):
    """Holds matrices, and computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(2, EXPERTS, WIDTH, WIDTH) * 0.2)


class Reaches(nn.Module):
    """Computes with the matrices of a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf, self.keys = Shelf(), nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        shares = (x @ self.keys.mT).topk(2)
        sparse = torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype, device=x.device)
        sparse = sparse.scatter(-1, shares.indices, shares.values.sigmoid())
        first, second = self.shelf.both
        return torch.einsum("ehg,bte,btg->bth", second, sparse, torch.einsum("bth,ehg->btg", x, first).tanh())


class Bank(nn.Module):
    """Stacked experts, found by their structure."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) * 0.2)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            rows, place = (index == expert).nonzero(as_tuple=True)
            made = F.gelu(hidden[rows] @ self.up[expert]) @ self.down[expert]
            found = found.index_add(0, rows, made * weights[rows, place, None])
        return found


class Frozen(nn.Module):
    """Stacked experts that do not train, beside a router that does."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.bank = nn.Linear(WIDTH, EXPERTS), Bank().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x.flatten(0, 1)).softmax(-1).topk(2)
        return self.bank(x.flatten(0, 1), index, weights).view_as(x)  # type: ignore[no-any-return]


class Added(nn.Module):
    """Something that is added to a weight."""

    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class Adapter(nn.Module):
    """Adds a product of two small matrices to each expert's weight while it is called, as PEFT's adapters do."""

    def __init__(self, inner: nn.Module, bank: Bank, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name
        shape = getattr(bank, name).shape
        self.a = nn.Parameter(torch.randn(EXPERTS * 2, shape[1]) * 0.2)
        self.b = nn.Parameter(torch.randn(EXPERTS * 2, shape[2]) * 0.2)

    def forward(self, *given: Tensor) -> Tensor:
        a, b = self.a.view(EXPERTS, 2, -1), self.b.view(EXPERTS, 2, -1)
        bank = self.get_submodule("inner.inner") if isinstance(self.inner, Adapter) else self.inner
        parametrize.register_parametrization(bank, self.name, Added(a.mT @ b))
        try:
            return self.inner(*given)  # type: ignore[no-any-return]
        finally:
            parametrize.remove_parametrizations(bank, self.name, leave_parametrized=False)


class Adapted(nn.Module):
    """Stacked experts with an adapter on each of their weights."""

    def __init__(self) -> None:
        super().__init__()
        bank = Bank()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.bank = Adapter(Adapter(bank, bank, "up"), bank, "down")

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x.flatten(0, 1)).softmax(-1).topk(2)
        return self.bank(x.flatten(0, 1), index, weights).view_as(x)  # type: ignore[no-any-return]


class Unlike(nn.Module):
    """A list of experts of unlike widths."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(_mlp(8 * (1 + number)) for number in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = index == number
            out[mine] = expert(x[mine]) * weight[mine, None]
        return out


class ByPlace(nn.Module):
    """A list of experts without a router: a token's place in the text chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(_mlp(24) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[:, number::EXPERTS] = expert(x[:, number::EXPERTS])
        return out


class Picked(nn.Module):
    """Picks the weights that each token has chosen out of one stack."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.bank = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return (torch.einsum("bth,btkhg->btkg", x, self.bank[index]).tanh() * weights[..., None]).sum(2)


def _mlp(inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH))


PLANNED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "turns": (Turns, {"*.bank": "experts", "*.bank.up": 1, "*.bank.down": 2}),
    "soft": (Soft, {"layers.*.mixture": "gathered"}),
    "softly": (Soft, {"layers.*.mixture": "gathered", "*.gate.weight": 1, "*.up": 2, "*.down": 1}),
    "listed": (Listed, {"layers.*.mixture": "gathered", "*.up.*": 0, "*.down.*": 1}),
    "reaches": (Reaches, {"layers.*.mixture": "gathered", "*.shelf.both": 1}),
    "frozen": (Frozen, {"*.bank": "experts"}),
    "adapted": (Adapted, {"layers.*.mixture.bank": "gathered"}),
    "unlike": (Unlike, {"layers.*.mixture": "gathered", "*.experts.*.*.weight": 0, "*.experts.*.*.bias": 0}),
    "by_place": (ByPlace, {"layers.*.mixture": "gathered", "*.experts.*.*.weight": 0, "*.experts.*.*.bias": 0}),
    "picked": (Picked, {"layers.*.mixture": "gathered"}),
    "shelves": (Reaches, {"*.shelf": "gathered", "*.shelf.both": 1}),
}
"""By name: the mixture, and its plan."""
