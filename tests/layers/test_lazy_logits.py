"""Losses of logits that are computed in pieces of tokens: the numbers of whole logits, in a part of the memory."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_megatron import MegatronStrategy
from lightning_megatron.pipeline.forwards.lazy_heads import LazyHeads

CLASSES, HIDDEN = 50, 16
WEIGHT = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


class Net(nn.Module):
    """Layers, and a head that is a module, tied to the embedding, or the embedding's table itself."""

    def __init__(self, head: str = "own", classes: int = CLASSES, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding, self.kind = nn.Embedding(classes, hidden), head
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        if head in ("own", "tied"):
            self.head = nn.Linear(hidden, classes, bias=head == "own")
        if head == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.kind == "table":
            return F.linear(x, self.embedding.weight)
        if self.kind == "transposed":
            return x @ self.embedding.weight.T
        return self.head(x)


def _written(logits, y):
    logits[..., 3] = 0.0
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def _hooked(logits, y):
    logits.register_hook(lambda grad: 2 * grad)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def _none(logits, y):
    loss = F.cross_entropy(logits.transpose(1, 2), y, reduction="none", ignore_index=5)
    return (loss * torch.arange(y.numel()).view_as(y)).mean()


LOSSES = {  # name: loss of logits and targets, and what made the logits whole
    "flattened": (lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()), set()),
    "shifted": (
        lambda z, y: F.cross_entropy(z[:, :-1].contiguous().view(-1, z.size(-1)), y[:, 1:].reshape(-1), ignore_index=3),
        set(),
    ),
    "classes in dim 1": (
        lambda z, y: F.cross_entropy(z.transpose(1, 2), y, weight=WEIGHT, label_smoothing=0.1, ignore_index=7),
        set(),
    ),
    "summed": (lambda z, y: F.cross_entropy(z.permute(0, 2, 1), y, reduction="sum"), set()),
    "by token": (_none, set()),
    "soft cap": (lambda z, y: F.cross_entropy((30 * torch.tanh(z / 30)).view(-1, CLASSES), y.view(-1)), set()),
    "log probabilities": (lambda z, y: F.nll_loss(F.log_softmax(z, -1).view(-1, CLASSES), y.view(-1)), set()),
    "gathered": (lambda z, y: -z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean(), set()),
    "normaliser": (
        lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()) + 0.01 * z.logsumexp(-1).square().mean(),
        set(),
    ),
    "accuracy": (
        lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()) * (z.detach().argmax(-1) == y).double().mean(),
        set(),
    ),
    "picked": (lambda z, y: F.cross_entropy(z[y > 10], y[y > 10]), set()),
    "last": (lambda z, y: F.cross_entropy(z[:, -1], y[:, -1]), set()),
    "per class": (lambda z, y: F.cross_entropy((z + WEIGHT).flatten(0, 1), y.flatten()), set()),
    "reduced": (lambda z, y: z.max(-1).values.mean() + z.topk(3).values.sum() + z.softmax(-1).amax(-1).sum(), set()),
    "none left": (lambda z, y: F.cross_entropy(z.flatten(0, 1), torch.full_like(y, -100).flatten()), set()),
    "also whole": (lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()) + z.std(), {"std"}),
    "probabilities": (
        lambda z, y: F.cross_entropy(z.flatten(0, 1), F.one_hot(y, CLASSES).double().flatten(0, 1)),
        {"cross_entropy"},
    ),
    "in place": (lambda z, y: F.cross_entropy(z.div_(2).flatten(0, 1), y.flatten()), {"div_"}),
    "written": (_written, {"__setitem__"}),
    "hooked": (_hooked, {"register_hook"}),
}


def in_pieces(net, pieces, loss, tokens, targets):
    """The loss over so many pieces, and what was told of them."""
    heads = LazyHeads(net, ["layers.0", "layers.1"], pieces)
    heads.open()
    try:
        return heads.run(lambda batch: loss(net(batch[0]), batch[1]), (tokens, targets)), heads.pieces
    finally:
        heads.close()


@pytest.mark.parametrize("head", ["own", "tied", "table", "transposed"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_pieces_is_that_of_whole_logits(name, head):
    loss, made_whole = LOSSES[name]
    for pieces in (1, 3, 100, "auto"):
        torch.manual_seed(3)
        whole, tokens, targets = Net(head).double(), *torch.randint(0, CLASSES, (2, 2, 7))
        split = copy.deepcopy(whole)
        wanted = loss(whole(tokens), targets)
        wanted.backward()
        found, told = in_pieces(split, pieces, loss, tokens, targets)
        found.backward()
        assert set(told.whole) == made_whole
        assert bool(told.done) == (name not in ("probabilities", "in place", "written", "hooked"))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
        for one, other in zip(whole.parameters(), split.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_weights_are_added_up_over_pieces_before_they_are_rounded(dtype):
    torch.manual_seed(3)
    exact, tokens, targets = Net().to(dtype).double(), *torch.randint(0, CLASSES, (2, 8, 64))
    rounded, split = (copy.deepcopy(exact).to(dtype) for _ in range(2))
    loss = LOSSES["flattened"][0]
    loss(exact(tokens), targets).backward()
    loss(rounded(tokens), targets).backward()
    in_pieces(split, 64, loss, tokens, targets)[0].backward()
    errors = [float((net.head.weight.grad - exact.head.weight.grad).abs().max()) for net in (rounded, split)]
    assert errors[1] <= 1.5 * errors[0]


def test_autocast_holds_where_the_head_was_called():
    torch.manual_seed(3)
    whole, tokens, targets = Net(), *torch.randint(0, CLASSES, (2, 2, 7))
    split = copy.deepcopy(whole)

    def step(net):
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(tokens)
            assert logits.dtype == torch.bfloat16
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    wanted = step(whole)
    wanted.backward()
    heads = LazyHeads(split, ["layers.0", "layers.1"], 3)
    heads.open()
    found = heads.run(lambda _: step(split), None)
    found.backward()
    heads.close()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(split.head.weight.grad, whole.head.weight.grad, rtol=0.02, atol=1e-3)


def _frozen(net, names):
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith(names))


def _hooked_head(net):
    net.head.register_forward_hook(lambda module, args, output: output * 0.5)


HABITS = {
    "frozen layers": lambda net: _frozen(net, ("layers", "embedding")),
    "frozen head": lambda net: _frozen(net, ("head",)),
    "hooked head": _hooked_head,
    "weight norm": lambda net: nn.utils.parametrizations.weight_norm(net.head),
}


@pytest.mark.parametrize("name", HABITS)
def test_heads_as_users_treat_them_give_the_same_gradients(name):
    torch.manual_seed(3)
    whole, tokens, targets = Net().double(), *torch.randint(0, CLASSES, (2, 2, 7))
    split = copy.deepcopy(whole)
    for net in (whole, split):
        HABITS[name](net)
    wanted = LOSSES["flattened"][0](whole(tokens), targets)
    wanted.backward()
    found, told = in_pieces(split, 3, LOSSES["flattened"][0], tokens, targets)
    found.backward()
    assert told.done and not told.whole
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside had at one time."""

    def __init__(self):
        super().__init__()
        self.most, self._live = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves(found):
            if type(value) is torch.Tensor and value.device.type == "cpu":
                storage = value.untyped_storage()
                if storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.most = max(self.most, sum(self._live.values()))
        return found


def live_bytes(pieces, length):
    """The most bytes of a step with a vocabulary of 4,096 and 64 features, forward and backward."""
    torch.manual_seed(3)
    net, loss = Net(classes=4096, hidden=64), lambda z, y: F.cross_entropy(z.float().flatten(0, 1), y.flatten())
    tokens, targets = torch.randint(0, 4096, (2, 1, length))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        found = loss(net(tokens), targets) if pieces is None else in_pieces(net, pieces, loss, tokens, targets)[0]
        found.backward()
    return live.most


def test_memory_grows_with_the_piece_and_not_with_the_logits():
    whole, pieces = live_bytes(None, 1024), live_bytes(16, 1024)
    assert whole > 3 * 1024 * 4096 * 4  # logits, probabilities and their gradient
    assert pieces < 0.15 * whole
    per_token = (live_bytes(32, 2048) - live_bytes(16, 1024)) / 1024  # pieces of 64 tokens
    assert per_token < 12 * 64 * 4  # a few rows of hidden features, of 4,096 classes nothing


class Cubed(torch.autograd.Function):
    """With a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def _viewed(logits, y):
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    logits.mul_(2)
    return loss


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (
            lambda z, y: F.cross_entropy(checkpoint(torch.tanh, z, use_reentrant=True).flatten(0, 1), y.flatten()),
            "`torch.utils.checkpoint(use_reentrant=True)`",
        ),
        (lambda z, y: F.cross_entropy(Cubed.apply(z).flatten(0, 1), y.flatten()), "a custom `autograd.Function`"),
        (_viewed, "`mul_` was asked of logits"),
    ],
)
def test_what_would_be_silently_different_is_refused(loss, wanted):
    with pytest.raises(RuntimeError, match="loss_chunks") as error:
        in_pieces(Net(), 3, loss, *torch.randint(0, CLASSES, (2, 2, 7)))
    assert wanted in str(error.value)


def test_a_weight_that_changes_before_its_logits_are_computed_is_refused():
    net = Net()

    def loss(logits, y):
        with torch.no_grad():
            net.head.weight.mul_(2)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    with pytest.raises(RuntimeError, match="was changed in place after logits had been asked"):
        in_pieces(net, 3, loss, *torch.randint(0, CLASSES, (2, 2, 7)))


def test_a_step_without_a_head_is_refused():
    net = Net()
    net.forward = lambda tokens: torch.einsum("bsh,vh->bsv", net.embedding(tokens), net.embedding.weight)
    with pytest.raises(RuntimeError, match="found no head in the step of `Net`"):
        in_pieces(net, 3, LOSSES["flattened"][0], *torch.randint(0, CLASSES, (2, 2, 7)))


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "many", {"head": 2}])
def test_a_number_of_pieces_that_is_none_is_refused_at_once(value):
    with pytest.raises(ValueError, match="must be a number of pieces, 'auto' or None"):
        MegatronStrategy(loss_chunks=value)


def test_weights_that_are_freed_before_the_backward_are_refused_at_once():
    with pytest.raises(ValueError, match="`weight_sharding=True` has freed it"):
        MegatronStrategy(loss_chunks=4, weight_sharding=True)
