"""What travels between the test process and its workers.

Jobs and results are pickled by hand into bytes: torch teaches multiprocessing to send tensors through shared memory,
whose file handles die with a killed worker, and killing workers is half of this package's work.
"""

from __future__ import annotations

import importlib
import io
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RankInfo:
    """Where one process of a job stands.

    Attributes:
        rank: this process, 0..world_size-1.
        world_size: how many processes run the job.
        port: a free TCP port on 127.0.0.1, the same for every rank of the job and new for every job.
        directory: the directory the job runs in, the same for every rank; emptied when the test session ends.
    """

    rank: int
    world_size: int
    port: int
    directory: str

    def meet(self, seconds: float = 30.0) -> Any:
        """Opens the store of the job's process group on rank 0; the others wait until it listens.

        To be called just before torch connects to it, and kept until then. torch would do without, but slowly: a rank
        that asks before rank 0 listens sleeps for half a second or more, longer than most jobs take; and a store that
        also listens for IPv6 asks the name server who ``::ffff:127.0.0.1`` is at every connection, which takes five
        seconds each time that the question is lost.

        Returns:
            The store, which torch shares where it opens one of that port; None on other ranks.
        """
        if self.rank == 0:
            return self._listen()
        end = time.monotonic() + seconds
        while sys.platform == "linux" and self._is_free() and time.monotonic() < end:
            time.sleep(0.002)
        return None

    def _listen(self) -> Any:
        from torch.distributed import TCPStore

        server = socket.create_server(("127.0.0.1", self.port), backlog=128)
        where = {"master_listen_fd": server.detach(), "multi_tenant": True, "wait_for_workers": False}
        return TCPStore("127.0.0.1", self.port, self.world_size, True, **where)

    def _is_free(self) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # in nobody's way before anyone listens
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                return False
        return True


@dataclass(frozen=True)
class Job:
    """One function call on one rank; ``function`` is named, not pickled, because decorators replace test functions."""

    module: str
    qualname: str
    info: RankInfo
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sys_path: tuple[str, ...]

    def resolve(self) -> Callable[..., Any]:
        """Imports the function, looking behind a harness decorator."""
        found: Any = importlib.import_module(self.module)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return getattr(found, "rank_body", found)


@dataclass
class Outcome:
    """What became of one rank.

    Attributes:
        rank: the rank.
        value: what the function returned; None where it did not return.
        error: ``"TypeName: message"`` of the exception, or what the harness had to do; None where the rank succeeded.
        error_types: qualified class names of the exception, most specific first.
        trace: the formatted traceback, as the rank saw it.
        stacks: every Python stack of the process at the moment it was killed; empty where it was not.
        output: what the process printed during the job.
        seconds: time from the start of the job to this rank's end.
    """

    rank: int
    value: Any = None
    error: str | None = None
    error_types: tuple[str, ...] = ()
    trace: str = ""
    stacks: str = ""
    output: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass
class JobFailed(Exception):
    """Some rank of a job raised, died, or did not end in time; carries every rank's outcome."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list)

    def __str__(self) -> str:
        failed = [outcome for outcome in self.outcomes if not outcome.ok]
        lines = [f"{self.name}: {len(failed)} of {len(self.outcomes)} ranks failed"]
        for outcome in failed:
            lines.append(f"--- rank {outcome.rank} after {outcome.seconds:.1f} s: {outcome.error}")
            lines += [part for part in (outcome.trace, outcome.stacks) if part]
            if outcome.output:
                lines.append(f"    printed by rank {outcome.rank}:\n{outcome.output[-4000:]}")
        return "\n".join(lines)


def check_function(function: Callable[..., Any]) -> None:
    """Refuses a function that a worker could not import by name.

    Raises:
        ValueError: for lambdas, nested functions and functions of ``__main__``.
    """
    qualname = function.__qualname__
    if "<" in qualname or function.__module__ == "__main__":
        raise ValueError(
            f"{function.__module__}.{qualname} cannot be imported by a worker process: "
            "define it at the top level of an importable module"
        )


class _ToHost(pickle.Pickler):
    """Tensors of a GPU travel as tensors of the CPU: who reads them has not started CUDA, and need not."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")  # whoever has a tensor has imported it
        if torch is not None and isinstance(obj, torch.Tensor) and obj.is_cuda:
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def pack(payload: Any) -> bytes:
    """Pickles ``payload``; tensors travel as bytes."""
    buffer = io.BytesIO()
    _ToHost(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(payload)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return pickle.loads(data)


def single(outcomes: Sequence[Outcome]) -> list[Any]:
    """The returned values in rank order."""
    return [outcome.value for outcome in outcomes]
