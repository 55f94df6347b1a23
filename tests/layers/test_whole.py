"""Every rule for tensors that hold a part gives, with gradients, what the function gives on the whole tensor."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron.layers.whole import GATHERED, RULES, SplitDim, WholeTensor
from tests.harness import run_ranks
from tests.harness.twins import random_tensor, tensor_group

LENGTH, BLOCK = 5, 3  # over two ranks: 3 indices and 2, then one entry of padding
MATRIX = random_tensor(LENGTH, 4, seed=3)
OTHER = random_tensor(2, 3, LENGTH, seed=4)
TARGET = torch.tensor([[0, 4, 2], [3, 1, -100]])
CLASS_WEIGHT = random_tensor(LENGTH, seed=5).abs()
EXACT = {"rtol": 1e-9, "atol": 1e-9}


class Shards(WholeTensor):
    """A kind of its own: the rules are not those of logits alone."""

    rules = RULES


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Exponential(torch.autograd.Function):
    """Saves its output, and asks for a row's sum in its backward."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y / y.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        p = y / y.sum(-1, keepdim=True)
        return p * (grad - (grad * p).sum(-1, keepdim=True))


class Penalty(torch.autograd.Function):
    """A z-loss: an ordinary tensor comes out."""

    @staticmethod
    def forward(ctx, x):
        z = torch.logsumexp(x, -1)
        ctx.save_for_backward(x, z)
        return z.square().mean()

    @staticmethod
    def backward(ctx, grad):
        x, z = ctx.saved_tensors
        return grad * 2 * z.unsqueeze(-1) * torch.softmax(x, -1) / z.numel()


class Doubled(torch.autograd.Function):
    """Works in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Filled(torch.autograd.Function):
    """Asks for memory and writes its result there."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.mul(x, x, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def bias(z):
    b = nn.Parameter(random_tensor(LENGTH, seed=6))
    out = (z * b).square().sum()
    (grad,) = torch.autograd.grad(out, b, retain_graph=True)
    return out + grad.detach().sum()


def scaled(z):
    row, number = (nn.Parameter(random_tensor(*shape, seed=7)) for shape in ((3, 1), ()))
    out = z * row + number
    grads = torch.autograd.grad((out**2).sum(), (row, number), retain_graph=True)
    return out + sum(grad.detach().sum() for grad in grads)


def trained_operand(use):
    """The gradient of an ordinary operand is whole, and the same on all ranks."""

    def run(z):
        weight = nn.Parameter(MATRIX.clone())
        out = use(z, weight)
        (grad,) = torch.autograd.grad(out.square().sum(), weight, retain_graph=True)
        return out.square().sum() + (grad.detach() * random_tensor(LENGTH, 4, seed=9)).sum()

    return run


LOCAL = {
    "add": lambda z: z + 1.5 + OTHER,
    "reflected": lambda z: 1 - z + 2 / (z + 9) + OTHER - z,
    "divide": lambda z: z / (OTHER + 3),
    "power": lambda z: z**3 + 2.0**z + z.pow(2),
    "logarithm": lambda z: (z + 9).log() + (z.abs() + 1).sqrt() + z.square().log1p(),
    "activations": lambda z: F.gelu(z) + F.silu(z) + F.softplus(z) + z.relu() + z.sigmoid() + torch.tanh(z),
    "softcap": lambda z: 30 * torch.tanh(z / 30),
    "trained scales": lambda z: scaled(z),
    "where": lambda z: torch.where(OTHER > 0, z, -1.0) + z.masked_fill(OTHER > 1, 0.5),
    "two tensors": lambda z: z * z.exp() - z.detach(),
    "in place": lambda z: z.clone().mul_(2).add_(OTHER).masked_fill_(OTHER > 0, 1.0).exp_(),
    "a list in place": lambda z: listed(z),
    "clamped": lambda z: z.clamp(-0.5, 0.5),
    "cast": lambda z: z.float().double(),
    "rows": lambda z: z[1:, [0, 2]] + z[1, 1],
    "reshaped": lambda z: z.flatten(0, 1).view(2, 3, LENGTH).transpose(0, 2).permute(2, 1, 0),
    "cut in the middle": lambda z: (z.mT * 2).mT,
    "joined": lambda z: torch.cat([z, z * 2], 1) + torch.stack([z, z], 1).flatten(1, 2),
    "unbound": lambda z: sum(z.unbind(0)) + z.chunk(2, 0)[1][0] + z.select(0, 0),
    "softmax": lambda z: z.softmax(-1) + F.softmax(z, dim=-1) * F.log_softmax(z, -1) + torch.softmax(z, 0),
    "softmax, wide": lambda z: z.float().softmax(-1, dtype=torch.float64),
    "sum over others": lambda z: z.sum(0) + z.mean((0, 1)) + z.logsumexp(0),
    "rows of a product": lambda z: (z.mT @ MATRIX[:3]).mT,
}
"""Stay split."""

REDUCED = {
    "sum": lambda z: z.sum() + z.mean() + torch.sum(z) * 2 + torch.mean(z),
    "sum over": lambda z: (
        z.sum(-1) + z.mean(dim=-1) + z.sum((1, 2), keepdim=True)[..., 0] + z.mean((0, 2), keepdim=True)[..., 0]
    ),
    "logsumexp": lambda z: torch.logsumexp(z, -1) + z.logsumexp(-1, keepdim=True)[..., 0] + z.logsumexp(dim=-1),
    "z-loss": lambda z: z.logsumexp(-1).square().mean(),
    "infinite": lambda z: torch.where(OTHER > 0.5, z, -math.inf).logsumexp(-1).exp(),
    "product": lambda z: z @ MATRIX + torch.matmul(z.softmax(-1), MATRIX),
    "linear": lambda z: F.linear(z, MATRIX.mT.contiguous(), MATRIX[0]),
    "linear of rows": lambda z: F.linear(z.mT.contiguous(), random_tensor(4, 3), MATRIX[0]).sum(1),
    "trained product": trained_operand(lambda z, w: z @ w),
    "trained product of rows": trained_operand(lambda z, w: z.mT @ w[:3]),
    "trained bias": bias,
    "cross entropy": lambda z: F.cross_entropy(z.flatten(0, 1), TARGET.flatten(), CLASS_WEIGHT, label_smoothing=0.1),
    "classes second": lambda z: F.cross_entropy(z.mT, TARGET, reduction="none"),
    "negative log likelihood": lambda z: F.nll_loss(F.log_softmax(z, -1).flatten(0, 1), TARGET.flatten(), CLASS_WEIGHT),
    "summed": lambda z: F.nll_loss(z.log_softmax(-1).mT, TARGET, reduction="sum"),
    "each": lambda z: F.nll_loss(z.log_softmax(-1).mT, TARGET, ignore_index=4 - 104, reduction="none"),
    "sequence log probability": lambda z: z.log_softmax(-1).gather(2, TARGET.clamp(min=0).unsqueeze(2)).squeeze(2),
    "entropy": lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
}
"""Give a whole tensor without gathering one."""

GATHERS = {
    "argmax": lambda z: z.argmax(-1).double(),
    "cumulative": lambda z: z.cumsum(-1),
    "norm": lambda z: z.norm() + torch.linalg.vector_norm(z, dim=-1).sum(),
    "sorted": lambda z: z.sort(-1).values + z.topk(5).values,
    "an index": lambda z: z[..., 3] + z[..., [0, 4]].sum(-1),
    "flat": lambda z: z.reshape(-1)[3:7] * 2,
    "set": lambda z: zeroed(z).exp(),
    "set by a mask": lambda z: masked(z).exp(),
    "set in a row": lambda z: row_zeroed(z),
    "scatter": lambda z: z.clone().scatter_(-1, TARGET.clamp(min=0).unsqueeze(-1), 0.0),
    "in an option": lambda z: relu_in_place(z),
    "two dims": lambda z: z.log_softmax(-1).sum((0, 1)).cumsum(0),
    "inverse": lambda z: torch.linalg.matrix_norm(z, 2),
}
"""Need the whole tensor."""

BYPASS = {
    "custom function": lambda z: Square.apply(z),
    "twice": lambda z: Square.apply(Square.apply(z) + z),
    "which saves its output": lambda z: Exponential.apply(z),
    "which returns a number": lambda z: Penalty.apply(z) + z.sum(),
    "which works in place": lambda z: Doubled.apply(z.clone()) * 3,
    "after a change in place": lambda z: Square.apply(z.clone().mul_(3).add_(1)),
    "before a change in place": lambda z: Square.apply(z) * 1 + (z * 1).mul_(2),
    "of a view": lambda z: Square.apply(z[:, 1:].flatten(0, 1)).sum(0),
    "checkpoint": lambda z: checkpoint(lambda x: (x.exp() * MATRIX[:, 0]).sum(-1), z, use_reentrant=True),
    "checkpoint that stays split": lambda z: checkpoint(torch.exp, z, use_reentrant=True) * 2,
    "checkpoint, other kind": lambda z: checkpoint(lambda x: Square.apply(x).exp(), z, use_reentrant=False),
    "vmap": lambda z: torch.func.vmap(lambda row: row.exp().sum(-1))(z),
    "functional gradient": lambda z: torch.func.grad(lambda x: (x**3).sum())(z),
    "operator": lambda z: torch.ops.aten.mul.Tensor(z, 2) + torch.ops.aten.sum(z),
    "asked for a gradient": lambda z: torch.autograd.grad((z**3).sum(), z, create_graph=True)[0] * 2,
    "with a start": lambda z: torch.autograd.grad(z**3, z, OTHER, create_graph=True)[0].sum(),
    "hook": lambda z: hooked(z),
    "which writes into memory of its own": lambda z: Filled.apply(z),
}
"""Pass by ``__torch_function__``, or are about the graph."""


def zeroed(z):
    z = z.clone()
    z[..., 3] = 0.0
    return z


def masked(z):
    z = z * 1
    z[z > 0.3] = -1.0
    return z


def row_zeroed(z):
    z = z * 1
    row = z[:, 1]
    row[row > 0] = 0.0  # reaches z
    return z * 2


def listed(z):
    z = z * 1
    torch._foreach_mul_([z], [2.0])
    torch._foreach_exp_([z])
    return z


def relu_in_place(z):
    z = z * 1
    F.relu(z, inplace=True)
    return z


def hooked(z):
    z = z * 1
    z.register_hook(lambda grad: grad / grad.norm())
    return z**3


def shards(values: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Shards]:
    """A leaf, and the tensor of which it is this rank's part."""
    split = SplitDim(group, LENGTH)
    block = BLOCK if group.size() > 1 else LENGTH
    local = split.take(values.detach(), 2, block).clone().requires_grad_()
    return local, Shards.show(local * 1.0, split, 2)


def compare(use, group) -> object:
    values = random_tensor(2, 3, LENGTH)
    whole = values.clone().requires_grad_()
    local, given = shards(values, group)
    want, found = use(whole * 1.0), use(given)
    kept = isinstance(found, WholeTensor)
    assert found.shape == want.shape and found.dtype == want.dtype and found.requires_grad == want.requires_grad
    got = found.full() if kept else found
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if use in (LOCAL["cast"], LOCAL["softmax, wide"]) else EXACT
    torch.testing.assert_close(got.as_subclass(Tensor), want, **tolerance)
    if want.requires_grad:
        scale = random_tensor(*want.shape, seed=8)
        (got * scale).sum().backward(), (want * scale).sum().backward()
        mine = SplitDim(group, LENGTH)
        torch.testing.assert_close(
            mine.held(local.grad, 2), mine.take_held(whole.grad, 2, len(local[0, 0])), **tolerance
        )
        assert not local.grad[..., mine.span(local.shape[2])[1] :].any(), "a gradient for padding"
    return kept


def check_table(table, group, *, kept=None, gathers=None):
    wrong = {}
    for name, use in table.items():
        try:
            GATHERED.clear()
            split = compare(use, group)
            assert kept is None or split == kept, "a whole tensor came out" if kept else "a split tensor came out"
            assert gathers is None or bool(sum(GATHERED.values())) == gathers, dict(GATHERED)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


@run_ranks(tensor=2)
def test_rules_give_what_the_whole_tensor_gives(mesh):
    group = tensor_group(mesh)
    check_table(LOCAL, group, kept=True, gathers=False)
    check_table(REDUCED, group, kept=False, gathers=False)
    check_table(GATHERS, group, gathers=True)


@run_ranks(tensor=2)
def test_functions_that_bypass_torch_functions_keep_the_graph(mesh):
    check_table(BYPASS, tensor_group(mesh))


def written(z):
    """Scores that are changed in place, one token's, some tokens', and a row's."""
    z[0, 1, 4] += 2.0
    z[..., 3] -= 1.0
    z[:, 0, 1:4] *= 0.5
    z[:, :, 2].clamp_(max=0.1)
    first, second = z[..., 0], z[:, 1]
    first += second.sum()
    z[1, 2][4] = 3.0
    z[..., 1] -= z[..., 0]
    z[:, 2:] += z[:, :1]
    before, wide = z[..., 3], z[0, :, 1:]
    z[..., 3] = 7.0
    z[:, 1].mul_(2.0)
    z.detach()[:, 0].add_(1.0)
    second[0] = before[0, 2]
    wide[1:].neg_()
    return z + before.unsqueeze(-1)


@run_ranks(tensor=2)
def test_views_along_the_cut_dim_are_written(mesh):
    whole = random_tensor(2, 3, LENGTH)
    _, given = shards(whole, tensor_group(mesh))
    with torch.no_grad():
        torch.testing.assert_close(written(given.clone()).full(), written(whole.clone()), **EXACT)


@pytest.fixture(scope="module")
def alone():
    """A group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_needs_no_rules(alone):
    for table in (LOCAL, REDUCED, GATHERS, BYPASS):
        check_table(table, alone)


REFUSED = {
    "a view written as output": (lambda z: torch.sin(z.detach()[..., 4], out=(z * 1)[..., 3]), "gathered copy"),
    "a view that was another's": (lambda z: view_read(z), "take the view again"),
    "a view in a list": (lambda z: torch._foreach_mul_([z.detach()[..., 3]], 2.0), "gathered copy"),
    "a view of what it was": (lambda z: late_read(z), "take the view again"),
    "an output": (lambda z: torch.mul(z.detach(), 2, out=z.detach()), "assign its result"),
    "a list": (lambda z: torch._foreach_maximum_([z.detach()], 1.0), "one at a time"),
    "an address": (lambda z: z.data_ptr(), "local\\(\\)"),
    "a storage": (lambda z: z.untyped_storage(), "local\\(\\)"),
    "memory of an operator": (lambda z: torch.utils.dlpack.to_dlpack(z.detach()), "data pointer"),
    "an array written": (lambda z: z.detach().numpy().__setitem__(0, 1.0), "read-only"),
    "a shape in place": (lambda z: z.unsqueeze_(0), "unsqueeze"),
    "a change under a view": (lambda z: stale(z), "changed in place"),
}


def view_read(z):
    view = (z * 1)[..., 3]
    view.mul_(2)
    view.sum()


def late_read(z):
    z = z * 1
    view = z[..., 3]
    z[:, 1].mul_(2)
    view.sum()


def stale(z):
    z = z * 1
    z[:, 1].mul_(2)
    Square.apply(z).sum().backward()


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused(alone, name):
    use, message = REFUSED[name]
    _, given = shards(random_tensor(2, 3, LENGTH), alone)
    with pytest.raises((RuntimeError, ValueError), match=message):
        use(given)


def test_a_view_that_is_given_as_output_is_written_where_it_is(alone):
    _, given = shards(random_tensor(2, 3, LENGTH), alone)
    before = given.full().detach().clone()
    torch.mul(before[0, 0, 1:], 2, out=given.detach()[0, 0, :-1])
    torch.testing.assert_close(given.full()[0, 0, :-1], 2 * before[0, 0, 1:])
    torch.testing.assert_close(given.full()[1:], before[1:])


def test_data_and_gradients_are_written_where_they_are(alone):
    local, _ = shards(random_tensor(2, 3, LENGTH), alone)
    leaf = Shards.show(local.detach(), SplitDim(alone, LENGTH), 2).requires_grad_()
    leaf.data.mul_(2)
    (leaf**2).sum().backward()
    assert leaf.is_leaf and isinstance(leaf.grad, Shards)
    torch.testing.assert_close(leaf.grad.full(), 4 * local.detach() / 2)
    Square.apply(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad.full(), 4 * local.detach())
    leaf.grad = None
    assert leaf.local().grad is None
    leaf.data = torch.ones(2, 3, LENGTH, dtype=local.dtype)
    assert leaf.sum() == leaf.numel()


def test_copies_are_whole(alone):
    _, given = shards(random_tensor(2, 3, LENGTH), alone)
    for copied in (
        copy.deepcopy(given),
        pickle.loads(pickle.dumps(given)),
        torch.tensor(given.tolist()).double(),
    ):
        assert type(copied) is Tensor
        torch.testing.assert_close(copied, given.full().detach(), rtol=1e-6, atol=1e-6)
    assert "Shards(shape=(2, 3, 5)" in f"{given}"
