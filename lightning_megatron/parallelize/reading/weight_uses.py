"""Notes which weights of layers are used by code that does not call the layer, in any way at all.

What is computed from a weight with a gradient shows in the autograd graph. What is not, shows where it is called::

    y / self.c_proj.weight.detach().norm()      a number of all rows, of which a rank has some
    h / math.log(self.head.weight.shape[0])     a size that is another after the split
    self.c_proj(y)                              the layer's own code, which is replaced
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_megatron.mesh.parts.names import lies_in
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from

_SAYS_NOTHING = frozenset(
    (
        *("dtype", "device", "layout", "requires_grad", "requires_grad_", "is_leaf", "ndim", "dim", "grad", "grad_fn"),
        *("is_floating_point", "is_complex", "element_size", "is_contiguous", "data_ptr", "untyped_storage", "names"),
        *("new", "new_tensor", "new_empty", "new_full", "new_ones", "new_zeros"),
        *("is_cuda", "is_meta", "is_quantized", "is_sparse", "is_cpu", "is_nested", "is_mps", "is_xpu", "retains_grad"),
        *(
            "_backward_hooks",
            "_version",
            "_is_view",
            "_base",
            "is_inference",
            "is_neg",
            "is_conj",
            "is_xla",
            "is_mkldnn",
        ),
    )
)
"""Attributes and methods that say the same of a part as of the whole."""
_AS_ANOTHER = frozenset(("to", "type_as"))
"""Methods that take dtype and device of a tensor that they are given besides their own."""
_OTHER_VIEWS = frozenset(("data", "detach"))
_BY_ENTRY = frozenset(("mul_", "add_", "sub_", "div_", "clamp_", "clamp_min_", "clamp_max_", "zero_", "fill_", "neg_"))
"""Methods that write each entry from that entry alone, where no other tensor is given: a part as the whole."""


class WeightUses(TorchFunctionMode):
    """Around a run of a module.

    Args:
        module: the module.
        layers: names of its parts that are split as one, each with code of its own.

    Attributes:
        used: names of parameters of ``layers`` that other code has used.
    """

    def __init__(self, module: nn.Module, layers: Collection[str]) -> None:
        super().__init__()
        self.used: set[str] = set()
        self._alive: list[Tensor] = []  # so that no other tensor gets an identity of theirs
        self._held: dict[int, tuple[str, set[int]]] = {}
        for layer in layers:
            part = module.get_submodule(layer)
            own = {id(inner) for inner in part.modules()}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if lies_in(name, layer):
                    known = self._held.setdefault(id(parameter), (name, set()))
                    known[1].update(own)  # of a tied weight each of its layers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        said = func.__self__.__name__ if name in ("__get__", "__set__") else name
        result = func(*args, **(kwargs or {}))
        if said in _SAYS_NOTHING:
            return result
        read = args[:1] if said in _AS_ANOTHER else (args, kwargs or {})
        given = [value for value in tree_leaves(read) if isinstance(value, Tensor)]
        for value in given:
            known = self._held.get(id(value))
            if known is None or not _is_foreign(sys._getframe(1), known[1]):
                continue
            if said in _OTHER_VIEWS and name != "__set__":
                self._held[id(result)] = known
                self._alive.append(result)
            elif said not in _BY_ENTRY or len(given) > 1:
                self.used.add(known[0])
        return result


def _is_foreign(frame: FrameType | None, own: set[int]) -> bool:
    """Whether code runs that belongs to another module of the user's than the layer's own."""
    if comes_from(frame, PACKAGE):
        return False
    while frame is not None:
        runs = frame.f_locals.get("self")
        if isinstance(runs, nn.Module):
            return id(runs) not in own
        frame = frame.f_back
    return False
