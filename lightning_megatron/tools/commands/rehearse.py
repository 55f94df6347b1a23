"""``lightning-megatron rehearse``: runs one step of one rank of a launch, in a single process."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_megatron.tools.commands.conduct import refusing, working

_AXES = {
    "t": "tensor_parallel_size",
    "p": "pipeline_parallel_size",
    "d": "data_parallel_size",
    "v": "virtual_pipeline_parallel_size",
    "b": "micro_batch_size",
}


def rehearse(
    target: Annotated[
        str,
        typer.Argument(help="file.py:function or module:function; returns a LightningModule, or it and a batch."),
    ],
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    layout: Annotated[
        str, typer.Option(help="Sizes, e.g. t8 p64 d6: tensor, pipeline, data; v chunks and b micro-batch may follow.")
    ] = "t1 p1 d1",
    rank: Annotated[int, typer.Option(help="Global rank to be.")] = 0,
    schedule: Annotated[str | None, typer.Option(help="Pipeline schedule; interleaved where v is given.")] = None,
    devices_per_node: Annotated[int, typer.Option(help="Ranks on each node.")] = 8,
    host_gib: Annotated[
        float | None, typer.Option(help="Free memory of a node for activation_offload; without it as much as is asked.")
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="Further argument of MegatronStrategy, name=value; may be repeated.")
    ] = None,
    trainer: Annotated[
        list[str] | None, typer.Option(help="Argument of the Trainer, e.g. gradient_clip_val=1.0; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Where an error came from.")] = False,
) -> None:
    """Build and run one step as one rank would, in one process: nothing is sent, and weights take no memory.

    Prints the parameters, bytes, instructions and communication of that rank, or the error that it would have raised.
    """
    with refusing():  # before Lightning is imported, which takes seconds
        arguments = strategy_arguments([layout, *(more or [])], schedule, strategy or [])
        trainer_arguments = _named(trainer or [], "--trainer")
        _check_target(target)
    world = math.prod(arguments.get(_AXES[axis], 1) for axis in "tpd")
    try:
        with working(f"rehearsing rank {rank} of {world}"):
            from lightning_megatron.strategy.strategy import MegatronStrategy
            from lightning_megatron.tools.rehearsal import rehearse as run

            build = load(target)
            found = run(
                MegatronStrategy(**arguments),
                build,
                world_size=world,
                rank=rank,
                devices_per_node=devices_per_node,
                host_gib=host_gib,
                **trainer_arguments,
            )
    except Exception as error:  # any error of the launch is a result of the rehearsal
        if show_traceback:
            traceback.print_exc()
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(json.dumps(found.as_dict(), indent=1) if as_json else found.describe())


def strategy_arguments(sizes: Sequence[str], schedule: str | None, extra: Sequence[str]) -> dict[str, Any]:
    """Parse arguments of ``MegatronStrategy`` from the command line.

    Args:
        sizes: such as ``["t8", "p64", "d6"]``.
        schedule: name of the schedule; None means ``interleaved`` with several chunks, else the strategy's default.
        extra: such as ``["activation_recompute=full"]``.

    Raises:
        ValueError: a size or an argument cannot be read.
    """
    arguments: dict[str, Any] = {}
    for size in " ".join(sizes).replace(",", " ").split():
        matched = re.fullmatch(r"([tpdvb])([1-9]\d*)", size)
        if matched is None:
            raise ValueError(f"`--layout` has {size!r}; write sizes as t8 p64 d6, with letters {', '.join(_AXES)}.")
        arguments[_AXES[matched[1]]] = int(matched[2])
    if schedule is None and arguments.get("virtual_pipeline_parallel_size", 1) > 1:
        schedule = "interleaved"
    if schedule is not None:
        arguments["pipeline_schedule"] = schedule
    return arguments | _named(extra, "--strategy")


def _named(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """Parse ``["a=1", "b=x"]`` to ``{"a": 1, "b": "x"}``.

    Raises:
        ValueError: an entry has no ``=``; the message names ``option``.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"`{option} {pair}` must be name=value.")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def _check_target(target: str) -> None:
    """Refuse what names no function in a file or module that exists.

    Raises:
        ValueError: with the target.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ValueError(f"`{target}` must name a function, as in train.py:build.")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"`{target}`: there is no file {place}.")


def load(target: str) -> Callable[[], Any]:
    """Import the function that ``file.py:function`` or ``module:function`` names.

    Raises:
        ValueError: there is no such file or function.
    """
    place, _, name = target.rpartition(":")
    if not place:
        raise ValueError(f"`{target}` must name a function, as in train.py:build.")
    directory = str(Path(place).resolve().parent if place.endswith(".py") else Path.cwd())
    sys.path.insert(0, directory)
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        function = getattr(module, name)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(f"`{target}`: {error}") from error
    if not callable(function):
        raise ValueError(f"`{target}` is a {type(function).__name__}, not a function.")
    found: Callable[[], Any] = function
    return found


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ImportError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
