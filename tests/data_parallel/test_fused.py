"""Updates by fused kernels: the same numbers, only where nobody chose a kernel, and options as they were."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.data_parallel.update.fused import fused_update

KINDS: dict[str, Any] = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}, "_fused_adamw_"),
    "adam": (torch.optim.Adam, {"amsgrad": True}, "_fused_adam_"),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}, "_fused_sgd_"),
    "adagrad": (torch.optim.Adagrad, {}, "_fused_adagrad_"),
}


def train(kind: str, by_strategy: bool, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Any, list[bool]]:
    """Weights after five steps, the optimizer, and in which steps its fused kernel ran."""
    make, defaults, kernel = KINDS[kind]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype)
    optimizer = make(module.parameters(), lr=1e-2, **defaults, **options)
    ran = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module(torch.ones(4, 7, dtype=dtype)).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        with patch(f"torch.{kernel}", wraps=getattr(torch, kernel)) as used:
            if by_strategy:
                with fused_update(optimizer, closure) as computing:
                    assert optimizer.step(computing).item() > 0
            else:
                optimizer.step(closure)
        ran.append(used.called)
    return torch.cat([p.detach().flatten() for p in module.parameters()]), optimizer, ran


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_updates_give_the_numbers_of_torchs_loop(kind: str, dtype: torch.dtype) -> None:
    expected, plain, _ = train(kind, False, dtype)
    found, optimizer, ran = train(kind, True, dtype)
    assert ran == [kind in ("sgd", "adagrad"), True, True, True, True]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15 if dtype == torch.float64 else 1e-6)
    assert optimizer.param_groups[0]["fused"] is None
    for mine, other in zip(optimizer.state.values(), plain.state.values(), strict=True):
        assert {key: getattr(v, "dtype", None) for key, v in mine.items()} == {
            key: getattr(v, "dtype", None) for key, v in other.items()
        }


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": False}])
def test_a_kernel_that_was_chosen_stays(options: dict[str, bool]) -> None:
    _, optimizer, ran = train("adamw", True, torch.float64, **options)
    assert not any(ran)
    assert {key: optimizer.param_groups[0][key] for key in options} == options


def test_subclasses_and_narrow_weights_keep_torchs_loop() -> None:
    class Own(torch.optim.AdamW):
        """May do anything in its step."""

    with patch.dict(KINDS, {"adamw": (Own, {}, "_fused_adamw_")}):
        assert not any(train("adamw", True, torch.float64)[2])
    assert not any(train("adamw", True, torch.bfloat16)[2])


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_parameters_may_join_later(make: Any, options: dict[str, Any]) -> None:
    found = []
    for by_strategy in (False, True):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(3)]
        optimizer = make(weights[:2], lr=0.1, **options)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": weights[2:]})
            for weight in weights if step else weights[:1]:
                weight.grad = weight.detach() + step
            with fused_update(optimizer, lambda: None) as computing:
                optimizer.step(computing if by_strategy else None)
        found.append(torch.cat([weight.detach() for weight in weights]))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("fails", ["closure", "kernel"])
def test_options_are_back_after_a_step_that_failed(fails: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure() -> None:
        if fails == "closure":
            raise ValueError("no")

    with (
        patch("torch._fused_sgd_", side_effect=ValueError("no")),
        pytest.raises(ValueError, match="no"),
        fused_update(optimizer, closure) as computing,
    ):
        optimizer.step(computing)
    assert optimizer.param_groups[0]["fused"] is None
