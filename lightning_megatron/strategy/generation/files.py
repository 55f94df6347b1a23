"""Files of generated texts, written while they come, so that a run that ends early goes on where it stopped.

Each replica appends to a file of its own, a batch at a time; the first line of it says what was asked for. Once all
prompts are done, the parts become one file in the order of the prompts::

    out.jsonl.part0   {"asked": {...}}  {"index": 0, ...}  {"index": 1, ...}  {"index": 4, ...}
    out.jsonl.part1   {"asked": {...}}  {"index": 2, ...}  {"index": 3, ...}      ──▶  out.jsonl   0 1 2 3 4
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_ASKED = "asked"


def part_of(out: Path, replica: int) -> Path:
    """The file that a replica appends to."""
    return out.with_name(f"{out.name}.part{replica}")


def parts(out: Path) -> list[Path]:
    """Those of an earlier run, or of this one."""
    return sorted(file for file in out.parent.glob(f"{out.name}.part*") if file.name[len(out.name) + 5 :].isdigit())


def check_out(out: Path, asked: Mapping[str, Any]) -> None:
    """Refuse a file that is complete, a folder that is not there, and parts of something else.

    Raises:
        ValueError: says which, and what to do.
    """
    if out.exists():
        raise ValueError(f"`--out {out}` is there already, and complete; remove it, or name another file.")
    if not out.parent.is_dir():
        raise ValueError(f"`--out {out}`: there is no folder {out.parent}.")
    for part in parts(out):
        begun = _read(part)[0]
        differing = [name for name, value in asked.items() if begun is not None and begun.get(name) != value]
        if differing:
            names = ", ".join(differing)
            raise ValueError(
                f"`{part}` was begun with other values of {names}; generate with the same, or remove it to start anew."
            )


def done(out: Path) -> set[int]:
    """Numbers of the prompts that an earlier run has got through."""
    return {line["index"] for part in parts(out) for line in _read(part)[1]}


class PartFile:
    """A replica's part file; a line that an earlier run was writing when it was killed is removed.

    Args:
        file: to write.
        asked: what is to be generated, for :func:`check_out`.
    """

    def __init__(self, file: Path, asked: Mapping[str, Any]) -> None:
        begun, lines = _read(file) if file.exists() else (None, [])
        text = "".join(json.dumps(line) + "\n" for line in ({_ASKED: dict(begun or asked)}, *lines))
        _replace(file, text)
        self._file = file.open("a", encoding="utf-8")

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write a batch, which is on the disk when this returns."""
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """End the file."""
        self._file.close()


def put_together(out: Path) -> None:
    """Make one file of the parts, in the order of the prompts."""
    found = parts(out)
    lines = sorted((line for part in found for line in _read(part)[1]), key=lambda line: line["index"])
    _replace(out, "".join(json.dumps(line) + "\n" for line in lines))
    for part in found:
        part.unlink()


def _replace(file: Path, text: str) -> None:
    new = file.with_name(f".{file.name}.new")
    new.write_text(text, encoding="utf-8")
    new.rename(file)


def _read(part: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Request that a part was begun for, ``None`` if it has no first line, and its complete lines."""
    found = []
    for line in part.read_text(encoding="utf-8").split("\n")[:-1]:  # the last one has not ended
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if not found or _ASKED not in found[0]:
        return None, []
    return found[0][_ASKED], found[1:]
