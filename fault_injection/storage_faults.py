"""What chaos does to the storage of checkpoints: errors, delays and silent damage at the calls by which a save touches a file system.

Standard library only: it runs in the keeper, which has no torch.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ..progress import Page
from .plan import CHAOS_VARIABLE, RUN_STARTED_VARIABLE, Fault, for_keeper, from_env

T = TypeVar("T")
_REFUSES: Mapping[str, tuple[int, frozenset[str]]] = {
    "enospc": (errno.ENOSPC, frozenset({"mkdir", "open", "write", "rename"})),
    "eio": (errno.EIO, frozenset({"open", "write", "fsync", "opendir", "fsyncdir"})),
    "read-only": (errno.EROFS, frozenset({"mkdir", "open", "rename", "unlink", "rmdir"})),
}
_SAVE = re.compile(r"step-0*(\d+)\.g(\d+)-")
_SHARD = "__*.distcp"
_COMMITTED = "manifest.json"


class StorageFaults:
    """The faults that wait for this storage. One with a duration acts on every call while it lasts, any other on one."""

    def __init__(self, faults: Sequence[Fault], page: Page, run_started: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`run_started` is read on the same clock as `clock`."""
        self._waiting, self._lasting = list(faults), list[tuple[Fault, float]]()
        self._page, self._run_started, self._clock = page, run_started, clock

    def call(self, verb: str, path: Path, act: Callable[[], T]) -> T:
        """Do `act`, one file-system call of a save, or what the plan makes of it."""
        for fault in self._due(path):
            self._lasting.append((fault, self._clock() + (fault.for_s or 0.0)))
        for fault, end in list(self._lasting):
            once = fault.for_s is None and fault.kind != "slow-storage"
            if not once and fault.for_s is not None and self._clock() >= end:
                self._lasting.remove((fault, end))
            elif self._acts(fault, verb, path):
                self._page.chaos_fires(fault.index)
                if once:
                    self._lasting.remove((fault, end))
                if fault.kind in _REFUSES:
                    raise OSError(_REFUSES[fault.kind][0], os.strerror(_REFUSES[fault.kind][0]), str(path))
                if fault.kind == "slow-storage":
                    time.sleep(fault.ms / 1000)
                else:
                    done = act()
                    _damage(fault.kind, path)
                    return done
        return act()

    def _due(self, path: Path) -> list[Fault]:
        save = next((match for part in path.parts if (match := _SAVE.match(part))), None)
        if save is None:
            return []
        step, attempt, elapsed = int(save[1]), int(save[2]), self._clock() - self._run_started
        found = [
            f
            for f in self._waiting
            if attempt >= f.from_attempt and (f.at_step is None or step >= f.at_step) and (f.at_s is None or elapsed >= f.at_s)
        ]
        self._waiting = [f for f in self._waiting if f not in found]
        return found

    @staticmethod
    def _acts(fault: Fault, verb: str, path: Path) -> bool:
        if fault.kind in _REFUSES:
            return verb in _REFUSES[fault.kind][1]
        if fault.kind == "removed-file":
            return verb == "fsyncdir" and (path / _COMMITTED).exists()
        return fault.kind == "slow-storage" or (verb == "fsync" and path.match(_SHARD))


def armed(env: Mapping[str, str], page: Page) -> StorageFaults:
    """The storage's part of the plan in the environment."""
    return StorageFaults(for_keeper(from_env(env[CHAOS_VARIABLE])), page, float(env[RUN_STARTED_VARIABLE]))


def _damage(kind: str, path: Path) -> None:
    """Change what storage holds behind the back of whoever wrote it."""
    if kind == "removed-file":
        min(path.glob(_SHARD)).unlink()
        return
    size = path.stat().st_size
    if kind == "torn-write":
        os.truncate(path, size // 2)
        return
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        [byte] = os.pread(fd, 1, size // 2)
        os.pwrite(fd, bytes([byte ^ 1]), size // 2)
    finally:
        os.close(fd)
