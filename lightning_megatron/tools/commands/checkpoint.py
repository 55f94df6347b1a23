"""``lightning-megatron checkpoint``: inspects, verifies, exports and imports checkpoints.

It needs no process group and no GPU; export and import hold one tensor in memory at a time.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_megatron.tools.commands.conduct import read_json, refusing, working

app = typer.Typer(no_args_is_help=True, help="Inspect, verify, export and import checkpoints.")

_TOKENIZER = (
    "tokenizer*.json",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
)

_Path = Annotated[str, typer.Argument(help="A checkpoint directory, by path or fsspec URL.")]
_Trust = Annotated[bool, typer.Option("--trust", help="Load pickled objects too, which runs code from the file.")]


@app.command()
def inspect(
    path: _Path,
    pattern: Annotated[str, typer.Option("--match", help="Only tensors whose name contains this.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show step, layout, versions, and every tensor's logical shape and type. Works for .ckpt and safetensors too."""
    source = _open(path, trust=False)
    kinds = {name: kind for name, kind in source.kinds.items() if pattern in name}
    tied = {name: first for name, first in source.aliases.items() if pattern in name}
    if as_json:
        tensors = {
            name: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "files": _files(source, name)}
            for name, (shape, dtype) in kinds.items()
        }
        typer.echo(json.dumps({"about": source.about, "tensors": tensors, "tied": tied}))
        return
    _print_tables(path, source, kinds, tied)


def _print_tables(path: str, source: Any, kinds: Any, tied: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console()
    facts = Table(title=path, show_header=False)
    for key, value in source.about.items():
        if key != "huggingface" and value not in ({}, None):
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
            facts.add_row(key, text)
    console.print(facts)
    table = Table(Column("tensor", overflow="fold"), Column("shape", overflow="fold"), "type", "MB", "files")
    total = 0
    for name, (shape, dtype) in sorted(kinds.items(), key=lambda kind: _counted_up(kind[0])):
        size = shape.numel() * dtype.itemsize
        total += size
        shown = " × ".join(map(str, shape)) or "scalar"
        table.add_row(
            name, shown, str(dtype).removeprefix("torch."), f"{size / 1e6:.2f}", str(len(_files(source, name)))
        )
    for name, first in tied.items():
        table.add_row(name, f"is {first}", "", "", "")
    console.print(table)
    console.print(f"{len(kinds)} tensors, {total / 1e6:.2f} MB")


def _counted_up(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 2 before layer 10, whichever rank has written them, and optimizers' states last."""
    numbered = re.split(r"(\d+)", name)
    return [
        (int(name.startswith("optimizer.")), ""),
        *((int(part), "") if part.isdigit() else (0, part) for part in numbered),
    ]


def _files(source: Any, name: str) -> list[str]:
    return sorted({place.file for place in source.metadata.storage_data[name]})


@app.command()
def verify(path: _Path) -> None:
    """Read every file and compare size and checksum; exits 1 if anything is damaged."""
    _check_exists(path)
    from lightning_megatron.checkpoints.files.directory import IncompleteCheckpointError, damaged_files

    broken = False
    try:
        for name, damage in damaged_files(path):
            broken |= damage is not None
            typer.echo(f"{'ok     ' if damage is None else 'DAMAGED'} {name}{'' if damage is None else ': ' + damage}")
    except (IncompleteCheckpointError, OSError, ImportError, ValueError) as error:
        typer.echo(f"INCOMPLETE {error}")
        raise typer.Exit(1) from None
    if broken:
        raise typer.Exit(1)


@app.command("export")
def export_(
    path: _Path,
    to: Annotated[Path, typer.Argument(help="File to write (.ckpt), or folder (safetensors).")],
    form: Annotated[str, typer.Option("--format", help="lightning, safetensors or adapter.")] = "",
    optimizer: Annotated[bool, typer.Option(help="Write the optimizers' state too (lightning).")] = True,
    prefix: Annotated[str | None, typer.Option(help="Start of the model's names, taken off (safetensors).")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of the weights, e.g. bfloat16 (safetensors).")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json to put beside the weights.")] = None,
    shard_gb: Annotated[float, typer.Option(help="Largest size of one file, in GB (safetensors).")] = 5.0,
    merge: Annotated[
        bool, typer.Option("--merge-adapters", help="Add an adapter to the weights (safetensors).")
    ] = False,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="Name of the adapter, if there are several; to merge several, repeat it: A, or A=0.5."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="Folder of the model, for a checkpoint without the frozen weights (--merge-adapters)."),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder whose tokenizer is copied beside the weights.")] = None,
    trust: _Trust = False,
) -> None:
    """Write one Lightning .ckpt, Hugging Face safetensors with their config.json, or an adapter of peft."""
    _check_exists(path)
    form = form or ("lightning" if to.suffix == ".ckpt" else "safetensors")
    if form not in ("lightning", "safetensors", "adapter"):
        raise typer.BadParameter(f"`--format {form}` must be lightning, safetensors or adapter.")
    if merge and form != "safetensors":
        raise typer.BadParameter(f"`--merge-adapters` is for `--format safetensors`, not {form}.")
    if base is not None and not merge:
        raise typer.BadParameter("`--base` is for `--merge-adapters`, which adds an adapter to its weights.")
    if tokenizer is not None and form == "lightning":
        raise typer.BadParameter("`--tokenizer` is for folders, and `--format lightning` writes one file.")
    if form == "adapter" and len(adapter or ()) > 1:
        raise typer.BadParameter("`--format adapter` writes one adapter; give `--adapter` once.")
    if form == "lightning":
        _refuse_for_lightning(prefix=prefix, dtype=dtype, config=config, adapter=adapter or None)
    if shard_gb <= 0:
        raise typer.BadParameter(f"`--shard-gb {shard_gb}` must be above 0.")
    vocabulary = [] if tokenizer is None else _tokenizer_files(tokenizer)
    content = None if config is None else read_json(config, "--config")
    import torch

    from lightning_megatron.checkpoints.files.exporting import export_adapter, export_lightning, export_safetensors

    source = _open(path, trust)
    chosen = None if dtype is None else _dtype(getattr(torch, dtype, None), dtype)
    with _refusing_damage(), working(f"writing {to}"):
        if form == "lightning":
            export_lightning(source, to, optimizer=optimizer)
            typer.echo(f"wrote {to}")
            return
        if form == "adapter":
            names = export_adapter(source, to, adapter=next(iter(adapter or ()), None), dtype=chosen)
        else:
            options: dict[str, Any] = {"shard_bytes": int(shard_gb * 1e9), "merge": merge, "adapters": adapter or ()}
            options["base"] = None if base is None else _open_base(base)
            names = export_safetensors(source, to, prefix=prefix, dtype=chosen, config=content, **options)
        for file in vocabulary:
            shutil.copy(file, to / file.name)
    typer.echo(f"wrote {len(names)} tensors to {to}")


def _refuse_for_lightning(**options: Any) -> None:
    """Refuse options that change nothing in a Lightning file."""
    given = [f"`--{name}`" for name, value in options.items() if value is not None]
    if given:
        raise typer.BadParameter(f"{', '.join(given)} is for folders, and `--format lightning` writes one file.")


def _tokenizer_files(folder: Path) -> list[Path]:
    """Files of a tokenizer, by the names that Hugging Face gives them."""
    found = sorted(file for pattern in _TOKENIZER for file in folder.glob(pattern))
    if not found:
        raise typer.BadParameter(f"`--tokenizer {folder}`: there are no files of a tokenizer in it.")
    return found


def _dtype(found: Any, name: str) -> Any:
    import torch

    if not isinstance(found, torch.dtype):
        raise typer.BadParameter(f"`--dtype {name}` is no type of torch; use float32, float16 or bfloat16.")
    return found


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="A Lightning .ckpt, a .safetensors file, or a folder with some.")],
    path: Annotated[str, typer.Argument(help="Checkpoint directory to create.")],
    prefix: Annotated[str, typer.Option(help="Put before the names of a Hugging Face model, e.g. model.")] = "",
    trust: _Trust = False,
) -> None:
    """Make a checkpoint directory that any layout loads."""
    _check_exists(source)
    from lightning_megatron.checkpoints.files.importing import import_checkpoint

    opened = _open(source, trust)
    if opened.kind == "directory":
        raise typer.BadParameter(f"{source} is a checkpoint directory already.")
    with _refusing_damage(), working(f"writing {path}"):
        names = import_checkpoint(opened, path, prefix=prefix)
    typer.echo(f"wrote {len(names)} tensors to {path}")


def _open(path: str, trust: bool) -> Any:
    _check_exists(path)
    with _refusing_damage(), working(f"reading {path}"):
        from lightning_megatron.checkpoints.files.sources import open_source

        return open_source(path, trust=trust)


def _open_base(folder: Path) -> Any:
    _check_exists(str(folder))
    from lightning_megatron.checkpoints.files.library_names import open_weights

    return open_weights(folder)


def _check_exists(path: str) -> None:
    """Refuse a path that leads nowhere before torch is imported, which takes seconds."""
    if "://" in path:
        return
    here = Path(path)
    if not here.exists():
        raise typer.BadParameter(f"there is no checkpoint at {path}.")
    if here.is_dir() and not any(here.iterdir()):
        raise typer.BadParameter(f"there is no checkpoint in {path}: the folder is empty.")
    within = sorted(str(inner.parent) for inner in here.glob("*/COMPLETE"))
    if within and not (here / "COMPLETE").exists():
        raise typer.BadParameter(f"{path} is a folder of checkpoints; name one: {', '.join(within)}.")


@contextmanager
def _refusing_damage() -> Iterator[None]:
    """Turn errors of reading and writing checkpoints, those of damaged ones too, into refusals of the call."""
    with refusing():
        try:
            yield
        except RuntimeError as error:
            raise typer.BadParameter(str(error)) from error
