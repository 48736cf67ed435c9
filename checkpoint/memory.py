"""How much memory this node can still give, and the anonymous shared memory that snapshots are kept in."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .pages import enlarge, mapped

PAGE = 4096


def padded(nbytes: int) -> int:
    """The same number rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True)
class SlotShape:
    """How a slot is laid out: a page with the number of the snapshot in it, the shard as it will lie in its file, then the values."""

    shard: int
    values: int

    @property
    def values_at(self) -> int:
        """Where the values begin."""
        return PAGE + padded(self.shard)

    @property
    def size(self) -> int:
        """Bytes of the whole slot."""
        return self.values_at + padded(self.values)


@dataclass
class Memory:
    """A memfd, which nothing but descriptors keeps alive: no file, no name, no limit of /dev/shm."""

    fd: int
    size: int
    map: memoryview = field(init=False)

    def __post_init__(self) -> None:
        """Map it."""
        self.map = mapped(self.fd, self.size)

    @classmethod
    def create(cls, size: int) -> Memory:
        """Fresh memory with every page there already: what is faulted in later stalls whoever touches it first."""
        fd = os.memfd_create("goodrun-snapshot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            memory = cls(fd, size)
            enlarge(fd, memory.map)
            os.posix_fallocate(fd, 0, size)
        except BaseException:
            os.close(fd)
            raise
        return memory

    @property
    def holds(self) -> int:
        """The number of the snapshot that is whole in here; 0 while one is being copied."""
        return int.from_bytes(self.map[:8], "little")

    @holds.setter
    def holds(self, number: int) -> None:
        self.map[:8] = number.to_bytes(8, "little")

    def close(self) -> None:
        """Give it back, as far as nobody else holds it; what still looks at it here keeps it mapped until then."""
        os.close(self.fd)
        self.map = memoryview(b"")


def available(root: Path = Path("/")) -> int:
    """Bytes that can still be taken: what the machine has free, or what the control groups around this process allow, if less."""
    return min(_machine(root), *_groups(root), 1 << 62)


def _machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _groups(root: Path) -> Iterable[int]:
    """What each group from this process's own up to the root leaves, in both versions of control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in names.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            left = _left(folder, limit, usage)
            if left is not None:
                yield left
            if folder == base:
                break


def _left(folder: Path, limit: str, usage: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        cache = _reclaimable(folder)
    except (OSError, ValueError):
        return None
    return None if most == "max" else max(int(most) - used + cache, 0)


def _reclaimable(folder: Path) -> int:
    """Page cache counts as used but goes when memory is needed; shared memory does not."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
