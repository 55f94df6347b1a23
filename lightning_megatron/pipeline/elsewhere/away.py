"""Stand-ins that know what they are: numbers of another stage, and everything computed from them.

On a stage that lacks a part, user code goes on with zeros of the right shape. As long as these only meet the layers
that are skipped, nobody reads them. A mask, a detached norm or ``float(x.mean())`` made of them would be wrong without
a word, in the first step or in the thousandth. So each of them is an :class:`Away`, and so is what torch's functions
make of it::

    shape, dtype, device, zeros_like()     as they are
    arithmetic, in-place writes            a result that is away too
    .item(), float(), if                   an error that names the part
    an argument of a layer that is here, a log, a result of the step        likewise (:func:`refuse_away`)

A tensor becomes away, and ceases to be, by a change of its class: user code may hold it under any name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from lightning_megatron.pipeline.elsewhere.inner_gradients import gradients_away
from lightning_megatron.pipeline.elsewhere.undo import Contents

_OF_LAYER = (
    "What layers compute reaches later stages only through the arguments of the layers after them, or as a number that "
    "a layer keeps on itself (`self.penalty = x.square().mean()`) and the step reads: compute it in the layer, or use "
    "`pipeline_parallel_size=1`. (A penalty on weights of layers is the optimizer's `weight_decay`.)"
)
LARGEST = 1 << 16
"""Elements of the largest buffer that is kept at each run, to be put back where stand-ins were written into it."""

_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided", "new")
_TESTS = ("isnan", "isinf", "isfinite")
# Only the shape or the type of their tensors goes into what these return.
MAKERS = frozenset(
    getattr(owner, name) for owner in (torch, Tensor) for name in (*_LIKE, *_NEW) if hasattr(owner, name)
)
BLIND = MAKERS | {getattr(owner, name) for owner in (torch, Tensor) for name in _TESTS if hasattr(owner, name)}
# Only the first argument's numbers go into what these return.
FIRST_ONLY = frozenset(
    getattr(Tensor, name) for name in ("to", "type_as", "expand_as", "view_as", "reshape_as", "type")
)
_READS = frozenset(
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__"),
        *("__array__", "__contains__", "__dlpack__"),
    )
) | {torch.equal, torch.allclose, Tensor.equal, Tensor.allclose, torch.is_nonzero}
# These write running means and variances, their second and third arguments, without saying so by their names.
_NORMS = frozenset({F.batch_norm, F.instance_norm})
# These take numbers out of tensors without asking the tensors' class.
TAKES_NUMBERS = frozenset({torch.tensor, torch.full, torch.full_like, torch.arange, torch.linspace, torch.addcmul})
_WRITTEN = "add sub mul truediv floordiv pow mod matmul and or xor lshift rshift"
_IN_PLACE = frozenset(("__setitem__", *(f"__i{name}__" for name in _WRITTEN.split())))


@dataclass(frozen=True)
class StageSource:
    """The part of another stage that a stand-in's values would come from.

    Attributes:
        name: dotted name.
        is_layer: whether it is a layer of the trunk.
        way_out: what to do about it, where that is not what its being a layer or another part tells.
        line: of the user's code that first computes with the values; "" where no run was traced.
    """

    name: str
    is_layer: bool = False
    way_out: str = ""
    line: str = field(default="", compare=False)

    def remedy(self) -> str:
        """Advice about a value that depends on it."""
        kept = f'`MegatronStrategy(pipeline_placement={{"{self.name}": "all"}})` (its gradients are summed)'
        of_part = f"Keep that part on every stage with {kept}, or use `pipeline_parallel_size=1`."
        advice = self.way_out or (_OF_LAYER if self.is_layer else of_part)
        return f"{advice} The step first computes with it in {self.line}." if self.line else advice


class STATE:
    """State of the running step; one step at a time in a process.

    Attributes:
        paused: above 0 while stand-ins are not told from other tensors; see :func:`unmarked`.
        written: ordinary tensors that stand-ins were written into in this run, as they were before; without their
            numbers, if they have a gradient.
        spared: ids of the running statistics of norms of stand-ins in this run.
        undone: names of buffers -> what a run of this step wrote of real values, where it was undone for another run
            on this rank to write.
        in_layers: whether the step that runs has come to its layers: what it writes from then on, only the stages
            write that have come as far.
        weights: finds the parameter of the module that shares memory with a tensor; its name, or "".
    """

    paused = 0
    written: list[Contents] = []  # noqa: RUF012
    spared: set[int] = set()  # noqa: RUF012
    undone: dict[str, Tensor] = {}  # noqa: RUF012
    in_layers = False
    weights: Callable[[Tensor], str] = staticmethod(lambda tensor: "")


class Away(Tensor):
    """A stand-in for a tensor that only another stage has computed.

    Attributes:
        source: what they depend on.
        form: shape and dtype, where they were asked for and have not been written over since.
    """

    source: StageSource
    form: tuple[torch.Size, torch.dtype] | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and not STATE.paused and _KINDS.get(func) is _USUAL:  # spelled out: this is in every micro-batch
            for argument in args:
                if argument.__class__ is Away:
                    with torch._C.DisableTorchFunctionSubclass():
                        output = func(*args)
                    if output.__class__ is Tensor:
                        output.__class__ = Away
                        output.source, output.form = argument.source, None  # type: ignore[attr-defined]
                        return output
                    return mark(output, argument.source)
        kwargs = kwargs or {}
        if func not in _KINDS:
            _KINDS[func] = _kind_of(func)
        if STATE.paused:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        source = source_of(args[:1] if func in FIRST_ONLY else (args, kwargs))
        if source is not None and func in _READS:
            refuse_read(source, func)
        name = getattr(func, "__name__", "")
        if name in _WORDS:
            return f"<tensor of `{source.name if source else ''}` on another pipeline stage>"
        if func is torch.autograd.grad:
            found, source = gradients_away(args, kwargs, source_of)
            return tuple(mark(found, source))
        if func in _NORMS:
            args, kwargs = _with_copies_of_statistics(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if source is not None and func not in BLIND:
                _note_written(name, args, kwargs)
            output = func(*args, **kwargs)
        return output if source is None else spread(source, func, name, output, args, kwargs)


_WORDS = ("__repr__", "__format__")
_USUAL = object()
_KINDS: dict[Any, Any] = {}


def _kind_of(func: Any) -> Any:
    """``_USUAL`` for a function whose result depends on the numbers of all its arguments, and that only returns it."""
    name = getattr(func, "__name__", "")
    special = func in (*BLIND, *FIRST_ONLY, *_READS, *_NORMS) or name in (*_WORDS, "__get__", "__set__")
    return None if special or writes_in_place(name) else _USUAL


def _with_copies_of_statistics(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of a norm of stand-ins, which must not go into its running statistics."""
    names = ("running_mean", "running_var")
    statistics = [*args[1:3], *(kwargs.get(name) for name in names)]
    STATE.spared.update(id(value) for value in statistics if isinstance(value, Tensor))
    args = (*args[:1], *(value.clone() if isinstance(value, Tensor) else value for value in args[1:3]), *args[3:])
    return args, {k: v.clone() if k in names and isinstance(v, Tensor) else v for k, v in kwargs.items()}


def refuse_read(source: StageSource, func: Any) -> None:
    """Complain that the step makes a Python number of a stand-in.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"the step reads, in Python, a number that depends on `{source.name}`, which another pipeline stage owns "
        f"(`{getattr(func, '__name__', func)}`). {source.remedy()}"
    )


def spread(source: StageSource, func: Any, name: str, output: Any, args: Any, kwargs: Any) -> Any:
    """Mark the results of a torch function that was given a stand-in, and the tensors that it wrote them into.

    Args:
        source: the stand-in's.
        func: the function.
        name: its name.
        output: what it returned.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        ``output``.
    """
    if func in BLIND:
        return output
    for tensor in _written_by(name, args, kwargs):
        if type(tensor) is Away:
            tensor.form = None
        elif type(tensor) is Tensor:
            if not STATE.written or STATE.written[-1].value is not tensor:
                STATE.written.append(Contents(tensor, None))
            mark(tensor, source)
    return mark(output, source)


def _written_by(name: str, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that a function called ``name`` writes into."""
    return tensors_in([args[0] if args and writes_in_place(name) else None, kwargs.get("out")])


def _note_written(name: str, args: Any, kwargs: Any) -> None:
    """Keep the numbers of ordinary tensors that a stand-in is about to be written into."""
    for tensor in _written_by(name, args, kwargs):
        if type(tensor) in (Tensor, nn.Parameter) and (weight := STATE.weights(tensor)):
            refuse_away((args, kwargs), f"what the step writes into the weight `{weight}`")
        if type(tensor) is Tensor and not tensor.requires_grad and not tensor.is_inference():
            STATE.written.append(Contents.of_tensor(tensor))


def refuse_late_write(part: str) -> None:
    """Complain about a write into a tensor of another stage that the owner, which has stopped earlier, does not do.

    Raises:
        RuntimeError: if the step has come to its layers.
    """
    if STATE.in_layers:
        raise RuntimeError(
            f"the step writes a weight or buffer of `{part}` after layers, where the pipeline stage that owns it has "
            "left the step. Write it before the layers are called, or in a hook (`on_train_batch_end`), or use "
            "`pipeline_parallel_size=1`."
        )


def writes_in_place(name: str) -> bool:
    """Whether an operation of this name writes into its first argument."""
    return name in _IN_PLACE or (name[-1:] == "_" and name[-2:] != "__")


def mark(value: Any, source: StageSource) -> Any:
    """Say that the tensors in ``value`` are away; returns ``value``."""
    if STATE.paused:
        return value
    for tensor in (value,) if type(value) is Tensor else tensors_in(value):
        if type(tensor) is Tensor:
            tensor.__class__ = Away  # type: ignore[assignment]
            tensor.source, tensor.form = source, None  # type: ignore[attr-defined]
    return value


def make_real(tensor: Tensor) -> Tensor:
    """Say that ``tensor`` has its numbers now; returns it."""
    if type(tensor) is Away:
        tensor.__class__ = Tensor  # type: ignore[assignment]
    return tensor


def plain(tensor: Tensor) -> Tensor:
    """An ordinary tensor with the same zeros."""
    return tensor.as_subclass(Tensor) if type(tensor) is Away else tensor


@contextmanager
def unmarked() -> Iterator[None]:
    """Compute with stand-ins as with any tensors, while only shapes are wanted."""
    STATE.paused += 1
    try:
        yield
    finally:
        STATE.paused -= 1


def forget_written() -> None:
    """Let what stand-ins were written into be ordinary tensors again at the end of a run, with their numbers before."""
    while STATE.written:
        before = STATE.written.pop()
        if type(before.value) is Away:
            make_real(before.value)
            before.rewind()


def source_of(value: Any) -> StageSource | None:
    """Source on another stage that the numbers in ``value`` depend on; ``None`` if they are those of one process."""
    if isinstance(value, Tensor):
        return value.source if type(value) is Away else value.__dict__.get("absent_source")
    items: Iterable[Any] = value if isinstance(value, (list, tuple)) else ()
    if not items and value.__class__ not in NUMBERS and isinstance(value, Mapping):  # which costs more to ask
        items = value.values()
    return next((found for item in items if (found := source_of(item)) is not None), None)


def refuse_away(value: Any, what: str) -> None:
    """Raise an error if ``value`` depends on values that only another stage has.

    Args:
        value: a tensor or a nest of them.
        what: what it is, as the subject of the message.

    Raises:
        RuntimeError: naming the part and the way out.
    """
    source = None if type(value) is Tensor else source_of(value)
    if source is not None:
        raise RuntimeError(f"{what} depends on `{source.name}`, which another pipeline stage owns. {source.remedy()}")


def refuse_away_metrics(module: nn.Module) -> None:
    """Complain about torchmetrics objects in ``module`` that were updated with stand-ins.

    Raises:
        RuntimeError: naming the metric.
    """
    for name, metric in module.named_modules():
        if isinstance(metric, Metric):
            refuse_away([getattr(metric, state) for state in metric._defaults], f"the metric `{name}`")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a nest of lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


NUMBERS = (bool, int, float, complex)
_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_ASKED = (
    *("float", "int", "index", "bool", "complex", "hash", "format", "len", "getitem", "iter", "round", "trunc"),
    *("floor", "ceil", "abs", "neg", "pos", "invert", "eq", "ne", "lt", "le", "gt", "ge"),
    *(f"{side}{name}" for name in _BINARY for side in ("", "r", "i")),
)


class AwayNumber:
    """Stands for a number that a layer of another stage computes from its data and returns besides its tensors.

    ``return x, float(scores.mean())`` gives a number that no stage but the layer's own knows: what a run on fake or
    empty input would put there is another one. This says it is of the number's type, may be handed around and left
    unused, and raises when it is asked for.

    Args:
        kind: type of the number.
        source: the layer that knows it.
    """

    def __init__(self, kind: type, source: StageSource) -> None:
        self._kind, self._source = kind, source

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for `isinstance`
        return self._kind

    def __repr__(self) -> str:
        return f"<number of `{self._source.name}` on another pipeline stage>"

    def __deepcopy__(self, memo: Any) -> AwayNumber:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"`{self._source.name}` returns a number that it reads off its data, and the step uses this number on a "
            "pipeline stage that does not compute that part. Make it a tensor that goes through the arguments of all "
            "layers, keep it on the layer as an attribute, or use `pipeline_parallel_size=1`."
        )


def _refusing() -> Callable[..., NoReturn]:
    def method(self: AwayNumber, *args: Any) -> NoReturn:
        AwayNumber._refuse(self)

    return method


for _name in _ASKED:
    setattr(AwayNumber, f"__{_name}__", _refusing())
