"""Repeats one call of a part of the user's module, each time from the same state.

To compare two ways of running a part, both runs must start from the same state. A replay keeps the part in the state at
the time of its call and never runs it; every run gets a fresh copy. What one run changes (counters, caches,
data-dependent initial values, running statistics) affects neither the next run nor the module::

    kept part ──copy──▶ run 1: whole          discarded
              ──copy──▶ run 2: rank 0's part  discarded
              ──copy──▶ run 3: rank 1's part  discarded

The random generators of torch (on the CPU and the devices of the part), Python and NumPy are restored after a run.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_megatron.parallelize.reading.copy import copy_of

Prepare = Callable[[nn.Module], Any]
"""Changes a copy before it runs: hooks, weights, attributes. The return value is ignored."""


class Replay:
    """A part of a module and the arguments that it was called with.

    Args:
        part: the part, in the state at the time of the call; it is copied, never run.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    def __init__(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.part = part
        self.args = args
        self.kwargs = kwargs

    def run(
        self,
        prepare: Prepare | None = None,
        *,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        training: bool = False,
        seed: int = 0,
    ) -> tuple[nn.Module, Any]:
        """Run a fresh copy of the part, in evaluation mode by default.

        Args:
            prepare: changes the copy before it runs.
            args: positional arguments in place of the recorded ones.
            kwargs: keyword arguments in place of the recorded ones.
            training: whether the copy is in training mode.
            seed: seed of the random generators during the run.

        Returns:
            The copy in its state after the run, and its output.

        Raises:
            Exception: any exception of the user's code.
        """
        copied = copy_of(self.part)
        for part in copied.modules():
            part.training = training
        if prepare is not None:
            prepare(copied)
        args, kwargs = self.args if args is None else args, self.kwargs if kwargs is None else kwargs
        with _quiet(copied, seed):
            return copied, copied(*tree_map(fresh, args), **tree_map(fresh, kwargs))

    def at(self, name: str) -> Replay:
        """A replay of the first call of an inner part, with its state and arguments at that moment.

        Args:
            name: dotted name of the inner part; empty for this part itself.

        Raises:
            LookupError: this part does not call the inner part.
            Exception: any exception of the user's code before that call.
        """
        if not name:
            return self

        def watch(copied: nn.Module) -> None:
            def stop(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                handle.remove()
                raise _Called(Replay(copy_of(part), *tree_map(_detached, (args, kwargs))))

            handle = copied.get_submodule(name).register_forward_pre_hook(stop, with_kwargs=True, prepend=True)

        try:
            with torch.no_grad():
                self.run(watch)
        except _Called as called:
            return called.replay
        raise LookupError(f"{name!r} was not called when its surroundings were run again")


class _Called(Exception):
    """Ends a run when an inner part is called; carries the replay of that part."""

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self.replay = replay


@contextlib.contextmanager
def _quiet(module: nn.Module, seed: int) -> Iterator[None]:
    """Seed the random generators and restore them; disable torch's fused encoder kernels, which call no submodules."""
    devices = {x.device.index for x in (*module.parameters(), *module.buffers()) if x.device.type == "cuda"}
    python, numpy = random.getstate(), sys.modules.get("numpy")  # user code that draws from NumPy has imported it
    numpy_state = None if numpy is None else numpy.random.get_state()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=devices):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)):
                generator.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def fresh(value: Any) -> Any:
    """A copy of an argument that a call may write into."""
    return value.clone() if isinstance(value, Tensor) else value


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
