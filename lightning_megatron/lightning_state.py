"""Translations between what Lightning handles (whole modules, optimizers by index) and what a rank holds (parts,
by name).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import Callback, ModelSummary
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.plugins.checkpoint import MegatronCheckpointIO
from lightning_megatron.replay import StepResult
from lightning_megatron.tensor_state import TensorState

GroupNames = list[list[str]]
"""Names of the parameters of each group of an optimizer, over all stages, in the user's order."""


class _FailureCallback(Callback):
    """Comes first among the callbacks, so that a failure is known before any other callback starts a collective."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Tell the other ranks."""
        self._report(exception)


def callbacks_of(trainer: pl.Trainer) -> list[Callback]:
    """The Trainer's list of callbacks itself, not a copy."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def insert_failure_callback(trainer: pl.Trainer, report: Callable[[BaseException], None]) -> None:
    """Put the failure callback in front, once."""
    callbacks = callbacks_of(trainer)
    if not any(isinstance(callback, _FailureCallback) for callback in callbacks):
        callbacks.insert(0, _FailureCallback(report))


def show_whole_summary(trainer: pl.Trainer, whole_view: Callable[[], Any]) -> None:
    """Let ModelSummary count the whole model instead of this stage."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelSummary) and not isinstance(callback.__dict__.get("on_fit_start"), _WholeSummary):
            callback.on_fit_start = _WholeSummary(callback.on_fit_start, whole_view)  # type: ignore[method-assign]


class _WholeSummary:
    def __init__(self, summarize: Callable[..., None], whole_view: Callable[[], Any]) -> None:
        self._summarize, self._whole_view = summarize, whole_view

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with self._whole_view():
            self._summarize(*args, **kwargs)


def seed_workers(dataloader: Any, replica: int) -> None:
    """Where Lightning would seed loader workers by global rank, seed them by replica."""
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(dataloader, "worker_init_fn", 0) is None:
        dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=replica)


def training_output(result: StepResult) -> Any:
    """What ``training_step`` returned, for the whole batch: the loss, or a dict with it."""
    if result.output is None:
        return result.loss
    return {"loss": result.loss, **result.output}


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Name of every parameter by identity."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def localize_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> GroupNames:
    """Drop the parameters of other stages, which are on the meta device; returns the names of all."""
    group_names: GroupNames = []
    for group in optimizer.param_groups:
        group_names.append([names.get(id(p), f"parameter {i}") for i, p in enumerate(group["params"])])
        for parameter in group["params"]:
            if parameter.is_meta:
                optimizer.state.pop(parameter, None)
        group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]
    return group_names


def optimizer_state(optimizer: Optimizer, names: GroupNames, module: nn.Module) -> dict[str, Any]:
    """State of this rank's parameters by name, and the groups with the names of all stages' parameters."""
    known = parameter_names(module)
    state = {known[id(parameter)]: entries for parameter, entries in optimizer.state.items() if id(parameter) in known}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        members = names[index] if index < len(names) else [known[id(p)] for p in group["params"]]
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": members})
    return {"state": state, "param_groups": groups}


def load_optimizer(
    optimizer: Optimizer, names: GroupNames, module: nn.Module, saved: Mapping[str, Any], tensor: TensorState
) -> None:
    """Load this rank's part of a state saved by name, or by index as plain torch does.

    Raises:
        ValueError: the numbers of parameter groups differ.
    """
    groups = saved["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the checkpoint's optimizer has {len(groups)} parameter groups, this run's has "
            f"{len(optimizer.param_groups)}; return the same groups from `configure_optimizers`, or load the weights "
            "only."
        )
    order = [name for group in names for name in group]
    by_name = {order[key] if isinstance(key, int) else key: value for key, value in saved["state"].items()}
    known = parameter_names(module)
    template = optimizer.state_dict()
    state: dict[int, Any] = {}
    for group, numbered in zip(optimizer.param_groups, template["param_groups"], strict=True):
        for parameter, number in zip(group["params"], numbered["params"], strict=True):
            entries = by_name.get(known[id(parameter)])
            if entries is not None:
                state[number] = {key: _local(tensor, known[id(parameter)], value) for key, value in entries.items()}
    merged = [
        {**group, "params": numbered["params"]}
        for group, numbered in zip(groups, template["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": merged})


def _local(tensor: TensorState, name: str, value: Any) -> Any:
    return tensor.to_local(name, value) if isinstance(value, Tensor) else value


def read_tensors(
    io: MegatronCheckpointIO,
    path: Any,
    checkpoint: dict[str, Any],
    module: nn.Module,
    with_optimizer: bool,
    tensor: TensorState,
) -> None:
    """Fill ``checkpoint`` with this rank's tensors from a checkpoint directory; does nothing for a plain file.

    Raises:
        ValueError: a tensor has another shape than the module's.
    """
    if "state_dict" in checkpoint:
        return
    shapes, dtypes = io.tensor_names(path), io.tensor_dtypes(path)
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    wanted: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in shapes:
            if shapes[name] != tensor.logical_shape(name, value):
                raise ValueError(
                    f"`{name}` has shape {tuple(value.shape)} in the module but {tuple(shapes[name])} in {path}; build "
                    "the module as it was when the checkpoint was saved."
                )
            wanted[name] = torch.empty(shapes[name], dtype=value.dtype, device=value.device)
    mine = set(parameter_names(module).values())
    optimizers = len(checkpoint.get("optimizer_groups", [])) if with_optimizer else 0
    entries = [_parse_optimizer_name(name) for name in shapes]
    owned = [entry for entry in entries if entry is not None and entry[0] < optimizers and entry[1] in mine]
    device = next(iter(state.values())).device if state else torch.device("cpu")
    for index, parameter, key in owned:
        full = f"optimizer.{index}.{parameter}.{key}"
        wanted[full] = torch.empty(shapes[full], dtype=dtypes[full], device=device if shapes[full] else "cpu")
    io.load_tensors(path, wanted)
    checkpoint["state_dict"] = {name: wanted[name] for name in state if name in wanted}
    checkpoint["state_dict"] |= checkpoint.pop("state_dict_extra", {})
    checkpoint["state_dict_names"] = [n for n, entry in zip(shapes, entries, strict=True) if entry is None]
    if "optimizer_groups" in checkpoint:
        checkpoint["optimizer_states"] = _assemble_optimizers(checkpoint["optimizer_groups"], owned, wanted)


def _parse_optimizer_name(name: str) -> tuple[int, str, str] | None:
    """``"optimizer.0.layers.1.weight.exp_avg"`` -> ``(0, "layers.1.weight", "exp_avg")``."""
    parts = name.split(".")
    if parts[0] != "optimizer" or len(parts) < 4 or not parts[1].isdigit():
        return None
    return int(parts[1]), ".".join(parts[2:-1]), parts[-1]


def _assemble_optimizers(
    groups: Sequence[Any], owned: Sequence[tuple[int, str, str]], tensors: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = [{"state": {}, "param_groups": group} for group in groups]
    for index, parameter, key in owned:
        states[index]["state"].setdefault(parameter, {})[key] = tensors[f"optimizer.{index}.{parameter}.{key}"]
    return states


def load_module(
    module: nn.Module, checkpoint: Mapping[str, Any], whole: set[str], strict: bool, tensor: TensorState
) -> None:
    """Load this rank's part of ``checkpoint["state_dict"]``.

    Args:
        module: this rank's part of the module.
        checkpoint: with the state, and under ``"state_dict_names"`` the names of all that was saved.
        whole: names of the whole module's state.
        strict: whether missing and unexpected names are errors.
        tensor: how parameters are split over tensor-parallel ranks.

    Raises:
        RuntimeError: names are missing or unexpected, and ``strict``.
    """
    state = checkpoint["state_dict"]
    saved = set(checkpoint.get("state_dict_names", state))
    local = module.state_dict()
    missing, unexpected = sorted(set(local) - saved), sorted(saved - whole)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"the checkpoint does not fit {type(module).__name__}: missing {missing or 'nothing'}, unexpected "
            f"{unexpected or 'nothing'}; set `strict_loading = False` on the module to load what fits."
        )
    parts = {name: _local(tensor, name, value) for name, value in state.items() if name in local}
    module.load_state_dict(parts, strict=False)


def gather_state_dict(local: Mapping[str, Any], mesh: ParallelMesh) -> dict[str, Tensor]:
    """Whole state on the CPU of global rank 0; an empty dict elsewhere."""
    mine = {name: value.detach().cpu() for name, value in local.items() if isinstance(value, Tensor)}
    if mesh.layout.pipeline == 1:
        return mine if mesh.rank == 0 else {}
    if 0 not in mesh.pipeline_ranks:
        return {}
    parts: list[Any] | None = [None] * mesh.layout.pipeline if mesh.rank == 0 else None
    dist.gather_object(mine, parts, dst=0, group=mesh.group("pipeline_parallel"))
    if parts is None:
        return {}
    return {name: value for part in parts for name, value in part.items()}
