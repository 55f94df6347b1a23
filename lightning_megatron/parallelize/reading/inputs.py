"""Guesses a tiny input for a module without an example: token ids, an image, or a hidden state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_megatron.mesh.parts.names import leaf_of, parent
from lightning_megatron.mesh.parts.packages import comes_from
from lightning_megatron.parallelize.reading.kinds import (
    hugging_face_models,
    is_hugging_face,
    is_linear,
    linear_sizes,
)
from lightning_megatron.parallelize.reading.trace import Trace, trace

BATCH, LENGTH = 2, 11
"""Batch size and sequence length of the tiny input; neither is a usual number of heads."""

_MOST_OWN_SIZES = 8

_SIGNALS = ("pixel_values", "input_features", "input_values", "past_values")

SHORT_LENGTHS = (7, 5, 3)
"""For modules that cannot take a sequence of `LENGTH`, such as some with tables of relative positions."""


@dataclass(frozen=True)
class Example:
    """A way to call one part of a module.

    Attributes:
        name: dotted name of the part, empty for the module itself.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def run_examples(module: nn.Module, example: Any = None) -> tuple[Trace | None, str]:
    """Trace the module on the given input, or on the first guess that runs.

    Args:
        module: the module.
        example: a tensor, a tuple of arguments, a dict of keyword arguments, or None to guess.

    Returns:
        The trace, with names relative to ``module``, and an empty reason; or None and the reason if no guess runs.

    Raises:
        Exception: any exception of the user's code on a given ``example``.
    """
    if example is not None:
        return _merge(module, [_given(example)]), ""
    models = hugging_face_models(module)
    if models:
        traces = [_of_model(module, name, model) for name, model in models.items()]
        found = [t for t, _ in traces if t is not None]
        return (_join(found), "") if found else (None, traces[0][1])
    return _first_that_runs(module, _guesses(module))


def _of_model(module: nn.Module, name: str, model: Any) -> tuple[Trace | None, str]:
    """Of a Hugging Face model: the trace of the whole or, where no guess runs, of the models that it is made of."""
    found = _first_that_runs(module, (Example(name, (), inputs) for inputs in _hugging_face_inputs(model)))
    if found[0] is not None:
        return found
    inner = [_of_model(module, f"{name}.{part}" if name else part, m) for part, m in _models_inside(model).items()]
    traces = [trace for trace, _ in inner if trace is not None]
    return (_join(traces), "") if traces else found


def _models_inside(model: nn.Module) -> dict[str, Any]:
    found = {name: hugging_face_models(child) for name, child in model.named_children()}
    return {f"{at}.{name}".rstrip("."): inner for at, models in found.items() for name, inner in models.items()}


def _given(example: Any) -> Example:
    if isinstance(example, dict):
        return Example("", (), example)
    return Example("", tuple(example) if isinstance(example, (tuple, list)) else (example,), {})


def _first_that_runs(module: nn.Module, guesses: Any) -> tuple[Trace | None, str]:
    reason = ""
    for guess in guesses:
        try:
            _check_taken(module.get_submodule(guess.name), guess)
            result = _merge(module, [guess])
        except Exception as error:  # a guess may fail in any way; the error of the first guess says most
            reason = reason or f"{guess.name or type(module).__name__}: {type(error).__name__}: {error}"
            continue
        if any(result.sources.values()):
            return _with_siblings(module, guess, result), ""
        reason = reason or f"{guess.name or type(module).__name__} runs, but no linear layer of it feeds another one"
    return None, reason or "no part of the module takes token ids or a hidden state"


def _check_taken(part: nn.Module, example: Example) -> None:
    """Refuse what a part cannot be called with, before anything is copied for a trial of it.

    A LightningModule with a ``training_step`` alone would be copied for each of its guesses, as large as it is.

    Raises:
        NotImplementedError: the part has no ``forward``.
        TypeError: its ``forward`` takes other arguments.
    """
    forward, hooked = part.forward, part._forward_pre_hooks
    if hooked or type(part).__call__ is not nn.Module.__call__:  # which may change what it is given
        return
    if comes_from(forward, "torch.nn.modules.module", "lightning.pytorch.core", "pytorch_lightning.core"):
        raise NotImplementedError(f"{type(part).__name__} has no `forward`")
    try:
        taken = inspect.signature(forward, follow_wrapped=False)  # a decorator may add arguments
    except ValueError:  # of code that is not Python's
        return
    taken.bind(*example.args, **example.kwargs)


def _with_siblings(module: nn.Module, example: Example, found: Trace) -> Trace:
    """If only a single layer of a list could be run, run the other layers of the list on the same input as well.

    Those that need more, such as keys and values of an earlier layer, stay unknown.
    """
    prefix = parent(example.name)
    if not leaf_of(example.name).isdigit():
        return found
    names = [f"{prefix}.{n}" if prefix else n for n, _ in module.get_submodule(prefix).named_children()]
    traces = [found]
    for name in names:
        if name != example.name:
            with suppress(Exception):  # as for a guess
                traces.append(_merge(module, [Example(name, example.args, example.kwargs)]))
    return _join(traces)


def _merge(module: nn.Module, examples: list[Example]) -> Trace:
    traces = []
    for example in examples:
        part = module.get_submodule(example.name)
        found = trace(part, example.args, example.kwargs, inner=bool(example.name))
        traces.append(_prefixed(found, example.name))
    return _join(traces)


def _prefixed(found: Trace, prefix: str) -> Trace:
    if not prefix:
        return found

    def full(name: str) -> str:
        return f"{prefix}.{name}" if name else prefix

    for call in found.calls.values():
        call.name = full(call.name)
    return Trace(
        {full(n): c for n, c in found.calls.items()},
        {full(n): c for n, c in found.counts.items()},
        {full(n): {full(s) for s in sources} for n, sources in found.sources.items()},
        {full(n): {full(p) for p in met} for n, met in found.between.items()},
        {full(n) for n in found.results},
        {full(p) for p in found.loose},
        {full(n) for n in found.on_inputs},
        [full(n) for n in found.roots],
        {full(p) for p in found.used},
        {full(n) for n in found.replaced},
    )


def _join(traces: list[Trace]) -> Trace:
    joined = Trace(roots=[])
    for found in traces:
        joined.calls |= found.calls
        joined.counts |= found.counts
        joined.sources |= found.sources
        joined.between |= found.between
        joined.results |= found.results
        joined.loose |= found.loose
        joined.on_inputs |= found.on_inputs
        joined.roots += found.roots
        joined.used |= found.used
        joined.replaced |= found.replaced
    return joined


def _device_and_dtype(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.device, parameter.dtype
    return torch.device("cpu"), torch.float32


def token_ids(module: nn.Module, vocabulary: int, length: int = LENGTH) -> Tensor:
    """Token ids [BATCH, length], spread over the vocabulary, on the device of the module."""
    ids = torch.arange(BATCH * length, device=_device_and_dtype(module)[0]) * 7 + 3
    return (ids % max(1, vocabulary)).view(BATCH, length)


def _hugging_face_inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Token ids, images or sounds; ids with the others that its forward may take, where it needs both."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    ids = token_ids(model, getattr(config, "vocab_size", 8))
    taken = inspect.signature(model.forward).parameters
    if "past_time_features" in taken:
        yield _series(model)
        return
    if model.main_input_name != "input_ids" or "input_ids" not in taken:
        yield _signals(model, ids)
        return
    options: dict[str, Any] = {"use_cache": False} if hasattr(config, "use_cache") else {}
    if getattr(model.config, "is_encoder_decoder", False):
        options = {"decoder_input_ids": ids, "use_cache": False}
    yield {"input_ids": ids, **options}
    others = {name: _signal(model, name) for name in _SIGNALS if name in taken}
    if others:
        yield {"input_ids": ids, **others, **options}


def _signal(model: Any, name: str) -> Tensor | None:
    """A random image, sound or series of the size in the configuration; ``None`` where it says none."""
    shape = _signal_shape(name, model.config)
    if shape is None:
        return None
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(*_device_and_dtype(model))


def _signals(model: Any, ids: Tensor) -> dict[str, Any]:
    """Random images or sounds of the size in the configuration, with token ids for a decoder if there is one."""
    taken, name = inspect.signature(model.forward).parameters, model.main_input_name
    if name not in taken:  # inherited from the base class
        name = next((each for each in _SIGNALS if each in taken), name)
    values = _signal(model, name)
    if values is None:
        return dict(model.dummy_inputs)
    decoder = {"decoder_input_ids": ids, "use_cache": False} if model.config.is_encoder_decoder else {}
    return {name: values, **decoder}


def _series(model: Any) -> dict[str, Any]:
    """The past and the future of a series, with those features of times and series that its configuration asks for."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    device, dtype = _device_and_dtype(model)
    spans = {"past": config.context_length + max(config.lags_sequence), "future": config.prediction_length}
    size = getattr(config, "input_size", 1)
    own = (size,) if size > 1 else ()
    shapes: dict[str, tuple[int, ...]] = {}
    for span, length in spans.items():
        shapes |= {f"{span}_values": (BATCH, length, *own), f"{span}_observed_mask": (BATCH, length, *own)}
        shapes[f"{span}_time_features"] = BATCH, length, config.num_time_features
    shapes["static_real_features"] = BATCH, config.num_static_real_features
    found: dict[str, Any] = {
        name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items() if shape[-1]
    }
    found |= {name: torch.ones_like(value) for name, value in found.items() if name.endswith("_mask")}
    if categories := config.num_static_categorical_features:
        found["static_categorical_features"] = torch.zeros(BATCH, categories, dtype=torch.int64, device=device)
    return found


def _signal_shape(name: str, config: Any) -> tuple[int, ...] | None:
    """Shape of images [batch, channels, height, width], of sound samples, or of features over time in either order."""
    if name == "pixel_values":
        config = getattr(config, "vision_config", getattr(config, "encoder", config))
        size = getattr(config, "image_size", 64)
        return (BATCH, getattr(config, "num_channels", 3), *(size if isinstance(size, (list, tuple)) else (size, size)))
    if name == "past_values":
        return BATCH, getattr(config, "context_length", 32), getattr(config, "num_input_channels", 1)
    frames = 2 * getattr(config, "max_source_positions", 50)
    bins = getattr(config, "num_mel_bins", 80)
    if name == "input_values":
        patched = hasattr(config, "time_stride")  # a spectrogram, cut into patches as an image is
        return (BATCH, config.max_length, bins) if patched else (BATCH, 40 * frames)
    if name == "input_features":
        for key in ("input_feat_per_channel", "feature_projection_input_dim"):
            if hasattr(config, key):
                return BATCH, 40, getattr(config, key)
        return BATCH, bins, frames
    return None


def _guesses(module: nn.Module) -> Iterator[Example]:
    """Inputs for the module, then for its largest child, and so on down to single layers."""
    given = getattr(module, "example_input_array", None)
    if given is not None:
        inner = _given(given)
        yield Example("", inner.args, inner.kwargs)
        yield Example("", *tree_map(_converting(module), (inner.args, inner.kwargs)))  # as a precision converts batches
    name, part = "", module
    while part is not None:
        yield from (Example(name, args, {}) for args in _inputs(part))
        name, part = _largest_child(name, part)


def _converting(module: nn.Module) -> Callable[[Any], Any]:
    """Brings tensors to the device of a module, and numbers to its dtype."""
    device, dtype = _device_and_dtype(module)

    def convert(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)

    return convert


def _inputs(part: nn.Module) -> Iterator[tuple[Any, ...]]:
    if isinstance(part, (nn.ModuleList, nn.ModuleDict)) or is_hugging_face(part):
        return
    embeddings = [m for m in part.modules() if isinstance(m, nn.Embedding)]
    if embeddings:
        vocabulary = max(m.num_embeddings for m in embeddings)
        tables = [m.num_embeddings for m in embeddings]
        lengths = [LENGTH, *(n for n in [*tables, *_own_sizes(part)] if n <= 4096), *SHORT_LENGTHS]
        for length in dict.fromkeys(lengths):
            ids = token_ids(part, vocabulary, length)
            yield (ids,)
            yield (ids, ids)
    device, dtype = _device_and_dtype(part)
    for size in dict.fromkeys(_widths(part)):
        values = torch.randn(BATCH, LENGTH, size, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        yield (values,)
        yield (values[:, 0],)
        yield (values, values)


def _own_sizes(part: nn.Module) -> list[int]:
    """Sizes of tensors in modules that are not torch's: tables of positions and masks may fix the sequence length."""
    own = [m for m in part.modules() if not comes_from(type(m), "torch.nn")]
    tensors = [x for m in own for x in (*m.buffers(recurse=False), *m.parameters(recurse=False))]
    return list(dict.fromkeys(size for x in tensors for size in x.shape[:-1] if size > 1))[:_MOST_OWN_SIZES]


def _widths(part: nn.Module) -> Iterator[int]:
    for m in part.modules():
        if is_linear(m):
            yield linear_sizes(m)[0]
            return
        if isinstance(m, nn.MultiheadAttention):
            yield m.embed_dim
            return


def _largest_child(name: str, part: nn.Module) -> tuple[str, Any]:
    children = [(sum(p.numel() for p in c.parameters()), n, c) for n, c in part.named_children()]
    if not children or max(children, key=lambda c: c[0])[0] == 0:
        return name, None
    _, child, module = max(children, key=lambda c: c[0])
    return (f"{name}.{child}" if name else child), module
