"""Every file-system call of a save, one after the other: it fails, or its process dies at it, and what was committed stays whole.

The calls are counted, not sampled: each test goes on to the next call until one run gets through without meeting the fault.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from goodrun.checkpoint import CheckpointError, DictCheckpoints
from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.manifest import first_fault
from goodrun.checkpoint.places import Where, located

from .stores import Store
from .test_keeper import load, same, state_of

LONG = pytest.mark.exhaustive
LEAST_CALLS = {"directory": 20, "s3": 12, "volume": 12}
"""A save of one rank makes more calls than this; fewer would mean that the seam has a hole."""

STORES = ["directory", pytest.param("s3", marks=LONG), pytest.param("volume", marks=LONG)]
everywhere = pytest.mark.parametrize("store", STORES, indirect=True)
Check = Callable[[Path, Where, Any, Any], None]


def at_every_call(tmp_path: Path, store: Store, keepers: Any, fault: tuple[str, str], check: Check) -> bool:
    """Save step 1 well, then step 2 with `fault` at call 1, 2, 3 …, each in a place of its own.

    `check` sees the folder where the fault is armed, the place, the rank's checkpoints and the handle. Whether the calls were as many as a
    save makes at least.
    """
    at = 0
    while True:
        at += 1
        folder = tmp_path / f"call-{at}"
        folder.mkdir()
        keepers.folder = folder
        keepers.start(fault[0], at, fault[1])
        place = folder / "ckpt" if store.kind == "directory" else located(f"{store.url}/{at}")
        checkpoints = DictCheckpoints(str(place), keep=1)
        checkpoints.save(state_of(1), 1).result(30)
        (folder / "armed").touch()
        pending = checkpoints.save(state_of(2), 2)
        check(folder, place, checkpoints, pending)
        checkpoints._store._saver.close()
        if keepers.process is not None:
            keepers.end()
        if not (folder / "fired").exists():
            return at > LEAST_CALLS[store.kind]


def newest_is_whole(root: Where, least: int) -> None:
    """The newest committed checkpoint has every byte, is not older than `least`, and loads as exactly what was saved at its step."""
    newest = next(f for f in found_in(root) if f.manifest is not None)
    assert newest.step >= least
    assert newest.manifest is not None
    assert first_fault(newest.path, newest.manifest.files.items()) is None
    step, state = load(root)
    assert step is not None and step >= least
    assert same(state, step)


@pytest.mark.timeout(600)
@everywhere
@pytest.mark.parametrize("fault", ["ENOSPC", pytest.param("EIO", marks=LONG), pytest.param("EROFS", marks=LONG)])
def test_a_call_that_fails_once(store: Store, keepers: Any, tmp_path: Path, fault: str) -> None:
    """Whatever call fails once, the save is tried again and becomes durable with the right bits."""

    def check(folder: Path, place: Where, checkpoints: Any, pending: Any) -> None:
        pending.result(30)
        newest_is_whole(place, 2)

    assert at_every_call(tmp_path, store, keepers, (fault, "once"), check)


@pytest.mark.timeout(600)
@everywhere
@pytest.mark.parametrize("fault", ["EROFS", pytest.param("EIO", marks=LONG), pytest.param("ENOSPC", marks=LONG)])
def test_storage_that_fails_from_a_call_on(store: Store, keepers: Any, tmp_path: Path, fault: str) -> None:
    """Storage may fail for good at any call: the last committed checkpoint stays, and the next save after the repair is durable."""

    def check(folder: Path, place: Where, checkpoints: Any, pending: Any) -> None:
        with suppress(CheckpointError):  # the fault may come after the commit
            checkpoints.wait()
        newest_is_whole(place, 1)
        (folder / "armed").unlink()
        checkpoints.save(state_of(3), 3).result(30)
        newest_is_whole(place, 3)
        assert [f.step for f in found_in(place)] == [3], "what was left half written or superfluous is gone"

    assert at_every_call(tmp_path, store, keepers, (fault, "on"), check)


@pytest.mark.timeout(600)
@everywhere
@pytest.mark.parametrize("how", ["before", pytest.param("after", marks=pytest.mark.exhaustive)])
def test_keeper_killed_at_a_call(store: Store, keepers: Any, tmp_path: Path, how: str) -> None:
    """SIGKILL of the keeper before or after any call, the rank gone as well: what is committed is whole and not older than before."""

    def check(folder: Path, place: Where, checkpoints: Any, pending: Any) -> None:
        pending.fate.seen = True
        assert keepers.end() == (-signal.SIGKILL if (folder / "fired").exists() else 0)
        keepers.start()  # what a next launch would find
        newest_is_whole(place, 1)

    assert at_every_call(tmp_path, store, keepers, ("KILL", how), check)


@pytest.mark.timeout(600)
@everywhere
@pytest.mark.exhaustive
def test_keeper_killed_at_a_call_and_replaced(store: Store, keepers: Any, tmp_path: Path) -> None:
    """As above with the rank alive: the keeper that takes the dead one's place makes the snapshot durable."""

    def check(folder: Path, place: Where, checkpoints: Any, pending: Any) -> None:
        keepers.end()
        if (folder / "fired").exists():
            (folder / "armed").unlink()
        keepers.start()
        pending.result(30)
        newest_is_whole(place, 2)

    assert at_every_call(tmp_path, store, keepers, ("KILL", "before"), check)
