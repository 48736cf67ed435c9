"""The crash matrix with two DDP ranks: at every file-system call of a save storage fails, or ranks, the keeper or the launcher are killed.

After each case another launch restores on two ranks: what it gets is, bit for bit, what was saved at that step, and it is not older than
what was committed before. The calls are counted, not sampled, with `-m exhaustive`; each day a few of them are tried.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.manifest import first_fault

LONG = pytest.mark.exhaustive
LEAST_CALLS = 30
"""A save of two ranks makes more calls than this; fewer would mean that the seam has a hole."""
calls = pytest.mark.parametrize("calls", [pytest.param(None, marks=LONG), (9, 31)], ids=["every call", "some calls"])
pytestmark = pytest.mark.timeout(1800)
LAUNCHER = Path(__file__).with_name("faulty_launcher.py")


class Matrix:
    """Two ranks save steps 1 and 2, the second with a fault at one call; in a folder of its own for each call."""

    def __init__(self, tmp_path: Path, keepers: Any, job_in: Callable[[Path], Any], patch: pytest.MonkeyPatch) -> None:
        self._tmp, self.keepers, self._job_in, self._patch = tmp_path, keepers, job_in, patch

    def walk(self, case: Callable[[Path, int], int], calls: Iterable[int] | None = None) -> None:
        """Try these calls, or one after the other until one run does not meet its fault. `case` gives the oldest step that may be left."""
        for at in calls or itertools.count(1):
            folder = self._tmp / f"call-{at}"
            folder.mkdir()
            self.keepers.folder = folder
            self._patch.setenv("GOODRUN_RUN_STARTED", "1000")
            least = case(folder, at)
            assert not (folder / "hole").exists(), (folder / "hole").read_text()
            self._next_launch(folder, least)
            if not (folder / "fired").exists():
                assert calls is None and at > LEAST_CALLS
                return

    def begin(self, folder: Path, then: str) -> Callable[[], list[int]]:
        """Start the ranks; what is returned waits for their exit statuses."""
        ended = self._job_in(folder).begin(2, "matrix", str(folder / "ckpt"), then)
        return lambda: [code for code, _ in ended()]

    def _next_launch(self, folder: Path, least: int) -> None:
        """What is on the disk is whole; a new launch finds it, with the right bits, goes on, and clears up."""
        newest = next(f for f in found_in(folder / "ckpt") if f.manifest is not None)
        assert newest.step >= least
        assert newest.manifest is not None
        assert first_fault(newest.path, newest.manifest.files.items()) is None
        self._patch.setenv("GOODRUN_RUN_STARTED", str(time.time_ns()))
        self.keepers.start()
        job = self._job_in(folder)
        job.good(2, "matrix", str(folder / "ckpt"), "leave")
        assert self.keepers.end() == 0
        for rank in (0, 1):
            assert job.told("restored", rank) == newest.step
            assert job.told(f"restored-{newest.step}", rank) == job.told(f"saved-{newest.step}", rank)
        assert [f.step for f in found_in(folder / "ckpt")] == [newest.step + 1], "what was left half written or superfluous is gone"


@pytest.fixture
def matrix(tmp_path: Path, keepers: Any, job_in: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Matrix:
    """Where the cases are played."""
    return Matrix(tmp_path, keepers, job_in, monkeypatch)


@LONG
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", "EROFS"])
def test_a_call_that_fails_once(matrix: Matrix, fault: str) -> None:
    """Whatever call fails once, the save is tried again and becomes durable."""

    def case(folder: Path, at: int) -> int:
        matrix.keepers.start(fault, at, "once")
        assert matrix.begin(folder, "wait")() == [0, 0]
        assert matrix.keepers.end() == 0
        return 2

    matrix.walk(case)


@calls
@pytest.mark.parametrize("fault", ["ENOSPC", pytest.param("EIO", marks=LONG), pytest.param("EROFS", marks=LONG)])
def test_storage_that_fails_from_a_call_on(matrix: Matrix, calls: tuple[int, ...] | None, fault: str) -> None:
    """Storage may fail for good at any call: what was committed before stays."""

    def case(folder: Path, at: int) -> int:
        matrix.keepers.start(fault, at, "on")
        assert matrix.begin(folder, "give-up")() == [0, 0]
        assert matrix.keepers.end() == 0
        return 1

    matrix.walk(case, calls)


@calls
@pytest.mark.parametrize("whom", ["pid.r1", pytest.param("pid.r*", marks=LONG)], ids=["one rank", "every rank"])
def test_ranks_killed_at_a_call(matrix: Matrix, calls: tuple[int, ...] | None, whom: str) -> None:
    """SIGKILL of one rank or of all at any call: the snapshot is the keeper's, which makes it durable."""

    def case(folder: Path, at: int) -> int:
        matrix.keepers.start(f"KILL:{whom}", at, "before")
        codes = matrix.begin(folder, "wait")()
        if (folder / "fired").exists():
            assert codes[1] == -signal.SIGKILL
        assert matrix.keepers.end() == 0
        return 2

    matrix.walk(case, calls)


@LONG
@pytest.mark.parametrize("how", ["before", "after"])
def test_keeper_and_ranks_killed_at_a_call(matrix: Matrix, how: str) -> None:
    """The ranks die after the snapshot and the keeper at any call: what was committed before is whole."""

    def case(folder: Path, at: int) -> int:
        matrix.keepers.start("KILL", at, how)
        assert matrix.begin(folder, "die")() == [-signal.SIGKILL] * 2
        assert matrix.keepers.end() == (-signal.SIGKILL if (folder / "fired").exists() else 0)
        return 1

    matrix.walk(case)


@calls
def test_keeper_killed_at_a_call_and_replaced(matrix: Matrix, calls: tuple[int, ...] | None) -> None:
    """The keeper dies at any call and the ranks live: the one that takes its place makes the snapshot durable."""

    def case(folder: Path, at: int) -> int:
        matrix.keepers.start("KILL", at, "before")
        ended = matrix.begin(folder, "wait")
        status = matrix.keepers.dead_or(lambda: (folder / "left.r0").exists())
        if status is not None:
            assert status == -signal.SIGKILL
            (folder / "armed").unlink()
            matrix.keepers.start()
        assert ended() == [0, 0]
        assert matrix.keepers.end() == 0
        return 2

    matrix.walk(case, calls)


@calls
def test_launcher_killed_at_a_call(matrix: Matrix, calls: tuple[int, ...] | None) -> None:
    """SIGKILL of a real launcher at any call: its ranks die with it, and the keeper makes the snapshot durable."""

    def case(folder: Path, at: int) -> int:
        command = [sys.executable, str(LAUNCHER), str(at), str(folder)]
        launcher = subprocess.run(command, env=os.environ | {"GOODRUN_HOME": str(folder / "home")}, capture_output=True, timeout=120)
        fired = (folder / "fired").exists()
        assert launcher.returncode == (-signal.SIGKILL if fired else 0), launcher.stderr
        return 2

    matrix.walk(case, calls)
