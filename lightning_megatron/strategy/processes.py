"""The processes of a run: which rank each is, how they talk, and which of them has failed.

Nothing here knows of modules or steps.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_megatron.checkpoints.loading.as_built import noting_construction
from lightning_megatron.mesh.draws.construction import Construction
from lightning_megatron.mesh.layout import resolve_layout
from lightning_megatron.mesh.mesh import ParallelMesh, build_mesh
from lightning_megatron.mesh.messages import host_peers, objects
from lightning_megatron.mesh.watch import waits
from lightning_megatron.mesh.watch.board import AgreedFailure, Failure
from lightning_megatron.mesh.watch.echoes import RemoteFailure, be_brief_about_echoes, is_echo, say_instead
from lightning_megatron.mesh.watch.failure import FailureWatch
from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.strategy.lightning import distributed
from lightning_megatron.strategy.lightning.log_replay import ALREADY_REDUCED
from lightning_megatron.strategy.options.options import Options
from lightning_megatron.strategy.world import REAL_WORLD, World


def _of_others(pid: int) -> None:
    """Exit status of a process that was not started here: nobody knows."""


def _as_it_is(error: BaseException) -> None:
    """An error says enough by itself."""


class _NamingFailures(AbstractContextManager[None]):
    """Around what may fail on some ranks: tells ``name`` of an error; entered several times in each step."""

    def __init__(self, name: Callable[[Exception], None]) -> None:
        self._name = name

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            self._name(error)


class Processes:
    """The processes of one strategy. They connect once and stay connected from run to run.

    Args:
        backend: of the process groups; ``None`` for what fits the device.
        timeout: of collectives.
        hang_timeout: until a rank that others wait for is named and the run ended; ``None`` for never.
        world: what lies outside of this process.

    Attributes:
        backend: of the process groups; ``None`` until they are made, if it was not given.
        numbers: rank of every process by the order of the launch; ``None`` where the two are the same.
        device: this rank's; the CPU until the processes connect.
        exit_of: exit status of a process that this one started, by its number; ``None`` of others.
        explain: adds to an error of this rank what a run knows of it, before other ranks hear of it.
        constructions: what built modules on the meta device that are to run on these processes.
    """

    def __init__(
        self,
        backend: str | None,
        timeout: timedelta | None,
        hang_timeout: timedelta | None,
        world: World = REAL_WORLD,
    ) -> None:
        self.backend = self._given = backend
        self.world = world
        self.numbers: list[int] | None = None
        self.device = torch.device("cpu")
        self._timeout = timeout
        self._hang_s = None if hang_timeout is None else hang_timeout.total_seconds()
        self.exit_of: Callable[[int], int | None] = _of_others
        self.explain: Callable[[BaseException], None] = _as_it_is
        self.constructions: list[Construction] = []
        self._mesh: ParallelMesh | None = None
        self._watch: FailureWatch | None = None
        self._has_failed = False
        self._naming = _NamingFailures(self.name_failure)

    def __getstate__(self) -> dict[str, Any]:
        """Options and numbers: a copy, or what another process unpickles, has met nobody yet."""
        unmet = {"_mesh": None, "_watch": None, "_runs": 0, "exit_of": _of_others, "explain": _as_it_is}
        return self.__dict__ | unmet | {"device": torch.device("cpu"), "backend": self._given}

    @contextmanager
    def building(self, empty: bool) -> Generator[None, None, None]:
        """Build tensors on the CPU, or nowhere; note how those come about that have no memory."""
        with noting_construction(self.constructions), torch.device("meta" if empty else "cpu"):
            yield

    def rank_of(self, launched: int) -> int:
        """Global rank of the process that was launched as number ``launched``: another where a topology says so."""
        return launched if self.numbers is None else self.numbers[launched]

    def connect(
        self, environment: ClusterEnvironment, device: torch.device, nodes: int, per_node: int, sizes: dict[str, Any]
    ) -> None:
        """Connect the processes and build the mesh, as far as an earlier run has not; watch for failures.

        Args:
            environment: Lightning's, of this launch.
            device: this rank's.
            nodes: of the launch.
            per_node: processes on each.
            sizes: of the mesh's axes, for :func:`~lightning_megatron.mesh.layout.resolve_layout`.
        """
        self.device = device
        environment.set_global_rank(environment.node_rank() * per_node + environment.local_rank())
        environment.set_world_size(nodes * per_node)
        rank = self.rank_of(environment.global_rank())
        for function in (rank_zero_only, fabric_rank_zero_only):
            function.rank = rank  # type: ignore[attr-defined]
        self.backend = self.backend or distributed.default_backend(device)
        try:
            distributed.connect(environment, self.backend, rank, self._timeout, device)
        except dist.DistNetworkError as error:
            raise _not_connected(error, environment, rank) from error
        if self._mesh is None or self._mesh.device_mesh.size() != dist.get_world_size():
            self._mesh = build_mesh(resolve_layout(dist.get_world_size(), **sizes), device.type)
        if device.type == "cpu":
            host_peers.open_peers()
        self._watch_for_failures(self._mesh)

    def _watch_for_failures(self, mesh: ParallelMesh) -> None:
        self.stop_watching()
        store = dist.distributed_c10d._get_default_store()
        run = store.add(f"lightning_megatron/runs/{mesh.rank}", 1)  # of this process, whichever strategy it has
        self._watch = self.world.watch(store, mesh.layout, mesh.rank, run, hang_s=self._hang_s, exit_of=self.exit_of)
        if mesh.layout.world_size > 1:
            self._watch.start()
            be_brief_about_echoes()

    @property
    def are_watched(self) -> bool:
        """Whether the ranks have connected and look after each other."""
        return self._watch is not None

    def stop_watching(self) -> None:
        """Look for failures no more, at the end of a run."""
        self.explain = _as_it_is  # it knows the run that ends
        if self._watch is not None:
            self._watch.leave()

    def part(self) -> None:
        """At the end of a run that has failed: close the connections; ranks that wait for this one get an error."""
        if self._has_failed:
            host_peers.close_peers()
        self._has_failed = False

    def beat(self) -> None:
        """Tell that this rank takes part."""
        if self._watch is not None:
            self._watch.beat()

    def wants_batch(self, kind: str, batch: int | None = None, length: float = math.inf) -> None:
        """This rank has a next batch of a loop; see :class:`~lightning_megatron.mesh.watch.turns.Turns`."""
        if self._watch is not None:
            self._watch.turns.wants(kind, batch, length)

    def end_loop(self, kind: str, count: int | None = None) -> None:
        """Wait until this loop over batches has ended on every rank, and after as many in training.

        Raises:
            RemoteFailure: it has not; the message names the ranks and their numbers of batches.
        """
        if self._watch is not None and self.mesh.layout.world_size > 1:
            self._watch.end_loop(kind, count)

    def replica(self, world: int, rank: int, options: Options) -> dict[str, int]:
        """Number of replicas, and which of them this process belongs to, in the words of distributed samplers.

        Args:
            world: number of processes.
            rank: this one's; where there is no mesh yet, because Lightning only counts batches, it tells the replica.
            options: of the strategy.

        Raises:
            RuntimeError: processes are not connected yet, and a planner will choose the layout.
        """
        if self._mesh is None and not options.asks_the_planner:
            layout = resolve_layout(world, **options.sizes)
        else:
            layout, rank = self.mesh.layout, self.mesh.rank
        return {"num_replicas": layout.data, "rank": layout.coordinates(rank).data}

    @property
    def mesh(self) -> ParallelMesh:
        """Process groups and coordinates of this rank.

        Raises:
            RuntimeError: processes are not connected yet.
        """
        if self._mesh is None:
            raise RuntimeError(
                "the mesh exists only once the Trainer has started; use it in `configure_model` or later."
            )
        return self._mesh

    @property
    def place(self) -> str:
        """This rank's coordinates, in words."""
        return self.mesh.layout.describe(self.mesh.rank)

    @property
    def speaks_for_stage(self) -> bool:
        """Whether this rank says what all ranks of its stage have come to."""
        where = self.mesh.coordinates
        return where.data == where.tensor == where.context == 0

    def reduce(self, value: Any, group: Any | None, operation: Any) -> Any:
        """A tensor reduced over the data-parallel replicas, or over ``group``; anything else as it is.

        What another stage has, all replicas of this one lack: there it is reduced, and here nothing is sent.
        """
        if not isinstance(value, Tensor) or not dist.is_initialized() or group is ALREADY_REDUCED:
            return value
        if group is None and isinstance(value, Absent) and value.is_away():
            return value
        return distributed.reduce(value, group or self.mesh.group("data_parallel"), operation)

    def all_gather(self, tensor: Tensor, group: Any | None, sync_grads: bool) -> Tensor:
        """A tensor of all data-parallel replicas, or of all ranks of ``group``, stacked: ``[replicas, ...]``.

        Args:
            tensor: of this rank; shaped alike on all.
            group: ``None`` or the world for the replicas.
            sync_grads: whether gradients flow back, those of all ranks summed.
        """
        if not dist.is_initialized():
            return tensor
        if group in (None, dist.group.WORLD, self.mesh.group("world")):
            group = self.mesh.group("data_parallel")
            if isinstance(tensor, Absent) and tensor.is_away():
                return tensor.expand(group.size(), *tensor.shape)
        return distributed.all_gather(tensor, group, sync_grads)

    def agree(self, decision: bool, *, everyone: bool) -> bool:
        """Whether all ranks, or any of them, say yes; collective over the world, and this rank's word before that."""
        if not dist.is_initialized():
            return decision
        return self.count(decision) >= (dist.get_world_size() if everyone else 1)

    def count(self, decision: bool) -> int:
        """How many ranks say yes; collective over the world."""
        votes = torch.tensor(int(decision), device=self.device)
        with waits.on(waits.collective, "all_reduce", votes, None):
            dist.all_reduce(votes)
        return int(votes)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            with self.naming_failures(), waits.on(waits.collective, "barrier", None, None):
                dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def broadcast(self, value: Any, source: int) -> Any:
        """Rank ``source``'s value, on all ranks."""
        with self.naming_failures():
            return objects.broadcast(value, source)

    def naming_failures(self) -> AbstractContextManager[None]:
        """Report an exception raised here, or say which other rank it came from."""
        return self._naming

    def naming_echoes(self) -> AbstractContextManager[None]:
        """Around what each rank may refuse by itself: what another one's failure has cut off is named by that."""
        return _NamingFailures(lambda error: self.name_failure(error) if is_echo(error) else None)

    def name_failure(self, error: Exception) -> None:
        """Report an exception, or raise what says which other rank it came from."""
        watch = self._watch
        remote = _cause(watch, error, 3.0) if watch is not None else None
        if watch is not None and remote is not None and not isinstance(error, (RemoteFailure, AgreedFailure)):
            watch.stop()
            raise RemoteFailure(str(remote)) from error
        self.report(error)

    def report(self, exception: BaseException) -> None:
        """Tell the other ranks of a failure that began here; not of the echo of another rank's."""
        if not isinstance(exception, (RemoteFailure, AgreedFailure)):
            self.explain(exception)
        if self._watch is not None and isinstance(exception, SIGTERMException):
            self._watch.stop()  # no failure: all ranks have agreed to stop
        elif self._watch is not None and not self._repeats_another(exception):
            self._watch.report(exception)

    def _repeats_another(self, error: BaseException) -> bool:
        """Whether ``error`` is the echo of another rank's failure, which is known by now."""
        if isinstance(error, RemoteFailure) or not is_echo(error) or self._watch is None:
            return isinstance(error, RemoteFailure)
        return self._watch.cause(3.0) is not None

    def end(self, exception: BaseException) -> None:
        """Tell the other ranks, and stay long enough for them to hear."""
        watch = self._watch
        if watch is None:
            self.report(exception)
            return
        remote = _cause(watch, exception, 2.0)
        self.report(exception)
        self._has_failed = not isinstance(exception, SIGTERMException)
        if remote is not None and not isinstance(exception, (RemoteFailure, AgreedFailure)):
            exception.add_note(str(remote))
        if remote is not None and _repeats(exception, remote):
            say_instead(exception, watch.message(remote))
        elif watch.is_running and not isinstance(exception, (AgreedFailure, SIGTERMException)):
            exception.add_note(f"This was {self.place}; the other ranks end with it.")
        watch.stop()
        first = watch.reported and remote is None
        if isinstance(exception, SIGTERMException):
            return  # all ranks have agreed, and nobody waits for news
        if self.mesh.layout.world_size > 1 and (first or self.mesh.rank == 0):  # rank 0 may host the others' store
            watch.linger()

    def can_meet(self) -> bool:
        """Whether all ranks can still take part in something: no rank has failed, or all have, together."""
        return self._watch is None or not self._watch.reported or self._watch.gather(seconds=5.0)

    def all_stand_at(self, place: str, group: Any, seconds: float = 5.0) -> bool:
        """Whether all ranks of ``group`` ask this within ``seconds``, with the same ``place``; beside all collectives.

        Args:
            place: how far this rank has come, in words; the same on ranks that have made the same collectives.
            group: of ranks.
            seconds: to wait for the others.
        """
        ranks, deadline = dist.get_process_group_ranks(group), time.monotonic() + seconds
        try:
            store = dist.distributed_c10d._get_default_store()
            run = store.add(f"lightning_megatron/runs/{self.mesh.rank}", 0)
            key = f"lightning_megatron/stands/{run}/{ranks[0]}/{place}"
            arrived = store.add(key, 1)
            while arrived < len(ranks) and time.monotonic() < deadline:
                time.sleep(0.05)
                arrived = store.add(key, 0)
        except RuntimeError:  # the process that hosts the store is gone
            return False
        return arrived == len(ranks)


def _cause(watch: FailureWatch, error: BaseException, wait_s: float) -> Failure | None:
    """The failure of another rank behind ``error``; ``None`` if it began here.

    Args:
        watch: of this rank.
        error: raised here.
        wait_s: seconds to wait for news, if ``error`` may be an echo.
    """
    return watch.cause(wait_s) if is_echo(error) else watch.remote()


def _repeats(error: BaseException, remote: Failure) -> bool:
    """Whether ``error`` says no more than the failure that another rank has reported."""
    last = "".join(traceback.format_exception_only(error)).strip()
    return isinstance(error, RemoteFailure) or is_echo(error) or last.splitlines()[0] in remote.traceback


def _not_connected(error: Exception, environment: ClusterEnvironment, rank: int) -> Exception:
    """Error message where the ranks could not meet."""
    address = f"{environment.main_address}:{environment.main_port}"
    if "EADDRINUSE" in str(error) or "already in use" in str(error):
        return RuntimeError(
            f"rank {rank} cannot open {address}, where the ranks are to meet: another process has that port "
            "(MASTER_PORT). End it (perhaps a run that was left behind), or set MASTER_PORT to a free port on all "
            "nodes."
        )
    return RuntimeError(
        f"rank {rank} cannot reach {address}, where the ranks are to meet (MASTER_ADDR, MASTER_PORT): rank 0 has not "
        f"started or has ended, or a firewall is between. {error}"
    )
