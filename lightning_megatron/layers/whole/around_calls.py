"""Lets the forwards of layers read the local parts of their parameters while a step sees the parameters whole.

Parameters change their class around the calls of the modules that compute with them. Calls nest, so each parameter has
a count of those that are under way. What a step has put in the place of a parameter (``torch.func.functional_call``) is
whole, and is exchanged for its part meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.mesh.parts.names import lies_in, outwards


class SeenParameter(Protocol):
    """Facts about a parameter.

    Attributes:
        inside: how many calls under way read it as it is.
        given: tensors in its place, each with the table of a module and the name there, while such calls are under way.
    """

    inside: int
    given: list[tuple[dict[str, Any], str, Any]]


class ShowsWhole(Protocol):
    """Shows parameters whole; knows whether a step runs, and the class that they have then."""

    runs: bool
    kind: type[nn.Parameter]

    def part_of_given(self, given: Tensor, parameter: nn.Parameter) -> Tensor:
        """The local part that a layer computes with where the step has put a tensor in the place of a parameter."""


class Read(NamedTuple):
    """A parameter that a module computes with, and the table of a module where it is."""

    parameter: nn.Parameter
    entry: SeenParameter
    table: dict[str, Any]
    name: str


class _AroundCall:
    """Hook around the calls of a module that computes with parameters as they are.

    A copy of the module has it, too, where it does no harm; a module written to a file has none.

    Args:
        view: shows the parameters.
        reads: the parameters.
    """

    def __init__(self, view: ShowsWhole, reads: Sequence[Read]) -> None:
        self._view, self._reads = view, reads

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> Any:
        return _without_hook, ()


class Entering(_AroundCall):
    """A call begins.

    Args:
        view: shows the parameters.
        reads: the parameters.
        first: called before.
    """

    def __init__(self, view: ShowsWhole, reads: Sequence[Read], first: Callable[[], None]) -> None:
        super().__init__(view, reads)
        self._first = first

    def __call__(self, *call: Any) -> None:
        self._first()
        if self._view.runs:
            for parameter, entry, table, name in self._reads:
                if not entry.inside:
                    parameter.__class__ = nn.Parameter
                entry.inside += 1
                if name in table and table[name] is not parameter and not _is_exchanged(entry, table, name):
                    given = table[name]
                    entry.given.append((table, name, given))
                    table[name] = self._view.part_of_given(given, parameter)


class Leaving(_AroundCall):
    """A call has ended."""

    def __call__(self, *call: Any) -> None:
        if self._view.runs:
            for parameter, entry, _, _ in self._reads:
                entry.inside -= 1
                if not entry.inside:
                    parameter.__class__ = self._view.kind
                    while entry.given:
                        table, name, given = entry.given.pop()
                        table[name] = given


def _is_exchanged(entry: SeenParameter, table: dict[str, Any], name: str) -> bool:
    """Whether a call further out has put the part there already."""
    return any(place is table and there == name for place, there, _ in entry.given)


def _without_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*call: Any) -> None:
    """A hook that does nothing."""


def readers_of(
    modules: dict[str, nn.Module],
    name: str,
    is_compiled: Callable[[nn.Module], bool],
    is_alone: Callable[[nn.Module], bool] = lambda _: False,
    shows_whole: Callable[[nn.Module], bool] = lambda _: False,
) -> list[nn.Module]:
    """Modules whose forwards may compute with the parameters of module ``name``: itself, the one around it, and layers
    that bring in an input together with it; what is compiled around them in their place.

    Rows of a table are looked up by the embedding alone, and experts' weights by the experts: the module around them
    reads all of them, for a norm say. Those in experts that show whole weights do not read the parts themselves.
    """
    above = [each for each in outwards(name) if each != name and type(modules[each]) not in _CONTAINERS]
    alone = next((each for each in outwards(name) if is_alone(modules[each])), None)
    if alone is not None and shows_whole(modules[alone]):
        return [modules[alone]]
    if alone is not None:
        above = [each for each in above if lies_in(each, alone)]
    if isinstance(modules[name], VocabParallelEmbedding):
        above = []
    entry = getattr(getattr(modules[name], "_sharding", None), "entry", None)
    found = [_compiled_around(modules, each, is_compiled) for each in (name, *above[:1])]
    return [*found, *getattr(entry, "members", ())]


def _compiled_around(modules: dict[str, nn.Module], name: str, is_compiled: Callable[[nn.Module], bool]) -> nn.Module:
    """The outermost compiled module that ``name`` is in, or else itself; compiled code must not see classes change."""
    compiled = [
        each
        for each in (modules[outer] for outer in outwards(name))
        if "_orig_mod" in each._modules or each._compiled_call_impl is not None or is_compiled(each)
    ]
    return compiled[-1] if compiled else modules[name]


def around_calls(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> list[Callable[[], None]]:
    """Have these run around each call of a module; returns what undoes that."""
    compiled = module._compiled_call_impl
    if compiled is not None:  # its hooks are compiled with it

        def called(*args: Any, **kwargs: Any) -> Any:
            before()
            try:
                return compiled(*args, **kwargs)
            finally:
                after()

        module._compiled_call_impl = called
        return [partial(setattr, module, "_compiled_call_impl", compiled)]
    entered = module.register_forward_pre_hook(before)
    left = module.register_forward_hook(after, always_call=True, prepend=True)
    return [entered.remove, left.remove]


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
