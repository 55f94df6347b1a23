"""Whatever people do with logits gives on split ones what it gives on whole ones, gradients included."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.layers import VocabParallelLogits
from lightning_megatron.layers.loss import local_vocabulary
from tests.harness import run_ranks
from tests.harness.twins import count_collectives, random_tensor, tensor_group

CLASSES = 301
TARGET = torch.tensor([[0, 5, 2, 300, 255, 5], [256, 128, 127, 2, 5, 7]])
WEIGHT = random_tensor(CLASSES, seed=5).abs()
TEACHER = random_tensor(2, 6, CLASSES, seed=6)
FLOAT32 = {"softmax method", "hugging face", "hugging face, summed", "hugging face, masked", "half", "mixed"}


def causal_loss(z, y, **options):
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(z, y, CLASSES, **options)


def masked_loss(z, y):
    from transformers.loss.loss_utils import ForMaskedLMLoss

    return ForMaskedLMLoss(z, y, CLASSES)


def mixed_loss(z, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(z.bfloat16().flatten(0, 1), y.flatten())
    assert loss.dtype == torch.float32  # not rounded to the 16 bits of the logits
    return loss


# Stay split: nothing of the size of the whole logits is built, nothing is gathered.
SPLIT = {
    "hugging face": causal_loss,
    "hugging face, summed": lambda z, y: causal_loss(z, y, num_items_in_batch=7),
    "hugging face, masked": masked_loss,
    "half": lambda z, y: F.cross_entropy(z.bfloat16().float().flatten(0, 1), y.flatten()),
    "mixed": mixed_loss,
    "keywords": lambda z, y: F.cross_entropy(input=z.flatten(0, 1), target=y.flatten(), reduction="none"),
    "positions": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), WEIGHT, None, 5, None, "sum", 0.1),
    "classes second": lambda z, y: F.cross_entropy(z.mT, y, WEIGHT, ignore_index=5, reduction="none"),
    "classes second, smoothed": lambda z, y: F.cross_entropy(z.transpose(-1, -2), y, label_smoothing=0.3),
    "images": lambda z, y: F.cross_entropy(z.permute(0, 2, 1).unflatten(2, (2, 3)), y.view(2, 2, 3)),
    "criterion": lambda z, y: nn.CrossEntropyLoss(WEIGHT, reduction="none")(z.view(-1, CLASSES), y.view(-1)),
    "everything ignored": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten() * 0 - 100, reduction="sum"),
    "temperature": lambda z, y: F.cross_entropy((z / 0.7 + 1).flatten(0, 1), y.flatten()),
    "in place": lambda z, y: F.cross_entropy(z.clone().div_(0.7).flatten(0, 1), y.flatten()),
    "augmented": lambda z, y: F.cross_entropy(augmented(z).flatten(0, 1), y.flatten()),
    "cut": lambda z, y: F.cross_entropy(z[:, :-1].reshape(-1, z.shape[-1]), y[:, 1:].reshape(-1)),
    "narrowed": lambda z, y: F.cross_entropy(z.narrow(1, 0, 4).flatten(0, 1), y[:, :4].flatten()),
    "selected": lambda z, y: F.cross_entropy(z.select(1, 2), y[:, 2]),
    "rows": lambda z, y: sum(F.cross_entropy(row, target) for row, target in zip(z, y, strict=True)),
    "unbound": lambda z, y: sum(F.cross_entropy(row, t) for row, t in zip(z.unbind(0), y, strict=True)),
    "chunks": lambda z, y: sum(F.cross_entropy(c.flatten(0, 1), t.flatten()) for c, t in parts(z, y)),
    "joined": lambda z, y: F.cross_entropy(torch.cat([z, 2 * z], 0).flatten(0, 1), torch.cat([y, y]).flatten()),
    "bias": lambda z, y: F.cross_entropy((z + TEACHER).flatten(0, 1), y.flatten()),
    "two heads": lambda z, y: F.cross_entropy((z + 0.5 * z).flatten(0, 1), y.flatten()),
    "another of its shape": lambda z, y: (z * torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view_as(z)).sum(),
    "same shape": lambda z, y: F.cross_entropy(z.reshape_as(z.detach()).flatten(0, 1), y.flatten()),
}


def parts(z, y):
    return zip(z.chunk(2, 1), y.chunk(2, 1), strict=True)


def augmented(z):
    z = z.clone()
    z *= 1.5
    z += 0.25
    return z


def banned(z):
    z = z.clone()
    z[..., 7] = -math.inf
    z[z > 2.5] = 0.0
    return z


def accuracy(z, y):
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, top_k=3)
    metric(z.flatten(0, 1), y.flatten())
    return metric.compute().double()


def perplexity(z, y):
    metric = torchmetrics.text.Perplexity()
    metric.update(z, y)
    return metric.compute().double()


def sampled(z, y):
    torch.manual_seed(3)
    return torch.multinomial(z[:, -1].softmax(-1), 2).double()


# See the whole logits.
WHOLE = {
    "argmax": lambda z, y: z.argmax(dim=-1).double(),
    "argmax function": lambda z, y: torch.argmax(input=z, dim=-1).double(),
    "maximum": lambda z, y: z.max(-1).values + z.max(dim=-1)[0] + z.amax(-1),
    "softmax": lambda z, y: F.softmax(z, -1).square(),
    "softmax method": lambda z, y: z.float().softmax(-1).double(),
    "log softmax": lambda z, y: F.nll_loss(F.log_softmax(z.flatten(0, 1), -1), y.flatten()),
    "logsumexp": lambda z, y: torch.logsumexp(z, -1).square().mean(),
    "entropy": lambda z, y: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "distillation": lambda z, y: F.kl_div(z.log_softmax(-1), TEACHER.softmax(-1), reduction="batchmean"),
    "distributions": lambda z, y: torch.distributions.Categorical(logits=z).log_prob(y),
    "soft targets": lambda z, y: F.cross_entropy(z.flatten(0, 1), TEACHER.softmax(-1).flatten(0, 1)),
    "accuracy": accuracy,
    "perplexity": perplexity,
    "sampling": sampled,
    "gather": lambda z, y: z.gather(-1, y.unsqueeze(-1)).squeeze(-1),
    "take along": lambda z, y: torch.take_along_dim(z, y.unsqueeze(-1), -1),
    "class": lambda z, y: z[..., 3] + z[:, :, 300],
    "class range": lambda z, y: z[..., 100:280].logsumexp(-1),
    "class list": lambda z, y: z[..., [3, 290]],
    "advanced": lambda z, y: z[torch.arange(2)[:, None], torch.arange(6), y],
    "index select": lambda z, y: z.index_select(-1, torch.tensor([1, 299])),
    "banned": lambda z, y: banned(z).softmax(-1),
    "masked fill": lambda z, y: z.masked_fill(TEACHER > 0, -1.0).logsumexp(-1),
    "masked fill in place": lambda z, y: z.clone().masked_fill_(TEACHER > 0, -1.0).logsumexp(-1),
    "scatter in place": lambda z, y: z.clone().scatter_(-1, y.unsqueeze(-1), 0.0).logsumexp(-1),
    "where": lambda z, y: torch.where(TEACHER > 0, z, 0.0).sum(-1),
    "mean": lambda z, y: z.mean() + z.sum() + z.norm(),
    "linear": lambda z, y: F.linear(z, TEACHER[0]),
    "einsum": lambda z, y: torch.einsum("bsv,btv->bst", z, TEACHER),
    "one hot": lambda z, y: (z * F.one_hot(y, CLASSES)).sum(-1),
    "sort": lambda z, y: z.sort(-1, descending=True)[0][..., :5] + z.topk(5).values,
    "comparison": lambda z, y: (z > 0).double() + (z == z.max()).double() + z.isfinite().double(),
    "flat": lambda z, y: z.flatten().square().sum() + z.reshape(-1)[7] + z.view(12, 7, 43)[0, 0, 0],
    "list": lambda z, y: torch.tensor(z.tolist(), dtype=z.dtype),
    "numpy": lambda z, y: torch.from_numpy(z.detach().cpu().numpy() + 1),
    "item": lambda z, y: torch.tensor(z[0, 0, 5].item(), dtype=z.dtype),
    "stacked classes": lambda z, y: torch.cat([z, TEACHER[..., :3]], -1).softmax(-1),
    "padded": lambda z, y: F.pad(z, (0, 3)).logsumexp(-1),
    "mutual": lambda z, y: z.flatten(0, 1) @ z.flatten(0, 1).t(),
    "clamped by tensor": lambda z, y: torch.minimum(z, TEACHER).sum(-1),
    "copy": lambda z, y: torch.empty_like(TEACHER).copy_(z.detach()) + torch.zeros_like(z),
}


class Largest(TorchDispatchMode):
    """The largest number of elements that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if type(value) is torch.Tensor and not value.is_meta:
                self.elements = max(self.elements, value.numel())
        return out


def split(values, group):
    """This rank's classes of whole logits, padded, and the logits that hold them."""
    start, held = local_vocabulary(CLASSES, group)
    local = F.pad(values[..., start : start + held], (0, 256 // group.size() * 2 - held))
    local = local.detach().requires_grad_()
    return local, VocabParallelLogits.wrap(local * 1.0, group, CLASSES), slice(start, start + held)


def check(use, group, name):
    values = random_tensor(2, 6, CLASSES) * 2
    whole = values.clone().requires_grad_()
    local, logits, mine = split(values, group)
    got, want = use(logits, TARGET), use(whole * 1.0, TARGET)
    got = got.full() if isinstance(got, VocabParallelLogits) else got
    assert type(got) is torch.Tensor and got.shape == want.shape and got.dtype == want.dtype
    close = {"rtol": 1e-5, "atol": 1e-5} if name in FLOAT32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(got, want, **close)
    assert got.requires_grad == want.requires_grad
    if want.requires_grad:
        scale = random_tensor(*want.shape, seed=8)
        (got * scale).sum().backward(), (want * scale).sum().backward()
        torch.testing.assert_close(local.grad[..., : mine.stop - mine.start], whole.grad[..., mine], **close)
        assert not local.grad[..., mine.stop - mine.start :].any()


@run_ranks(tensor=2)
def test_uses_that_leave_the_classes_alone_gather_nothing(mesh):
    group, wrong = tensor_group(mesh), {}
    for name, use in SPLIT.items():
        try:
            with count_collectives() as counts:
                check(use, group, name)
            assert counts["all_gather_single"] == 0, "gathered"
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


@run_ranks(tensor=2)
def test_other_uses_see_the_whole_logits(mesh):
    group, wrong = tensor_group(mesh), {}
    for name, use in WHOLE.items():
        try:
            check(use, group, name)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "weight": WEIGHT, "reduction": "none"}], ids=str)
@run_ranks(tensor=2)
def test_the_loss_builds_nothing_of_the_size_of_the_whole_logits(mesh, options):
    group = tensor_group(mesh)
    local, logits, _ = split(random_tensor(2, 6, CLASSES), group)
    with Largest() as largest:
        loss = F.cross_entropy(logits.flatten(0, 1), TARGET.flatten(), **options)
        loss.sum().backward()
    assert 0 < largest.elements <= local.numel() < 12 * CLASSES, (largest.elements, local.numel())
