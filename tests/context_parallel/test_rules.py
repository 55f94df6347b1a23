"""What code does with a tensor of which a rank holds some tokens gives, with gradients, what the whole one gives.

Each rank computes the whole result, and the ranks' gradients are averaged, as gradients of parameters are.
"""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron.context_parallel.rules import ring_attention
from lightning_megatron.context_parallel.token_shards import TokenShards, cut
from lightning_megatron.context_parallel.token_split import Scope
from lightning_megatron.layers.whole import GATHERED, WholeTensor
from tests.harness import run_ranks
from tests.harness.twins import random_tensor, tensor_group

BATCH, TOKENS, WIDTH = 2, 11, 6
OTHER = random_tensor(BATCH, TOKENS, WIDTH, seed=4)
MATRIX = random_tensor(WIDTH, 5, seed=3)
TARGET = torch.randint(0, WIDTH, (BATCH, TOKENS), generator=torch.Generator().manual_seed(5))
TARGET[1, 8:] = -100
KEPT = TARGET >= 0
WEIGHT = random_tensor(WIDTH, seed=6).abs()
CAUSAL = torch.ones(TOKENS, TOKENS).tril().bool()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Sum(Square):
    """A number comes out."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).sum()


def heads(x, count=2):
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def sdpa(x, **options):
    y = F.scaled_dot_product_attention(heads(x), heads(x * 2), heads(x + 1), **options)
    return y.transpose(1, 2).reshape(BATCH, TOKENS, -1)


def by_hand(x, mask=CAUSAL):
    q, k, v = heads(x), heads(x * 2), heads(x + 1)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(3)).masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def in_batches(x):
    q, k, v = (z.reshape(BATCH * 2, TOKENS, 3) for z in (heads(x), heads(x * 2), heads(x + 1)))
    bias = torch.zeros(BATCH * 2, TOKENS, TOKENS, dtype=x.dtype).masked_fill(~CAUSAL, -1e9)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=0.5).softmax(-1)
    return torch.bmm(scores, v).view(BATCH, 2, TOKENS, 3).transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)


def linear_attention(x):
    q, k = F.elu(heads(x)) + 1, F.elu(heads(x * 2)) + 1
    return (q @ (k.mT @ heads(x))).transpose(1, 2).flatten(2)


def rotary(x):
    angles = torch.arange(TOKENS)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    table = torch.cat([angles, angles], -1)
    return x * table.cos() + torch.cat([-x[..., 3:], x[..., :3]], -1) * table.sin()


def trained(use):
    """The gradient of an operand that all ranks have."""

    def run(x):
        weight = nn.Parameter(MATRIX.clone())
        return use(x, weight), weight

    return run


def viewed(x):
    """Writes into views of single tokens, and of every other one."""
    x = x * 1
    x[:, 0] += OTHER[:, 1]
    x[:, ::2] *= 2
    x.select(1, 3)[:, 2:].sub_(1)
    last = x[:, -1]
    last += x[:, 2] * 1
    return x.exp() + last[:, None]


def written_outside(x):
    """Writes into views of single tokens that have left the graph, to which gradients go as before."""
    x = x * 1
    x[:, 1].data.mul_(3)
    x[:, -1].detach().zero_()
    with torch.no_grad():
        x[:, 2].sub_(1)
    return x * 2


def twice_kept(x):
    """Whose inputs are computed, and need a gradient when they are fetched."""
    return checkpoint(lambda q, k: sdpa(q * k) + q.exp() * k, x * 2, x.sin(), use_reentrant=False)


LOCAL = {
    "arithmetic": lambda x: (x * 2 + OTHER) / (OTHER.abs() + 1) - x.exp() ** 2 + torch.arange(TOKENS)[:, None],
    "activations": lambda x: F.gelu(x) + F.silu(x) + x.relu() + torch.sigmoid(x) + x.tanh(),
    "norms": lambda x: F.layer_norm(x, (WIDTH,), WEIGHT) + F.rms_norm(x, (WIDTH,)),
    "norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "linear": lambda x: F.linear(x, MATRIX.mT.contiguous(), MATRIX[0, :5]),
    "product": lambda x: x @ MATRIX,
    "flattened": lambda x: torch.addmm(MATRIX[0], x.reshape(-1, WIDTH), MATRIX).view(BATCH, TOKENS, 5),
    "rows in front": lambda x: (x.transpose(0, 1).reshape(TOKENS * BATCH, WIDTH) * 2).view(TOKENS, BATCH, WIDTH),
    "heads": lambda x: heads(x).permute(0, 2, 1, 3).contiguous().flatten(2),
    "chunks": lambda x: sum(x.chunk(3, -1)) + x.split([2, 2, 2], -1)[1] + x.unflatten(-1, (3, 2)).unbind(2)[0],
    "a stretch of tokens": lambda x: x[:, 2:9] * 2 + x.narrow(1, 2, 7),
    "no stretch": lambda x: (x[:, 4:4].sum() + x)[..., None, :].squeeze(2),
    "selected features": lambda x: x[..., 1:3] + x[..., 0:1] + x.select(2, 1)[..., None],
    "where": lambda x: torch.where(torch.arange(TOKENS)[None, :, None] % 3 == 0, x * 2, x).masked_fill(OTHER > 1, 0.0),
    "joined": lambda x: torch.cat([x, OTHER, x * 2], -1) + torch.stack([x, x, x], 2).flatten(2),
    "softmax of features": lambda x: x.softmax(-1) + F.log_softmax(x, -1),
    "largest": lambda x: x.topk(2, -1).values + x.amax(-1, keepdim=True) + x.max(-1, keepdim=True).values,
    "in place": lambda x: (x * 1).mul_(2).add_(OTHER).masked_fill_(OTHER > 0, 1.0),
    "a stretch in place": lambda x: stretched(x),
    "rotary": rotary,
    "sdpa, causal": lambda x: sdpa(x, is_causal=True),
    "sdpa": sdpa,
    "sdpa, mask": lambda x: sdpa(x, attn_mask=CAUSAL),
    "sdpa, window": lambda x: sdpa(x, attn_mask=CAUSAL & ~CAUSAL.tril(-4)),
    "sdpa, padding": lambda x: sdpa(x, attn_mask=torch.arange(TOKENS)[None, None, None] < 7),
    "attention by hand": by_hand,
    "attention in batches": in_batches,
    "linear attention": linear_attention,
    "sizes that are tensors": lambda x: x.view(BATCH, TOKENS, torch.div(WIDTH, 2, rounding_mode="trunc"), 2).flatten(2),
    "data": lambda x: x * x.data.abs() + (x * 2).data,
    "over samples": lambda x: x + x[0:1] * 0.1 + x.sum(0) + x.mean(0, keepdim=True),
    "losses, each": lambda x: F.cross_entropy(x.mT, TARGET, reduction="none")[..., None] * x,
    "looked up": lambda x: x.log_softmax(-1).gather(-1, TARGET.clamp(min=0)[..., None]),
    "checkpoint": lambda x: checkpoint(lambda z: by_hand(z.exp()), x, use_reentrant=False),
    "a checkpoint in another": lambda x: checkpoint(twice_kept, x, use_reentrant=False),
}
"""Stay split; of attention only keys and values travel."""

WHOLE = {
    "sum": lambda x: x.sum() + x.mean() + (x**2).sum(1).sum() + x.mean((0, 1)).sum(),
    "pooled": lambda x: x.mean(1) + (x * KEPT[..., None]).sum(1) / KEPT.sum(1, keepdim=True),
    "over tokens that one rank holds": lambda x: x[:, :2].logsumexp(1) + x[:, :2].softmax(1).square().sum(1),
    "over tokens": lambda x: x.logsumexp(1) + x.softmax(1).square().sum(1),
    "z-loss": lambda x: x.logsumexp(-1).square().mean(),
    "cross entropy": lambda x: F.cross_entropy(x.flatten(0, 1), TARGET.flatten()),
    "weighted": lambda x: F.cross_entropy(x.view(-1, WIDTH), TARGET.view(-1), WEIGHT, label_smoothing=0.1),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), TARGET, reduction="sum"),
    "shifted": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, WIDTH), TARGET[:, 1:].reshape(-1)),
    "negative log likelihood": lambda x: F.nll_loss(F.log_softmax(x, -1).mT, TARGET, WEIGHT),
    "squares": lambda x: F.mse_loss(x, OTHER) + F.l1_loss(x[:, 1:], OTHER[:, :-1]) + F.huber_loss(OTHER, x),
    "mutual": lambda x: F.normalize(x.mean(1), dim=-1) @ F.normalize(x.mean(1), dim=-1).T,
}
"""Give a whole tensor; only numbers travel that are added up."""

GATHERS = {
    "views written": lambda x: viewed(x),
    "views written outside of the graph": lambda x: written_outside(x),
    "places": lambda x: x.sum() * torch.where(x > 0)[1].double().mean(),
    "strides": lambda x: x.as_strided((BATCH, TOKENS - 2, 3, WIDTH), (TOKENS * WIDTH, WIDTH, WIDTH, 1)).mean(2),
    "last token": lambda x: x[:, -1] + x[:, 0],
    "chosen tokens": lambda x: x[torch.arange(BATCH), torch.tensor([3, 10])] + x[KEPT].sum(),
    "every other": lambda x: x[:, ::2],
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), random_tensor(4, WIDTH, 3), padding=2)[..., :TOKENS],
    "cumulative": lambda x: x.cumsum(1) + x.flip(1) + x.roll(1, 1),
    "padded": lambda x: F.pad(x, (0, 0, 1, -1)),
    "twice": lambda x: torch.cat([x, x], 1) + torch.cat([x, x[:, :0], x], 1),
    "another token": lambda x: torch.cat([torch.zeros(BATCH, 1, WIDTH, dtype=x.dtype), x], 1),
    "batch norm": lambda x: F.batch_norm(x.flatten(0, 1), None, None, training=True),
    "recurrent": lambda x: nn.GRU(WIDTH, 3, batch_first=True, dtype=x.dtype)(x)[0] * 0 + x[..., :3],
    "einsum": lambda x: torch.einsum("bsd,btd->bst", x, x),
    "named otherwise": lambda x: torch.matmul(x, other=MATRIX) + x.chunk(chunks=2, dim=1)[0].sum(),
    "an entry set": lambda x: with_entry(x),
    "sorted": lambda x: x.sort(1).values + x.std(1, keepdim=True),
    "number": lambda x: x / float(x.detach().abs().max()),
    "list": lambda x: torch.tensor(x.detach().tolist(), dtype=x.dtype) + x,
    "operator": lambda x: torch.ops.aten.mul.Tensor(x.detach(), 2) + x,
    "matrix on a view": lambda x: x[:, ::1].cumsum(1).transpose(1, 2) @ x,
}
"""Run on the gathered tensor."""

TRAINED = {
    "linear": trained(lambda x, w: F.linear(x, w.mT)),
    "whole": trained(lambda x, w: (x.mean(1) @ w).sum() + w.square().sum() + (OTHER @ w).mean()),
    "both": trained(lambda x, w: (x @ w).sum(-1).softmax(1).sum() + (x.cumsum(1) @ w).sum() + w.exp().sum()),
    "bias of tokens": trained(lambda x, w: x[..., :5] * w[0] + w.sum()),
}
"""With a parameter, whose gradient is the mean over the ranks."""


def stretched(x):
    x = x * 1
    y = x[:, 3:8]
    y.mul_(2)  # reaches x
    return x + 1


def with_entry(x):
    x = x * 1
    x[:, 4] = 0.0
    x[x > 1] = 1.0
    return x * 2


def compare(use, group: dist.ProcessGroup, balance: str, scope: Scope | None = None) -> bool:
    values = random_tensor(BATCH, TOKENS, WIDTH)
    leaves = [values.clone().requires_grad_() for _ in range(2)]
    torch.manual_seed(1)
    want = use(leaves[0] * 1.0)
    torch.manual_seed(1)
    found = use(cut(leaves[1] * 1.0, group, 1, balance, scope))
    (want, *wanted), (found, *trained_) = (value if isinstance(value, tuple) else (value,) for value in (want, found))
    kept = isinstance(found, WholeTensor)
    assert found.shape == want.shape and found.dtype == want.dtype
    got = found.full() if kept else found
    torch.testing.assert_close(got.as_subclass(Tensor), want, rtol=1e-9, atol=1e-9)
    scale = random_tensor(*want.shape, seed=8)
    (got * scale).sum().backward(), (want * scale).sum().backward()
    for mine, whole in zip((leaves[1], *trained_), (leaves[0], *wanted), strict=True):
        mean = torch.zeros_like(whole) if mine.grad is None else mine.grad.clone()
        dist.all_reduce(mean, group=group)
        torch.testing.assert_close(mean / group.size(), whole.grad, rtol=1e-9, atol=1e-9)
    return kept


def check_table(table, group, *, kept=None, gathers=None):
    wrong = {}
    for name, use in table.items():
        for balance in ("zigzag", "block"):
            try:
                GATHERED.clear()
                split = compare(use, group, balance)
                assert kept is None or split == kept, "a whole tensor came out" if kept else "a split tensor came out"
                assert gathers is None or bool(sum(GATHERED.values())) == gathers, dict(GATHERED)
            except Exception as error:
                wrong[name, balance] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


def check_tables(group):
    check_table(LOCAL, group, kept=True, gathers=False)
    check_table(WHOLE, group, kept=False, gathers=False)
    check_table(GATHERS, group, gathers=True)
    check_table(TRAINED, group)


def grouped(x, **options):
    key = torch.stack((x[..., :3], x[..., 3:] + 1), 1)[:, :1]
    y = F.scaled_dot_product_attention(heads(x), key, key * 2, enable_gqa=True, **options)
    return y.transpose(1, 2).reshape(BATCH, TOKENS, -1)


DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5 + [2] * 2, [0] * 7 + [1] * 4])
NOBODY = CAUSAL.clone()
NOBODY[3] = False
# In float64, as the tokens are: torch's kernel for processors without AVX-512 misreads a float32 mask beside them.
SLOPES = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).double() * -0.3
RINGED = {
    "whole": sdpa,
    "causal": lambda x: sdpa(x, is_causal=True),
    "scaled": lambda x: sdpa(x, is_causal=True, scale=0.3),
    "window": lambda x: sdpa(x, attn_mask=CAUSAL & ~CAUSAL.tril(-4)),
    "padding": lambda x: sdpa(x, attn_mask=torch.arange(TOKENS)[None, None, None] < 7),
    "documents": lambda x: sdpa(x, attn_mask=((DOCUMENTS[:, None] == DOCUMENTS[..., None]) & CAUSAL)[:, None]),
    "slopes": lambda x: sdpa(x, attn_mask=SLOPES),
    "a row that sees no key": lambda x: sdpa(x, attn_mask=NOBODY),
    "in numbers": lambda x: sdpa(x, attn_mask=torch.zeros(NOBODY.shape).double().masked_fill(~NOBODY, -math.inf)),
    "large scores": lambda x: sdpa(x * 40, is_causal=True),
    "shared heads": lambda x: grouped(x, is_causal=True),
    "shared heads, mask": lambda x: grouped(x, attn_mask=CAUSAL[None, None]),
    "shared heads, a mask each": lambda x: grouped(x, attn_mask=torch.stack((CAUSAL, NOBODY))[None]),
    "after an empty cache": lambda x: sdpa(torch.cat((x[:, :0], x), 1)[:, :TOKENS], is_causal=True),
}


def check_exchanged(group, method):
    wrong = {}
    for name, use in RINGED.items():
        for balance in ("zigzag", "block"):
            try:
                scope = Scope(method)
                compare(use, group, balance, scope)
                assert dict(scope.attended) == {method: 1}, dict(scope.attended)
            except Exception as error:
                wrong[name, balance] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


@run_ranks(tensor=2)
def test_attention_around_a_ring_and_by_heads_is_that_of_the_whole_tensor(mesh):
    check_exchanged(tensor_group(mesh), "ring")
    check_exchanged(tensor_group(mesh), "ulysses")
    with mock.patch.object(ring_attention, "BLOCK", 2):
        check_exchanged(tensor_group(mesh), "ring")


@pytest.mark.wide
@run_ranks(tensor=4)
def test_attention_around_a_ring_of_four_is_that_of_the_whole_tensor(mesh):
    check_exchanged(tensor_group(mesh), "ring")


@pytest.mark.wide
@run_ranks(tensor=3)
def test_heads_that_ranks_cannot_share_are_refused(mesh):
    shards = cut(random_tensor(BATCH, TOKENS, WIDTH), tensor_group(mesh), scope=Scope("ulysses"))
    with pytest.raises(RuntimeError, match=r"cannot divide 2 heads .* among `context_parallel_size=3` ranks"):
        sdpa(shards)


@run_ranks(tensor=2)
def test_rules_give_what_the_whole_tensor_gives(mesh):
    check_tables(tensor_group(mesh))


@pytest.mark.wide
@run_ranks(tensor=3)
def test_rules_over_three_ranks_give_what_the_whole_tensor_gives(mesh):
    check_tables(tensor_group(mesh))


def read_before(view):
    """Of a view, what it was before a write into it."""
    view.mul_(2)
    return view.sum()


REFUSED = {
    "custom function": (lambda x: Square.apply(x) * 2, "`context_parallel_size`.*torch's functions do not see"),
    "which gives a number": (lambda x: Sum.apply(x).backward(), "torch's functions do not see"),
    "checkpoint": (lambda x: checkpoint(torch.exp, x, use_reentrant=True) * 2, "use_reentrant=False"),
    "gradient": (lambda x: torch.autograd.grad(x.sum(), x), "context_parallel_size=1"),
    "hook": (lambda x: x.register_hook(print), "`register_hook` was asked of"),
    "its own backward": (lambda x: x.backward(torch.ones(())), "part of such a gradient only"),
    "a token as it was": (lambda x: read_before(x[:, 0]), "take the view again"),
    "an address": (lambda x: x.data_ptr(), "reaches for the memory"),
}


@pytest.fixture(scope="module")
def alone():
    """A group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_rank_would_know_in_part_is_refused(alone, name):
    use, message = REFUSED[name]
    x = random_tensor(BATCH, TOKENS, WIDTH).requires_grad_()
    with pytest.raises(RuntimeError, match=message):
        use(cut(x * 1.0, alone))


def test_gradients_that_a_step_takes_itself_are_refused(alone):
    scope, weight = Scope(), nn.Parameter(MATRIX.clone())
    shards = cut(random_tensor(BATCH, TOKENS, WIDTH), alone, scope=scope)
    assert isinstance(shards, TokenShards)
    loss = (shards @ weight).sum()
    scope.running = True
    with pytest.raises(RuntimeError, match="inside the step"):
        torch.autograd.grad(loss, weight, retain_graph=True)
    scope.running = False
    loss.backward()
    torch.testing.assert_close(weight.grad, random_tensor(BATCH, TOKENS, WIDTH).sum((0, 1))[:, None].expand(-1, 5))
