"""Networks that are not language models: images, series, plain perceptrons."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.parity.zoo.blocks import HIDDEN, Block, Convolution


class VisionTransformer(nn.Module):
    """Patches, a class token that is a bare parameter, a Sequential trunk. ``[batch, 3, 8, 8]`` to ``[batch, 5]``."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, 4, stride=4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, HIDDEN))
        self.positions = nn.Parameter(torch.randn(1, 5, HIDDEN) * 0.1)
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([x, self.class_token.expand(x.size(0), -1, -1)], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, -1])


class ResidualConvolutions(nn.Module):
    """A convolutional trunk with four-dimensional activations. ``[batch, 3, 8, 8]`` to ``[batch, 5]``."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(*[Convolution(8) for _ in range(layers)])
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.pool(self.layers(self.stem(images))).flatten(1))


class Perceptron(nn.Module):
    """A flat Sequential of unlike layers. ``[batch, seq, 6]`` to the same."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        middle = [layer for _ in range(layers) for layer in (nn.Linear(HIDDEN, HIDDEN), nn.Tanh())]
        self.layers = nn.Sequential(nn.Linear(6, HIDDEN), nn.Tanh(), *middle, nn.Linear(HIDDEN, 6))

    def forward(self, series: Tensor) -> Tensor:
        return self.layers(series)
