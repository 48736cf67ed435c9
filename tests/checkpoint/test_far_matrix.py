"""The crash matrix where a save goes to S3, a volume or a mount, with faults on: answers 503, 429 and 401, connections that break off.

As in test_crash_matrix.py every call of a save is tried, one after the other, until a run gets through without meeting its fault. Shards
go in several parts.
"""

from __future__ import annotations

import itertools
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from goodrun.checkpoint import CheckpointError, DictCheckpoints
from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.manifest import first_fault
from goodrun.checkpoint.places import Where, located
from goodrun.checkpoint.wire import ADDRESS_VARIABLE

from .far import Fault
from .stores import Store
from .test_any_size import C58, pool, sent, told  # noqa: F401 (a fixture)
from .test_keeper import load, same, state_of

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("store", ["s3", "volume", "mount"], indirect=True),
]
LEAST_CALLS = {"s3": 14, "volume": 12, "mount": 20}
"""A save of one rank makes more calls than this; fewer would mean that the seam has a hole."""
NEVER = ("EIO", 0, "once")


def every(turn: int, method: str = "", but: str = " ") -> Callable[[str, str], bool]:
    """Picks each so manyth request, of one method or of all, `but` not where the path has that in it."""
    count = itertools.count(1)
    return lambda asked, path: (not method or asked == method) and but not in path and next(count) % turn == 0


@pytest.fixture
def troubled(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store with faults on (a mount has its own), to which files go in parts."""
    monkeypatch.setenv("TEST_PARTS", store.kind)
    if store.server is not None:
        store.server.plan.faults = [
            Fault(every(11), status=503),
            Fault(every(7, "PUT"), cut=1000),
            Fault(every(7, "GET"), cut=100),
            Fault(every(17), status=429, retry_after="0.1"),
            Fault(every(29, but="/signed/"), status=401),
        ]
    return store


def places(store: Store, tmp_path: Path) -> Iterator[tuple[int, Path, Where]]:
    """For call 1, 2, 3 …: a folder where the fault is armed, and a place of its own; until the fault was not met."""
    for at in itertools.count(1):
        folder = tmp_path / f"call-{at}"
        folder.mkdir()
        yield at, folder, located(f"{store.url}/{at}")
        if not (folder / "fired").exists():
            assert at > LEAST_CALLS[store.kind]
            return


def newest_is_whole(place: Where, least: int) -> None:
    """The newest committed checkpoint has every byte, is not older than `least`, and loads as exactly what was saved at its step."""
    newest = next(f for f in found_in(place) if f.manifest is not None)
    assert newest.step >= least
    assert newest.manifest is not None
    assert first_fault(newest.path, newest.manifest.files.items()) is None
    step, state = load(place)  # type: ignore[arg-type]
    assert step is not None and step >= least
    assert same(state, step)


def faulty(store: Store, keepers: Any, tmp_path: Path, fault: str, how: str) -> Iterator[tuple[Path, Where, Any, Any]]:
    """Save step 1 well, then step 2 with `fault` at call 1, 2, 3 …: the folder, the place, the rank's checkpoints and the handle."""
    for at, folder, place in places(store, tmp_path):
        keepers.folder = folder
        keepers.start(fault, at, how)
        checkpoints = DictCheckpoints(str(place), keep=1)
        checkpoints.save(state_of(1), 1).result(300)
        (folder / "armed").touch()
        yield folder, place, checkpoints, checkpoints.save(state_of(2), 2)
        checkpoints._store._saver.close()
        if keepers.process is not None:
            keepers.end()


def test_a_call_that_fails_once(troubled: Store, keepers: Any, tmp_path: Path) -> None:
    """Whatever call fails once, the save is tried again and becomes durable with the right bits."""
    for _, place, _, pending in faulty(troubled, keepers, tmp_path, "EIO", "once"):
        pending.result(300)
        newest_is_whole(place, 2)


def test_storage_that_fails_from_a_call_on(troubled: Store, keepers: Any, tmp_path: Path) -> None:
    """Storage may fail for good at any call: the last committed checkpoint stays, and the next save after the repair is durable."""
    for folder, place, checkpoints, _ in faulty(troubled, keepers, tmp_path, "EROFS", "on"):
        with suppress(CheckpointError):  # the fault may come after the commit
            checkpoints.wait()
        newest_is_whole(place, 1)
        (folder / "armed").unlink()
        for step in (3, 4, 5):  # a deletion may meet one of the faults that are on
            checkpoints.save(state_of(step), step).result(300)
            newest_is_whole(place, step)
            if [f.step for f in found_in(place)] == [step]:
                break
        else:
            pytest.fail("what was left half written or superfluous is still there")


@pytest.mark.parametrize("how", ["before", "after"])
def test_keeper_killed_at_a_call(troubled: Store, keepers: Any, tmp_path: Path, how: str) -> None:
    """SIGKILL of the keeper before or after any call, the rank gone as well: what is committed is whole and not older than before."""
    for folder, place, _, pending in faulty(troubled, keepers, tmp_path, "KILL", how):
        pending.fate.seen = True
        assert keepers.end() == (-signal.SIGKILL if (folder / "fired").exists() else 0)
        keepers.start(*NEVER)  # what a next launch would find
        newest_is_whole(place, 1)


def test_keeper_killed_at_a_call_and_replaced(troubled: Store, keepers: Any, tmp_path: Path) -> None:
    """As above with the rank alive: the keeper that takes the dead one's place makes the snapshot durable."""
    for _, place, _, pending in faulty(troubled, keepers, tmp_path, "KILL", "before"):
        keepers.end()
        keepers.start(*NEVER)
        pending.result(300)
        newest_is_whole(place, 2)


@pytest.mark.parametrize(("fault", "how"), [("EIO", "once"), ("KILL", "before")])
def test_several_ranks(
    troubled: Store, pool: subprocess.Popen[str], keepers: Any, tmp_path: Path, fault: str, how: str  # noqa: F811
) -> None:
    """Three ranks save, a call of their first save fails or kills the keeper, which is replaced: two ranks restore every value."""
    for at, folder, place in places(troubled, tmp_path):
        keepers.folder = folder
        (folder / "armed").touch()
        keepers.start(fault, at, how)
        sent(pool, C58, [3, 2], str(place), {**troubled.environ, ADDRESS_VARIABLE: keepers.name})
        assert pool.stdout is not None
        while not select.select([pool.stdout], [], [], 0.05)[0]:
            if keepers.process.poll() is not None:
                keepers.end()
                keepers.start(*NEVER)
        told(pool)
        keepers.end()
