"""What the module's own code says about where its parts and buffers belong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.pipeline.cut.averaged_copies import AveragedCopy, find_copies
from lightning_megatron.pipeline.cut.partition import Partition, make_partition
from lightning_megatron.pipeline.cut.trunk import find_trunk, note_trunk
from lightning_megatron.pipeline.schedule import make_schedule
from tests.parity.zoo import strangers
from tests.parity.zoo.loops import Walker


def _cut(module: nn.Module, stages: int = 3) -> Partition:
    return make_partition(module, make_schedule("1f1b", stages, 2))


def _places(module: nn.Module) -> dict[str, list[int]]:
    return {name: sorted(stages) for name, stages in _cut(module).units.items()}


class Unpacked(nn.Module):
    """Gives its parts other names, several in one line."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.embed = nn.Linear(8, 20), nn.Embedding(20, 8)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))})

    def forward(self, tokens: Tensor) -> Tensor:
        layers, head, x = self.body["layers"], self.head, self.embed(tokens)
        for layer in layers:
            x = layer(x)
        out: Tensor = head(x)
        return out


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (Unpacked, {"embed": [0], "head": [2]}),
        (Walker, {"embed": [0], "head": [2]}),
        (strangers.AskedFirst, {"embed": [0], "head": [2]}),
        (strangers.EmbeddingMask, {"embed": [0], "head": [2]}),
        (strangers.EmbeddingSkip, {"embed": [0, 1, 2], "head": [2]}),
        (strangers.CutBetween, {"embed": [0, 1, 2], "head": [2], "parts": [0, 1, 2]}),
        (strangers.Conditioned, {"embed": [0], "head": [2], "condition": [0, 1, 2], "scale": [2]}),
        (strangers.Distilled, {"embed": [0], "head": [2], "teacher": [0, 2]}),
    ],
)
def test_parts_are_kept_where_their_values_are_needed(network: type[nn.Module], expected: dict[str, list[int]]) -> None:
    assert _places(network()) == expected


class Gatherer(Walker):
    """Collects what the layers return, and asks a variable whether it is there: neither needs the embedding again."""

    def forward(self, tokens: Tensor, extra: Tensor | None = None) -> Tensor:
        x, seen = self.embed(tokens), []
        masks = {"all": torch.ones_like(x[..., 0], dtype=torch.bool)}
        for block in self.blocks:
            x = block(x, masks["all"])
            if extra is not None:
                seen.append(x)
        assert x is not None
        return self.head(x)


def test_what_layers_are_given_and_return_keeps_no_part_anywhere_else() -> None:
    assert _places(Gatherer()) == {"embed": [0], "head": [2]}


class Prompted(Walker):
    """Two ways through the layers; the second begins where the first has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = True
        self.prompt = nn.Parameter(torch.zeros(self.embed.embedding_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.plain:
            with torch.autocast("cpu", enabled=False):
                return self._layers(self.embed(tokens))
        return self._layers(self.prompt + self.embed(tokens))

    def _layers(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_code_behind_a_branch_that_returns_is_not_behind_the_layers() -> None:
    assert _places(Prompted()) == {"embed": [0], "head": [2], "prompt": [0]}


class Nested(nn.Module):
    """The layers in an outer ``nn.Sequential``, which names its parts by number and is called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        walker = Walker()
        self.backbone = nn.Sequential(walker.embed, nn.Sequential(*walker.blocks))
        self.whole = nn.Sequential(self.backbone, walker.head)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.whole(tokens)


def test_the_layers_may_lie_in_an_outer_sequential_followed_by_a_head() -> None:
    assert _places(Nested()) == {"backbone.0": [0], "whole.1": [2]}


class Means(Walker):
    """A running mean before the layers and one after them, in modules without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.BatchNorm1d(8, affine=False), nn.BatchNorm1d(8, affine=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.late(self.walk(self.early(self.embed(tokens)))))


def test_buffers_belong_to_the_stage_that_fills_them() -> None:
    partition = _cut(Means())
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert set(partition.early_buffers) == {f"early.{name}" for name in names}
    assert set(partition.late_buffers) == {"seen", *(f"late.{name}" for name in names)}


class Shadowed(nn.Module):
    """A trained network, copies of it and of parts of it, and frozen or trained parts that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Walker()
        self.average = AveragedModel(self.net)
        self.old_head = copy.deepcopy(self.net.head).requires_grad_(False)
        self.norms = nn.ModuleList([nn.LayerNorm(3), nn.LayerNorm(3)])
        self.still = nn.LayerNorm(3).requires_grad_(False)
        self.other = nn.Linear(5, 7).requires_grad_(False)
        self.table = nn.Embedding(6, 4).requires_grad_(False)
        self.reads = nn.Linear(4, 6, bias=False)
        self.target_norm = nn.LayerNorm(3)


def test_copies_are_found_with_their_sources() -> None:
    module = Shadowed()
    copies = find_copies(module, find_trunk(module))
    assert list(copies.sources) == [
        AveragedCopy("average", "net", "module.", ""),
        AveragedCopy("old_head", "net.head"),
        AveragedCopy("still"),
        AveragedCopy("target_norm"),
    ]
    found = copies.in_question(module, {id(parameter) for parameter in module.parameters()})
    assert {id(p) for p in found} == {id(p) for p in [*module.average.parameters(), *module.target_norm.parameters()]}
    left = copies.without_trained(module, {id(module.target_norm.weight)})
    assert [copy.name for copy in left.sources] == ["average", "old_head", "still"]


def test_a_trained_list_is_the_trunk_before_its_frozen_copy() -> None:
    module = nn.Module()
    module.teacher, module.student = Walker().requires_grad_(False), Walker()
    assert find_trunk(module).name == "student.blocks"


def test_the_trunk_stays_the_trunk_when_its_layers_are_split() -> None:
    module = nn.Module()
    module.teacher, module.student = Walker().requires_grad_(False), Walker()
    note_trunk(module)
    whole = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for parameter in module.student.blocks.parameters():
        parameter.data = parameter.data[: parameter.shape[0] // 2]  # as a tensor rank has them
    trunk = find_trunk(module)
    assert trunk.name == "student.blocks"
    assert list(find_copies(module, trunk, whole).sources) == [AveragedCopy("teacher", "student")]


def test_a_layer_that_tensor_ranks_share_is_the_source_of_its_whole_copy() -> None:
    module = nn.Module()
    module.net = Walker()
    module.first = copy.deepcopy(module.net.embed).requires_grad_(False)
    trunk, shape = find_trunk(module), tuple(module.net.embed.weight.shape)
    module.net.embed.__class__ = VocabParallelEmbedding  # type: ignore[assignment]
    module.net.embed.weight.data = module.net.embed.weight.data[: shape[0] // 2]
    copies = find_copies(module, trunk, {"net.embed.weight": shape})
    assert list(copies.sources) == [AveragedCopy("first", "net.embed")]
