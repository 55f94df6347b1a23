"""Memory of the host for weights and state: in RAM, pinned where a device copies it faster then, or in files.

Files have no name: a process that is killed at any time leaves none behind, and a run goes on from its
checkpoint, which holds the state as ever. Their space is taken when they are made, so that a full disk is an error
with a message, and not a signal in the middle of a step.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

GIB = 1024**3
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


class HostMemory:
    """Allocates memory of the host for this rank.

    Args:
        folder: for files; ``None`` for RAM.
        device: that copies from and to it.

    Attributes:
        bytes: given so far.
    """

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self.folder, self.bytes = folder, 0
        self._pins = folder is None and device.type == "cuda"
        self._given: set[int] = set()

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Uninitialized memory: a flat tensor on the CPU.

        Raises:
            RuntimeError: there is no room on the disk.
        """
        self.bytes += elements * dtype.itemsize
        folder = self.folder
        given = self._ram(elements, dtype) if folder is None or not elements else self._mapped(folder, elements, dtype)
        self._given.add(given.untyped_storage().data_ptr())
        return given

    def take(self, value: Tensor) -> Tensor:
        """``value`` in this memory: itself if it lies there, or where RAM is as good as any other."""
        ours = value.untyped_storage().data_ptr() in self._given
        if ours or (self.folder is None and not self._pins and value.device.type == "cpu"):
            return value
        taken = self.empty(value.numel(), value.dtype).view(value.shape)
        return taken.copy_(value)

    def _ram(self, elements: int, dtype: torch.dtype) -> Tensor:
        if self._pins:
            try:
                return torch.empty(elements, dtype=dtype, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                warnings.warn(f"host memory cannot be pinned, so copies are slower: {error}", stacklevel=2)
        return torch.empty(elements, dtype=dtype)

    def _mapped(self, folder: Path, elements: int, dtype: torch.dtype) -> Tensor:
        size = elements * dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # without a name: gone with the process
                os.posix_fallocate(file.fileno(), 0, size)
                return torch.from_file(f"/dev/fd/{file.fileno()}", shared=True, size=elements, dtype=dtype)
        except OSError as error:
            raise RuntimeError(
                f"`optimizer_offload` finds no room for {size / GIB:.3g} GiB in {folder}, after "
                f"{(self.bytes - size) / GIB:.3g} GiB: {error.strerror}. Free some, or choose another folder."
            ) from error


def check_folder(folder: Path) -> str | None:
    """Create a folder for files; returns what is wrong with it, or ``None``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror}"
    return None


def free_bytes(folder: Path | None) -> int:
    """Free space of a disk, or of this host's memory: what the system and the container leave, whichever is less."""
    if folder is not None:
        disk = os.statvfs(folder)
        return disk.f_bavail * disk.f_frsize
    found = [_available()]
    for limit, used in _CGROUPS:
        try:
            found.append(int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # no such control group, or no limit
            continue
    return max(min(found), 0)


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
