"""Token-wise modules in layers, such as an MLP, run in pieces of the tokens, with modules that know nothing of it.

The activations inside of an MLP are several times its input, and all of them are whole at one moment even where they
are recomputed. In pieces of the tokens (ALST, arXiv 2506.13996) they never are: the forward keeps the input only, and
the backward runs one piece after another again, and adds up the gradients of the weights::

    forward     piece 0   piece 1   piece 2      nothing kept but x
    backward    piece 0 again, its gradients     piece 1 ...     piece 2 ...

A module is run so if it treats every token alike. Its first call finds out, on some of the tokens: no function in it
may read other tokens than those it computes, and outputs and gradients of pieces must be those of the whole.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.autograd import first_order, graph_behind, saved_values
from lightning_megatron.mesh.parts.names import lies_in
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from
from lightning_megatron.pipeline.elsewhere.abstract import is_fake, is_ordinary
from lightning_megatron.pipeline.forwards.seen_state import SeenState, StatefulForward
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack, Wrapper
from lightning_megatron.strategy.activations.generator_states import differs, random_state, set_random_state
from lightning_megatron.strategy.activations.token_rows import LayerScope, NotTokenwise, ReadsOtherTokens, rows_of_input

MlpChunks = int | Mapping[str, int] | None
_TRIED_TOKENS = 48
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}


def check_chunks(chunks: Any) -> None:
    """Refuse an invalid value of ``mlp_chunks``.

    Raises:
        ValueError: lists the choices.
    """
    counts = list(chunks.values()) if isinstance(chunks, Mapping) else [chunks]
    named = not isinstance(chunks, Mapping) or (chunks and all(isinstance(name, str) for name in chunks))
    if chunks is not None and not (named and all(type(count) is int and count >= 1 for count in counts)):
        raise ValueError(
            f"`mlp_chunks={chunks!r}` must be None, a number of pieces, or {{pattern: number}} by names of modules "
            "such as {'*.mlp': 8}."
        )


class MlpPieces:
    """The modules of one module that run in pieces; from :meth:`open` to :meth:`close`.

    Args:
        module: the user's module.
        layers: names of its repeated layers on this rank.
        chunks: pieces of every module that is found, or of those whose names match a pattern.

    Raises:
        ValueError: a pattern matches no module inside of the layers.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str], chunks: int | Mapping[str, int]) -> None:
        self.chunks, self.done, self.others, self.inside = chunks, set[str](), dict[str, str](), False
        self._module = module
        inside = [
            (name, part)
            for name, part in module.named_modules()
            if any(lies_in(name, layer) and name != layer for layer in layers)
        ]
        self._calls = [_PiecesCall(self, part, name, count) for name, part, count in self._chosen(inside)]

    def _chosen(self, inside: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module, int]]:
        if isinstance(self.chunks, int):
            return [(name, part, self.chunks) for name, part in inside if _matrices(part) > 1]
        found = []
        for pattern, count in self.chunks.items():
            matching = [(name, part, count) for name, part in inside if fnmatch.fnmatchcase(name, pattern)]
            if inside and not matching:
                names = ", ".join(name for name, _ in inside[:6])
                raise ValueError(f"`mlp_chunks` names {pattern!r}, which matches no module in layers: {names}, ...")
            found += matching
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> MlpPieces:
        return self  # the modules of a copy, which a step is tried on, run as these do

    def __reduce__(self) -> Any:
        return type(None), ()

    def open(self) -> None:
        """Let the modules run in pieces."""
        for call in self._calls:
            call.install()

    def close(self) -> None:
        """Leave them as they were."""
        for call in self._calls:
            ForwardStack.of(call.module).remove(call.slot)

    def run(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Run a step of the user's.

        Raises:
            RuntimeError: no module in the layers runs in pieces.
        """
        output = step(batch)
        if torch.is_grad_enabled() and not self.done and (self.others or not self._calls):
            told = "; ".join(f"`{name}`: {why}" for name, why in list(self.others.items())[:3])
            raise RuntimeError(
                f"`mlp_chunks={self.chunks!r}` found no module inside of the layers of `{type(self._module).__name__}` "
                "that has two matrices or more and treats every token alike" + (f" ({told})" if told else "") + ". "
                "Put the MLP of a layer into a module of its own, or leave `mlp_chunks` out."
            )
        return output


class _PiecesCall(Wrapper):
    """Runs in place of a module's ``forward``."""

    slot = ForwardSlot.PIECES

    def __init__(self, owner: MlpPieces, module: nn.Module, name: str, count: int) -> None:
        super().__init__(module)
        self._owner, self._name, self._count = owner, name, count
        self._tried: dict[Any, bool] = {}
        self._state = StatefulForward(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner
        if not torch.is_grad_enabled() or owner.inside or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        x = args[0] if len(args) == 1 and not kwargs else None
        tokens = x.local() if isinstance(x, WholeTensor) else x
        if not is_ordinary(tokens) or tokens.ndim != 3 or not tokens.is_floating_point():
            self._leave("it is given other than one tensor [batch, tokens, features]")
            return self.forward(*args, **kwargs)
        dim = x.along if isinstance(x, WholeTensor) else 1
        key = (dim, tokens.dtype, self.module.training)
        if key not in self._tried:
            self._tried[key] = self._try(tokens, dim)
        if not self._tried[key]:
            return self.forward(x)
        owner.done.add(self._name)
        run = _Run(self, dim, self._count, tokens.device)
        found = _Pieces.apply(tokens, run, *run.weights)
        return x.like(found) if isinstance(x, WholeTensor) else found

    def run(self, rows: Tensor) -> Tensor:
        """The module's forward, in which nothing runs in pieces."""
        before, self._owner.inside = self._owner.inside, True
        try:
            found: Tensor = self.forward(rows)
            return found
        finally:
            self._owner.inside = before

    def _leave(self, why: str) -> None:
        """Note why the module runs whole; refuse it if it was asked for by name."""
        chunks = self._owner.chunks
        if isinstance(chunks, Mapping):
            raise RuntimeError(
                f"`mlp_chunks={chunks!r}` runs `{self._name}` in pieces of the tokens, but {why}. Name modules that "
                "treat every token alike, or leave `mlp_chunks` out."
            )
        self._owner.others[self._name] = why

    def _try(self, x: Tensor, dim: int) -> bool:
        tried = x.detach().narrow(dim, 0, min(x.shape[dim], _TRIED_TOKENS)).clone().requires_grad_()
        state = random_state(x.device)
        with torch.enable_grad(), saved_tensors_hooks(saved_values, _unchanged):  # those around are not told of a trial
            why = self._why_not(tried, dim, state)
        set_random_state(state, x.device)
        if why is not None:
            self._leave(why)
        return why is None

    def _why_not(self, x: Tensor, dim: int, state: Any) -> str | None:
        """Why the module does not treat every token alike; ``None`` if it does."""
        tokens, run, seen = x.shape[dim], _Run(self, dim, 3, x.device), SeenState()
        if any(_hooked(part) for part in self.module.modules() if part is not self.module):
            return "there are hooks on modules in it, which would be given pieces"
        try:
            given = x * 1.0
            found = self._state.run(seen, self.run, given)
            if differs(state, random_state(x.device)):
                return "it draws random numbers, which would be others in pieces"
            if seen.changes or seen.buffers:
                return "it writes buffers or attributes, which each piece would"
            if given._version:
                return "it writes into what it is given"
            if not isinstance(found, Tensor) or found.ndim != 3 or found.shape[dim] != tokens:
                return "it does not return one tensor with a row for each token"
            known = {id(x), *(id(weight) for weight in run.weights)}
            leaves = [node.variable for node in graph_behind([found.grad_fn]) if hasattr(node, "variable")]
            if any(id(leaf) not in known for leaf in leaves):
                return "it uses tensors with a gradient that are not its own"
            with torch.no_grad():
                scope = LayerScope(self._name, "mlp_chunks")
                self.run(rows_of_input(x.detach(), dim, tokens, ((0, tokens),), scope))
            if is_fake(found) or _alike(x, found, run):  # a rehearsal has no numbers
                return None
            return "its numbers for some tokens are others without the rest"
        except ReadsOtherTokens:
            return "an operator in it reads other tokens, or may do so"
        except NotTokenwise as error:
            return str(error).partition("but there ")[2].partition(". Use ")[0]
        except RuntimeError as error:
            return f"it cannot be run on some tokens: {str(error).splitlines()[0]}"


class _Run:
    """How a module runs in pieces.

    Args:
        call: of the module.
        dim: of the tokens.
        count: of the pieces.
        device: of the tokens.
    """

    def __init__(self, call: _PiecesCall, dim: int, count: int, device: torch.device) -> None:
        self.dim, self._count, self._call, kind = dim, count, call, device.type
        self.weights = [weight for weight in call.module.parameters() if weight.requires_grad]
        self.versions, self._default = [weight._version for weight in self.weights], torch.get_default_dtype()
        self._casting = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """Nearly equal pieces of the tokens, none of them empty."""
        return torch.tensor_split(x, min(self._count, max(1, x.shape[self.dim])), self.dim)

    def __call__(self, piece: Tensor) -> Tensor:
        """The module's output for some tokens, as its forward computes it, in a backward as well."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(self._default)
        try:
            with torch.autocast(*self._casting):
                return self._call.run(piece)
        finally:
            torch.set_default_dtype(default)


class _Pieces(torch.autograd.Function):
    """A module's output, of which only the input is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Run, *_: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run = run
        return torch.cat([run(piece) for piece in run.cut(x)], run.dim)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x,), run = ctx.saved_tensors, ctx.run
        if [weight._version for weight in run.weights] != run.versions:
            raise RuntimeError(
                "a weight of a module that `mlp_chunks` runs in pieces was changed between its forward and its "
                "backward, which runs it again; change it after the backward, or leave `mlp_chunks` out."
            )
        sums: list[Tensor | None] = [None] * len(run.weights)
        into = []
        for piece, slope in zip(run.cut(x), run.cut(grad), strict=True):
            leaf = piece.detach().requires_grad_()
            with torch.enable_grad():
                found = run(leaf)
            first, *rest = torch.autograd.grad(found, [leaf, *run.weights], slope, allow_unused=True)
            into.append(torch.zeros_like(leaf) if first is None else first)
            sums = [_added(total, part) for total, part in zip(sums, rest, strict=True)]
        rounded = [None if total is None else total.to(w.dtype) for total, w in zip(sums, run.weights, strict=True)]
        return torch.cat(into, run.dim), None, *rounded


def _alike(x: Tensor, found: Tensor, run: _Run) -> bool:
    """Whether outputs and gradients of pieces are those of the whole."""
    slopes = torch.arange(found.numel(), device=x.device, dtype=torch.float32).sin().view(found.shape).to(found.dtype)
    again = _Pieces.apply(x, run, *run.weights)
    whole, parts = (torch.autograd.grad(y, [x, *run.weights], slopes, allow_unused=True) for y in (found, again))
    return _close(found, again) and all(_close(one, other) for one, other in zip(whole, parts, strict=True))


def _unchanged(kept: Tensor) -> Tensor:
    return kept


def _hooked(part: nn.Module) -> bool:
    """Whether somebody else than this package watches the calls of a module."""
    hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    hooks += (*part._backward_hooks.values(), *part._backward_pre_hooks.values())
    return any(not comes_from(hook, PACKAGE) for hook in hooks)


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Sums of 16-bit gradients are of 32 bits, and rounded once."""
    if part is None:
        return total
    part = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
    return part if total is None else total.add_(part)


def _matrices(module: nn.Module) -> int:
    return sum(weight.ndim == 2 for weight in module.parameters())


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    rounding = _ROUNDING.get(one.dtype, 5e-2)
    return torch.allclose(one, other, rtol=rounding, atol=rounding * float(one.detach().abs().amax()), equal_nan=True)
