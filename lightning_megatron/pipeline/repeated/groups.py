"""Several pieces of code that call the model repeatedly, at once, so that no stage idles while another computes.

A loop that decodes keeps one stage busy at a time. As many loops as there are stages, each on requests of its own, keep
all of them busy (DeepSpeed Inference, section IV-C). Two stages, three tokens of groups a and b::

    one group at a time           together
    stage 0   a . a . a . b .     a b a b a b .
    stage 1   . a . a . a . b     . a b a b a b
    wave                          0 1 2 3 4 5 6

The code of each group runs unchanged, on a thread of its own, and one thread runs at a time. A *turn* of a group is
what it does between two changes of the stage that computes; turn k of the group in place g belongs to wave g + k. Each
rank goes through the waves in order, and in a wave first does what it has to compute, which needs nothing of this wave,
and then hears what the others have computed in it. So nobody waits for whoever waits for him, whatever the groups do,
and the ranks of a tensor group, which compute together, do so in one order.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from lightning_megatron.mesh.default_group import of_this_thread
from lightning_megatron.mesh.draws.random_streams import current_rng_state, restore_rng_state
from lightning_megatron.mesh.precisions import RunningPrecision
from lightning_megatron.pipeline.repeated.wire import Wire

_NOBODY = -1


class _Ended(BaseException):
    """Ends the thread of a group, as another has failed."""


class Groups:
    """Runs tasks side by side, one after the other in each of several places.

    Args:
        wires: of each place, over which its code tells the other stages what layers gave.
        stage: this rank's.
        device: whose random numbers the tasks draw, besides the CPU's.
        asides: contexts around what others do in the middle of a task.

    Attributes:
        wire: that of the task that runs now.
        waves: how many waves there were.
        busy: in how many of them this stage computed.
    """

    def __init__(
        self,
        wires: Sequence[Wire],
        stage: int,
        device: torch.device,
        asides: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
    ) -> None:
        self.wire = wires[0]
        self.waves = self.busy = 0
        self._stage, self._device, self._asides = stage, device, asides
        self._places = [_Place(self, at, wire) for at, wire in enumerate(wires)]
        self._current: _Place | None = None
        self._todo: deque[Callable[[], Any]] = deque()
        self._surroundings = _Surroundings()

    def run(self, tasks: Sequence[Callable[[], Any]]) -> None:
        """Run all tasks. Each begins with the random numbers that there are now.

        Args:
            tasks: that call the model; equal on all ranks of the pipeline, where they are taken in the same order.

        Raises:
            BaseException: what a task raised; the others are ended.
        """
        self._todo.extend(tasks)
        numbers, counted = current_rng_state(self._device), -1
        for place in self._places:
            place.begin(numbers)
        try:
            while places := [place for place in self._places if place.goes_on]:
                place = min(places, key=lambda one: one.turn)
                self._current, self.wire = place, place.wire
                restore_rng_state(place.numbers, self._device)
                wave, heard, _ = place.turn
                if not heard and wave > counted:
                    self.busy, counted = self.busy + 1, wave
                self.waves = max(self.waves, wave + 1)
                place.resume()
                place.numbers = current_rng_state(self._device)
                if place.error is not None:
                    raise place.error
        finally:
            for place in self._places:
                place.end()
            self._todo.clear()
            restore_rng_state(numbers, self._device)

    def reach(self, owner: int) -> None:
        """Say which stage computes next; other tasks run before it does where it is another than before."""
        place = self._current
        if place is not None and place.owner != owner:
            with ExitStack() as stack:
                for aside in self._asides:
                    stack.enter_context(aside())
                place.next_turn(owner, heard=owner != self._stage)
            place.wire.settle()

    def work(self) -> None:
        """Run tasks until there are none; every rank takes the same ones, as all end a task in one wave."""
        self.reach(_NOBODY)
        while self._todo:
            self._todo.popleft()()
            self.reach(_NOBODY)

    def surroundings(self) -> Any:
        """A context with what code sees that runs on the thread of this object."""
        return self._surroundings.entered()


class _Place:
    """One thread, whose tasks run one after the other.

    Args:
        groups: all of them.
        number: of the place.
        wire: of its tasks.

    Attributes:
        turn: the wave, whether another stage computes in it, and the place: what runs first is less.
        owner: stage that computes now.
        numbers: states of the random generators.
        goes_on: whether there is more to do.
        error: what ended it.
    """

    def __init__(self, groups: Groups, number: int, wire: Wire) -> None:
        self._groups, self._number, self.wire = groups, number, wire
        self.turn, self.owner = (number, True, number), -2
        self.numbers: dict[str, Any] = {}
        self.error: BaseException | None = None
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = self._ends = False
        self._thread: threading.Thread | None = None

    @property
    def goes_on(self) -> bool:
        return self._thread is not None and not self._ended

    def begin(self, numbers: dict[str, Any]) -> None:
        """Make the thread, which waits for its first turn."""
        self.numbers = numbers
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=lambda: run(self._run), name=f"group {self._number}", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Let the thread run until its next turn."""
        self._mine.release()
        self._theirs.acquire()

    def next_turn(self, owner: int, heard: bool) -> None:
        """Let others run, on the thread itself."""
        self.turn, self.owner = (self.turn[0] + 1, heard, self._number), owner
        self._theirs.release()
        self._mine.acquire()
        if self._ends:
            raise _Ended

    def end(self) -> None:
        """End the thread, whatever it waits in."""
        if self._thread is not None and not self._ended:
            self._ends = True
            self.resume()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self._mine.acquire()
        try:
            if not self._ends:
                with self._groups.surroundings():
                    self._groups.work()
        except _Ended:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._ended = True
            self._theirs.release()


class _Surroundings:
    """Thread-local settings of torch, as they are on the thread that makes this object."""

    def __init__(self) -> None:
        self._gradients, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._precision = RunningPrecision.now()
        self._modes, self._dispatches = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._replicas = of_this_thread()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same on this thread."""
        with ExitStack() as stack:
            stack.enter_context(self._replicas())
            if self._device is not None:
                torch.cuda.set_device(self._device)
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            stack.enter_context(self._precision.entered())
            for mode in self._modes:
                stack.enter_context(mode)
            for dispatch in self._dispatches:
                _push_mode(dispatch)
                stack.callback(_pop_mode)
            yield
