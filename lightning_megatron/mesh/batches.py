"""Splits a batch into micro-batches, and merges the outputs of their steps.

The batch is the user's own object: a tensor, a tuple, a dict, a Hugging Face ``BatchEncoding``, or a nest of them. It
is split along dimension 0 of its tensors, and each micro-batch is rebuilt as the same kind of object, so that
``training_step`` sees a smaller batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.parts.packages import module_of

_SCALARS = (str, bytes, bool, int, float, complex, type(None))


def batch_size_of(batch: Any) -> int:
    """Number of samples in ``batch``.

    It is the size of dimension 0 of the first tensor that has one, depth first; without such a tensor it is the length
    of the first list of plain values (texts).

    Raises:
        ValueError: the batch holds neither.
    """
    size = size_of_plain(batch)
    if size is None:
        size = _first_size(batch)
    if size is None:
        size = _first_length(batch)
    if size is None:
        raise ValueError(
            f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension, so it cannot be cut into "
            "micro-batches; return tensors whose dimension 0 is the batch."
        )
    return size


def size_of_plain(batch: Any) -> int | None:
    """The size of the usual batch, a tuple or list of tensors of one length; ``None`` for any other."""
    if type(batch) is not tuple and type(batch) is not list:
        return None
    length: Any = None
    for item in batch:
        if item.__class__ is not Tensor or not item.shape or (length is not None and item.shape[0] != length):
            return None
        length = item.shape[0]
    return length  # type: ignore[no-any-return]


def _first_size(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if is_ragged(batch):
        return len(batch)
    for child in parts_of(batch):
        size = _first_size(child)
        if size is not None:
            return size
    return None


def is_ragged(value: Any) -> bool:
    """Whether ``value`` is a list with one tensor per sample, of different lengths."""
    if not isinstance(value, (list, tuple)) or len(value) < 2 or not all(isinstance(item, Tensor) for item in value):
        return False
    first = value[0]
    alike = all(item.dim() == first.dim() > 0 and item.dtype == first.dtype for item in value)
    return alike and any(item.shape[0] != first.shape[0] for item in value)


def is_per_sample(value: Any, size: int) -> bool:
    """Whether ``value`` is a list with one tensor for each of ``size`` samples; their lengths may all be the same."""
    if (
        not isinstance(value, (list, tuple))
        or len(value) != size
        or not all(isinstance(each, Tensor) for each in value)
    ):
        return False
    return is_ragged(value) or all(each.shape[:1] != (size,) for each in value)


def _first_length(batch: Any) -> int | None:
    if isinstance(batch, (list, tuple)) and batch and all(isinstance(item, _SCALARS) for item in batch):
        return len(batch)
    for child in parts_of(batch):
        size = _first_length(child)
        if size is not None:
            return size
    return None


def parts_of(batch: Any) -> Sequence[Any]:
    """Members of a list, mapping or dataclass; nothing of any other value."""
    if type(batch) is tuple or type(batch) is list:
        return batch
    if isinstance(batch, Mapping):
        return list(batch.values())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if isinstance(batch, (list, tuple)):
        return list(batch)
    return []


def auto_micro_batch_size(batch_size: int, stages: int) -> int:
    """Samples per micro-batch for ``micro_batch_size="auto"``.

    One stage runs the whole batch at once. With ``p`` stages, about ``m = 4p`` micro-batches keep the bubble
    ``(p-1)/m`` of a 1F1B step below a quarter (SC21, section 2.2).
    """
    if stages == 1:
        return batch_size
    return max(1, math.ceil(batch_size / (4 * stages)))


def split_batch(batch: Any, micro_batch_size: int) -> list[Any]:
    """Split ``batch`` into consecutive micro-batches of ``micro_batch_size`` samples; the last may be smaller.

    Tensors whose dimension 0 is the batch size are split (as views), and so are lists of that length that hold no
    tensors (texts, ids). Numbers, strings and tensors of other sizes go to every micro-batch unchanged.

    Args:
        batch: the user's batch, of ``B`` samples.
        micro_batch_size: samples per micro-batch.

    Returns:
        ``ceil(B / micro_batch_size)`` batches of the same structure; ``batch`` itself if that is one.

    Raises:
        ValueError: the batch holds an object that is neither a container, a tensor nor a plain value.
    """
    size = batch_size_of(batch)
    if micro_batch_size >= size:
        return [batch]
    starts = range(0, size, micro_batch_size)
    ends = [(start, min(start + micro_batch_size, size)) for start in starts]
    return [_slice(batch, size, itemgetter(slice(*pair)), pair[1] - pair[0]) for pair in ends]


def samples_of(batch: Any, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of ``batch``, cut as :func:`split_batch` cuts it."""
    return _slice(batch, batch_size_of(batch), itemgetter(slice(start, stop)), stop - start)


def map_rows(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Rebuild a batch with ``function`` applied to what is cut along its samples: tensors, and lists such as texts."""
    size = batch_size_of(batch)
    return _slice(batch, size, function, size)


def even_tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, but for those in lists of one tensor per sample."""
    if isinstance(batch, Tensor):
        yield batch
    elif not is_ragged(batch):
        for child in parts_of(batch):
            yield from even_tensors(child)


def _slice(value: Any, size: int, take: Callable[[Any], Any], count: int) -> Any:
    if isinstance(value, Tensor):
        return take(value) if value.dim() and value.shape[0] == size else value
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, {k: _slice(v, size, take, count) for k, v in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _slice(getattr(value, f.name), size, take, count) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, (list, tuple)):
        if is_per_sample(value, size) or (len(value) == size and _first_size(value) is None):
            return take(value)
        items = [_slice(item, size, take, count) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_array(value) and value.shape[0] == size:
        return take(value)
    raise ValueError(
        f"the batch holds an object of type {type(value).__name__}, which cannot be cut into micro-batches of "
        f"{count} out of {size} samples; return tensors, dicts, lists, tuples or dataclasses, or set "
        f"`micro_batch_size={size}`."
    )


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Rebuild a nest with ``function`` applied to its tensors; objects that are no containers stay as they are."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, {key: map_tensors(item, function) for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(getattr(value, f.name), function) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _is_array(value: Any) -> bool:
    """Whether ``value`` is a NumPy array with at least one dimension; NumPy need not be installed."""
    return module_of(type(value)) == "numpy" and bool(getattr(value, "ndim", None))


def _rebuild_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    try:
        rebuild: Callable[[dict[Any, Any]], Any] = type(original)
        return rebuild(items)
    except TypeError:
        return items


def signature(value: Any) -> Any:
    """Hashable description of the shapes, dtypes and plain values in a nest; equal on all ranks with equal nests."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, _SCALARS):
        return value if not isinstance(value, float) or value == value else "nan"
    if isinstance(value, Mapping):
        return (type(value).__name__, tuple((str(k), signature(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(signature(item) for item in value))
    return type(value).__name__


def shape_signature(batch: Any) -> Any:
    """Shapes and dtypes of the tensors in ``batch``: the key under which stages remember activation shapes."""
    if isinstance(batch, Tensor):
        return (batch.shape, batch.dtype)
    return tuple(shape_signature(child) for child in parts_of(batch))


def checksum(batch: Any, samples: int = 1024) -> float | Tensor:
    """Cheap checksum to detect ranks with different batches: a weighted sum over strided elements.

    Args:
        batch: any nest of tensors.
        samples: about how many elements of each tensor are summed.

    Returns:
        A scalar tensor where the batch has tensors, so that nobody waits for a device.
    """
    total: float | Tensor = 0.0
    for index, tensor in enumerate(tensors_of(batch)):
        flat = tensor.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // samples)]
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        found = flat.double().nan_to_num().sum() if flat.is_floating_point() else flat.sum(dtype=torch.float64)
        total = total + (index + 1) * found + tensor.numel()
    return total


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors in ``batch``, depth first."""
    if batch.__class__ is tuple or batch.__class__ is list:  # the usual batch
        found = [item for item in batch if item.__class__ is Tensor]
        if len(found) == len(batch):
            return found
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for child in parts_of(batch) for tensor in tensors_of(child)]


def look_of(batch: Any) -> Any:
    """Key of the kind of a batch: its tensors, but not how long they are."""
    size = batch_size_of(batch)
    return tuple((t.ndim, t.dtype, t.ndim > 0 and t.shape[0] == size) for t in tensors_of(batch))


def merge_outputs(outputs: Sequence[Any], weights: Sequence[float], sizes: Sequence[int], where: str) -> Any:
    """Merge the outputs of a step's micro-batches into one output of the whole batch.

    Tensors whose dimension 0 is the micro-batch size are concatenated, and so are lists of that length. Other
    floating-point tensors of one shape, and floats, are averaged by weight. Scalar integer tensors that differ are
    summed, and equal plain values stay. Mappings, sequences and dataclasses are merged item by item.

    Args:
        outputs: one output per micro-batch.
        weights: weight of each micro-batch in means.
        sizes: samples of each micro-batch.
        where: the step's name, for the error.

    Raises:
        ValueError: outputs that cannot be merged.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    merge: Callable[[Sequence[Any]], Any] = lambda items: merge_outputs(items, weights, sizes, where)  # noqa: E731
    if isinstance(first, Tensor):
        return _merge_tensors(outputs, weights, sizes, where)
    if isinstance(first, float):
        return sum(w * o for w, o in zip(weights, outputs, strict=True)) / sum(weights)
    if isinstance(first, _SCALARS) and all(output == first for output in outputs):
        return first
    if isinstance(first, Mapping):
        return _rebuild_mapping(first, {key: merge([output[key] for output in outputs]) for key in first})
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [f.name for f in dataclasses.fields(first)]
        return dataclasses.replace(first, **{n: merge([getattr(o, n) for o in outputs]) for n in names})
    if isinstance(first, (list, tuple)):
        return _merge_sequences(outputs, weights, sizes, where)
    if _is_array(first):
        import numpy

        return numpy.concatenate(outputs)
    raise ValueError(
        f"`{where}` returned a {type(first).__name__} for each of {len(outputs)} micro-batches, which cannot be merged "
        f"into one output; return tensors, lists or dicts, or set `micro_batch_size={sum(sizes)}`."
    )


def _merge_tensors(outputs: Sequence[Tensor], weights: Sequence[float], sizes: Sequence[int], where: str) -> Tensor:
    if all(output.dim() and output.shape[0] == size for output, size in zip(outputs, sizes, strict=True)):
        return torch.cat(list(outputs))
    if outputs[0].dim() == 0 and outputs[0].is_floating_point():
        return weighted_mean(outputs, weights)
    if all(output.shape == outputs[0].shape for output in outputs):
        if outputs[0].is_floating_point():
            return weighted_mean(outputs, weights)
        if all(torch.equal(output, outputs[0]) for output in outputs):
            return outputs[0]
        if outputs[0].dim() == 0:
            return torch.stack(list(outputs)).sum()
    if outputs[0].dim() and all(output.shape[1:] == outputs[0].shape[1:] for output in outputs):
        return torch.cat(list(outputs))
    shapes = [tuple(output.shape) for output in outputs]
    raise ValueError(
        f"`{where}` returned tensors of shapes {shapes} for micro-batches of {list(sizes)} samples, which cannot be "
        f"merged; make dimension 0 the batch, or set `micro_batch_size={sum(sizes)}`."
    )


def _merge_sequences(outputs: Sequence[Any], weights: Sequence[float], sizes: Sequence[int], where: str) -> Any:
    first = outputs[0]
    per_sample = all(len(output) == size for output, size in zip(outputs, sizes, strict=True))
    if isinstance(first, list) and per_sample and not any(_is_batched(item, sizes[0]) for item in first):
        return [item for output in outputs for item in output]
    if any(len(output) != len(first) for output in outputs):
        return type(first)(item for output in outputs for item in output)
    items = [merge_outputs(column, weights, sizes, where) for column in zip(*outputs, strict=True)]
    return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)


def _is_batched(item: Any, size: int) -> bool:
    return isinstance(item, Tensor) and item.dim() > 0 and item.shape[0] == size and size > 1


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """``sum(w * v) / sum(w)`` of tensors of one shape, summed in the order given."""
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total / sum(weights)
