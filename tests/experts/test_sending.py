"""Rows reach the ranks that hold their experts and come back in order, in messages of the size that is documented."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from lightning_megatron.experts.exchange import gathering, sending
from lightning_megatron.experts.exchange.taking_part import Calls
from tests.experts.expert_scenarios import TOKENS as SEQUENCE
from tests.experts.strangers import WIDTH as HIDDEN
from tests.experts.volume_scenarios import CHOICES, sent
from tests.harness import run_ranks, run_trainers

BATCH = 16

TOKENS, WIDTH, RANKS = 8, 3, 2


@run_ranks(data=RANKS)
def test_rows_come_back_computed_in_their_order(mesh):
    group, moved = mesh["data_parallel"].get_group(), []
    owners = sending.Owners(4, group)
    rows = torch.arange(TOKENS * CHOICES * WIDTH, dtype=torch.float64).view(-1, WIDTH).requires_grad_()
    expert = torch.arange(len(rows)) % 4  # all are equally liked
    plain = sending.start_all_to_all_rows

    def counting(x, outgoing, incoming, group):
        moved.append((sum(outgoing) - outgoing[group.rank()]) * x.shape[1])
        return plain(x, outgoing, incoming, group)

    def compute(arrived, local, told):
        assert told.called == [False, False]
        assert sum(told.of_experts) == len(arrived) == sum(told.incoming)
        return arrived * (owners.first + local + 1).unsqueeze(1)

    with mock.patch.object(sending, "start_all_to_all_rows", counting):
        found = owners.send(rows, expert, compute)
        found.sum().backward()
    torch.testing.assert_close(found, rows * (expert + 1).unsqueeze(1))
    torch.testing.assert_close(rows.grad, (expert + 1.0).double().unsqueeze(1).expand_as(rows))
    assert sum(moved) == 4 * TOKENS * CHOICES * WIDTH * (RANKS - 1) // RANKS


@run_ranks(data=RANKS)
def test_gathered_tokens_come_back_weighed_in_messages_of_the_size_of_the_tokens(mesh):
    group, moved = mesh["data_parallel"].get_group(), []
    owners = sending.Owners(4, group, gathers=True)
    tokens = TOKENS - 3 * group.rank()  # 8 and 5
    hidden = torch.arange(tokens * WIDTH, dtype=torch.float64).view(-1, WIDTH).requires_grad_()
    index = torch.tensor([[0, 2], [3, 1], [4, 3]]).repeat(3, 1)[:tokens]  # 4 means none
    weights = torch.linspace(0, 1, 2 * tokens, dtype=torch.float64).view(-1, 2).requires_grad_()

    def counting(own, parts):
        def call(x, dim, group):
            moved.append(x.numel() // parts * (x.shape[-1] == WIDTH))
            return own(x, dim, group)

        return call

    def compute(arrived, local, told):
        assert told.tokens == [8, 5]
        assert sum(told.of_experts) == len(arrived)
        return arrived * (owners.first + local + 1).unsqueeze(1)

    gather, scatter = gathering.raw_all_gather, gathering.raw_reduce_scatter
    with (
        mock.patch.object(gathering, "raw_all_gather", counting(gather, 1)),
        mock.patch.object(gathering, "raw_reduce_scatter", counting(scatter, RANKS)),
    ):
        found = owners.gather(hidden, index, weights, compute)
        found.sum().backward()
    factors = (index + 1) * (index < 4)
    torch.testing.assert_close(found, hidden * (weights * factors).sum(1, keepdim=True))
    torch.testing.assert_close(hidden.grad, (weights * factors).sum(1, keepdim=True).expand_as(hidden))
    torch.testing.assert_close(weights.grad, factors * hidden.sum(1, keepdim=True))
    assert sum(moved) == 4 * TOKENS * WIDTH * (RANKS - 1)


@run_ranks(data=RANKS)
def test_a_rank_without_rows_takes_part_in_both_directions(mesh):
    group = mesh["data_parallel"].get_group()
    owners, weight = sending.Owners(2, group), torch.ones(1, dtype=torch.float64, requires_grad=True)
    rows = torch.ones(4 * group.rank(), WIDTH, dtype=torch.float64, requires_grad=group.rank() == 1)
    expert = torch.zeros(len(rows), dtype=torch.long)
    found = owners.send(rows, expert, lambda arrived, *_: arrived * weight, called=[0] if group.rank() else [])
    (found.sum() * 3).backward()
    assert found.shape == rows.shape
    assert weight.grad is not None
    assert weight.grad.item() == (0.0 if group.rank() else 3.0 * 4 * WIDTH)


SENT: list[Any] = [
    (2, {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
    *(
        pytest.param(*row, marks=pytest.mark.wide)
        for row in (
            (2, {"expert_parallel_size": 2, "micro_batch_size": 4}),
            (4, {"expert_parallel_size": 4}),
            (2, {"tensor_parallel_size": 2, "expert_parallel_size": 2, "sequence_parallel": True}),
            (4, {"tensor_parallel_size": 2, "expert_parallel_size": 2, "micro_batch_size": 4}),
            (4, {"expert_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batch_size": 2}),
            (2, {"expert_parallel_size": 2, "activation_recompute": "full"}),
        )
    ),
]


@pytest.mark.parametrize(("devices", "options"), SENT, ids=str)
@pytest.mark.parametrize("listed", [False, True])
def test_a_step_sends_as_many_numbers_as_documented(listed, devices, options):
    stages, ranks = options.get("pipeline_parallel_size", 1), options["expert_parallel_size"]
    tokens = BATCH * SEQUENCE * stages // devices  # of a rank, in all micro-batches
    layers = 2 // stages
    expected = 4 * tokens * CHOICES * HIDDEN * (ranks - 1) // ranks * layers
    if "activation_recompute" in options:
        expected += expected // 2
    for outcome in run_trainers(sent, listed, options, devices=devices):
        assert outcome.value == expected


class _Waits:
    """Notes what is asked of the device, and what happens in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[str] = []
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
            monkeypatch.setattr(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))

    def _noting(self, name: str, own: Any) -> Any:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.reads.append(name)
            return own(tensor, *args, **kwargs)

        return read


@run_ranks(data=RANKS)
def test_the_host_waits_for_the_device_once_per_exchange(mesh):
    owners, patch = sending.Owners(4, mesh["data_parallel"].get_group(), parts=1), pytest.MonkeyPatch()
    rows = torch.randn(6, WIDTH, requires_grad=True)
    expert, weight = torch.tensor([3, 1, 0, 4, 2, 2]), torch.ones(2, requires_grad=True)
    with patch.context() as patched:
        waits = _Waits(patched)
        found = owners.send(rows, expert, lambda arrived, local, _: arrived * weight[local, None])
        assert waits.reads == ["tolist"]
        found.sum().backward()
        assert waits.reads == ["tolist"]
    torch.testing.assert_close(found[3], torch.zeros(WIDTH))  # a number beyond the last expert means none


@run_ranks(data=RANKS)
def test_what_runs_meanwhile_runs_while_rows_are_on_their_way_and_back(mesh):
    owners, order = sending.Owners(2, mesh["data_parallel"].get_group()), []
    plain = sending._Message.start, sending._Message.wait

    def start(message, rows):
        order.append("starts back" if torch._C._current_graph_task_id() >= 0 else "starts")
        return plain[0](message, rows)

    def wait(message):
        order.append("waits")
        return plain[1](message)

    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            order.append("meanwhile")
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            order.append("its backward")
            return grad * 2

    rows, given = torch.randn(4, WIDTH, requires_grad=True), torch.randn(4, WIDTH, requires_grad=True)
    made: list[torch.Tensor] = []
    with mock.patch.object(sending._Message, "start", start), mock.patch.object(sending._Message, "wait", wait):
        meanwhile = lambda: made.append(Shared.apply(given))  # noqa: E731
        found = owners.send(rows, torch.arange(4) % 2, lambda arrived, *_: arrived * 3, meanwhile=meanwhile)
        (found + made[0]).sum().backward()
    forward = ["starts", "meanwhile", "waits", "starts", "waits"]
    assert order == [*forward, "starts back", "waits", "starts back", "its backward", "waits"]
    torch.testing.assert_close(rows.grad, torch.full_like(rows, 3.0))


@pytest.mark.parametrize("gathers", [False, True])
@run_ranks(data=RANKS)
def test_a_backward_takes_part_in_the_messages_of_others_that_its_loss_does_not_depend_on(mesh, gathers):
    group, weights = mesh["data_parallel"].get_group(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    calls = Calls(group)
    owners = [sending.Owners(2, group, calls, name, gathers=gathers) for name in "abc"]
    rows, expert = torch.ones(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True), torch.arange(TOKENS) % 2

    def made(layer, x):
        def compute(arrived, local, told):
            return arrived * weights[layer] * 2

        if gathers:
            return owners[layer].gather(x, expert[:, None], torch.ones(TOKENS, 1, dtype=x.dtype), compute)
        return owners[layer].send(x, expert, compute)

    with calls.joint.noting() as noted:
        first = made(0, rows)
        second = made(1, first)
        made(2, second)
    loss = (first if group.rank() else second).sum()
    calls.joint.joined({"loss": loss}, noted)["loss"].backward()
    torch.testing.assert_close(rows.grad, torch.full_like(rows, 2 if group.rank() else 4))
    each = TOKENS * WIDTH  # of the rows that a rank computes, half are from the other one
    torch.testing.assert_close(weights.grad, torch.tensor([2.0 + 4.0, 4.0, 0.0], dtype=torch.float64) * each / 2)


@run_ranks(data=RANKS)
def test_gradients_of_gradients_go_through_messages(mesh):
    owners = sending.Owners(2, mesh["data_parallel"].get_group())
    rows, expert = torch.full((TOKENS, WIDTH), 3.0, dtype=torch.float64, requires_grad=True), torch.arange(TOKENS) % 2
    found = owners.send(rows, expert, lambda arrived, local, told: arrived**3)
    (gradient,) = torch.autograd.grad(found.sum(), rows, create_graph=True)
    torch.testing.assert_close(gradient, 3 * rows**2)
    gradient.sum().backward()
    torch.testing.assert_close(rows.grad, 6 * rows)


@run_ranks(data=RANKS)
def test_ranks_that_do_different_things_with_gradients_say_so(mesh):
    group, rows, expert = mesh["data_parallel"].get_group(), torch.ones(2, WIDTH, requires_grad=True), torch.arange(2)
    calls = Calls(group)
    owners = sending.Owners(2, group, calls, "layer.experts")

    def send():
        return owners.send(rows, expert, lambda arrived, local, told: 2 * arrived)

    one = pytest.raises(RuntimeError, match=r"`layer\.experts` with gradients, and another one under")
    with one, torch.set_grad_enabled(bool(group.rank())):
        send()
    with calls.joint.noting():
        found = send()
        with pytest.raises(RuntimeError, match=r"computes a gradient through `layer\.experts` in its step"):
            if group.rank():
                torch.autograd.grad(found.sum(), rows)
            else:
                send()
