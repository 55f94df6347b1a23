"""What a process says it waits for, and which exceptions may be echoes of another rank's failure."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.watch import hang, waits
from lightning_megatron.mesh.watch.echoes import RemoteFailure, is_echo
from lightning_megatron.mesh.watch.other_threads import places_of
from lightning_megatron.mesh.watch.waits import Waiting
from tests.harness import run_ranks


def _told(what: str, *ranks: int) -> Waiting:
    return Waiting(what, ranks)


def test_it_is_told_from_the_outermost_to_the_innermost_with_the_ranks_known_best() -> None:
    assert waits.waiting() is None
    with waits.within(_told, "forward pass"):
        assert waits.waiting() is None, "it computes"
        with waits.on(_told, "sum", 0, 1), waits.on(_told, "sum", 0, 1), waits.on(_told, "message", 1):
            assert waits.waiting() == Waiting("forward pass: sum: message", (1,))
        assert waits.waiting("`barrier` called at task.py:3") == Waiting("forward pass: `barrier` called at task.py:3")
    assert waits.waiting() is None and not waits._entered


def test_another_thread_may_wait_in_this_ones_name() -> None:
    arrived, leave = threading.Event(), threading.Event()

    def backward() -> None:
        with waits.on(_told, "gradient", 2):
            arrived.set()
            leave.wait(10)

    thread = threading.Thread(target=backward)
    with waits.within(_told, "backward pass"):
        thread.start()
        assert arrived.wait(10)
        assert waits.waiting() == Waiting("backward pass: gradient", (2,))
    assert waits.waiting() == Waiting("gradient", (2,)), "who enters first may leave first"
    leave.set()
    thread.join()
    assert waits.waiting() is None


def _caught(error: BaseException, waited: bool) -> BaseException:
    with pytest.raises(type(error)) as info:
        if waited:
            with waits.within(_told, "forward pass"), waits.on(_told, "message", 1):
                raise error
        with waits.within(_told, "forward pass"):
            raise error
    return info.value


def test_an_error_is_an_echo_if_it_was_raised_while_waiting() -> None:
    assert is_echo(_caught(RuntimeError("connection closed"), True))
    assert is_echo(_caught(ConnectionError("rank 1 closed its connection"), True))
    assert not is_echo(_caught(RuntimeError("CUDA out of memory"), False))
    assert not is_echo(_caught(ValueError("a bad batch"), True))
    assert not is_echo(_caught(RemoteFailure("rank 1 failed"), True))
    outer = RuntimeError("in training_step")
    outer.__cause__ = _caught(RuntimeError("connection closed"), True)
    assert is_echo(outer)


def test_errors_of_compiled_code_begin_here() -> None:
    with pytest.raises(RuntimeError) as info:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not is_echo(info.value)


def _sum_of_autograd(x: torch.Tensor) -> torch.Tensor:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with waits.on(_told, "message", 1):
                raise RuntimeError("connection closed")

    return Fails.apply(x).sum()  # type: ignore[no-any-return]


def test_an_echo_is_known_after_it_went_through_autograd() -> None:
    with pytest.raises(RuntimeError) as info:
        _sum_of_autograd(torch.ones(2, requires_grad=True)).backward()
    assert is_echo(info.value)


@run_ranks(tensor=2)
def test_what_breaks_under_a_collective_is_an_echo_whoever_calls_it(mesh: DeviceMesh) -> None:
    group = mesh["tensor_parallel"].get_group()
    if distributed.get_rank() == 1:
        distributed.destroy_process_group()
        return
    x = torch.ones(3)
    for call in (lambda: raw_all_reduce(x, group), lambda: distributed.all_reduce(x, group=group)):
        with pytest.raises(RuntimeError) as info:
            call()
        assert is_echo(info.value), info.value


@run_ranks(tensor=2)
def test_a_thread_sees_what_a_rank_waits_for(mesh: DeviceMesh) -> None:
    group, main = mesh["tensor_parallel"].get_group(), threading.get_ident()
    found: list[str] = []

    def look(told: str) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not any(what.startswith(told) for what in found):
            waiting = hang._waiting_now(places_of(main) or [])
            found.append(waiting.what if waiting is not None else "")
            time.sleep(0.05)

    for call, told in (
        (
            lambda: raw_all_reduce(torch.ones(2, 3), group),
            "`all_reduce` of 2×3 float32 over ranks 0, 1: messages of",
        ),
        (lambda: distributed.all_reduce(torch.ones(3), group=group), "`all_reduce` called at test_waits.py:"),
    ):
        if distributed.get_rank() == 0:
            found.clear()
            thread = threading.Thread(target=look, args=(told,))
            thread.start()
            call()
            thread.join()
            assert found[-1].startswith(told), found
        else:
            time.sleep(1.5)
            call()


def test_entering_and_leaving_takes_five_calls_and_makes_no_words() -> None:
    called: list[str] = []

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            called.append(frame.f_code.co_name if event == "call" else function.__name__)

    sys.setprofile(note)
    try:
        with waits.on(_told, "message", 1):
            pass
    finally:
        sys.setprofile(None)
    assert called == ["__init__", "__enter__", "append", "__exit__", "remove", "setprofile"]
