"""Weights and buffers of other stages, as code outside of a step sees them.

Hooks reach into layers by name: ``self.layers[1].out.weight.clamp_(-1, 1)``. On a stage that does not own the layer
there is no number to read and nothing to write, only zeros of the right shape for the steps to run over. So outside of
a step such a tensor answers what it knows and no more::

    shape, dtype, device, len()          as they are
    in-place writes, .data = ...         nothing: the owning stage does the same to the real one
    nn.init.*, normal_, ...              likewise, but the random numbers are drawn, as later layers draw after them
    arithmetic                           a result that is absent too
    .item(), float(), if, print          an error that names the part, instead of a zero
    writing it into a tensor that is here                 likewise

Its shape is that of one process, as hooks see split weights whole, and so do steps: of a split weight, only the layer
that has it gets zeros of the shape of a rank's part. What a step computes from it is marked (:mod:`.away`); while a
backward recomputes layers, it is plain zeros. A logged value that is absent here is taken from the stage that has it
(``strategy.logs.hook_logs``).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from, module_of
from lightning_megatron.mesh.pickling import refuse_pickling
from lightning_megatron.pipeline.elsewhere.away import (
    FIRST_ONLY,
    MAKERS,
    STATE,
    StageSource,
    mark,
    refuse_late_write,
    writes_in_place,
)
from lightning_megatron.pipeline.elsewhere.presence import Phase

KNOWN = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_inference", "is_contiguous", "is_pinned", "is_shared"),
        *("__len__", "__hash__", "is_same_size", "is_conj", "is_neg", "is_set_to", "data_ptr", "result_type"),
        "untyped_storage",
    )
)
TENSOR_ATTRIBUTES = frozenset(("data", "grad", "T", "mT", "H", "mH", "real", "imag"))
_DRAWS = frozenset(
    ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_")
)
_TURNS = frozenset(("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"))
_OF_GRADIENT = tuple(getattr(vars(torch._C.TensorBase)["grad"], name) for name in ("__get__", "__set__"))
_GET_DATA = vars(torch._C.TensorBase)["data"].__get__
_GET_FLAG = vars(torch._C.TensorBase)["requires_grad"].__get__
_FLAGS = frozenset((_GET_FLAG, vars(torch._C.TensorBase)["requires_grad"].__set__, Tensor.requires_grad_))
_ALIASES = ("__get__", "detach")
_HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))


class TellsPhase(Protocol):
    """Says what of the user's code runs; see :meth:`.presence.Viewer.phase`."""

    def __call__(self, *, lists: bool = False) -> Phase:
        """For listings, and for gradients, a step after its own backward counts as a hook."""


class Absent(Tensor):
    """Zeros in the place of a tensor that another stage owns.

    Attributes:
        part: dotted name of what it belongs to.
        plain: the zeros.
        whole: the same as hooks see them: of the shape that it has in one process.
        away: the same, for layers in steps.
        is_part: whether those have the shape of a rank's part, and not that which it has in one process.
        away_whole: the same as ``away``, for code outside of the layer.
        absent_source: what they lack.
        phase: tells what runs now.
        twin: the parameter as it is in one process; ``None`` for a buffer, or a result.
    """

    part: str
    plain: Tensor
    whole: Tensor
    away: Tensor
    is_part: bool
    away_whole: Tensor
    absent_source: StageSource
    phase: TellsPhase
    twin: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FLAGS and args[0].__class__ is Absent and args[0].twin is not None:
            return args[0]._flag(func, *args[1:], **(kwargs or {}))
        direct = nested = None
        for argument in args:  # the usual case in a step first: ``x + self.positions``
            if argument.__class__ is Absent:
                direct = argument if direct is None else direct
            elif argument.__class__ is list or argument.__class__ is tuple:
                nested = argument
        if direct is not None and nested is None and not kwargs and direct._is_in_step():
            if args[0].__class__ is Absent:  # the owning stage runs the same line
                if writes_in_place(func.__name__):
                    refuse_late_write(args[0].part)
                    return args[0]
                if func.__name__ in _ALIASES and func in (_GET_DATA, Tensor.detach):
                    return args[0]._alias()
                if func in _OF_GRADIENT and args[0].phase(lists=True) is not Phase.STEP:
                    return args[0]._gradient()
            return func(*[argument.in_steps() if argument.__class__ is Absent else argument for argument in args])
        kwargs = kwargs or {}
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Absent))
        if first._is_in_step():
            if args and writes_in_place(func.__name__) and any(leaf.__class__ is Absent for leaf in _listed(args[0])):
                return _write_here(func, args, kwargs)
            return func(*_away(args), **_away(kwargs))
        if first._is_zeros():
            return func(*_plain(args), **_plain(kwargs))
        name = getattr(func, "__name__", "")
        attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
        if name in KNOWN or (name == "__get__" and attribute not in TENSOR_ATTRIBUTES):
            return func(*_whole(args), **_whole(kwargs))
        if name in ("__repr__", "__str__"):
            return f"<tensor of `{first.part}` on another pipeline stage>"
        if name == "__deepcopy__":
            return first
        if name == "__reduce_ex__":
            refuse_pickling(f"`{first.part}`")
        if name == "__set__" or writes_in_place(name):
            target = args[0] if args else next(iter(kwargs.values()))
            if not all(isinstance(leaf, Absent) for leaf in pytree.tree_leaves(target)):
                first.refuse(f"written into another tensor by `{name}`")
            if name in _TURNS:
                func(*_whole(args), **_whole(kwargs))
            elif name in _DRAWS or module_of(func) == nn.init.__name__:
                _draw(func, args, kwargs)
            return target
        if name in _HOOKS:
            return RemovableHandle(OrderedDict())  # torch refers to it weakly, as no plain dict allows
        return first._result(func, attribute or name, args, kwargs)

    def in_steps(self) -> Tensor:
        """The tensor that the code which runs computes with in a step."""
        return self.away_whole if self.is_part and _is_outside(sys._getframe(1), self) else self.away

    def as_zeros(self) -> Tensor:
        """The same, unmarked."""
        return self.whole if self.is_part and _is_outside(sys._getframe(1), self) else self.plain

    def is_away(self) -> bool:
        """Whether code runs now that may not see the zeros, such as a hook's."""
        return not (self._is_in_step() or self._is_zeros())

    def _flag(self, func: Any, requires_grad: bool = True, *_: Any) -> Any:
        """Whether it is trained, asked or said."""
        twin: Any = self.twin
        if func == _GET_FLAG:
            return twin.requires_grad
        if self._is_in_step():
            refuse_late_write(self.part)
        twin.requires_grad_(requires_grad)
        return self

    def _gradient(self) -> Absent:
        """Its gradient after a backward of the step's own: as in hooks, of the shape that its weight has in steps."""
        return make_absent(self.as_zeros().detach(), self.part, _in_hook, self.absent_source)

    def _alias(self) -> Absent:
        """Result of ``.data`` and ``detach()``: the same memory, so that to write there is to write here."""
        return make_absent(self.plain.detach(), self.part, self.phase, self.absent_source, self.whole.shape)

    def _is_in_step(self) -> bool:
        return self.phase() is Phase.STEP and not STATE.paused

    def _is_zeros(self) -> bool:
        return self.phase() is Phase.STEP or in_backward()

    def _result(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The result of an operation: absent tensors, never a number."""
        if name == "grad":
            return self
        if isinstance(kwargs.get("out"), Tensor):
            self.refuse(f"written by `{name}`")
        with torch.no_grad():
            output = func(*_whole(args), **_whole(kwargs))
        if name == "new_tensor":  # of the caller's numbers
            return output
        leaves = pytree.tree_leaves(output)
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            self.refuse(f"read by `{name}`")
        return pytree.tree_map(lambda tensor: make_absent(tensor, self.part, self.phase, self.absent_source), output)

    def refuse(self, what: str) -> Any:
        """Raise the error that says why there is no number.

        Raises:
            RuntimeError: always.
        """
        part = self.part
        raise RuntimeError(
            f"a value that depends on `{part}` was {what} outside of a step, but `{part}` is on another pipeline "
            "stage. Go over `self.named_parameters()`, which gives what this rank holds; get the whole model's "
            "weights by `strategy.full_state_dict()`; or use `pipeline_parallel_size=1`."
        )


def _listed(target: Any) -> list[Any] | tuple[Any, ...]:
    return target if isinstance(target, (list, tuple)) else (target,)


def _write_here(func: Any, args: Any, kwargs: Any) -> Any:
    """Write into a tensor in a step, or into a list of them (``torch._foreach_add_``): into those that are here, as the
    stages that have the others run the same line.
    """
    targets = _listed(args[0])
    refuse_late_write(next(target.part for target in targets if target.__class__ is Absent))
    here = [place for place, target in enumerate(targets) if target.__class__ is not Absent]

    def of_here(value: Any) -> Any:
        return [value[place] for place in here] if isinstance(value, (list, tuple)) else value

    if here:
        func(*map(of_here, args), **{name: of_here(value) for name, value in kwargs.items()})
    return args[0]


class Unread(Tensor):
    """A parameter of another stage in a listing of all: it may be counted, or give other tensors its dtype, device or
    shape; anything else is refused.

    Attributes:
        module: what was listed, for the message.
        leads: whether it is the first of all, which code asks for a dtype: ``next(self.parameters()).data.new(3)``.
    """

    module: str
    leads: bool = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        of = func.__self__.__name__ if name == "__get__" else ""
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        listed, same = first.module, first.leads and (of == "data" or name == "detach")
        like = func in MAKERS or (func in FIRST_ONLY and not isinstance(args[0], cls))
        if name in KNOWN or like or same or (of and of not in TENSOR_ATTRIBUTES):
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if same:
                found = found.as_subclass(cls)
                found.module, found.leads = listed, True
            return found
        if name.endswith("_") and not name.startswith("__") and args and not isinstance(args[0], cls):
            raise RuntimeError(
                f"the step writes what it makes of parameters of `{listed}` into other tensors (`{name}`), as where it "
                "updates a target network, and under a pipeline each stage has only its own. Do it in a hook, such as "
                "`on_train_batch_start` or `on_train_batch_end`, where each stage updates its part of a copy and the "
                "parts are exchanged; or use `pipeline_parallel_size=1`."
            )
        raise RuntimeError(
            f"the step read all parameters of `{listed}`, but under a pipeline each stage has only its own, so what it "
            "makes of all (a sum, gradients by them, weights of an inner loop) would be wrong. Use the optimizer's "
            "`weight_decay` instead of a penalty in the loss; set flags (`requires_grad_`), and update a copy that "
            "follows the weights, in `on_train_batch_start`; and use `pipeline_parallel_size=1` for anything else."
        )


def without_absent(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Part of a state, listed of all stages by a hook, that this stage has."""
    here = {n: value for n, value in state_dict.items() if not (isinstance(value, Absent) and value.is_away())}
    if len(here) == len(state_dict):
        return state_dict
    found = OrderedDict(here)
    found._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]
    found.of_one_stage = True  # type: ignore[attr-defined]
    return found


def make_absent(
    zeros: Tensor,
    part: str,
    phase: TellsPhase,
    source: StageSource | None = None,
    shape: tuple[int, ...] | torch.Size | None = None,
    twin: Tensor | None = None,
) -> Absent:
    """``zeros`` as a tensor that is absent outside of steps; shares its memory and its place in the graph.

    Args:
        zeros: what steps see.
        part: dotted name of what it belongs to.
        phase: tells what runs now.
        source: the part, for messages about steps.
        shape: in one process, if that is another.
        twin: the parameter that it stands for.
    """
    absent = zeros.as_subclass(Absent)
    absent.twin = twin
    absent.part, absent.plain, absent.whole, absent.phase = part, zeros, zeros, phase
    absent.absent_source = source or StageSource(part)
    absent.away = absent.away_whole = mark(zeros.as_subclass(Tensor), absent.absent_source)
    absent.is_part = shape is not None and zeros.shape != shape
    if shape is not None and absent.is_part:
        absent.whole = torch.zeros((), dtype=zeros.dtype, device=zeros.device).expand(shape)
        whole = absent.whole.detach().requires_grad_(zeros.requires_grad)
        absent.away_whole = mark(whole, absent.absent_source)
    return absent


def _is_outside(frame: FrameType | None, tensor: Absent) -> bool:
    """Whether code runs that is not that of the layer that has a split weight, which computes with a rank's part of it:
    this package's, or the forward of a layer whose output is split as it is, such as a table of biases by head.

    Modes of this package may stand between a function and the code that calls it.
    """
    outermost = ""
    while frame is not None and not _is_forward_of(frame, tensor):
        if not comes_from(frame, "torch", PACKAGE):
            return outermost in ("", "__torch_function__")
        if comes_from(frame, PACKAGE) and frame.f_code.co_filename != __file__:
            outermost = frame.f_code.co_name
        frame = frame.f_back
    return False


def _is_forward_of(frame: FrameType, tensor: Absent) -> bool:
    """Whether a frame runs the forward of the layer that has a tensor."""
    if frame.f_code.co_name != "forward" or not frame.f_code.co_argcount:
        return False
    layer = frame.f_locals.get(frame.f_code.co_varnames[0])
    return isinstance(layer, nn.Module) and any(each is tensor for each in vars(layer).values())


def _in_hook(*, lists: bool = False) -> Phase:
    return Phase.HOOK


def _draw(func: Any, args: Any, kwargs: Any) -> None:
    """Draw the random numbers that an in-place function draws where the tensor is, so that the state of the generator
    afterwards is the same.
    """
    first = next(iter((*args, *kwargs.values())))
    scratch = torch.empty(first.whole.shape, dtype=first.whole.dtype, device=first.whole.device)
    if args:
        func(scratch, *_whole(args[1:]), **_whole(kwargs))
    else:
        func(**{**_whole(kwargs), next(iter(kwargs)): scratch})
    if 0 not in first.whole.stride():  # made in a hook, with memory of its own, and may be computed with
        first.whole.copy_(scratch)


def _away(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.in_steps() if isinstance(leaf, Absent) else leaf, value)


def _plain(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.as_zeros() if isinstance(leaf, Absent) else leaf, value)


def _whole(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.whole if isinstance(leaf, Absent) else leaf, value)
