"""Pretrained weights straight into the parts that ranks hold.

Files are read by place: a rank brings in its own layers and its own slices of them, and nothing else. With
``configure_model`` under the meta device, no process ever holds a whole model::

    def configure_model(self):
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        load_hf_weights(self, path)
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.checkpoints.files.library_names import open_weights
from lightning_megatron.checkpoints.files.sources import Source
from lightning_megatron.checkpoints.loading.adapted import match_adapted, names_in_files
from lightning_megatron.checkpoints.state.stored import Match, aliases, match
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.parts.pieces import PiecedTensor, as_pieces


@dataclass(frozen=True)
class _Later:
    """Path of the weights to load once the module is divided, as asked for in ``configure_model``."""

    path: Any


_ADAPTED = (
    " The module has adapters, and a folder of its model has none: read both from a checkpoint that has them, or merge "
    "them into a folder (`lightning-megatron checkpoint export CHECKPOINT FOLDER --merge-adapters`)."
)


@dataclass(frozen=True)
class _Loaded:
    """Path that the weights of a divided module were loaded from."""

    path: str


def load_hf_weights(module: nn.Module, path: Any) -> None:
    """Load weights from safetensors, a Lightning ``.ckpt`` or a checkpoint directory.

    In ``configure_model`` under :class:`~lightning_megatron.MegatronStrategy` nothing is read yet: once the module is
    divided, each rank reads its part. Anywhere else the module is filled at once; meta tensors get memory.

    Args:
        module: a LightningModule, or any module. The weights may belong to all of it or to a part: the start of the
            names is found by comparing them.
        path: a file, or the folder of a Hugging Face model.

    Raises:
        RuntimeError: a parameter of the part that the weights belong to is missing in the files, or has another shape.
    """
    if _is_divided_later(module):
        Marks.of(module).put(_Later(path))
        return
    source = open_weights(path)
    source.verify()
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    shapes = {name: value.shape for name, value in state.items()}
    found = match_weights(source, shapes, aliases(module), path)
    wanted = {name: (stored, _room_for(state[name])) for name, stored in found.stored.items()}
    source.fill(wanted)
    module.load_state_dict({name: pieces.local for name, (_, pieces) in wanted.items()}, strict=False, assign=True)


def _room_for(value: Tensor) -> PiecedTensor:
    device = "cpu" if value.is_meta else value.device
    return as_pieces(torch.empty(value.shape, dtype=value.dtype, device=device))


def _is_divided_later(module: nn.Module) -> bool:
    """Whether a Trainer with our strategy is about to divide the module."""
    trainer = getattr(module, "_trainer", None)
    return hasattr(getattr(trainer, "strategy", None), "load_initial_weights")


def has_start(module: nn.Module, given: Any) -> bool:
    """Whether :func:`start_from` will give a place."""
    marks, asked = Marks.of(module), Marks.of(module).get(_Later)
    path = given if asked is None else asked.path
    return path is not None and marks.get(_Loaded) != _Loaded(str(path))


def start_from(module: nn.Module, given: Any) -> Any:
    """Source of a divided module's weights: what :func:`load_hf_weights` was asked for in ``configure_model``, or
    what the strategy was ``given``; ``None`` if neither, or if they were loaded already.
    """
    marks = Marks.of(module)
    asked = marks.take(_Later)
    path = given if asked is None else asked.path
    if path is None or marks.get(_Loaded) == _Loaded(str(path)):
        return None
    marks.put(_Loaded(str(path)))
    return path


def match_weights(
    source: Source,
    shapes: Mapping[str, torch.Size],
    further: Mapping[str, str],
    path: Any,
    built: Mapping[str, Sequence[str]] | None = None,
) -> Match:
    """Find every tensor's place in the files.

    Args:
        source: the opened files.
        shapes: logical shapes by name, over the whole module.
        further: tied names of the module.
        path: for messages.
        built: what a module with peft adapters may have besides what the files have; see :func:`match_adapted`.

    Raises:
        RuntimeError: a tensor is missing or has another shape.
    """
    kinds = {name: kind for name, kind in source.kinds.items() if not name.startswith("optimizer.")}
    taken, put = find_prefix(kinds, shapes)
    part = {name: shape for name, shape in shapes.items() if name.startswith(put)}
    found = match(kinds, part, further, source.aliases, {taken: put})
    if (found.missing or found.reshaped) and built:
        found = match_adapted(source, shapes, further, path, built, find_prefix) or found
    if found.missing or found.reshaped:
        out = _ADAPTED if not built and len(names_in_files(shapes)) < len(shapes) else ""
        raise RuntimeError(f"the weights in {path} do not fit: {found}.{out}")
    if found.unexpected and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(f"{path} holds weights that the module has no place for: {found.unexpected}", stacklevel=2)
    return found


def find_prefix(stored: Iterable[str], names: Iterable[str]) -> tuple[str, str]:
    """The prefix to remove from stored names and the prefix to add instead, with which most of them match ``names``.

    ``["h.0.w", "wte.w"]`` and ``["net.h.0.w", "net.wte.w", "scale"]`` give ``("", "net.")``.
    """
    stored, names = list(stored), list(names)
    votes: Counter[tuple[str, str]] = Counter()
    votes.update(("", prefix) for prefix in _prefixes(names, set(stored)))
    votes.update((prefix, "") for prefix in _prefixes(stored, set(names)))
    return votes.most_common(1)[0][0] if votes else ("", "")


def _prefixes(longer: list[str], shorter: set[str]) -> Iterable[str]:
    for name in longer:
        start = 0
        while start >= 0:
            if name[start:] in shorter:
                yield name[:start]
            dot = name.find(".", start)
            start = dot + 1 if dot >= 0 else -1
