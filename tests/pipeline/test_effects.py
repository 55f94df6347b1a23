"""What a layer writes to is found wherever it is, and repeated on another copy of the module."""

from __future__ import annotations

import functools
import pickle
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.pipeline.elsewhere.away import Away, refuse_away
from lightning_megatron.pipeline.elsewhere.effects import Effect, returned_beside
from lightning_megatron.pipeline.elsewhere.luggage import Luggage, unpack
from lightning_megatron.pipeline.elsewhere.reachable import Reach, may_read
from lightning_megatron.pipeline.elsewhere.undo import Snapshot
from lightning_megatron.pipeline.stage.arguments import same_nests

LOSSES: list[Tensor] = []
LATEST = 0.0


class Registry:
    losses: list[Tensor] = []  # noqa: RUF012 - as users write it
    calls = 0


@dataclass
class Context:
    seen: list[Any] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)


def record(value: Tensor) -> None:
    LOSSES.append(value)


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.square().mean()
        return x


class Layer(nn.Module):
    """Writes wherever it can."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), Inner()
        self.root = [root]
        self.load, self.calls, self.stats = 0.0, 0, {"sizes": [1.0]}

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        global LATEST
        y = self.inner(self.linear(x))
        record(y.mean())
        Registry.losses.append(y.sum())
        Registry.calls += 1
        self.root[0].losses.append(y.abs().mean())  # type: ignore[union-attr, operator]
        LATEST = self.load = float(y.detach().abs().mean())
        self.stats["sizes"].append(2.0)
        self.stats.setdefault("new", []).append(3.0)  # type: ignore[attr-defined]
        self.state = Context([y.mean()], {"load": self.load})
        self.large = y.detach().repeat(1000, 1)
        context.seen.append(y.std())
        context.numbers["rows"] = len(y)
        return y, y.mean()


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.hooked: dict[int, float] = {}
        self.layers = nn.ModuleList([Layer(self), Layer(self)])
        for place, layer in enumerate(self.layers):
            layer.register_forward_hook(functools.partial(self.keep, place))

    def keep(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        self.hooked[place] = float(output[0].detach().sum())


def travelled(effects: list[Effect], root: nn.Module) -> tuple[list[Effect], list[Tensor], list[Tensor]]:
    names = {id(module): name for name, module in root.named_modules()}
    luggage = Luggage(effects, ["layers.0", "layers.1"], names)
    arrived = [tensor.detach().requires_grad_() for tensor in luggage.tensors]
    return (
        unpack(pickle.loads(pickle.dumps(luggage.effects)), arrived, torch.device("cpu"), root),
        luggage.tensors,
        arrived,
    )


def forget() -> None:
    global LATEST
    LOSSES.clear()
    Registry.losses.clear()
    Registry.calls, LATEST = 0, 0.0


def test_what_a_layer_wrote_is_written_again_elsewhere_with_gradients() -> None:
    forget()
    here, there = Root(), Root()
    x, context, other = torch.randn(5, 4), Context(), Context()
    others = frozenset(id(module) for layer in here.layers for module in layer.modules())
    before = Snapshot(Reach(here, here.layers[0], others).containers((x, context)))
    output = here.layers[0](x, context)
    effects = [*(Effect.of(0, change) for change in before.compare()), *returned_beside(0, output)]
    kept, load = [*LOSSES, *Registry.losses], LATEST
    forget()
    back, sent, arrived = travelled(effects, here)
    returned = {effect.key: effect.value for effect in back if effect.kind == "return"}
    for effect in back:
        if effect.kind != "return":
            effect.repeat(there, (x, other))
    layer: Any = there.layers[0]
    assert torch.equal(torch.stack([*LOSSES, *Registry.losses]), torch.stack(kept))
    assert (Registry.calls, LATEST, layer.load) == (1, load, load)
    assert layer.stats == {"sizes": [1.0, 2.0], "new": [3.0]} and there.hooked == here.hooked
    assert len(there.losses) == len(other.seen) == len(layer.state.seen) == 1
    assert other.numbers == {"rows": 5} and layer.state.numbers == {"load": load}
    assert torch.equal(returned[1], output[1])
    assert type(layer.large) is Away and layer.large.shape == (5000, 4)
    with pytest.raises(RuntimeError, match=r"the loss depends on `layers\.0`"):
        refuse_away(layer.large.mean(), "the loss")

    (3 * layer.inner.aux + returned[1]).backward()
    torch.autograd.backward(sent, [tensor.grad for tensor in arrived])
    found = here.layers[0].linear.weight.grad
    again = nn.Linear(4, 4)
    again.load_state_dict(here.layers[0].linear.state_dict())
    y = again(x)
    (3 * y.square().mean() + y.mean()).backward()
    torch.testing.assert_close(found, again.weight.grad)


def test_a_layer_that_writes_nothing_has_no_effects() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = Snapshot(Reach(root, root[0], frozenset()).containers())
    root[0](torch.ones(1, 2))
    assert not before.compare()


def test_what_is_not_there_is_refused() -> None:
    effect = Effect(0, (("module", "0"), ("attr", "registry")), "append", None, [1.0])
    with pytest.raises(RuntimeError, match=r"wrote to `0.registry`, which is not there on this pipeline stage"):
        effect.repeat(nn.Sequential(nn.Linear(1, 1)), ())


def test_modules_travel_by_name_and_what_cannot_travel_says_so() -> None:
    class Local:
        def __init__(self) -> None:
            self.size = 1.0

    here, there = Root(), Root()
    address = (("module", ""), ("attr", "hooked"))
    made = [
        Effect(0, address, "set", here.layers[0], 2.0),
        Effect(0, address, "set", 1, Local()),
        Effect(0, address, "set", Local, 3.0),
        Effect(0, address, "set", 2, threading.Lock()),
    ]
    for effect in travelled(made, here)[0]:
        effect.repeat(there, ())
    layer, lost = there.hooked
    assert layer is here.layers[0], "names are of the module that they are read on"
    with pytest.raises(RuntimeError, match=r"`layers\.0` has left behind .* an object of `Local`"):
        _ = there.hooked[lost].size  # type: ignore[attr-defined]


def test_lists_keep_being_the_users_own_where_their_entries_are_exchanged() -> None:
    first, second, seen = torch.zeros(1), torch.ones(1), [torch.zeros(1)]
    old = ({"x": first}, seen, (first, 3))
    new = same_nests(old, ({"x": second}, [seen[0]], (second, 3)))
    assert new[0] is old[0] and new[1] is seen and new[0]["x"] is second and new[2][0] is second


@pytest.mark.parametrize(("key", "reads"), [("aux", False), ("load", True), ("sizes", True), ("fresh", False)])
def test_whether_a_layer_reads_what_it_writes_is_seen_in_its_code(key: str, reads: bool) -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.aux = self.load + self.table["sizes"]
            self.table["fresh"] = x
            return x

    assert may_read(nn.Sequential(Reading()), key) is reads


@pytest.mark.parametrize(("hook", "reads"), [("sets", False), ("adds", True)])
def test_whether_a_hook_adds_to_an_entry_is_seen_in_its_code(hook: str, reads: bool) -> None:
    sizes: dict[int, float] = {}

    def sets(_: Any, args: Any, output: Tensor) -> None:
        sizes[0] = float(output.sum())

    def adds(_: Any, args: Any, output: Tensor) -> None:
        sizes[0] += float(output.sum())

    layer = nn.Linear(1, 1)
    layer.register_forward_hook(sets if hook == "sets" else adds)
    assert may_read(layer, 0, in_table=True) is reads
