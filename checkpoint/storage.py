"""The one seam through which a save touches its storage: a few verbs, each made of calls that a faulty storage can refuse."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")
P = TypeVar("P", contravariant=True)
Bytes = bytes | bytearray | memoryview
_BLOCK = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)
_CHUNK = 4 << 20


class Storage(Protocol[P]):
    """Put, get (a range), list and delete: what directories and object stores have in common.

    A file is put front to back and never changed; `write` may leave half a file where it fails, `replace` puts a small one in place whole
    or not at all. Nothing is appended to, and nothing written on a condition.
    """

    width: int
    """How many files it pays to write at once."""
    look_every_s: float
    """How long to wait between two looks for what other nodes write."""

    def make_directory(self, path: P) -> None:
        """Make sure that files can be put under this path."""

    def write(self, path: P, parts: Iterable[Bytes], *, direct: bool = False) -> None:
        """Put a file."""

    def replace(self, path: P, content: bytes) -> None:
        """Put a small file, whole or not at all, in the place of one that may be there."""

    def sync_directory(self, path: P) -> None:
        """Make the names under a path durable."""

    def remove_tree(self, path: P, first: str) -> None:
        """Delete all files under a path; `first`, the commit mark, before all else: what is half deleted must not count as whole."""

    def remove(self, path: P) -> None:
        """Delete one file."""

    def read(self, path: P, at: int = 0, length: int | None = None) -> bytes:
        """A range of a file, or all of it; fewer bytes where it ends earlier. FileNotFoundError where there is none."""

    def blocks(self, path: P) -> Iterator[bytes]:
        """A whole file, block by block."""

    def entries(self, path: P) -> dict[str, int | None]:
        """The names directly under a path: bytes of a file, None for what has names under it. Empty where nothing is there."""

    def exists(self, path: P) -> bool:
        """Whether there is a file, or anything under this path."""


class Disk:
    """A directory tree on a local or shared file system."""

    width = 2
    look_every_s = 0.02

    def call(self, verb: str, path: Path, act: Callable[[], T]) -> T:
        """Every system call of a save comes by here; tests count them and let one of them fail."""
        return act()

    def make_directory(self, path: Path) -> None:
        """Make a directory, its parents too, and the name of it durable; one that is there already is taken as it is."""
        if path.is_dir():
            return
        if not path.parent.is_dir():
            self.make_directory(path.parent)
        with suppress(FileExistsError):  # another node was quicker
            self.call("mkdir", path, path.mkdir)
        self.sync_directory(path.parent)

    def write(self, path: Path, parts: Iterable[Bytes], *, direct: bool = False) -> None:
        """Write a file front to back, without seeks, and make its content durable.

        `direct` goes around the page cache where the file system can: a third of the processor time, which training has better use for.
        The parts must then begin at page boundaries in memory, and all but the last end there.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            fd = self.call("open", path, lambda: os.open(path, flags | (_DIRECT if direct else 0), 0o644))
        except OSError as e:
            if not direct or e.errno != errno.EINVAL:
                raise
            direct, fd = False, self.call("open", path, lambda: os.open(path, flags, 0o644))
        try:
            for part in parts:
                view = memoryview(part).cast("B") if len(part) else memoryview(b"")
                while len(view):
                    if direct and len(view) < _BLOCK:
                        direct = _buffered(fd)
                    some = view[: len(view) // _BLOCK * _BLOCK] if direct else view
                    try:
                        view = view[self.call("write", path, lambda v=some: os.write(fd, v)) :]  # type: ignore[misc]
                    except OSError as e:
                        if not direct or e.errno != errno.EINVAL:
                            raise
                        direct = _buffered(fd)
            self.call("fsync", path, lambda: os.fsync(fd))
        finally:
            os.close(fd)

    def replace(self, path: Path, content: bytes) -> None:
        """Put a small file in place whole or not at all, and make sure of it: write aside, fsync, rename, fsync the directory."""
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self.write(aside, [content])
            self.call("rename", path, lambda: aside.replace(path))
        except BaseException:
            with suppress(OSError):
                self.call("unlink", aside, aside.unlink)
            raise
        self.sync_directory(path.parent)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        fd = self.call("opendir", path, lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            self.call("fsyncdir", path, lambda: os.fsync(fd))
        finally:
            os.close(fd)

    def remove_tree(self, path: Path, first: str) -> None:
        """Delete a directory of files; `first`, the commit mark, before all else: what is half deleted must not count as whole."""
        mark = path / first
        if mark.exists():
            self.call("unlink", mark, mark.unlink)
            self.sync_directory(path)
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                self.remove_tree(entry, first)
            else:
                self.call("unlink", entry, entry.unlink)
        self.call("rmdir", path, path.rmdir)

    def remove(self, path: Path) -> None:
        """Delete one file."""
        self.call("unlink", path, path.unlink)

    def read(self, path: Path, at: int = 0, length: int | None = None) -> bytes:
        """A range of a file."""
        with path.open("rb") as f:
            f.seek(at)
            return f.read(length)

    def blocks(self, path: Path) -> Iterator[bytes]:
        """A whole file, block by block."""
        with path.open("rb") as f:
            while chunk := f.read(_CHUNK):
                yield chunk

    def entries(self, path: Path) -> dict[str, int | None]:
        """The names in a directory."""
        found: dict[str, int | None] = {}
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as listed:
            for entry in listed:
                with suppress(FileNotFoundError):  # another process deletes
                    found[entry.name] = None if entry.is_dir() else entry.stat().st_size
        return found

    def exists(self, path: Path) -> bool:
        """Whether it is there."""
        return path.exists()


def _buffered(fd: int) -> bool:
    """From here on by way of the page cache; False, as what is written is no longer direct."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
    return False
