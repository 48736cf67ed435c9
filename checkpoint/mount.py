"""Object stores that are mounted as a file system: Unity Catalog volumes, gcsfuse and others. They take files front to back only."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from .storage import Bytes, Disk

T = TypeVar("T")
_NOT_HAD = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EIO}
"""What such file systems answer when they are asked to sync a directory."""
_WHOLE = {"fuseblk", "fuse.fuse-overlayfs", "fuse.sshfs", "fuse.glusterfs"}
"""File systems in user space that are like any other."""


class Mount(Disk):
    """Sequential writes alone: no rename, no append, no second look at what is being written.

    The commit mark is put in place by a plain write. It carries a checksum of itself, so that half of one is none.
    """

    def __init__(self, through: Callable[[str, Path, Callable[[], T]], T] | None = None) -> None:
        """`through` is the seam that calls go by, where it is another storage's."""
        self._through = through

    def call(self, verb: str, path: Path, act: Callable[[], T]) -> T:
        """Every system call of a save comes by here."""
        return act() if self._through is None else self._through(verb, path, act)  # type: ignore[arg-type, return-value]

    def write(self, path: Path, parts: Iterable[Bytes], *, direct: bool = False) -> None:
        """Write front to back, never around the page cache."""
        with suppress(FileNotFoundError):  # some mounts refuse to open a file for writing that is there, as after a try that broke off
            self.call("unlink", path, path.unlink)
        super().write(path, parts, direct=False)

    def replace(self, path: Path, content: bytes) -> None:
        """Write it in place: there is no rename to rely on."""
        self.write(path, [content])

    def sync_directory(self, path: Path) -> None:
        """As far as the mount knows the word."""
        try:
            super().sync_directory(path)
        except OSError as e:
            if e.errno not in _NOT_HAD:
                raise


def sequential_only(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether this path lies on a mount that may refuse renames and random writes: a volume, or a file system in user space."""
    absolute = os.path.abspath(path)
    if absolute.startswith("/Volumes/"):
        return True
    best, kind = "", ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = fields.split(" ")[4].replace("\\040", " ")
        if len(point) >= len(best) and (absolute == point or absolute.startswith(point.rstrip("/") + "/")):
            best, kind = point, rest.split(" ")[0]
    return kind.startswith("fuse") and kind not in _WHOLE
