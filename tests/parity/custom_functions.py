"""Functions of logits as people write them with their own gradients: ``autograd.Function``s, in every common shape.

``autograd.Function.apply`` asks a tensor of a class of its own nothing, so that logits which are split over ranks would
lose their gradient here if they were no part of autograd's graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Softcap(torch.autograd.Function):
    """A tensor of the logits' shape; the newer way to write a function."""

    @staticmethod
    def forward(x, cap):
        return cap * torch.tanh(x / cap)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.cap = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return grad * (1 - (output / ctx.cap) ** 2), None


class ZLoss(torch.autograd.Function):
    """A number."""

    @staticmethod
    def forward(ctx, x, factor):
        z = torch.logsumexp(x, -1)
        ctx.save_for_backward(x, z)
        ctx.factor = factor
        return factor * z.square().mean()

    @staticmethod
    def backward(ctx, grad):
        x, z = ctx.saved_tensors
        return grad * ctx.factor * 2 * z.unsqueeze(-1) * torch.softmax(x, -1) / z.numel(), None


class ChunkedLoss(torch.autograd.Function):
    """Computes its gradient in the forward, in pieces of tokens."""

    @staticmethod
    def forward(ctx, x, target):
        losses, grads = [], []
        for rows, labels in zip(x.split(16), target.split(16), strict=True):
            with torch.enable_grad():
                leaf = rows.detach().requires_grad_()
                loss = F.cross_entropy(leaf, labels, reduction="sum")
                grads += torch.autograd.grad(loss, leaf)
            losses.append(loss.detach())
        count = (target >= 0).sum()
        ctx.save_for_backward(torch.cat(grads) / count)
        return sum(losses) / count

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad, None


class Tempered(torch.autograd.Function):
    """Has a trained operand."""

    @staticmethod
    def forward(ctx, x, temperature):
        ctx.save_for_backward(x, temperature)
        return x * temperature

    @staticmethod
    def backward(ctx, grad):
        x, temperature = ctx.saved_tensors
        return grad * temperature, (grad * x).sum().reshape(temperature.shape)


class Squared(torch.autograd.Function):
    """Writes into memory that it asked for, as kernels do; two results."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        squares = torch.empty_like(x)
        torch.mul(x, x, out=squares)
        return squares, x.sum(-1)

    @staticmethod
    def backward(ctx, squares, sums):
        (x,) = ctx.saved_tensors
        return 2 * x * squares + sums.unsqueeze(-1)


def custom_loss(logits: Tensor, target: Tensor, temperature: Tensor) -> Tensor:
    """A loss through all of them. logits: [batch, tokens, classes]; target: [batch, tokens], -100 where ignored."""
    capped = Softcap.apply(Tempered.apply(logits, temperature), 20.0)
    squares, sums = Squared.apply(capped)
    rest = squares.mean() * 1e-2 + sums.square().mean() * 1e-4
    return ChunkedLoss.apply(capped.flatten(0, 1), target.flatten()) + ZLoss.apply(capped, 1e-2) + rest
