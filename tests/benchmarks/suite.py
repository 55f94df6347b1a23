"""What there is to compare: every duel by name, with its peer, its ranks and its dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.benchmarks import contestants, grid_contestants, overhead, pieces, replicas, split_contestants
from tests.benchmarks.contestants import Round
from tests.benchmarks.model import Size
from tests.harness import RankInfo, run_job

TENSOR_SIZE = Size(layers=4, hidden=256, heads=8, sequence=128, vocabulary=1024, micro_batches=1, micro_batch=4)
WIDE = Size(hidden=256, sequence=128)


@dataclass(frozen=True)
class Duel:
    """Ours and a peer's, in turn in one run.

    Attributes:
        peer: what ours is compared with.
        ranks: processes.
        play: ``play(info, size, steps, rounds)`` on every rank: rounds of (ours, theirs).
        size: dimensions.
        steps: measured steps per round.
        config: anything else that a reader needs to repeat it.
    """

    peer: str
    ranks: int
    play: Callable[[RankInfo, Size, int, int], list[tuple[Round, Round]]]
    size: Size = field(default_factory=Size)
    steps: int = 10
    config: str = ""


def _of_replicas(peer: str, ours: str = "ours") -> Callable[..., list[tuple[Round, Round]]]:
    return partial(play_replicas, ours=ours, peer=peer)


def play_replicas(
    info: RankInfo, size: Size, steps: int, rounds: int, *, ours: str, peer: str
) -> list[tuple[Round, Round]]:
    """Ours, shared out or not, against one of the data-parallel peers."""
    entries = replicas.contestants(info.world_size)

    def turn(name: str) -> Round:
        strategy, task = entries[name]
        return contestants.trainer_round(info, size, steps, strategy(), size.batch // info.world_size, task)

    return contestants.alternate(lambda: turn(ours), lambda: turn(peer), rounds)


def _by_name(play: Callable[..., Any], name: str) -> Callable[..., list[tuple[Round, Round]]]:
    return partial(_named, play, name)


def _named(play: Callable[..., Any], name: str, info: RankInfo, size: Size, steps: int, rounds: int) -> Any:
    return play(info, name, size, steps, rounds)


def cpu_duels() -> dict[str, Duel]:
    """Duels on CPU processes over gloo, by name."""
    lightning = "Lightning 2.6"
    duels = {
        "pp2": Duel("torch Schedule1F1B", 2, _by_name(pieces.duel, "1f1b"), config="1f1b, 8 micro-batches"),
        "pp2-wide": Duel("torch Schedule1F1B", 2, _by_name(pieces.duel, "1f1b"), WIDE, config="1f1b"),
        "dp2": Duel(f"{lightning} DDPStrategy", 2, _of_replicas("DDP"), config="optimizer shared out"),
        "dp2-wide": Duel(f"{lightning} DDPStrategy", 2, _of_replicas("DDP"), WIDE),
        "dp2-unshared": Duel(
            f"{lightning} DDPStrategy", 2, _of_replicas("DDP", "ours, not shared"), config="optimizer_sharding=False"
        ),
        "dp2-zero": Duel("DDPStrategy + ZeroRedundancyOptimizer", 2, _of_replicas("DDP + Zero")),
        "dp2-fsdp": Duel("ModelParallelStrategy + fully_shard per block", 2, _of_replicas("FSDP2")),
        "empty": Duel(f"{lightning} SingleDeviceStrategy", 1, overhead.play, steps=400, config=overhead.CONFIG),
    }
    for name, peer in pieces.PEERS.items():
        if name != "1f1b":
            duels[f"pp2-{name}"] = Duel(f"torch {peer}", 2, _by_name(pieces.duel, name), config=name)
            duels[f"pp2-{name}-wide"] = replace(duels[f"pp2-{name}"], size=WIDE)
    for name, peer in pieces.PEERS.items():
        both = _by_name(partial(pieces.duel, trainer=True), name)
        duels[f"pp2-{name}-trainer"] = Duel(f"torch {peer} in a Trainer", 2, both, config=f"{name}, by hand")
    for name in split_contestants.DUELS:
        peer = "loss_parallel" if name == "loss" else "ModelParallelStrategy, DTensor"
        duels[f"tp2-{name}"] = Duel(peer, 2, _by_name(split_contestants.duel, name), TENSOR_SIZE)
    grid = replace(TENSOR_SIZE, micro_batches=4, micro_batch=1)
    duels["tp2-pp2"] = Duel("torch Schedule1F1B over DTensor stages", 4, grid_contestants.duel, grid, config="1f1b")
    return duels


def play(duel: Duel, rounds: int, steps: int | None = None, deadline: float = 900.0, **size: int) -> list[Any]:
    """Rounds of one duel, per rank."""
    chosen = replace(duel.size, **size)
    arguments = (duel.play, chosen, steps or duel.steps, rounds)
    return [outcome.value for outcome in run_job(_play, duel.ranks, *arguments, deadline=deadline)]


def _play(info: RankInfo, function: Any, size: Size, steps: int, rounds: int) -> list[tuple[Round, Round]]:
    return function(info, size, steps, rounds)  # type: ignore[no-any-return]
