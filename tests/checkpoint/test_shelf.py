"""What a keeper decides about the snapshots of a directory, without a keeper."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from goodrun.checkpoint.drain import Limiter, Work
from goodrun.checkpoint.fence import Token
from goodrun.checkpoint.memory import Memory, SlotShape
from goodrun.checkpoint.retention import Keep
from goodrun.checkpoint.shelf import Job, Layout, Shelf, Snapshot, State
from goodrun.checkpoint.storage import Disk
from goodrun.checkpoint.writing import Writer, _Running

OLD, NEW = Token(0, 1), Token(0, 2)


@pytest.mark.parametrize("token", [OLD, NEW])
def test_what_a_newer_durable_one_has_overtaken_is_not_written_after_it(token: Token) -> None:
    late = Snapshot(1, 2, OLD, "l", state=State.WAITING, not_before=1e9)
    after = Snapshot(3, 6, token, "l", state=State.WAITING)
    shelf = Shelf("d", snapshots=[late, Snapshot(2, 4, token, "l", state=State.WRITING), after])
    told: list[Any] = []
    host: Any = SimpleNamespace(shelves={"d": shelf}, tell=lambda *what: told.append(what), settled=lambda: None)
    assert shelf.overtaken() == []
    shelf.snapshots[1].state, after.state = State.DURABLE, State.COPYING
    Writer(host, lambda act: None, Disk(), Limiter(), patience_s=1.0, others_s=60.0).tend()
    assert (late.state, after.state) == (State.FAILED, State.COPYING)
    [(_, which, message)] = told
    assert which is late and message["replaced"]


def test_what_nodes_hold_together_is_written_anew() -> None:
    """A newer attempt goes on from step 4: this node writes what it was told to, whatever had become of it; step 6 will never be whole."""
    job = Job(OLD, 3, (0,), Keep(), "", -1)
    for state in (State.WAITING, State.FAILED, State.DURABLE, State.HELD):
        four = Snapshot(2, 4, OLD, "l", {0: (0, 1), 2: (2, 1)}, state=state)
        six = Snapshot(3, 6, OLD, "l", {0: (1, 1)}, state=State.WAITING)
        shelf = Shelf("d", {OLD: job}, [four, six])
        assert shelf.writes(four) == {0}
        before = four.name
        assert shelf.goes_on(four, NEW, [0, 2]) == [six]
        assert shelf.writes(four) == {0, 2}
        assert shelf.goes_on(four, NEW, [0, 2]) == []  # asked by another rank
        assert (shelf.token, shelf.next(0.0), six.state) == (NEW, four, State.FAILED)
        assert four.name != before and ".g2-" in four.name  # nobody may be waiting in the old place for parts that do not come


def test_one_that_is_being_written_is_given_up_first() -> None:
    """Until then it is nobody else's; one that other nodes write is only held."""
    writing, held = Snapshot(1, 2, OLD, "l", {0: (0, 1)}, state=State.WRITING), Snapshot(2, 4, OLD, "l", {0: (1, 1)}, state=State.WAITING)
    shelf = Shelf("d", {OLD: Job(OLD, 3, (0,), Keep(), "", -1)}, [writing, held])
    shelf.goes_on(writing, NEW, [0])
    shelf.goes_on(held, NEW, [])
    assert (writing.state, held.state) == (State.WRITING, State.HELD)
    assert shelf.next(0.0) is None


def test_what_nodes_went_on_from_together_stays_until_the_second_snapshot() -> None:
    """The first of the new attempt may never be whole on all nodes: until then the old one can be restored once more."""
    shape = SlotShape(8, 8)
    four = Snapshot(2, 4, OLD, "l", {0: (0, 1)}, state=State.DURABLE, adopted=NEW, taken_over=frozenset({0}))
    jobs = {token: Job(token, 2, (0,), Keep(), "", -1, {("l", 0): Layout(shape, ())}) for token in (OLD, NEW)}
    for job in jobs.values():
        job.layouts["l", 0].slots = {slot: Memory.create(shape.size) for slot in range(2)}
    shelf = Shelf("d", jobs, [four])
    shelf.given(NEW, 1, 6, "l", 0, 0, 1)
    assert four in shelf.snapshots
    shelf.given(NEW, 2, 8, "l", 0, 1, 1)
    assert [s.step for s in shelf.snapshots] == [6, 8]
    assert list(shelf.jobs) == [NEW]
    for memory in jobs[NEW].layouts["l", 0].slots.values():
        memory.close()


def test_a_newer_snapshot_does_not_wait_for_ever_for_another_nodes_parts() -> None:
    """A node whose storage is dead tells nobody; one that is merely slow has a minute, and five times as long as this one took."""
    shelf = Shelf("d", snapshots=[writing := Snapshot(1, 2, OLD, "l", state=State.WRITING)])
    work = Work(Path("d"), "name", 2, 2, {}, True, None, Keep(), own_s=10.0)  # type: ignore[arg-type]
    host: Any = SimpleNamespace(guests={3: SimpleNamespace(asked_to_settle=False, directory="d")})
    writer = Writer(host, lambda act: None, Disk(), Limiter(), patience_s=1.0, others_s=60.0)
    running = _Running(shelf, writing, work, {})
    assert writer.in_vain(running, 1000.0) is None  # nothing is held up by it
    shelf.snapshots.append(Snapshot(2, 4, OLD, "l", state=State.WAITING))
    assert writer.in_vain(running, 100.0) is None
    assert "nothing has come from the other nodes for 111 s, and a newer snapshot waits" in str(writer.in_vain(running, 111.0))
