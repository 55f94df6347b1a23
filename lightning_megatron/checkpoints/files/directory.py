"""Layout of a checkpoint directory, and how a new one is published atomically.

::

    epoch=1-step=40.ckpt/
        rank-00000.bin ...   elements of tensors, one file per rank that wrote any
        index.json           location of every box of every tensor
        meta.pt              loops, callbacks, schedulers, hyperparameters, optimizer groups
        about.json           step, layout, versions, for people
        manifest.json        size and checksum of every file above
        COMPLETE             written last: checksum of the manifest

On a mounted file system the directory is written under a temporary name beside the final one and then renamed, so a
directory with the final name is complete. Object stores cannot rename atomically: there the files lie in a subfolder,
and the marker, a single object, names the subfolder that is the checkpoint's content.
"""

from __future__ import annotations

import json
import re
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

from lightning_megatron.checkpoints.files.checksums import Checksum, check_kind, checksum
from lightning_megatron.checkpoints.files.folder import Folder
from lightning_megatron.checkpoints.files.storage import FileSum

MARKER = "COMPLETE"
MANIFEST = "manifest.json"
META = "meta.pt"
ABOUT = "about.json"
_UNMARKED = f"{{}} has no marker `{MARKER}`: it is no checkpoint, or is incomplete, as writing it was interrupted."
_IGNORED = "ignoring an incomplete checkpoint: {}"
_TEMPORARY = re.compile(r"^\.(?P<name>.+)\.[0-9a-f]{8}\.(incomplete|replaced)$")
_FORGOTTEN_S = 3600.0
_BLOCK = 16 * 1024 * 1024


class IncompleteCheckpointError(RuntimeError):
    """A checkpoint directory was not completely written, or has lost files since."""


class DamagedCheckpointError(IncompleteCheckpointError):
    """The content of a file of a checkpoint directory differs from what was written."""


class CheckpointFolder(Folder):
    """The files of a complete checkpoint; only files that its manifest lists can be read.

    Args:
        folder: holds the files.
        files: name -> size and checksum.
    """

    def __init__(self, folder: Folder, files: Mapping[str, FileSum]) -> None:
        self.__dict__.update(folder.__dict__)
        self.files = dict(files)

    def open(self, name: str, mode: str) -> IO[bytes]:
        """Open one of the files.

        Raises:
            DamagedCheckpointError: the manifest does not list it, so it has no checksum.
        """
        if name not in self.files:
            raise DamagedCheckpointError(
                f"{self}/{name} is needed, but `{MANIFEST}` does not list it: the directory mixes files of several "
                "checkpoints. Resume from another one."
            )
        return super().open(name, mode)

    def read(self, name: str) -> bytes:
        """Read a small file in full, and compare its checksum.

        Raises:
            DamagedCheckpointError: the checksum differs.
        """
        content, total = super().read(name), self.files[name]
        check_kind(total.checksum)
        if checksum(content) != total.checksum:
            raise _damaged(self, name, f"checksum {checksum(content)} instead of {total.checksum}")
        return content

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Read the ``.bin`` files and compare their checksums; with several shares, every ``shares``-th file.

        Args:
            share: index of the share to verify, 0 to ``shares - 1``.
            shares: number of shares, for instance of ranks that load.

        Raises:
            DamagedCheckpointError: a file is missing, or its size or checksum differs.
        """
        for number, name in enumerate(sorted(name for name in self.files if name.endswith(".bin"))):
            damage = _damage(self, name, self.files[name]) if number % shares == share else None
            if damage is not None:
                raise _damaged(self, name, damage)


def _damaged(folder: Folder, name: str, damage: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{folder}/{name} is damaged: {damage}. Resume from another checkpoint; to read this one nevertheless, pass "
        "`Trainer(plugins=[MegatronCheckpointIO(verify=False)])`, which helps with `.bin` files only."
    )


@dataclass(frozen=True)
class Marker:
    """Content of the marker file.

    Attributes:
        data: subfolder that holds the files; empty on mounted file systems.
        manifest_checksum: checksum of the manifest.
        step: number of optimizer steps taken.
        time: when the checkpoint was finished, in seconds since 1970.
    """

    data: str
    manifest_checksum: str
    step: int
    time: float


def new_token() -> str:
    """A random name for a temporary folder or subfolder; broadcast it, so that all ranks use the same."""
    return uuid.uuid4().hex[:8]


def data_folder(target: Folder, token: str) -> Folder:
    """Folder into which the files of a new checkpoint are written before it is published."""
    return target.sibling(f".{target.name}.{token}.incomplete") if target.is_local else target.child(token)


def publish(target: Folder, data: Folder, files: dict[str, FileSum], step: int, time: float) -> None:
    """Publish ``data`` as the checkpoint ``target``; an earlier checkpoint there is deleted afterwards.

    Args:
        target: the checkpoint.
        data: from :func:`data_folder`; holds all files except manifest and marker.
        files: name -> size and checksum of every file.
        step: number of optimizer steps taken.
        time: in seconds since 1970.
    """
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
    """Delete temporary folders of interrupted saves: those of the same checkpoint, and others older than an hour."""
    for folder in target.parent.folders():
        match = _TEMPORARY.match(folder.name)
        if match is not None and (match["name"] == target.name or folder.age() > _FORGOTTEN_S):
            folder.remove()


def open_checkpoint(path: Any, storage_options: dict[str, Any] | None = None) -> CheckpointFolder:
    """Open a checkpoint, after checking its marker, its manifest and the sizes of all files.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        IncompleteCheckpointError: there is no marker, the manifest does not match it, or a file is missing or has
            another size.
    """
    target = Folder(path, storage_options)
    if not target.exists():
        beside = _newest(_with_markers(target.parent.folders()))
        raise FileNotFoundError(
            f"Checkpoint file not found: {path}"
            + ("" if beside is None else f"; the newest one beside it is {beside}.")
        )
    marker = _marker_or_none(target)
    if marker is None:
        within = _newest(_with_markers(target.folders()))
        if within is not None:
            raise IncompleteCheckpointError(
                f"{target} is a folder of checkpoints and not one itself. Use one of them; the newest is {within}."
            )
        newest = _newest(_with_markers(target.parent.folders()))
        remedy = "another one; there is no complete checkpoint beside it"
        if newest is not None:
            remedy = f"the newest complete one, {newest}"
        raise IncompleteCheckpointError(f"{_UNMARKED.format(target)} Use {remedy}.")
    return _opened(target, marker)


def _opened(target: Folder, marker: Marker) -> CheckpointFolder:
    """The files of a checkpoint with a marker, after checking its manifest and the sizes of all files."""
    data = target.child(marker.data)
    files = read_manifest(data, marker)
    for name, total in files.items():
        size = data.size(name)
        if size != total.bytes:
            raise IncompleteCheckpointError(
                f"{data}/{name} has {size if size is not None else 'no'} bytes, {total.bytes} were written; "
                f"`lightning-megatron checkpoint verify {target}` tells more."
            )
    return CheckpointFolder(data, files)


def _with_markers(folders: Iterable[Folder]) -> Iterator[tuple[Folder, Marker]]:
    """Those of some folders that have a marker."""
    return ((folder, marker) for folder in folders if (marker := _marker_or_none(folder)) is not None)


def _newest(marked: Iterable[tuple[Any, Marker]]) -> Any:
    """The newest of some checkpoints, by the time of their markers; ``None`` without any.

    Steps would not do: where an earlier run has left a checkpoint of more steps, that run would be resumed.
    """
    found = max(marked, key=lambda pair: (pair[1].time, pair[1].step, str(pair[0])), default=None)
    return None if found is None else found[0]


def read_marker(target: Folder) -> Marker:
    """Read the marker of a checkpoint.

    Raises:
        IncompleteCheckpointError: there is no valid marker.
    """
    marker = _marker_or_none(target)
    if marker is None:
        raise IncompleteCheckpointError(f"the checkpoint {target} has no marker `{MARKER}`.")
    return marker


def _marker_or_none(target: Folder) -> Marker | None:
    try:
        content = json.loads(target.read(MARKER))
        data, step, time = str(content["data"]), int(content["step"]), float(content["time"])
        return Marker(data, str(content["manifest_checksum"]), step, time) if _is_plain(data, empty=True) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def _is_plain(name: str, *, empty: bool = False) -> bool:
    """Whether ``name`` is a plain file name, which cannot point outside of the folder."""
    return (empty or bool(name)) and "/" not in name and "\\" not in name and name not in (".", "..")


def read_manifest(data: Folder, marker: Marker) -> dict[str, FileSum]:
    """Read the manifest: name -> size and checksum of every file.

    Raises:
        IncompleteCheckpointError: the manifest is missing, or its checksum is not the marker's.
        DamagedCheckpointError: it is not a valid list of files, or lists files outside of the checkpoint.
    """
    try:
        content = data.read(MANIFEST)
    except FileNotFoundError as error:
        raise IncompleteCheckpointError(f"{data}/{MANIFEST} is missing.") from error
    check_kind(marker.manifest_checksum)
    if checksum(content) != marker.manifest_checksum:
        raise IncompleteCheckpointError(f"{data}/{MANIFEST} has changed since the checkpoint was written.")
    try:
        listed = json.loads(content)["files"].items()
        files = {name: FileSum(int(total["bytes"]), str(total["checksum"])) for name, total in listed}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{data}/{MANIFEST} is not a valid list of files: {error!r}.") from error
    if outside := [name for name in files if not _is_plain(name)]:
        raise DamagedCheckpointError(f"{data}/{MANIFEST} lists files outside of the checkpoint: {outside}.")
    return files


def damaged_files(path: Any, storage_options: dict[str, Any] | None = None) -> Iterator[tuple[str, str | None]]:
    """Yield every file of a checkpoint with a description of its damage, or ``None``; reads all files in full.

    Raises:
        IncompleteCheckpointError: there is no marker, or the manifest does not match it.
    """
    target = Folder(path, storage_options)
    marker = read_marker(target)
    data = target.child(marker.data)
    for name, total in read_manifest(data, marker).items():
        yield name, _damage(data, name, total)


def _damage(data: Folder, name: str, total: FileSum) -> str | None:
    check_kind(total.checksum)
    found, size, block = Checksum(), 0, memoryview(bytearray(min(_BLOCK, max(total.bytes, 1))))
    try:
        with data.open(name, "rb") as file:
            while count := file.readinto(block):  # type: ignore[attr-defined]
                found.add(block[:count])
                size += count
    except FileNotFoundError:
        return "missing"
    if size != total.bytes:
        return f"{size} bytes instead of {total.bytes}"
    return None if str(found) == total.checksum else f"checksum {found} instead of {total.checksum}"


def remove_checkpoint(path: Any, storage_options: dict[str, Any] | None = None) -> None:
    """Delete a checkpoint; the marker is deleted first, so that a partly deleted checkpoint counts as incomplete."""
    target = Folder(path, storage_options)
    if not target.is_link() and not target.is_file():
        target.remove_file(MARKER)
    target.remove()


def newest_of(paths: Iterable[str | None]) -> str | None:
    """The newest of some complete checkpoints, by time; ``None`` without any."""
    newest: str | None = _newest((path, read_marker(Folder(path))) for path in paths if path)
    return newest


def newest_complete(folder: Any, suffix: str = ".ckpt", prefix: str = "") -> str | None:
    """Path of the newest complete checkpoint in a folder, by time; warns of incomplete ones.

    Symbolic links (``last.ckpt``) are followed. A run that is killed between the two renames that replace a checkpoint
    leaves the old and the new one complete under temporary names; these count too.

    Args:
        folder: to search.
        suffix: of the names of checkpoints.
        prefix: of the names of checkpoints.

    Returns:
        The path, or ``None`` if there is no complete checkpoint.
    """
    found: list[tuple[Folder, Marker]] = []
    for candidate in Folder(folder).folders():
        temporary = _TEMPORARY.match(candidate.name)
        name = temporary["name"] if temporary else candidate.name
        if not (name.startswith(prefix) and name.endswith(suffix)):
            continue
        marker = _marker_or_none(candidate)
        if marker is None:
            if not temporary:
                warnings.warn(_IGNORED.format(_UNMARKED.format(candidate)), stacklevel=2)
            continue
        try:
            _opened(candidate, marker)
        except IncompleteCheckpointError as error:
            warnings.warn(_IGNORED.format(error), stacklevel=2)
            continue
        found.append((candidate, marker))
    newest = _newest(found)
    return None if newest is None else str(newest)
