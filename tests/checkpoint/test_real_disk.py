"""A disk that is really full, and one that is really remounted read-only: a tmpfs in a mount namespace of its own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from goodrun.checkpoint import CheckpointError, DictCheckpoints, PendingSave
from goodrun.checkpoint.catalogue import found_in

from .test_crash_matrix import newest_is_whole
from .test_keeper import state_of

LONG = pytest.mark.exhaustive
PAGE = 4096


class Tmpfs:
    """A small disk. Only the process that holds its namespace has it mounted; all others reach it by way of that one's root."""

    def __init__(self, where: Path, size: int) -> None:
        """Make the namespace, and the disk in it."""
        where.mkdir()
        mount = f"mount -t tmpfs -o size={size} tmpfs '{where}' && echo mounted && exec cat"
        command = ["unshare", *([] if os.getuid() == 0 else ["-r"]), "-m", "sh", "-c", mount]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "mounted\n":
            pytest.skip(f"no disk can be mounted here: {self._holder.stderr.read().strip()}")
        self._where, self.path = where, Path(f"/proc/{self._holder.pid}/root{where}")

    def remounting(self, how: str) -> list[str]:
        """The command that makes it read-only (ro) or takes that back (rw)."""
        names = ["-m"] if os.getuid() == 0 else ["-m", "-U", "--preserve-credentials"]
        return ["nsenter", "-t", str(self._holder.pid), *names, "mount", "-o", f"remount,{how}", str(self._where)]

    @property
    def free(self) -> int:
        """Bytes that it can still take."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """It goes with its namespace."""
        self._holder.communicate("")


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Tmpfs]:
    """A disk of 2 MiB."""
    found = Tmpfs(tmp_path / "disk", 2 << 20)
    yield found
    found.close()


def fault_of(checkpoints: DictCheckpoints, pending: PendingSave) -> str | None:
    """What a save has failed of, after a few tries; None if it has not."""
    try:
        checkpoints.wait()
    except CheckpointError as e:
        return str(e)
    finally:
        pending.fate.seen = True
    return None


def next_is_durable(checkpoints: DictCheckpoints, place: Path) -> None:
    """With the disk well again, the next save is committed and clears up."""
    checkpoints.save(state_of(3), 3).result(60)
    newest_is_whole(place, 3)
    assert [f.step for f in found_in(place)] == [3]
    checkpoints._store.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("pages", [pytest.param(None, marks=LONG), (0, 1, 40, 66)], ids=["every page", "some pages"])
def test_a_disk_that_is_full(tmpfs: Tmpfs, keepers: Any, pages: tuple[int, ...] | None) -> None:
    """So many pages are left, and no more: what was committed stays, and the save after the disk was cleared is durable."""
    for left in pages or itertools.count():
        keepers.start()
        place, ballast = tmpfs.path / f"ckpt-{left}", tmpfs.path / "ballast"
        checkpoints = DictCheckpoints(place, keep=1)
        checkpoints.save(state_of(1), 1).result(60)
        ballast.write_bytes(bytes(tmpfs.free - left * PAGE))
        pending = checkpoints.save(state_of(2), 2)
        fault = fault_of(checkpoints, pending)
        assert fault is None or "No space left on device" in fault
        fits = fault is None
        newest_is_whole(place, 2 if fits else 1)
        ballast.unlink()
        next_is_durable(checkpoints, place)
        assert keepers.end() == 0
        subprocess.run(["rm", "-r", str(place)], check=True)
        if fits:
            assert left > 64, "a checkpoint has more than a quarter of a MiB"
            return
    assert pages is not None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("calls", [pytest.param(None, marks=LONG), (1, 9, 17)], ids=["every call", "some calls"])
def test_a_disk_that_becomes_read_only(tmpfs: Tmpfs, keepers: Any, tmp_path: Path, calls: tuple[int, ...] | None) -> None:
    """It is remounted at a call of a save, where the kernel lets it: not while a file is being written."""
    refused = 0
    for at in calls or itertools.count(1):
        folder = tmp_path / f"call-{at}"
        folder.mkdir()
        (folder / "run").write_text(json.dumps(tmpfs.remounting("ro")))
        keepers.folder = folder
        keepers.start("RUN", at, "once")
        place = tmpfs.path / f"ckpt-{at}"
        checkpoints = DictCheckpoints(place, keep=1)
        checkpoints.save(state_of(1), 1).result(60)
        (folder / "armed").touch()
        pending = checkpoints.save(state_of(2), 2)
        fault = fault_of(checkpoints, pending)
        assert fault is None or "Read-only file system" in fault
        refused += fault is not None
        subprocess.run(tmpfs.remounting("rw"), check=True)
        newest_is_whole(place, 1)
        (folder / "armed").unlink()
        next_is_durable(checkpoints, place)
        assert keepers.end() == 0
        subprocess.run(["rm", "-r", str(place)], check=True)
        if not (folder / "fired").exists():
            break
    assert refused
