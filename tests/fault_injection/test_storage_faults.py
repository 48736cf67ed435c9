"""A storage with faults refuses, delays or damages exactly what the plan says, and says so on its page."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from goodrun.checkpoint.storage import Disk
from goodrun.elastic_runner.faulty_keeper import FaultyDisk
from goodrun.fault_injection import parse_plan
from goodrun.fault_injection.storage_faults import StorageFaults
from goodrun.progress import Page

SHARD = bytes(range(256)) * 64


class Storage:
    """A checkpoint directory on a disk with faults, and a clock that the test moves."""

    def __init__(self, root: Path, plan: str, page: Page) -> None:
        self.root, self.page, self.now = root, page, 100.0
        self.disk: Disk = FaultyDisk(StorageFaults(parse_plan(plan), page, 100.0, clock=lambda: self.now))

    def save(self, step: int, attempt: int = 0) -> Path:
        """What a save does to storage, in short."""
        path = self.root / f"step-{step:010d}.g{attempt}-abcdef"
        self.disk.make_directory(path)
        self.disk.write(path / "__0_0.distcp", [SHARD])
        self.disk.replace(path / "manifest.json", b"{}")
        return path

    @property
    def fired(self) -> int:
        return self.page.read().chaos_fired


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Callable[[str], Storage]]:
    page, fd = Page.create()
    yield lambda plan: Storage(tmp_path, plan, page)
    page.close()
    os.close(fd)


@pytest.mark.parametrize(("kind", "number"), [("enospc", errno.ENOSPC), ("eio", errno.EIO), ("read-only", errno.EROFS)])
def test_an_error_comes_once_from_its_step_on(storage, kind, number):
    """The saves before the step are whole, one call of the first at or after it is refused, and the next try succeeds."""
    s = storage(f"{kind}@step=20")
    s.save(10)
    assert s.fired == 0
    with pytest.raises(OSError) as caught:
        s.save(25)
    assert (caught.value.errno, s.fired) == (number, 1)
    assert (s.save(25) / "manifest.json").exists()


def test_an_error_with_a_time_lasts_that_long(storage):
    """Every try fails until the time is over."""
    s = storage("enospc:for=3s@0s")
    for now in (100.0, 101.0, 102.9):
        s.now = now
        with pytest.raises(OSError):
            s.save(5)
    s.now = 103.0
    s.save(5)


def test_slow_storage_is_slow(storage):
    """Each call takes its milliseconds longer, for good."""
    s = storage("slow-storage:ms=20@step=1")
    begin = time.monotonic()
    s.save(1)
    assert time.monotonic() - begin > 8 * 0.02
    assert s.fired == 1


def test_a_torn_write_keeps_half(storage):
    """Storage has half of the shard, whoever wrote it was told that all is there."""
    assert (storage("torn-write@step=1").save(1) / "__0_0.distcp").read_bytes() == SHARD[: len(SHARD) // 2]


def test_a_bit_flips(storage):
    """One bit of the shard is another one, and of the next save none."""
    s = storage("bit-flip@phase=save")
    damaged = (s.save(1) / "__0_0.distcp").read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(damaged, SHARD, strict=True)) == 1
    assert (s.save(2) / "__0_0.distcp").read_bytes() == SHARD


def test_a_file_of_a_complete_checkpoint_goes(storage):
    """The commit mark is there, the shard is not."""
    path = storage("removed-file@step=1").save(1)
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json"]


def test_an_attempt_holds_a_storage_fault_back(storage):
    """It comes with the first save of its attempt."""
    s = storage("eio@phase=save,attempt=2")
    s.save(1, attempt=1)
    with pytest.raises(OSError):
        s.save(2, attempt=2)
