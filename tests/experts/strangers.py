"""Mixtures with experts in lists, as different people write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.layers import MoE

WIDTH, EXPERTS = 16, 4


def feed_forward() -> nn.Module:
    """An expert."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Loop(nn.Module):
    """Visits experts that have tokens, and adds to their rows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([feed_forward() for _ in range(EXPERTS)])

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = self.gate(rows).softmax(-1).topk(2)
        return weights / weights.sum(-1, keepdim=True), index

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, index = self.route(rows)
        out, mask = torch.zeros_like(rows), F.one_hot(index, EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            place, token = torch.where(mask[number])
            if token.shape[0] == 0:
                continue
            out.index_add_(0, token, self.experts[number](rows[token]) * weights[token, place, None])
        return out.view_as(x)


class Sure(Loop):
    """Sends each token to one expert, whose weight is divided by itself: its router learns nothing but rounding."""

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = self.gate(rows).softmax(-1, dtype=torch.float32).topk(1)
        return (weights * weights.sum(-1, keepdim=True).reciprocal()).to(rows.dtype), index


class Normed(Loop):
    """Has experts with a norm inside, which looks at all of their inner width."""

    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.insert(1, nn.LayerNorm(2 * WIDTH))


class Odd(Loop):
    """Has experts that are 15 wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 15), nn.GELU(), nn.Linear(15, WIDTH)) for _ in range(EXPERTS)]
        )


class Starved(Loop):
    """Sends no token to the last experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.bias.data = torch.tensor([50.0, 49.0, -50.0, -50.0])


class Dense(Loop):
    """Every expert sees every token."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return (torch.stack([expert(x) for expert in self.experts], -2) * weights[..., None]).sum(-2)


class Batched(nn.Module):
    """All experts at once, by products of stacks with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.2)
        self.outer = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.2)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias[:, None], F.gelu(torch.bmm(x, self.inner)), self.outer)


class Blocks(Loop):
    """Gives each expert a block of rows: two places for each sequence, for the tokens that like it most."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Batched()

    def forward(self, x: Tensor) -> Tensor:
        weights, token = self.gate(x).softmax(-1).mT.topk(2)  # [batch, experts, places]
        index = token.flatten(1)[..., None].expand(-1, -1, WIDTH)
        rows = x.gather(1, index).view(len(x), EXPERTS, -1, WIDTH).transpose(0, 1).flatten(1, 2)
        made = self.experts(rows).view(EXPERTS, len(x), -1, WIDTH).transpose(0, 1) * weights[..., None]
        return torch.zeros_like(x).scatter_add(1, index, made.flatten(1, 2))


class Masked(Loop):
    """One sweep for each choice, written by masks; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, index = self.route(rows)
        out = torch.zeros_like(rows)
        for choice in range(2):
            for number, expert in enumerate(self.experts):
                mask = index[:, choice] == number
                if mask.any():
                    out[mask] = out[mask] + weights[mask, choice, None] * expert(rows[mask])
        self.calls += 1
        return out.view_as(x)


class ByWeight(Loop):
    """Gives an expert the tokens that a rectifier leaves it a weight for (ReMoE), chosen by comparing floats."""

    def forward(self, x: Tensor) -> Tensor:
        weights, out = self.gate(x).relu(), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            on = weights[..., number] > 0
            if on.any():
                out[on] = out[on] + expert(x[on]) * weights[..., number][on].unsqueeze(-1)
        return out


class Switch(nn.Module):
    """One expert for each token, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.switch = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({f"expert_{number}": feed_forward() for number in range(EXPERTS)})

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.switch(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts.values()):
            out[index == number] = expert(x[index == number]) * weight[index == number].unsqueeze(-1)
        return out


class Converting(Loop):
    """Lets its router compute in 32 bits, from its first forward on."""

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.gate = self.gate.to(torch.float32)
        weights, index = self.gate(rows.to(torch.float32)).softmax(-1).topk(2)
        return weights.to(rows.dtype), index


class Nested(nn.Module):
    """Experts are mixtures themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([Loop() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return torch.stack([expert(x) * weights[..., n, None] for n, expert in enumerate(self.experts)]).sum(0)


class Capacity(Loop):
    """Puts the tokens of each sequence into as many places as an expert has, and drops the others."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_capacity = 4

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.gate(x).softmax(-1).max(-1)
        chosen = F.one_hot(index, EXPERTS).to(x.dtype)
        place = (chosen.cumsum(1) * chosen).sum(-1).long() - 1
        places = self.expert_capacity
        sent = chosen[..., None] * F.one_hot(place.clamp(max=places - 1), places).to(x.dtype)[:, :, None]
        sent = sent * (place < places)[..., None, None]
        given = torch.einsum("btec,bth->ebch", sent, x)
        made = torch.stack([self.experts[number](given[number]) for number in range(EXPERTS)])
        return torch.einsum("btec,ebch->bth", sent * weight[..., None, None], made)


class Halves(Loop):
    """Has the experts' first layers in one list, and their second ones in another, that is built before."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.down = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(EXPERTS)])
        self.up = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.route(x)
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            chosen = (index == number).any(-1)
            weight = (weights * (index == number)).sum(-1)[chosen]
            out[chosen] = out[chosen] + self.down[number](F.gelu(self.up[number](x[chosen]))) * weight[:, None]
        return out


class Groups(nn.Module):
    """Weighs groups of experts, and experts in each group, by gates in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(WIDTH, 2)
        self.inner = nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(2)])
        self.groups = nn.ModuleList([nn.ModuleList([feed_forward(), feed_forward()]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        outer, out = self.outer(x).softmax(-1), torch.zeros_like(x)
        for number, (gate, experts) in enumerate(zip(self.inner, self.groups, strict=True)):
            inner = gate(x).softmax(-1) * outer[..., number : number + 1]
            for place, expert in enumerate(experts):
                out = out + inner[..., place : place + 1] * expert(x)
        return out


class Own(nn.Module):
    """An expert with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, 20) * 0.3), nn.Parameter(torch.randn(20, WIDTH) * 0.3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x @ self.up) @ self.down * self.scale


class Sorted(nn.Module):
    """Sorts rows by expert, beside a shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.3)
        self.experts, self.shared = nn.ModuleList([Own() for _ in range(EXPERTS)]), feed_forward()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        weights, index = (rows @ self.gate.t()).sigmoid().topk(2)
        order = index.flatten().argsort()
        made, start = [], 0
        for number, count in enumerate(index.flatten().bincount(minlength=EXPERTS).tolist()):
            if count:
                made.append(self.experts[number](rows[order[start : start + count] // 2]))
                start += count
        back = torch.empty_like(torch.cat(made))
        back[order] = torch.cat(made)
        return ((back.view(-1, 2, WIDTH) * weights[..., None]).sum(1) + self.shared(rows)).view_as(x)


class Bank(nn.Module):
    """Experts that are told how to weigh."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([feed_forward() for _ in range(EXPERTS)])

    def forward(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        terms = [each(x) * (weights * (index == n)).sum(-1, keepdim=True) for n, each in enumerate(self.members)]
        return torch.stack(terms).sum(0)


class Apart(nn.Module):
    """Router and experts are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.bank = nn.Linear(WIDTH, EXPERTS), Bank()

    def forward(self, x: Tensor) -> Tensor:
        return self.bank(x, *self.router(x).softmax(-1).topk(2))


KEPT: list[Tensor] = []


class Registry(Loop):
    """Appends its router's loss to a list of the Python module."""

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        KEPT.append(self.gate(rows).logsumexp(-1).square().mean())
        return super().route(rows)


class ByToken(Loop):
    """Goes from token to token."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, index = self.route(rows)
        made = [
            torch.stack([weights[t, k] * self.experts[int(index[t, k])](rows[t]) for k in range(2)]).sum(0)
            for t in range(len(rows))
        ]
        return torch.stack(made).view_as(x)


class Chained(Loop):
    """An expert sees what the one before it gave."""

    def forward(self, x: Tensor) -> Tensor:
        for number, expert in enumerate(self.experts):
            x = x + expert(x) * self.gate(x).softmax(-1)[..., number : number + 1]
        return x


class Balanced(Loop):
    """Keeps a balancing loss on itself."""

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(rows).softmax(-1)
        self.balance = (F.one_hot(shares.argmax(-1), EXPERTS).to(rows.dtype).mean(0) * shares.mean(0)).sum()
        return super().route(rows)


class Dropped(Loop):
    """An expert takes ten tokens of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_capacity = 10

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weight, index = self.gate(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            taken = (index == number).nonzero().squeeze(-1)[: self.expert_capacity]
            out[taken] = expert(rows[taken]) * weight[taken, None]
        return out.view_as(x)


class Filled(Dropped):
    """An expert takes as many tokens as no two micro-batches give it, and the whole batch does."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_capacity = 30


class Noisy(Loop):
    """Drops out what its experts have inside."""

    def __init__(self) -> None:
        super().__init__()
        experts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(experts)


class Returned(nn.Module):
    """Hands its balancing loss to whom it was given, and a z-loss too."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()

    def forward(self, x: Tensor) -> Tensor:
        shares = self.loop.gate(x).softmax(-1)
        KEPT.append((F.one_hot(shares.argmax(-1), EXPERTS).to(x.dtype).mean((0, 1)) * shares.mean((0, 1))).sum())
        return self.loop(x)


class Logits(Loop):
    """Keeps its router's logits, of which the step makes a balancing loss."""

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.logits = self.gate(rows)
        return super().route(rows)


class Sequences(Loop):
    """Keeps a balancing loss of each sequence by itself."""

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        chosen = F.one_hot(shares.argmax(-1), EXPERTS).to(x.dtype)
        KEPT.append((chosen.mean(1) * shares.mean(1)).sum(-1).mean())
        return super().forward(x)


class Choosing(Loop):
    """Experts choose ten tokens of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        shares, out = self.gate(rows).softmax(-1), torch.zeros_like(rows)
        shares = shares + 1e-4 * torch.arange(len(rows), dtype=x.dtype).flip(0)[:, None]  # equal tokens, equal shares
        for number, expert in enumerate(self.experts):
            weight, taken = shares[:, number].topk(10)
            out = out.index_add(0, taken, expert(rows[taken]) * weight[:, None])
        return out.view_as(x)


class OwnBias(Loop):
    """Chooses with a bias, which its own code moves by what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("balance_bias", torch.zeros(EXPERTS))

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(rows).sigmoid()
        index = (scores + self.balance_bias).topk(2).indices
        if self.training:
            with torch.no_grad():
                self.note(index.flatten().bincount(minlength=EXPERTS).to(scores.dtype))
        return scores.gather(-1, index), index

    def note(self, counts: Tensor) -> None:
        self.move(counts)

    def move(self, counts: Tensor) -> None:
        self.balance_bias += 0.05 * (counts.mean() - counts).sign()


class BiasByAttribute(OwnBias):
    """Keeps the counts for a hook."""

    def note(self, counts: Tensor) -> None:
        self.counts = counts


class BiasByBuffer(OwnBias):
    """Adds counts up for a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(EXPERTS), persistent=False)

    def note(self, counts: Tensor) -> None:
        self.counts += counts


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, mixture: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), mixture()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(self.norm(x))


class Attention(nn.Module):
    """Two heads, of which each of two tensor ranks gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (each.view(batch, length, 2, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, length, -1))


class Attending(Block):
    """A residual layer behind an attention."""

    def __init__(self, mixture: Callable[[], nn.Module]) -> None:
        super().__init__(mixture)
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.attention(self.before(x)))


class Stacked(nn.Module):
    """Experts in stacked parameters, visited one by one."""

    activation = staticmethod(F.gelu)

    def __init__(self, count: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) * 0.2)
        self.bias = nn.Parameter(torch.randn(count, WIDTH) * 0.2)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = torch.where(index == expert)
            if len(token):
                made = self.activation(hidden[token] @ self.up[expert]) @ self.down[expert] + self.bias[expert]
                out = out.index_add(0, token, (made * weights[token, place, None]).to(out.dtype))
        return out


class Rectified(Stacked):
    """With a corner at zero."""

    activation = staticmethod(F.relu)


class Selected(nn.Module):
    """Stacked experts behind a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Stacked()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x.flatten(0, 1)).softmax(-1).topk(2)
        return self.experts(x.flatten(0, 1), index, weights).view_as(x)


class Pushed(Selected):
    """Sends no token to the last experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router.bias.data = torch.tensor([50.0, 49.0, -50.0, -50.0])


_ALIKE = (
    *(Loop, Sure, Starved, Dense, Blocks, Masked, Switch, Capacity, Sorted, Apart, Registry, ByToken, Sequences),
    *(Halves, Groups, ByWeight),
)
EXACT = {kind.__name__.lower(): kind for kind in _ALIKE}
REFUSED = {kind.__name__.lower(): kind for kind in (Chained, Balanced, Dropped, Noisy)}
PER_BATCH = {kind.__name__.lower(): kind for kind in (Balanced, Dropped, Filled, Returned, Logits, Choosing)}
"""What mixes samples: over replicas it is not what one process computes."""
KINDS: dict[str, Callable[[], nn.Module]] = {
    **EXACT,
    **REFUSED,
    **PER_BATCH,
    "normed": Normed,
    "nested": Nested,
    "odd": Odd,
    "selected": Selected,
    "pushed": Pushed,
    "drop_in": lambda: MoE(WIDTH, 8, EXPERTS, shared=16),
}

BIASES = {kind.__name__.lower(): kind for kind in (OwnBias, BiasByAttribute, BiasByBuffer)}
"""What moves a bias by its own code, the last two in a hook."""
TIGHT: list[Callable[[], nn.Module]] = [
    lambda: MoE(WIDTH, 8, EXPERTS, capacity_factor=1.0),
    lambda: MoE(WIDTH, 8, EXPERTS, 1, gated=False, shared=8, capacity_factor=1.0, least_capacity=1),
    lambda: MoE(WIDTH, 8, EXPERTS, 3, router="sigmoid", capacity_factor=1.1),
    lambda: MoE(WIDTH, 8, EXPERTS, 1, capacity_factor=1.2),
]
"""Mixtures that drop tokens."""
BIASED: list[Callable[[], nn.Module]] = [
    lambda: MoE(WIDTH, 8, EXPERTS, router="sigmoid", biased=True),
    lambda: MoE(WIDTH, 8, EXPERTS, 1, biased=True),
    lambda: MoE(WIDTH, 8, EXPERTS, 3, biased=True, shared=8),
    lambda: MoE(WIDTH, 8, EXPERTS),
]
"""Mixtures that are balanced by biases."""
NOISY: list[Callable[[], nn.Module]] = [lambda: MoE(WIDTH, 8, EXPERTS, jitter=0.3) for _ in range(4)]
"""Mixtures whose routers see noise."""
DROP_IN: list[Callable[[], nn.Module]] = [
    lambda: MoE(WIDTH, 8, EXPERTS),
    lambda: MoE(WIDTH, 8, EXPERTS, router="sigmoid", shared=8, scale=2.5),
    lambda: MoE(WIDTH, 8, EXPERTS, 1, gated=False, shared=8),
    lambda: MoE(WIDTH, 8, EXPERTS, 3, normalize=False),
]
"""This package's own mixtures."""
