"""``weight_streaming``: weights of a model larger than memory stay in files, or in host memory, until a layer runs.

What lies in windows is taken off the divided module before it gets any memory, and is read by the places that the files
have for it: a rank reads its layers, and its slices of them::

    configure_model (meta)   divided   windows: hidden   the rest: memory, values   a call: read, compute, free
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import xxhash
from torch import Tensor, nn

from lightning_megatron.checkpoints.files.sources import Source
from lightning_megatron.checkpoints.files.storage import bytes_of
from lightning_megatron.checkpoints.state.stored import aliases
from lightning_megatron.data_parallel.windows.spread import spread_parameters
from lightning_megatron.data_parallel.windows.streamed import StreamedWindows, nowhere
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.mesh.parts.names import parent, unit_of
from lightning_megatron.mesh.parts.pieces import PiecedTensor

Streams = str | Mapping[str, Any] | None
"""``"cpu"``, ``"disk"``, or ``{"from": "cpu" or "disk", "ahead": windows}``."""

Places = Mapping[str, tuple[str, ShardSpec]]
"""By name of a parameter, its name in the files and the part of it that this rank has."""


@dataclass(frozen=True)
class Streaming:
    """Location where weights wait.

    Attributes:
        of: ``"cpu"`` or ``"disk"``.
        ahead: how many layers are read ahead.
    """

    of: str
    ahead: int = 1

    def __str__(self) -> str:
        return f"weight_streaming={self.of!r}"


def streaming_of(given: Streams) -> Streaming | None:
    """The requested location and settings.

    Raises:
        ValueError: the value is not one of those documented.
    """
    if given is None:
        return None
    options = {"from": given} if isinstance(given, str) else given
    known = isinstance(options, Mapping) and "from" in options and set(options) <= {"from", "ahead"}
    if known and options["from"] in ("cpu", "disk"):
        ahead = options.get("ahead", 1)
        if isinstance(ahead, int) and not isinstance(ahead, bool) and ahead >= 0:
            return Streaming(options["from"], ahead)
    raise ValueError(
        f"`weight_streaming={given!r}` must be 'cpu', 'disk', or {{'from': 'cpu' or 'disk', 'ahead': layers to read "
        "ahead, 0 or more}; leave it out to keep weights in memory."
    )


class StreamedWeights:
    """The weights of a module that are not in memory between two calls of their layers.

    Args:
        module: divided; may have no memory yet.
        layers: names of its layers.
        streaming: what was asked for.
        device: where layers compute.
        from_files: whether the values are in files.
        replicas: group of the ranks with the same part, whose values have to be equal.

    Attributes:
        names: of the parameters.
        windows: they lie in; once the rest of the module has memory.

    Raises:
        ValueError: there are no layers, or no values.
    """

    windows: StreamedWindows

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[str],
        streaming: Streaming,
        device: torch.device,
        from_files: bool,
        replicas: Any = None,
    ) -> None:
        self.streaming, self._module, self._device = streaming, module, device
        spread = spread_parameters(module, layers, ())
        self._openers, self._window_of = spread.modules, {**spread.trained, **spread.frozen}
        self.names: Collection[str] = self._window_of.keys()
        if not self.names:
            raise ValueError(
                f"`{streaming}` found no layers whose weights it could stream; name them with `pipeline_layers=`, or "
                "leave `weight_streaming` out."
            )
        own = self._own()
        if not from_files and (streaming.of == "disk" or any(parameter.is_meta for parameter in own.values())):
            _refuse_no_files(streaming)
        self._host = {} if from_files else {name: self._hosted(parameter) for name, parameter in own.items()}
        if not from_files:
            _check_alike(module, streaming, replicas)
        self._settled, self._holders = set[str](), {name: {parent(name)} for name in own}
        for name, first in aliases(module).items():
            if first in own:
                self._holders[first].add(parent(name))
        ids = {id(parameter) for parameter in own.values()}
        waiting = {unit_of(name) for name, child in module.named_modules() if _has_others(child, ids)}
        self._hide({id(parameter) for name, parameter in own.items() if unit_of(parent(name)) not in waiting})

    def settle(self, names: Iterable[str]) -> None:
        """Take weights off modules that were given memory for the sake of their other tensors.

        Args:
            names: of the modules.
        """
        self._settled |= set(names)
        named = dict(self._module.named_parameters(remove_duplicate=False))
        for name, holders in self._holders.items():
            if holders <= self._settled:
                named[name].data = nowhere(named[name], self._device)

    def install(self) -> None:
        """Make the windows, once the rest of the module has memory."""
        self._hide({id(parameter) for parameter in self._own().values()})
        weights: dict[str, dict[str, nn.Parameter]] = {window: {} for window in self._openers}
        for name, parameter in self._own().items():
            weights[self._window_of[name]][name] = parameter
        self.windows = StreamedWindows(self._module, weights, self._openers, self.streaming.ahead, self._device)
        if self._host:
            self._ready(self._from_host)

    def connect(self, source: Source, places: Places) -> None:
        """Say where the values are.

        Args:
            source: the files, opened.
            places: of each parameter in them.
        """
        self._source, self._places = source, dict(places)
        self._kinds = {name: (places[name][1].local_shape, own.dtype) for name, own in self._own().items()}
        if self.streaming.of == "cpu":
            self._host = self._filled(self.names)
        self._ready(self._from_host if self.streaming.of == "cpu" else self._from_files)

    def run(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Run a step of the user's, which may use weights without a call of their layer."""
        with self.windows.step():
            return step(batch)

    def open(self) -> None:
        """Do nothing: layers read their weights in and between runs."""

    def close(self) -> None:
        """Free the weights that were read ahead, at the end of a run."""
        self.windows.rest()

    def report(self) -> str:
        """Most bytes of weights at a time, of all, and what was read."""
        windows = self.windows
        whole = sum(window.size for window in windows.windows)
        most, read = windows.peak_bytes / 1e6, windows.read_bytes / 1e6
        return f"{most:,.1f} MB of {whole / 1e6:,.1f} MB of streamed weights in memory at a time, {read:,.1f} MB read"

    def _own(self) -> dict[str, nn.Parameter]:
        named = dict(self._module.named_parameters())
        return {name: named[name] for name in self._window_of}

    def _hosted(self, parameter: Tensor) -> Tensor:
        value = parameter.detach().cpu().contiguous()
        return value.pin_memory() if self._device.type == "cuda" else value

    def _hide(self, ids: Collection[int]) -> None:
        """Let parameters have no memory, wherever in the module they are."""
        made: dict[int, nn.Parameter] = {}
        for child in self._module.modules():
            for leaf, parameter in child._parameters.items():
                if parameter is None or id(parameter) not in ids:
                    continue
                if not parameter.is_meta:
                    parameter.data = nowhere(parameter, self._device)
                    continue
                if id(parameter) not in made:
                    hidden = nowhere(parameter, self._device)
                    made[id(parameter)] = nn.Parameter(hidden, requires_grad=parameter.requires_grad)
                child._parameters[leaf] = made[id(parameter)]

    def _ready(self, read: Callable[[Sequence[str]], dict[str, Tensor]]) -> None:
        self.windows.read = read
        for opener in {name for names in self._openers.values() for name in names}:
            self._module.get_submodule(opener).register_state_dict_pre_hook(self._refuse_state)

    def _from_host(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._host[name].to(self._device, non_blocking=True, copy=True) for name in names}

    def _from_files(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: tensor.to(self._device) for name, tensor in self._filled(names).items()}

    def _filled(self, names: Collection[str]) -> dict[str, Tensor]:
        """Host memory with what the files have; padding, of which they have nothing, is zero."""
        pinned, room = self._device.type == "cuda", dict[str, Tensor]()
        with torch.inference_mode(False):
            for name in names:
                shape, dtype = self._kinds[name]
                make = torch.empty if self._places[name][1].numel == math.prod(shape) else torch.zeros
                room[name] = make(shape, dtype=dtype, pin_memory=pinned)
        self._source.fill({n: (self._places[n][0], PiecedTensor(self._places[n][1], room[n])) for n in names})
        return room

    def _refuse_state(self, module: nn.Module, prefix: str, keep_vars: bool) -> NoReturn:
        name = prefix.rstrip(".") or type(module).__name__
        raise RuntimeError(
            f"`{self.streaming}` keeps the weights of `{name}` out of memory, so "
            "there is no state to save, and none to load into. To use a checkpoint's weights, name it with "
            "`MegatronStrategy(initial_weights=...)`; to save, leave `weight_streaming` out."
        )


def _has_others(module: nn.Module, ids: Collection[int]) -> bool:
    """Whether a module itself holds tensors without memory beside those that are streamed."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta and id(tensor) not in ids for tensor in own)


def stream_weights(
    module: nn.Module, layers: Sequence[str], streaming: Streaming | None, device: torch.device, *values: Any
) -> StreamedWeights | None:
    """Take away the weights of a module that are to be read when a layer needs them; an earlier run's stay away.

    Args:
        module: divided.
        layers: names of its layers.
        streaming: what was asked for.
        device: where layers compute.
        values: where they are; see :class:`StreamedWeights`.

    Raises:
        RuntimeError: an earlier run was asked to do so in another way.
    """
    earlier = Marks.of(module).get(StreamedWeights)
    if earlier is not None and earlier.streaming != streaming:
        raise RuntimeError(
            f"an earlier run of this module, with `{earlier.streaming}`, has left its weights out of memory; give the "
            "strategy the same `weight_streaming`, or make the module anew."
        )
    if streaming is None or earlier is not None:
        return earlier
    return Marks.of(module).put(StreamedWeights(module, layers, streaming, device, *values))


def _check_alike(module: nn.Module, streaming: Streaming, replicas: Any) -> None:
    """Refuse weights of a module in memory that are not those of the other replicas; collective over them."""
    digest = xxhash.xxh3_128()
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            digest.update(bytes_of(tensor.detach().cpu().contiguous()))
    if len(set(objects.gather(digest.hexdigest(), replicas))) > 1:
        raise ValueError(
            f"`{streaming}`: each replica streams the weights that it has in memory, and they differ. Load them from "
            "files, `MegatronStrategy(initial_weights=FOLDER)`, or build the module after `seed_everything`."
        )


def _refuse_no_files(streaming: Streaming) -> NoReturn:
    raise ValueError(
        f"`{streaming}` reads weights when a layer needs them, and nothing says from where: give "
        "`MegatronStrategy(initial_weights=FOLDER)`, or call `load_hf_weights(self, FOLDER)` in `configure_model`. "
        "Weights that the module has in memory already can stay there: `weight_streaming='cpu'`."
    )
