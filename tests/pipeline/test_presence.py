"""What of a module is on which rank, and what user code sees of it in a step, in a hook, and when it counts."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.layers.table import ParameterSharding
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.mesh import Holders
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.pipeline.cut.partition import Partition, make_partition
from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.pipeline.elsewhere.away import StageSource
from lightning_megatron.pipeline.elsewhere.listing import NewContainers
from lightning_megatron.pipeline.elsewhere.presence import Phase, Presence, Sight
from lightning_megatron.pipeline.elsewhere.standin import hollow_out
from lightning_megatron.pipeline.elsewhere.twins import shown_whole
from lightning_megatron.pipeline.schedule import make_schedule
from lightning_megatron.pipeline.stage.stage import Stage

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Embedding and head share their weight; two layers share a rotary table; the norm in the middle is a copy's source
    and a scale lies directly on the module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.rotary = nn.Module()
        self.rotary.register_buffer("table", torch.ones(3), persistent=False)
        for layer in self.layers[:2]:
            layer.rotary = self.rotary
        self.layers[3].register_buffer("mean", torch.zeros(4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale)


def _partition(module: nn.Module, stages: int, **options: object) -> Partition:
    return make_partition(module, make_schedule("1f1b", stages, 2), **options)  # type: ignore[arg-type]


def _presence(module: nn.Module, stage: int, stages: int = 4) -> Presence:
    return Presence.of_stage(module, _partition(module, stages), stage)


def test_parts_tell_the_virtual_stage_in_which_they_run_and_the_buffers_that_several_write() -> None:
    module = Tied()
    presence = Presence.of_stage(module, _partition(module, 2, pipeline_split=[2, 2]), 1)
    chunks = {name: part.chunk for name, part in presence.parts.items()}
    assert chunks == {"scale": 1, "embed": 0, "head": 1} | {f"layers.{at}": at // 2 for at in range(4)}
    assert presence.layer_names() == [f"layers.{at}" for at in range(4)]
    assert presence.shared_buffers == ("layers.0.rotary.table",)


def test_every_name_of_the_whole_module_has_an_entry_on_every_stage() -> None:
    module = Tied()
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    found = [_presence(module, stage) for stage in range(4)]
    for presence in found:
        assert list(presence.entries) == names
    assert all(presence.shared_stage_sets() == [(0, 3)] for presence in found)


@pytest.mark.parametrize(
    ("name", "part", "stages"),
    [
        ("embed.weight", "embed", {0, 3}),
        ("head.weight", "head", {0, 3}),
        ("layers.1.bias", "layers.1", {1}),
        ("layers.3.mean", "layers.3", {3}),
        ("scale", "scale", {3}),
        ("rotary.table", "layers.0", {0, 1, 2, 3}),
        ("layers.0.rotary.table", "layers.0", {0, 1, 2, 3}),
    ],
)
def test_a_tensor_is_on_the_stages_of_all_its_names(name: str, part: str, stages: set[int]) -> None:
    entry = _presence(Tied(), 0).entries[name]
    assert (entry.part, entry.stages) == (part, stages)


def test_a_further_name_of_a_module_is_where_the_module_is() -> None:
    module = Tied()
    module.embedding = module.embed  # an attribute of the same object
    entry = _presence(module, 1).entries["embedding.weight"]
    assert (entry.part, entry.stages, entry.first) == ("embed", {0, 3}, "embed.weight")


@pytest.mark.parametrize(
    ("name", "step", "hook", "whole"),
    [
        ("layers.1.weight", Sight.REAL, Sight.REAL, Sight.REAL),
        ("layers.2.weight", Sight.ZEROS, Sight.ABSENT, Sight.TWIN),
        ("layers.3.mean", Sight.ZEROS, Sight.ABSENT, Sight.TWIN),
        ("rotary.table", Sight.REAL, Sight.REAL, Sight.REAL),
        ("lora.weight", Sight.REAL, Sight.REAL, Sight.REAL),
    ],
)
def test_what_is_seen_of_a_name_depends_on_the_phase(name: str, step: Sight, hook: Sight, whole: Sight) -> None:
    presence = _presence(Tied(), 1)
    assert [presence.sight(name, phase) for phase in Phase] == [step, hook, whole]


def test_a_copy_lists_in_hooks_what_its_source_is_here_of() -> None:
    module = Tied()
    module.ema = copy.deepcopy(module.layers).requires_grad_(False)
    presence = Presence.of_stage(module, _partition(module, 4, pipeline_layers="layers", hooks_write=True), 1)
    seen = {index: presence.sight(f"ema.{index}.weight", Phase.HOOK) for index in range(4)}
    assert seen == {index: Sight.REAL if index == 1 else Sight.UNLISTED for index in range(4)}
    assert presence.sight("ema.0.weight", Phase.STEP) is presence.sight("ema.0.weight", Phase.WHOLE) is Sight.REAL
    trained = replace(presence, copies=presence.copies.without_trained(module, set()))
    assert trained.sight("ema.0.weight", Phase.HOOK) is Sight.UNLISTED
    trained = replace(presence, copies=replace(presence.copies, sources=()))
    assert trained.sight("ema.0.weight", Phase.HOOK) is Sight.REAL


def _split(rank: int) -> tuple[nn.Module, dict[str, ParameterSharding]]:
    """``Tied`` with layer 1 split by rows over two ranks, its bias whole, and the gradient of the scale summed."""
    module = Tied()
    spec = ShardSpec.along((4, 4), 0, [(2 * rank, 2 * rank + 2)])
    module.layers[1].weight = nn.Parameter(spec.slice_full(module.layers[1].weight.detach()))
    module.layers[2].weight = nn.Parameter(spec.slice_full(module.layers[2].weight.detach()))
    table = {name: ParameterSharding(spec) for name in ("layers.1.weight", "layers.2.weight")}
    return module, table | {"scale": ParameterSharding(ShardSpec.whole((4,)), sums_gradient=True)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_norm_over_the_model_counts_every_element_once(rank: int) -> None:
    module, table = _split(rank)
    uncut = Presence.uncut(module, table, rank)
    counted = {name for name in uncut.entries if uncut.is_counted_here(name, over_stages=True, over_tensor=True)}
    assert counted == (set(uncut.entries) if rank == 0 else {"layers.1.weight", "layers.2.weight"})
    last = Presence.of_stage(module, _partition(module, 4), 3, table, rank)
    assert last.is_counted_here("scale", over_stages=True, over_tensor=True) == (rank == 0)
    assert not last.is_counted_here("head.weight", over_stages=True, over_tensor=False)
    assert last.is_counted_here("head.weight", over_stages=False, over_tensor=False)


def test_holders_name_the_stages_and_whether_gradients_are_partial() -> None:
    module, table = _split(0)
    presence = Presence.of_stage(module, _partition(module, 4), 3, table)
    assert presence.holders("scale") == Holders((3,), True)
    assert presence.holders("head.weight") == Holders((0, 3), False)
    assert Presence.uncut(module, table).holders("registered.later") == Holders((0,), False)
    with pytest.raises(RuntimeError, match=r"`registered\.later` was registered after the module was cut into 4"):
        presence.holders("registered.later")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers.3.weight", "layers.3.bias"], True),
        (["layers.0.weight", "layers.3.weight"], False),
        (["layers.1.weight"], False),
        (["layers.1.bias"], True),
        (["scale"], False),
    ],
)
def test_gradients_of_one_unsplit_part_are_whole_here(names: list[str], expected: bool) -> None:
    module, table = _split(0)
    assert Presence.of_stage(module, _partition(module, 4), 3, table).are_whole_here(names) == expected


def test_parts_and_the_modules_around_them() -> None:
    presence = _presence(Tied(), 0)
    part = presence.part_of("layers.1.linear.weight")
    assert part is not None and (part.name, part.is_layer) == ("layers.1", True)
    assert presence.part_of("layers") is None
    assert presence.partial_modules() == {"", "layers"}
    assert not presence.is_everywhere("embed.weight")


def test_stages_are_told_by_layer_and_by_part() -> None:
    first, last = (_presence(Tied(), stage, stages=2) for stage in (0, 1))
    assert first.layer_owners() == last.layer_owners() == [0, 0, 0, 1]
    assert first.begins_here() and not last.begins_here()
    assert first.parts_of_some() == ["embed"] and last.parts_of_some() == ["scale", "head"]
    whole = Presence.uncut(Tied(), {})
    assert whole.layer_owners() == whole.parts_of_some() == [] and not whole.begins_here()


@pytest.mark.parametrize("stage", range(4))
def test_the_whole_module_is_shown_as_in_one_process(stage: int) -> None:
    whole, (module, table) = Tied(), _split(1)
    presence = Presence.of_stage(module, _partition(module, 4), stage, table, 1)
    before = {name: p for name, p in module.named_parameters() if presence.is_here(name)}
    hollow_out(module, presence, CPU, lambda: Phase.HOOK)
    with shown_whole(module, presence):
        for duplicates in (True, False):
            shown = {n: p.shape for n, p in module.named_parameters(remove_duplicate=duplicates)}
            expected = {n: p.shape for n, p in whole.named_parameters(remove_duplicate=duplicates)}
            assert list(shown.items()) == list(expected.items())
        buffers = {name: buffer.shape for name, buffer in module.named_buffers()}
        assert buffers == {name: buffer.shape for name, buffer in whole.named_buffers()}
    with shown_whole(module, presence, slices=False):
        kept = {name: p for name, p in module.named_parameters() if not p.is_meta}
        assert {name: id(p) for name, p in kept.items()} == {name: id(p) for name, p in before.items()}
    after = dict(module.named_parameters())
    assert {name: id(p) for name, p in after.items()} == {name: id(p) for name, p in before.items()}


def test_what_is_set_on_a_twin_stays() -> None:
    module = Tied()
    presence = _presence(module, 0)
    hollow_out(module, presence, CPU, lambda: Phase.HOOK)
    with shown_whole(module, presence):
        module.layers[2].requires_grad_(False)
    with shown_whole(module, presence):
        assert not module.layers[2].weight.requires_grad and module.layers[1].weight.requires_grad


def test_a_hollow_module_keeps_what_this_stage_has_under_another_name() -> None:
    module = Tied()
    presence = _presence(module, 3)
    sentinels = hollow_out(module, presence, CPU, lambda: Phase.HOOK)
    assert set(sentinels) == {"embed", "layers.0", "layers.1", "layers.2"}
    assert module.embed.weight is module.head.weight and not isinstance(module.embed.weight, Absent)
    assert not isinstance(module.layers[0].rotary.table, Absent)
    assert isinstance(module.layers[0].weight, Absent) and module.layers[0].weight.part == "layers.0"
    assert isinstance(module.layers[0], nn.Linear)


def test_a_stage_is_found_from_its_module_and_lists_what_it_has() -> None:
    module = Tied()
    assert Stage.of(module) is None
    stage = Stage(module, _partition(module, 4), _presence(module, 1), CPU, SegmentStreams(CPU, 0, 0))
    assert Stage.of(module) is stage is Stage.of(nn.Sequential(module))
    assert [name for name, _ in module.named_parameters()] == ["layers.1.weight", "layers.1.bias"]
    assert stage.phase() is Phase.HOOK and stage.cursor.parameters_read
    stage.cursor.running = True
    counted = sum(p.numel() for _, p in module.named_parameters()), sum(p.requires_grad for p in module.parameters())
    assert counted == (sum(p.numel() for p in Tied().parameters()), len(list(Tied().parameters())))
    for read in (Tensor.sum, Tensor.norm, Tensor.detach, lambda p: p.data, lambda p: torch._foreach_norm([p])):
        with pytest.raises(RuntimeError, match="the step read all parameters of `Tied`"):
            [read(parameter) for parameter in module.parameters()]
    assert [name for name, _ in module.layers[0].named_parameters(prefix="layer")] == ["layer.weight", "layer.bias"]
    assert next(module.layers[2].parameters()).dtype is torch.float32
    with pytest.raises(RuntimeError, match=r"depends on `layers\.0`, which another pipeline stage owns"):
        float(sum(parameter.sum() for parameter in module.layers[0].parameters()))
    stage.cursor.running = False
    assert not list(module.layers[0].parameters())


def test_a_container_made_of_layers_lists_what_these_list_while_a_run_lasts() -> None:
    module, before = Tied(), nn.Module.named_parameters
    stage = Stage(module, _partition(module, 4), _presence(module, 1), CPU, SegmentStreams(CPU, 0, 0))
    made = nn.ModuleDict({"some": nn.ModuleList([*module.layers[:2]]), "again": module.layers[1]})
    names = ["some.0.weight", "some.0.bias", "some.1.weight", "some.1.bias"]
    containers = NewContainers()
    containers.start()
    assert [name for name, _ in made.named_parameters()] == names[2:]
    stage.cursor.running = True
    assert [name for name, _ in made.named_parameters()] == names
    listed = [name for name, _ in made.named_parameters("a", remove_duplicate=False)]
    assert listed[4:] == ["a.again.weight", "a.again.bias"]
    assert len(list(nn.Linear(2, 2).parameters())) == 2
    containers.stop()
    assert nn.Module.named_parameters is before and [name for name, _ in made.named_parameters()] == names[2:]


def test_listings_of_a_copy_show_hooks_what_this_stage_updates() -> None:
    module = Tied()
    module.ema = copy.deepcopy(module.layers).requires_grad_(False)
    partition = _partition(module, 4, pipeline_layers="layers", hooks_write=True)
    stage = Stage(module, partition, Presence.of_stage(module, partition, 3), CPU, SegmentStreams(CPU, 0, 0))
    own = ["3.weight", "3.bias"]
    assert [name for name, _ in module.ema.named_parameters()] == own
    assert [name for name, _ in module.ema.named_parameters(prefix="ema")] == [f"ema.{name}" for name in own]
    assert list(module.ema.state_dict()) == [*own, "3.mean"]
    assert [name for name, _ in module.ema[3].named_parameters()] == ["weight", "bias"]
    assert not list(module.ema[0].parameters())
    assert len([name for name in module.state_dict() if name.startswith("ema.")]) == 9
    stage.cursor.running = True
    assert len(list(module.ema.named_parameters())) == 8
    stage.cursor.running = False
    stage.note_trained({id(module.ema[0].weight.requires_grad_(True))})
    assert len(list(module.ema.named_parameters())) == 8


def test_what_is_advised_about_a_part_of_another_stage_is_taken() -> None:
    assert 'pipeline_placement={"model.norm": "all"}' in StageSource("model.norm").remedy()
    advice = StageSource("layers.0", is_layer=True).remedy()
    assert "pipeline_placement" not in advice and "`weight_decay`" in advice, "layers cannot be placed by name"
