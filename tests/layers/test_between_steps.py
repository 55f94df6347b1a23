"""While a hook runs, split parameters and gradients are what one process has; afterwards they are parts again."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.layers.whole.between_steps import WholeView
from lightning_megatron.layers.whole.parameter_parts import ParameterParts
from lightning_megatron.layers.whole.seen_kinds import SummedGradientHook
from lightning_megatron.mesh.parts.boxes import ShardSpec, packed_ranges
from tests.harness import run_ranks
from tests.harness.twins import count_collectives, random_tensor, tensor_group

SHAPE = (8, 3)


def specs(ranks: int) -> tuple[ShardSpec, ...]:
    """A fused matrix of two segments, each split by rows."""
    return tuple(ShardSpec.along(SHAPE, 0, packed_ranges((4, 4), ranks, rank)) for rank in range(ranks))


class Layer(nn.Module):
    """Holds its part of a weight, and computes with it."""

    def __init__(self, part: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(part)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def made(group: dist.ProcessGroup) -> tuple[WholeView, Layer, nn.Linear]:
    """A split layer with a gradient, the view that shows it, and the same layer whole."""
    whole = nn.Linear(3, 8, bias=False, dtype=torch.float64)
    with torch.no_grad():
        whole.weight.copy_(random_tensor(*SHAPE))
    whole.weight.grad = random_tensor(*SHAPE, seed=2)
    parts = ParameterParts("weight", specs(group.size()), group)
    layer = Layer(parts.cut(whole.weight))
    layer.weight.grad = parts.cut(whole.weight.grad)
    view = WholeView(group)
    view.add(parts, layer.weight)
    return view, layer, whole


@torch.no_grad()
def unit_rows(layer: nn.Module) -> None:
    layer.weight.div_(layer.weight.norm(dim=0, keepdim=True))


def fresh(layer: nn.Module) -> None:
    torch.manual_seed(5)
    nn.init.orthogonal_(layer.weight)


def centred(layer: nn.Module) -> None:
    layer.weight.grad.sub_(layer.weight.grad.mean(dim=0, keepdim=True))


def replaced(layer: nn.Module) -> None:
    layer.weight.grad = layer.weight.grad / layer.weight.grad.norm()


def clipped(layer: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_([layer.weight], 0.1, norm_type=3.0)


def views(layer: nn.Module) -> None:
    layer.weight.data[2] = 0.0
    layer.weight.data.view(-1)[5:8].mul_(3)
    for row in layer.weight.detach():
        row.add_(row.max())


def through_a_vector(layer: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector([layer.weight])
    nn.utils.vector_to_parameters(vector / vector.norm(), [layer.weight])


def assigned(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data * layer.weight.data.abs().max()


def loaded(layer: nn.Module) -> None:
    layer.load_state_dict({name: value * 2 for name, value in layer.state_dict().items()})


def averaged(layer: nn.Module) -> None:
    teacher = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.mul_(2)
        teacher.weight.lerp_(layer.weight, 0.3)
        layer.weight.copy_(teacher.weight - teacher.weight.mean())


def stepped(layer: nn.Module) -> None:
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    optimizer.step()


def as_array(layer: nn.Module) -> None:
    layer.weight.detach().numpy()[1] = 4.0


def scaled(grad: Tensor) -> None:
    grad.mul_(grad.max())


CHANGES = [unit_rows, fresh, centred, replaced, clipped, views, through_a_vector, assigned, loaded, averaged, stepped]
CHANGES += [as_array]


@run_ranks(tensor=2)
def test_changes_are_those_of_the_whole_tensor(mesh):
    group = tensor_group(mesh)
    for change in CHANGES:
        view, layer, whole = made(group)
        memory, parts = layer.weight.data_ptr(), specs(2)[group.rank()]
        with view.seen("hook", serves=False):
            change(layer)
        change(whole)
        assert type(layer.weight) is nn.Parameter and layer.weight.data_ptr() == memory, change.__name__
        torch.testing.assert_close(layer.weight.data, parts.slice_full(whole.weight.data), msg=change.__name__)
        torch.testing.assert_close(layer.weight.grad, parts.slice_full(whole.weight.grad), msg=change.__name__)


@run_ranks(tensor=2)
def test_changing_every_element_alike_gathers_nothing(mesh):
    view, layer, _ = made(tensor_group(mesh))
    weight, grad = layer.weight, layer.weight.grad
    with count_collectives() as counts, view.seen("hook", serves=False), torch.no_grad():
        assert weight.shape == SHAPE and weight.numel() == 24 and len(weight) == 8
        assert layer.weight is weight and weight.grad is grad and {weight: 1}[layer.weight] == 1
        weight.mul_(0.5).add_(random_tensor(*SHAPE, seed=3)).clamp_(-1, 1)
        weight.add_(weight.grad, alpha=2.0)
        torch._foreach_mul_([weight, weight.grad], 0.25)
        torch._foreach_lerp_([weight], [weight.grad], 0.1)
        weight.grad.zero_()
    assert not counts, dict(counts)


@run_ranks(tensor=2)
def test_a_layer_called_in_a_hook_computes_with_its_part(mesh):
    group = tensor_group(mesh)
    view, layer, whole = made(group)
    x = random_tensor(2, 3, seed=4)
    with view.seen("hook", serves=False):
        assert view.is_whole and layer.weight.norm() == whole.weight.norm()
        out = layer(x)
        out.sum().backward()
        assert layer.weight.norm() == whole.weight.norm()
        with view.local():
            assert not view.is_whole and layer.weight.shape == (4, 3) and type(layer.weight) is nn.Parameter
    whole(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, specs(2)[group.rank()].slice_full(whole.weight.grad))


@run_ranks(tensor=2)
def test_one_rank_may_read_alone(mesh):
    group = tensor_group(mesh)
    view, layer, whole = made(group)
    with view.seen("hook", serves=True):
        if group.rank() == 0:
            assert layer.weight.norm() == whole.weight.norm()
            assert layer.weight.grad.norm() == whole.weight.grad.norm()
        else:
            assert layer.weight.grad.sum() == whole.weight.grad.sum()


@run_ranks(tensor=2)
def test_one_rank_may_not_write_alone(mesh):
    group = tensor_group(mesh)
    for change in (unit_rows, lambda layer: layer.weight.data.mul_(2)):
        view, layer, _ = made(group)
        with pytest.raises(RuntimeError, match="on some of them only"), view.seen("on_train_end", serves=True):
            if group.rank() == 1:
                change(layer)
        with view.seen("on_train_end", serves=True):
            change(layer)


@run_ranks(tensor=2)
def test_gradient_hooks_get_the_whole_gradient(mesh):
    group = tensor_group(mesh)
    view, layer, whole = made(group)
    for module in (layer, whole):
        module.weight.grad = None
    with view.seen("on_fit_start", serves=False):
        layer.weight.register_hook(lambda grad: grad / grad.norm())
        layer.weight.register_hook(lambda grad: scaled(grad))
    whole.weight.register_hook(lambda grad: grad / grad.norm() * (grad / grad.norm()).max())
    x = random_tensor(2, 3, seed=4)
    layer(x).square().sum().backward(), whole(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, specs(2)[group.rank()].slice_full(whole.weight.grad))


@run_ranks(tensor=2)
def test_hooks_of_gradients_in_terms_get_their_sum(mesh):
    group = tensor_group(mesh)
    terms = random_tensor(2, 5, seed=6)
    for hook in (lambda grad: grad / grad.norm(), lambda grad: grad.div_(grad.norm()), lambda grad: None):
        answer = SummedGradientHook(group, hook)(terms[group.rank()])
        want = terms.sum(0) if answer is None else terms.sum(0) / terms.sum(0).norm()
        total = terms[group.rank()].clone() if answer is None else answer.clone()
        dist.all_reduce(total, group=group)
        torch.testing.assert_close(total, want)


@run_ranks(tensor=2)
def test_what_would_go_stale_is_refused(mesh):
    view, layer, _ = made(tensor_group(mesh))
    kept = []
    complaint = "`on_fit_start` keeps a view of the whole `weight`"
    with pytest.raises(RuntimeError, match=complaint), view.seen("on_fit_start", serves=False):
        kept.append(layer.weight.data)
    with pytest.raises(RuntimeError, match="gave `weight` the shape"), view.seen("on_fit_start", serves=False):
        layer.weight.data = torch.zeros(2, 2, dtype=torch.float64)


@run_ranks(tensor=2)
def test_copies_are_parts_in_layers_and_whole_in_files(mesh):
    group = tensor_group(mesh)
    view, layer, whole = made(group)
    with view.seen("hook", serves=False):
        twin, kept = copy.deepcopy(layer), io.BytesIO()
        torch.save(layer.weight, kept)
        assert twin.weight.shape == SHAPE and twin.weight is not layer.weight
    assert twin.weight.shape == (4, 3) and type(twin.weight) is nn.Parameter
    torch.testing.assert_close(torch.load(io.BytesIO(kept.getvalue()), weights_only=False).data, whole.weight.data)
    with view.seen("hook", serves=False):
        assert twin.weight.norm() == whole.weight.norm()
