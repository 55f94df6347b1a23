"""Replaces large tensors by fake tensors, which have no memory, and leaves small ones real.

Code that only computes with large tensors (layers, buckets, optimizers) does not read their values. Code that makes
decisions reads small tensors: seeds, sizes, checksums of batches. Parameters, all results computed from them, and other
large tensors therefore become fake tensors, which have a shape, a dtype and a device; all other tensors stay real.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megatron.mesh.replaced import Replacements

LARGE = 1 << 20
"""Number of elements above which a tensor is fake, even if it does not depend on a parameter."""

BUFFER = 1 << 10
"""Once weights are fake: number of elements above which new zeros and empty tensors, which are buffers, are fake."""

_aten = torch.ops.aten
_grouped_mm = _aten._grouped_mm.default
_device = torch.ops.prim.device.default
_BUFFERS = frozenset({"empty", "zeros", "empty_strided"})
_FACTORIES = _BUFFERS | {"ones", "full", "rand", "randn"}


class Weightless(TorchDispatchMode):
    """Dispatch mode that makes large tensors fake.

    Args:
        seen: called with every tensor that an operation returns.

    Attributes:
        guesses: ``file:line`` of code that read a value of a fake tensor -> the value it got.
    """

    def __init__(self, seen: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.guesses: dict[str, Any] = {}
        self._seen = seen
        self._weightless = False
        self._replaced = Replacements()

    def __enter__(self) -> Any:
        # torch has no option for modules to convert fake parameters in place, so its method is replaced meanwhile.
        self._replaced.put(nn.Module, "_apply", apply_in_place)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._replaced.take_back()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _device and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is _aten.bincount.default and isinstance(args[0], FakeTensor):
            return alike(args[0].numel(), *args[2:], **{k: v for k, v in kwargs.items() if k == "minlength"})
        if func is _aten.nonzero.default and isinstance(args[0], FakeTensor):
            self._guessed(True)
            return torch.ones(args[0].shape, dtype=torch.bool).nonzero()
        if func in _READS and isinstance(args[0], FakeTensor):
            return self._guess(func, args[0])
        if func is _grouped_mm and (shape := grouped_shape(*args)) and FakeTensor in types:
            with self.fake:  # torch's own rule for fake tensors knows bfloat16 only
                result: Any = torch.empty(shape, dtype=kwargs.get("out_dtype") or args[0].dtype)
        elif FakeTensor in types or self._is_large(func, args, kwargs):
            result = self.fake.__torch_dispatch__(func, types, args, kwargs)
        else:
            result = func(*args, **kwargs)
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._seen(leaf)
        return result

    def _is_large(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation on real tensors reads or makes a large one."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        place = kwargs.get("device") or (tensors[0].device if tensors else torch.device("cpu"))
        if torch.device(place).type == "meta":
            return False
        if tensors:
            if func is _aten.empty_like.default and tensors[0].is_meta:
                return True  # materializes a parameter of the meta device
            limit = BUFFER if self._weightless else LARGE
            return any(t.is_floating_point() and not t.is_meta and t.numel() > limit for t in tensors)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if func.overloadpacket.__name__ not in _FACTORIES or not dtype.is_floating_point:
            return False
        size = next((arg for arg in args if isinstance(arg, (list, tuple))), [args[0]] if args else [])
        buffer = self._weightless and func.overloadpacket.__name__ in _BUFFERS
        return torch.Size(size).numel() > (BUFFER if buffer else LARGE)

    def _guess(self, func: Any, tensor: Tensor) -> Any:
        """A fixed value for code that reads a fake tensor; recorded in :attr:`guesses`, as it is made up."""
        if func is not _aten._local_scalar_dense.default:
            answer: Any = True
        elif tensor.dtype is torch.bool:
            answer = True
        else:
            answer = 1.0 if tensor.is_floating_point() else 1
        return self._guessed(answer)

    def _guessed(self, answer: Any) -> Any:
        """The answer, noted with the line of the code that asks."""
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and "rehearsal" not in f.filename]
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
        self.guesses.setdefault(place, answer)
        return answer

    def weightless(self, module: nn.Module) -> None:
        """Make all parameters of ``module`` fake, also small ones; tied parameters stay tied.

        Small parameters are real before, so that the trial of a tensor-parallel plan can compare values.
        """
        self._weightless = True
        known: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is None or parameter.is_meta or isinstance(parameter, FakeTensor):
                    continue
                if id(parameter) not in known:
                    empty = self.fake.from_tensor(parameter.detach())
                    known[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                part._parameters[name] = known[id(parameter)]


def apply_in_place(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replaces ``nn.Module._apply``, which swaps fake parameters with new tensors and fails if other code refers to
    them.

    As for real parameters, the objects stay the same and their data changes.
    """
    if recurse:
        for child in module.children():
            child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = function(parameter)
        if isinstance(changed, FakeTensor) == isinstance(parameter, FakeTensor) and not parameter.is_meta:
            parameter.data = changed
        else:
            module._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def grouped_shape(a: Tensor, b: Tensor, groups: Tensor | None = None, *_: Any) -> tuple[int, ...]:
    """Shape of a product of groups of rows, ``[n, k] x [groups, k, f]``, or of one of its gradients."""
    if groups is None:
        return ()
    if a.dim() == b.dim() == 2:
        return (groups.numel(), a.shape[0], b.shape[1])
    return (a.shape[-2], b.shape[-1])


def alike(rows: int, minlength: int = 0) -> Tensor:
    """Counts of ``rows`` numbers that a rehearsal does not know, such as the experts of tokens: all equally often.

    Seven rows for three experts are counted as 3, 2 and 2.
    """
    counts = torch.full((minlength,), rows // max(1, minlength), dtype=torch.int64)
    counts[: rows % max(1, minlength)] += 1
    return counts


_READS = frozenset({_aten._local_scalar_dense.default, _aten.equal.default, _aten.allclose.default})
