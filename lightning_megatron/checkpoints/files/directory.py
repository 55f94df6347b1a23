"""When a checkpoint directory is whole, and how it becomes so in one step.

::

    epoch=1-step=40.ckpt/
        rank-00000.bin ...   elements of tensors, one file per rank that wrote any
        index.json           where every box of every tensor lies
        meta.pt              loops, callbacks, schedulers, hyperparameters, optimizer groups
        about.json           step, layout, versions: what a human asks for first
        manifest.json        size and checksum of every file above
        COMPLETE             written last: checksum of the manifest

On a mounted file system all of this is written under a temporary name beside the final one and renamed, so a directory
of the final name is whole. Object stores cannot rename: there the files lie in a subfolder of their own, and the
marker, a single object, is what makes that subfolder the checkpoint's content.
"""

from __future__ import annotations

import json
import re
import uuid
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lightning_megatron.checkpoints.files.checksums import Checksum, check_kind, checksum
from lightning_megatron.checkpoints.files.folder import Folder
from lightning_megatron.checkpoints.files.storage import FileSum

MARKER = "COMPLETE"
MANIFEST = "manifest.json"
META = "meta.pt"
ABOUT = "about.json"
_TEMPORARY = re.compile(r"^\.(?P<name>.+)\.[0-9a-f]{8}\.(incomplete|replaced)$")
_FORGOTTEN_S = 3600.0
_BLOCK = 16 * 1024 * 1024


class IncompleteCheckpointError(RuntimeError):
    """A checkpoint directory was not written to its end, or has lost files since."""


@dataclass(frozen=True)
class Marker:
    """Content of the marker.

    Attributes:
        data: subfolder that holds the files; empty on mounted file systems.
        manifest_checksum: of the manifest.
        step: optimizer steps taken.
        time: seconds since 1970 when the checkpoint was finished.
    """

    data: str
    manifest_checksum: str
    step: int
    time: float


def new_token() -> str:
    """A fresh name for a temporary or subfolder; agree on it over ranks."""
    return uuid.uuid4().hex[:8]


def data_folder(target: Folder, token: str) -> Folder:
    """Where the files of a new checkpoint are written before it is whole."""
    return target.sibling(f".{target.name}.{token}.incomplete") if target.is_local else target.child(token)


def publish(target: Folder, data: Folder, files: dict[str, FileSum], step: int, time: float) -> None:
    """Make ``data`` the checkpoint ``target``; what was there before is deleted once the new one is whole."""
    manifest = json.dumps({"format": 1, "files": {name: asdict(total) for name, total in files.items()}}).encode()
    data.write(MANIFEST, manifest)
    marker = Marker("" if target.is_local else data.name, checksum(manifest), step, time)
    encoded = json.dumps({"format": 1, **asdict(marker)}).encode()
    if not target.is_local:
        before = _marker_or_none(target)
        target.write(MARKER, encoded)
        if before is not None:
            target.child(before.data).remove()
        return
    data.flush_names()
    data.write(MARKER, encoded)
    data.flush_names()
    replaced = None
    if target.exists() or target.is_link():
        replaced = target.sibling(f".{target.name}.{new_token()}.replaced")
        target.rename_to(replaced)
    data.rename_to(target)
    target.parent.flush_names()
    if replaced is not None:
        replaced.remove()
    _remove_leftovers(target)


def _remove_leftovers(target: Folder) -> None:
    """Delete what interrupted saves have left: those of the same name, and any that nobody has touched for an hour."""
    for folder in target.parent.folders():
        match = _TEMPORARY.match(folder.name)
        if match is not None and (match["name"] == target.name or folder.age() > _FORGOTTEN_S):
            folder.remove()


def open_checkpoint(path: Any, storage_options: dict[str, Any] | None = None) -> Folder:
    """The folder with a checkpoint's files, after a look at its marker and at the sizes of all files.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        IncompleteCheckpointError: no marker, or a file is missing or too short.
    """
    target = Folder(path, storage_options)
    if not target.exists():
        raise FileNotFoundError(f"no checkpoint at {target}.")
    marker = _marker_or_none(target)
    if marker is None:
        raise IncompleteCheckpointError(
            f"the checkpoint {target} has no marker `{MARKER}`: it was not written to its end. Use "
            '`ckpt_path="last"` to take the newest complete one.'
        )
    data = target.child(marker.data)
    for name, total in read_manifest(data, marker).items():
        size = data.size(name)
        if size != total.bytes:
            raise IncompleteCheckpointError(
                f"{data}/{name} has {size if size is not None else 'no'} bytes, {total.bytes} were written; "
                f"`lightning-megatron checkpoint verify {target}` tells more."
            )
    return data


def read_marker(target: Folder) -> Marker:
    """The marker of a checkpoint.

    Raises:
        IncompleteCheckpointError: there is none.
    """
    marker = _marker_or_none(target)
    if marker is None:
        raise IncompleteCheckpointError(f"the checkpoint {target} has no marker `{MARKER}`.")
    return marker


def _marker_or_none(target: Folder) -> Marker | None:
    try:
        content = json.loads(target.read(MARKER))
        return Marker(**{key: content[key] for key in ("data", "manifest_checksum", "step", "time")})
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def read_manifest(data: Folder, marker: Marker) -> dict[str, FileSum]:
    """Size and checksum of every file.

    Raises:
        IncompleteCheckpointError: the manifest is not the one that the marker speaks of.
    """
    try:
        content = data.read(MANIFEST)
    except FileNotFoundError as error:
        raise IncompleteCheckpointError(f"{data}/{MANIFEST} is missing.") from error
    check_kind(marker.manifest_checksum)
    if checksum(content) != marker.manifest_checksum:
        raise IncompleteCheckpointError(f"{data}/{MANIFEST} has changed since the checkpoint was written.")
    return {name: FileSum(**total) for name, total in json.loads(content)["files"].items()}


def damaged_files(path: Any, storage_options: dict[str, Any] | None = None) -> Iterator[tuple[str, str | None]]:
    """Yield every file of a checkpoint with what is wrong with it, or ``None``; reads everything.

    Raises:
        IncompleteCheckpointError: there is no marker, or not the manifest it speaks of.
    """
    target = Folder(path, storage_options)
    marker = read_marker(target)
    data = target.child(marker.data)
    for name, total in read_manifest(data, marker).items():
        yield name, _damage(data, name, total)


def _damage(data: Folder, name: str, total: FileSum) -> str | None:
    check_kind(total.checksum)
    found, size = Checksum(), 0
    try:
        with data.open(name, "rb") as file:
            while block := file.read(_BLOCK):
                found.add(block)
                size += len(block)
    except FileNotFoundError:
        return "missing"
    if size != total.bytes:
        return f"{size} bytes instead of {total.bytes}"
    return None if str(found) == total.checksum else f"checksum {found} instead of {total.checksum}"


def remove_checkpoint(path: Any, storage_options: dict[str, Any] | None = None) -> None:
    """Delete a checkpoint; the marker goes first, so a half-deleted one is not taken for whole."""
    target = Folder(path, storage_options)
    if not target.is_link() and not target.is_file():
        target.remove_file(MARKER)
    target.remove()


def newest_of(paths: Iterable[str | None]) -> str | None:
    """The newest of complete checkpoints, by steps taken, then by time."""
    marked = [(marker.step, marker.time, path) for path in paths if path for marker in [read_marker(Folder(path))]]
    return max(marked)[2] if marked else None


def newest_complete(folder: Any, suffix: str = ".ckpt", prefix: str = "") -> str | None:
    """Path of the newest complete checkpoint in a folder, by steps taken, then by time; warns about incomplete ones.

    Symbolic links (``last.ckpt``) count as what they point to. A run that was killed between the two renames that
    replace a checkpoint leaves both the old and the new one whole under temporary names: they count too.
    """
    found: list[str] = []
    parent = Folder(folder)
    for candidate in parent.folders():
        temporary = _TEMPORARY.match(candidate.name)
        name = temporary["name"] if temporary else candidate.name
        if not (name.startswith(prefix) and name.endswith(suffix)):
            continue
        if temporary and _marker_or_none(candidate) is None:
            continue
        try:
            open_checkpoint(str(candidate))
        except (IncompleteCheckpointError, FileNotFoundError) as error:
            warnings.warn(f"ignoring an incomplete checkpoint: {error}", stacklevel=2)
            continue
        found.append(str(candidate))
    return newest_of(found)
