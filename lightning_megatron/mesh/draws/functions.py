"""Torch's functions that draw, answered from counters.

| functions | numbers |
|---|---|
| rand, rand_like, uniform_ | :func:`~.counters.uniform` |
| randn, randn_like, normal, normal_, log_normal_ | :func:`~.counters.normal` |
| randint, randint_like, random_ | :func:`~.counters.integers` |
| dropout and its kin, bernoulli, bernoulli_, feature dropout, attention's | :func:`~.counters.below` |
| exponential_, cauchy_, geometric_, gumbel_softmax, multinomial | :func:`~.counters.exponential`, or uniform |
| randperm | the order of hashes; of samples: refused where a rank has some of them |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.mesh.draws import counters
from lightning_megatron.mesh.draws.mode import Answer, LayoutDraws

_SCALE = -1.7580993408473766  # of alpha dropout: what SELU gives for minus infinity


def abstract(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers, as where shapes are found out."""
    if tensor.device.type == "meta":
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _own(draws: LayoutDraws, func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call draws from a generator of the user's."""
    if kwargs.get("generator") is None:
        return False
    if not draws.rows.are_all:
        draws.refuse(_name(func), "`generator=` is the user's own, and draws for the samples that are here")
    return True


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


Numbers = Callable[[Tensor, int, torch.dtype], Tensor]


def _filled(draws: LayoutDraws, func: Any, out: Tensor, numbers: Numbers, values: Tensor | None = None) -> Tensor:
    """Write a draw into a tensor."""
    indices, key = draws.take(_name(func), out.shape, out.device, values)
    with torch.no_grad():
        out.copy_(numbers(indices, key, out.dtype))
    return out


def _factory(make: Any, numbers: Numbers) -> Answer:
    """rand, randn and those like a tensor: made empty, then filled."""

    def answer(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _own(draws, func, kwargs):
            return func(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        out = make(*args, **kwargs)
        if abstract(out):
            return func(*args, **kwargs)
        given = args[0] if args and isinstance(args[0], Tensor) else None
        return _filled(draws, func, out, numbers, given)

    return answer


def _randint(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _own(draws, func, kwargs):
        return func(*args, **kwargs)
    rest = {name: value for name, value in kwargs.items() if name not in ("generator", "low", "high", "size")}
    bounds = [*args, *(kwargs[name] for name in ("low", "high", "size") if name in kwargs)]
    like, bounds = (bounds[0], bounds[1:]) if isinstance(bounds[0], Tensor) else (None, bounds)
    size = () if like is not None else bounds.pop()
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
    out = torch.empty_like(like, **rest) if like is not None else torch.empty(size, **{"dtype": torch.int64, **rest})
    if abstract(out):
        return func(*args, **kwargs)
    return _filled(draws, func, out, lambda at, key, _: counters.integers(at, key, int(low), int(high)), like)


def _randperm(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _own(draws, func, kwargs):
        return func(*args, **kwargs)
    out = torch.empty(args[0] if args else kwargs["n"], **{"dtype": torch.int64, **_options(kwargs)})
    if abstract(out):
        return func(*args, **kwargs)
    indices, key = draws.take("randperm", out.shape, out.device)
    if not draws.rows.are_all and draws.lesson is None and draws.is_of_samples:
        draws.refuse("randperm", "it is an order of all samples, of which some are here")
    if draws.lesson is not None:
        indices = torch.arange(out.numel(), device=out.device)
    return out.copy_(counters.hashed_(indices, key).argsort())


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in ("generator", "n")}


def _in_place(numbers: Callable[..., Numbers], *names: str, **defaults: Any) -> Answer:
    """uniform_ and its kin: a tensor written with numbers, given parameters by place or by name."""

    def answer(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if abstract(args[0]) or _own(draws, func, kwargs):
            return func(*args, **kwargs)
        given = {**defaults, **dict(zip(names, args[1:], strict=False)), **kwargs}
        given.pop("generator", None)
        return _filled(draws, func, args[0], numbers(**given))

    return answer


def _uniform(**given: Any) -> Numbers:
    low, high = given["from"], given["to"]
    return lambda at, key, dtype: counters.uniform(at, key, dtype).mul_(high - low).add_(low)


def _normal(mean: Any = 0.0, std: Any = 1.0) -> Numbers:
    return lambda at, key, dtype: counters.normal(at, key, dtype).mul(std).add(mean)


def _log_normal(mean: float, std: float) -> Numbers:
    return lambda at, key, dtype: counters.normal(at, key, dtype).mul_(std).add_(mean).exp_()


def _exponential(lambd: float) -> Numbers:
    return lambda at, key, dtype: counters.exponential(at, key, dtype).div_(lambd)


def _cauchy(median: float, sigma: float) -> Numbers:
    def numbers(at: Tensor, key: int, dtype: torch.dtype) -> Tensor:
        return counters.uniform(at, key, dtype).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)

    return numbers


def _geometric(p: float) -> Numbers:
    return lambda at, key, _: counters.exponential(at, key, torch.float64).div_(-math.log1p(-p)).ceil_().clamp_(min=1)


def _random(**given: Any) -> Numbers:
    def numbers(at: Tensor, key: int, dtype: torch.dtype) -> Tensor:
        low, high = given.get("from"), given.get("to")
        if low is not None and high is None:
            low, high = 0, low
        digits = 1 << 53 if dtype == torch.float64 else 1 << 24
        top = digits if dtype.is_floating_point else 2 if dtype == torch.bool else torch.iinfo(dtype).max
        return counters.integers(at, key, low or 0, high if high is not None else top)

    return numbers


def _bernoulli_(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = args[0]
    if abstract(out) or _own(draws, func, kwargs):
        return func(*args, **kwargs)
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    indices, key = draws.take("bernoulli_", out.shape, out.device, p if isinstance(p, Tensor) else None)
    with torch.no_grad():
        return out.copy_(_below(indices, key, p))


def _bernoulli(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = args[0] if args else kwargs["input"]
    if abstract(given) or _own(draws, func, kwargs):
        return func(*args, **kwargs)
    p = args[1] if len(args) > 1 else kwargs.get("p", given)
    indices, key = draws.take("bernoulli", given.shape, given.device, given)
    return _below(indices, key, p.detach() if isinstance(p, Tensor) else p).to(given.dtype)


def _below(indices: Tensor, key: int, p: Any) -> Tensor:
    if not isinstance(p, Tensor):
        return counters.below(indices, key, float(p))
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    return counters.uniform(indices, key, wide) < p.to(indices.device)


def _normals(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.normal, whose mean, or deviation, or neither is a tensor."""
    mean = args[0] if args else kwargs["mean"]
    std = args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    size = args[2] if len(args) > 2 else kwargs.get("size")
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if "out" in kwargs or (tensors and abstract(tensors[0])) or _own(draws, func, kwargs):
        return func(*args, **kwargs)
    if size is not None:
        rest = {name: value for name, value in _options(kwargs).items() if name in ("dtype", "device", "requires_grad")}
        return _filled(draws, func, torch.empty(size, **rest), _normal(mean, std))
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    indices, key = draws.take("normal", shape, tensors[0].device, tensors[0])
    return counters.normal(indices, key, tensors[0].dtype) * std + mean


def _multinomial(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With replacement by the cumulated weights; without, by the race of exponentials."""
    names = ("input", "num_samples", "replacement")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    weights, count = given["input"], given["num_samples"]
    if "out" in kwargs or abstract(weights) or _own(draws, func, kwargs):
        return func(*args, **kwargs)
    if given.get("replacement", False):
        shape = (*weights.shape[:-1], count)
        indices, key = draws.take("multinomial", shape, weights.device)
        heaps = weights.detach().double().cumsum(-1)
        marks = counters.uniform(indices, key, torch.float64) * heaps[..., -1:]
        return torch.searchsorted(heaps, marks, right=True).clamp_(max=weights.shape[-1] - 1)
    indices, key = draws.take("multinomial", weights.shape, weights.device, weights)
    if draws.lesson is not None:
        indices = indices + torch.arange(weights.shape[-1], device=weights.device)
    race = counters.exponential(indices, key, torch.float64)
    return (weights.detach().double() / race).topk(count, -1).indices


def dropped(draws: LayoutDraws, name: str, given: Tensor, p: float, shape: Sequence[int] | None = None) -> Tensor:
    """Mask of the elements that a dropout sets to 0."""
    values = given if shape is None and type(given) is Tensor else None
    indices, key = draws.take(name, given.shape if shape is None else shape, given.device, values)
    return counters.below(indices, key, p)


def _dropout(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.dropout and torch.dropout: ``input, p, training, inplace``."""
    given, p, training, inplace = _of_dropout(func, args, kwargs)
    if not training or not 0.0 < p < 1.0 or abstract(given):
        return func(*args, **kwargs)
    if given.is_nested or given.is_sparse:
        draws.refuse("dropout", "its input is nested or sparse")
    mask = dropped(draws, "dropout", given, p)
    if type(given) is not Tensor and not isinstance(given, torch.nn.Parameter):  # a tensor of which a part is here
        factors = mask.logical_not_().to(given.dtype).mul_(1 / (1 - p))
        return given.mul_(factors) if inplace else given * factors
    if inplace:
        return given.masked_fill_(mask, 0).mul_(1 / (1 - p))
    return given.masked_fill(mask, 0).mul(1 / (1 - p))


def _of_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, float, bool, bool]:
    builtin = not hasattr(func, "__code__")  # torch's own takes `train`, and says by its name whether it writes
    names = ("input", "p", "train") if builtin else ("input", "p", "training", "inplace")
    defaults = {} if builtin else {"p": 0.5, "training": func is not F.alpha_dropout, "inplace": False}
    found = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    inplace = _name(func).endswith("_") if builtin else found["inplace"]
    return found["input"], float(found["p"]), found["train" if builtin else "training"], inplace


def _native_dropout(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, p, training = args
    if not training or not 0.0 < p < 1.0 or abstract(given):
        return func(*args, **kwargs)
    mask = dropped(draws, "native_dropout", given, p)
    return given.masked_fill(mask, 0).mul(1 / (1 - p)), mask.logical_not()


def _feature_dropout(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.dropout1d, 2d, 3d: whole channels."""
    given, p, training, inplace = _of_dropout(func, args, kwargs)
    if not training or not 0.0 < p < 1.0 or abstract(given):
        return func(*args, **kwargs)
    spatial = {"dropout1d": 1, "dropout2d": 2, "dropout3d": 3}.get(_name(func), given.ndim - 2)
    lead = given.shape[: given.ndim - spatial] if _name(func) in ("dropout1d", "dropout3d") else given.shape[:2]
    shape = (*lead, *[1] * (given.ndim - len(lead)))
    mask = dropped(draws, _name(func), given, p, shape)
    return given.masked_fill_(mask, 0).mul_(1 / (1 - p)) if inplace else given.masked_fill(mask, 0).mul(1 / (1 - p))


def _alpha_dropout(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.alpha_dropout (Klambauer et al., 2017) and, by channels, F.feature_alpha_dropout."""
    given, p, training, inplace = _of_dropout(func, args, kwargs)
    if not training or not 0.0 < p < 1.0 or abstract(given):
        return func(*args, **kwargs)
    shape = (*given.shape[:2], *[1] * (given.ndim - 2)) if "feature" in _name(func) else None
    mask = dropped(draws, _name(func), given, p, shape)
    scale = ((1 - p) * (1 + p * _SCALE**2)) ** -0.5
    out = given.masked_fill(mask, _SCALE) * scale - scale * p * _SCALE
    return given.copy_(out) if inplace else out


def _gumbel_softmax(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {
        "tau": 1.0,
        "hard": False,
        "dim": -1,
        **dict(zip(("logits", "tau", "hard", "eps", "dim"), args, strict=False)),
    }
    given |= kwargs
    logits, dim = given["logits"], given["dim"]
    if abstract(logits):
        return func(*args, **kwargs)
    indices, key = draws.take("gumbel_softmax", logits.shape, logits.device, logits if type(logits) is Tensor else None)
    noise = -counters.exponential(indices, key, logits.dtype).log()
    soft = ((logits + noise) / given["tau"]).softmax(dim)
    if not given["hard"]:
        return soft
    hard = torch.zeros_like(logits).scatter_(dim, soft.max(dim, keepdim=True)[1], 1.0)
    return hard - soft.detach() + soft


def _init(method: str) -> Answer:
    """nn.init.uniform_ and normal_, which are functions of their own where a mode is active."""

    def answer(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, *rest = (*args, *kwargs.values())
        with torch.no_grad():
            return ANSWERS[getattr(Tensor, method)](draws, getattr(Tensor, method), (tensor, *rest), {})

    return answer


def _refusing(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions whose numbers nothing here computes."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not any(abstract(tensor) for tensor in tensors) and draws.splits:
        draws.refuse(_name(func), "it has no counters")
    return func(*args, **kwargs)


def _where_training(place: int, name: str, draws_if: Callable[[Any], bool] = bool) -> Answer:
    """Functions that draw only with an argument of theirs."""

    def answer(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = kwargs.get(name, args[place] if len(args) > place else False)
        return _refusing(draws, func, args, kwargs) if draws_if(value) else func(*args, **kwargs)

    return answer


def _recurrent(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """lstm, gru, rnn_tanh, rnn_relu: ``..., num_layers, dropout, train, bidirectional`` and ``batch_first``."""
    at = next((place for place, value in enumerate(args) if isinstance(value, float)), -1)
    if at > 0 and args[at] and args[at + 1]:
        return _refusing(draws, func, args, kwargs)
    return func(*args, **kwargs)


T = Tensor
_uniform_ = _in_place(_uniform, "from", "to", **{"from": 0.0, "to": 1.0})
_normal_ = _in_place(_normal, "mean", "std")
ANSWERS: dict[Any, Answer] = {
    torch.rand: _factory(torch.empty, counters.uniform),
    torch.randn: _factory(torch.empty, counters.normal),
    torch.rand_like: _factory(torch.empty_like, counters.uniform),
    torch.randn_like: _factory(torch.empty_like, counters.normal),
    torch.randint: _randint,
    torch.randint_like: _randint,
    torch.randperm: _randperm,
    torch.normal: _normals,
    torch.bernoulli: _bernoulli,
    T.bernoulli: _bernoulli,
    T.bernoulli_: _bernoulli_,
    torch.multinomial: _multinomial,
    T.multinomial: _multinomial,
    T.uniform_: _uniform_,
    T.normal_: _normal_,
    T.log_normal_: _in_place(_log_normal, "mean", "std", mean=1.0, std=2.0),
    T.exponential_: _in_place(_exponential, "lambd", lambd=1.0),
    T.cauchy_: _in_place(_cauchy, "median", "sigma", median=0.0, sigma=1.0),
    T.geometric_: _in_place(_geometric, "p"),
    T.random_: _in_place(_random, "from", "to"),
    F.gumbel_softmax: _gumbel_softmax,
    torch.native_dropout: _native_dropout,
    torch.nn.init.uniform_: _init("uniform_"),
    torch.nn.init.normal_: _init("normal_"),
    F.rrelu: _where_training(3, "training"),
    torch.rrelu: _where_training(3, "training"),
    torch.rrelu_: _where_training(3, "training"),
}
ANSWERS |= dict.fromkeys((F.dropout, torch.dropout, torch.dropout_), _dropout)
ANSWERS |= dict.fromkeys(
    (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_), _feature_dropout
)
ANSWERS |= dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout), _alpha_dropout)
ANSWERS |= dict.fromkeys(
    (torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_), _alpha_dropout
)
ANSWERS |= dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent)
ANSWERS |= dict.fromkeys((torch.poisson, torch.binomial, torch._standard_gamma, torch._sample_dirichlet), _refusing)
ANSWERS |= dict.fromkeys((torch.nn.init.kaiming_uniform_, torch.svd_lowrank, torch.pca_lowrank), _refusing)
ANSWERS |= dict.fromkeys((F.fractional_max_pool2d, F.fractional_max_pool3d), _refusing)
ANSWERS |= dict.fromkeys((F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices), _refusing)


def draws_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is a dropout that is off."""
    if ANSWERS.get(func) not in (_dropout, _feature_dropout, _alpha_dropout):
        return False
    _, p, training, _ = _of_dropout(func, args, kwargs)
    return not training or p in (0.0, 1.0)
