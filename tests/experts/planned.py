"""Mixtures that their structure does not give away, and the plan that says what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


PLANNED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "turns": (Turns, {"*.bank": "experts", "*.bank.up": 1, "*.bank.down": 2}),
    "soft": (Soft, {"layers.*.mixture": "gathered"}),
    "softly": (Soft, {"layers.*.mixture": "gathered", "*.gate.weight": 1, "*.up": 2, "*.down": 1}),
    "listed": (Listed, {"layers.*.mixture": "gathered", "*.up.*": 0, "*.down.*": 1}),
    "reaches": (Reaches, {"layers.*.mixture": "gathered", "*.shelf.both": 1}),
    "shelves": (Reaches, {"*.shelf": "gathered", "*.shelf.both": 1}),
}
"""By name: the mixture, and its plan."""
