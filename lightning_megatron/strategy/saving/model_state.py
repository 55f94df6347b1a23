"""The weights of a divided module as one process names and shapes them, so that any layout can load what another saved.

A rank holds some of the parameters (a stage's), slices of others (tensor parallelism) and 16-bit copies where the
optimizer has float32 ones. Lightning asks for and gives whole states; between the two stands :class:`ModelState`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_megatron.checkpoints.files.library_names import open_weights
from lightning_megatron.checkpoints.loading.as_built import computed_from
from lightning_megatron.checkpoints.loading.pretrained import match_weights
from lightning_megatron.checkpoints.state.stored import Kinds, Match, aliases, load_module, match, stored_module
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.pieces import PiecedTensor, as_pieces
from lightning_megatron.pipeline.elsewhere.twins import shown_whole
from lightning_megatron.strategy.assembly.assembled import Assembled
from lightning_megatron.strategy.lightning import trainer_access as lightning_state
from lightning_megatron.strategy.saving.unseen import nobody_looks, nobody_looks_on


class PartOfState(dict[str, Any]):
    """A state of the module's names and shapes of which this rank holds its part.

    Callbacks put states into a checkpoint (averaged weights). Those of this type are stored as the weights are, each
    rank its own part, wherever in the checkpoint they lie.
    """


class ModelState:
    """State of one divided module.

    Args:
        assembled: the module, and how its tensors are split.
        mesh: the grid.

    Attributes:
        begins: called where a checkpoint is begun, before hooks of it.
        ends: called when it is saved.
    """

    def __init__(self, assembled: Assembled, mesh: ParallelMesh) -> None:
        self.module = assembled.module
        self._engine = assembled.engine
        self._tensors = assembled.tensor_state
        self._mesh = mesh
        self._streamed = assembled.streamed
        self.begins: Callable[[], None] = _nothing
        self.ends: Callable[[], None] = _nothing

    def logical_view(self, *, slices: bool = True) -> AbstractContextManager[None]:
        """Show the module as it is in one process, to code that names and counts; without ``slices``, those stay."""
        return shown_whole(self.module, self._engine.model_gradients.presence, slices=slices)

    def stored(self, without: Collection[str] = ()) -> PartOfState:
        """This rank's part as checkpoints keep it: split tensors in pieces, and float32 weights where there are any.

        Args:
            without: names of tensors to leave out.
        """
        gradients = self._engine.model_gradients
        gradients.finish_gather()
        masters = gradients.weights.pieces()
        stored = stored_module(self.module, self._tensors, without) | masters
        return PartOfState({n: value for n, value in stored.items() if value is not None or n not in masters})

    def saved(self) -> PartOfState:
        """The same for a checkpoint: weights that are spread over replicas stay so, unless code may look at them."""
        self.begins()
        return self._as_spread() if nobody_looks(self.module, self._engine.model_gradients) else self.stored()

    def _as_spread(self, without: Collection[str] = ()) -> PartOfState:
        """This rank's part, of weights that are spread now its shard."""
        own = self._engine.model_gradients.weights.pieces(spread=True)
        stored = stored_module(self.module, self._tensors, {*own, *without}) | own
        return PartOfState({n: value for n, value in stored.items() if value is not None or n not in own})

    def stored_once(self) -> dict[str, Any]:
        """The same without further names of tied tensors."""
        tied = aliases(self.module)
        return {name: value for name, value in self.stored().items() if name not in tied}

    def load(self, state: Mapping[str, Any], *, spread: bool | None = None) -> None:
        """Load a state that matches the module, whole or in pieces.

        Args:
            state: by name.
            spread: whether spread weights stay so; by default unless code of the user's may look at them.
        """
        gradients = self._engine.model_gradients
        spread = nobody_looks_on(self.module, gradients) if spread is None else spread
        gradients.finish_gather(spread=not spread)
        masters = gradients.weights.pieces(spread=spread)
        load_module(self.module, {n: v for n, v in state.items() if n not in masters}, self._tensors)
        if masters:
            gradients.weights.load(state, spread=spread)

    @property
    def names(self) -> Collection[str]:
        """Of the tensors of the whole module."""
        return self._engine.model_gradients.presence.entries

    def whole(self, keeps: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
        """The whole state on the CPU of global rank 0, an empty dict elsewhere; collective over all ranks.

        Args:
            keeps: which names; by default all.
        """
        self._engine.model_gradients.finish_gather()
        self._engine.share_copies()
        state = {n: value for n, value in self.module.state_dict().items() if keeps is None or keeps(n)}
        state |= {n: v for n, v in self._engine.model_gradients.weights.whole().items() if n in state}
        return lightning_state.gather_state_dict(self._tensors.logical_state(state), self._mesh)

    def fill_from(self, path: Any) -> None:
        """Load this rank's part of a file or folder of weights; see :meth:`reader_of`."""
        self.reader_of(path)()

    def reader_of(self, path: Any) -> Callable[[], None]:
        """A function that loads this rank's part of a file or folder of weights, reading that part only, into the
        memory that it has. Collective over all ranks; the function is not.

        Raises:
            RuntimeError: a parameter is missing there, or has another shape; or a file of a checkpoint is damaged.
        """
        source = open_weights(path)
        source.verify(self._mesh.rank, self._mesh.layout.world_size)
        built = computed_from(self.module) if self._streamed is None else {}
        return partial(self._fill_from, source, match_weights(source, *self._whole_shapes(), path, built))

    def _fill_from(self, source: Any, found: Match) -> None:
        streamed = self._streamed.names if self._streamed is not None else ()
        self._engine.model_gradients.finish_gather(spread=False)
        state = self._as_spread(_with_tied(self.module, streamed))
        wanted = {
            n: (found.stored[n], as_pieces(v))
            for n, v in state.items()
            if isinstance(v, (Tensor, PiecedTensor)) and n in found.stored
        }
        for _, pieces in wanted.values():
            pieces.clear_padding()  # as it came about, in a module that was never whole
        source.fill(wanted)  # tensors of the module itself, which the next line then copies onto themselves
        self.load({name: pieces for name, (_, pieces) in wanted.items()}, spread=True)
        if self._streamed is not None:
            own = {name: parameter for name, parameter in self.module.named_parameters() if name in streamed}
            places = {name: (found.stored[name], self._tensors.spec_of(name, p.shape)) for name, p in own.items()}
            self._streamed.connect(source, places)

    def memory(self) -> dict[str, PiecedTensor]:
        """This rank's part itself, by name: what is read into it, the module has once :meth:`load` was given it."""
        spread = nobody_looks_on(self.module, self._engine.model_gradients)
        stored = (self._as_spread() if spread else self.stored()).items()
        return {name: as_pieces(v) for name, v in stored if isinstance(v, (Tensor, PiecedTensor))}

    def match(
        self, kinds: Kinds, saved_aliases: Mapping[str, str] | None = None, prefixes: Mapping[str, str] | None = None
    ) -> Match:
        """Match each tensor of the whole module with the stored one to load it from; collective over the pipeline.

        Args:
            kinds: shape and dtype of every stored tensor.
            saved_aliases: tied names there -> the name that is stored.
            prefixes: start of a name there -> start of the name in the module.
        """
        return match(kinds, *self._whole_shapes(), saved_aliases or {}, prefixes)

    def _whole_shapes(self) -> tuple[dict[str, torch.Size], dict[str, str]]:
        """Logical shapes of the whole module's tensors, and its tied names; collective over the pipeline."""
        state = {name: value for name, value in self.module.state_dict().items() if isinstance(value, Tensor)}
        shapes = {name: self._tensors.logical_shape(name, value) for name, value in state.items()}
        stages = objects.gather((shapes, aliases(self.module)), self._mesh.group("pipeline_parallel"))
        return (
            {name: shape for stage in stages for name, shape in stage[0].items()},
            {name: first for stage in stages for name, first in stage[1].items()},
        )


def shares_memory(values: Iterable[Any], pieces: Iterable[PiecedTensor]) -> bool:
    """Whether any of ``values`` is a tensor in the memory of ``pieces``."""
    own = {each.local.untyped_storage().data_ptr() for each in pieces}
    tensors = (value for value in values if isinstance(value, Tensor) and value.layout is torch.strided)
    return any(tensor.untyped_storage().data_ptr() in own for tensor in tensors)


def _nothing() -> None:
    """Stands for what a run has nothing of."""


def _with_tied(module: Module, names: Collection[str]) -> set[str]:
    """Names of parameters, and further names of the same."""
    return {*names, *(name for name, first in aliases(module).items() if first in names)}


def does_not_fit(module: Any, found: Match) -> str:
    """Message for a checkpoint whose names or shapes are not the module's."""
    return (
        f"the checkpoint does not fit {type(module).__name__}: {found}; set `strict_loading = False` on the module to "
        "load what fits, or name what moved with `MegatronCheckpointIO(prefixes={'old.': 'new.'})`."
    )
