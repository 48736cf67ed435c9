"""Where runs live, what each came to, and how one is found."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from goodrun.elastic_runner import events as ev
from goodrun.elastic_runner.journal import FILE_NAME, Journal
from goodrun.elastic_runner.runs import RunNotFound, find_run, launcher_alive, list_runs, new_run_id, remember, runs_home


def make(run_dir: Path, *events: ev.Event, hour: int = 6, run_id: str = "") -> Path:
    """A run directory with a record that began at `hour` o'clock."""
    run_dir.mkdir(parents=True)
    journal = Journal(run_dir, wall=lambda: datetime(2026, 11, 30, hour, tzinfo=timezone.utc), node="n1")
    for event in (ev.RunStarted(run_id=run_id or run_dir.name, script="train.py", pid=1), *events):
        journal.write(event)
    journal.close()
    return run_dir


@pytest.mark.parametrize(
    ("env", "home"),
    [
        ({"GOODRUN_HOME": "/g", "XDG_STATE_HOME": "/x"}, "/g/runs"),
        ({"GOODRUN_HOME": "", "XDG_STATE_HOME": "/x"}, "/x/goodrun/runs"),
        ({"XDG_STATE_HOME": "relative"}, "~/.local/state/goodrun/runs"),
        ({}, "~/.local/state/goodrun/runs"),
    ],
)
def test_home(env: dict[str, str], home: str) -> None:
    """$GOODRUN_HOME beats $XDG_STATE_HOME beats ~/.local/state; an empty or (XDG) relative value counts as none."""
    assert runs_home(env) == Path(home).expanduser()


def test_ids_sort_by_time() -> None:
    """An id carries the second at which its run began, and a tail that keeps runs of the same second apart."""
    early, late = datetime(2026, 11, 30, 6, 25, 12), datetime(2026, 11, 30, 6, 25, 13)
    rng = random.Random(1)
    ids = {new_run_id(early, rng) for _ in range(20)}
    assert len(ids) == 20
    assert all(i.startswith("20261130-062512-") and len(i) == 20 for i in ids)
    assert max(ids) < new_run_id(late, rng)


def test_listing(tmp_path: Path) -> None:
    """Runs are listed newest first, each with what it came to, how often it restarted and how far it got."""
    ended = ev.RunEnded(outcome="succeeded", step=30)
    restart = (
        ev.AttemptStarted(world_size=2),
        ev.RankProgress(steps=(7, 8)),
        ev.RankProgress(steps=(9, 8)),
        ev.AttemptStarted(world_size=2),
    )
    make(tmp_path / "a", *restart, ended, hour=5)
    make(tmp_path / "b", *restart, hour=7)
    make(tmp_path / "c", hour=6)
    make(tmp_path / "d", hour=4)
    (tmp_path / "not-a-run").mkdir()
    alive = {"b": True, "c": False, "d": None}
    runs = list_runs(tmp_path, lambda run: alive[run.run_id])
    assert [(r.id, r.outcome, r.restarts, r.step) for r in runs] == [
        ("b", "running", 1, 9),
        ("c", "died", 0, -1),
        ("a", "succeeded", 1, 30),
        ("d", "unknown", 0, -1),
    ]
    assert runs[0].script == "train.py"
    assert runs[0].started.startswith("2026-11-30T07:00")
    assert runs[0].path == str(tmp_path / "b")
    assert list_runs(tmp_path / "absent") == []


def test_a_run_elsewhere_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run under --run-dir, relative too, is listed once and found by its id(s); when its directory goes, it is listed no more."""
    home, place = tmp_path / "home", make(tmp_path / "work" / "out", run_id="id1")
    monkeypatch.chdir(tmp_path / "work")
    remember(home, Path("out"), "id0")
    remember(home, Path("out"), "id1")
    remember(home, Path("out"), "id1")
    assert [r.id for r in list_runs(home)] == ["id1"]
    assert find_run("id0", home, tmp_path).resolve() == find_run("id1", home, tmp_path).resolve() == place
    assert find_run("id", home, tmp_path).resolve() == place  # both ids are one run
    (place / FILE_NAME).unlink()
    place.rmdir()
    assert list_runs(home) == []


def test_the_newest_place_of_an_id_counts(tmp_path: Path) -> None:
    """An id that is used again leads to where it was used last."""
    remember(tmp_path / "home", make(tmp_path / "old"), "out")
    remember(tmp_path / "home", make(tmp_path / "new"), "out")
    assert find_run("out", tmp_path / "home", tmp_path).resolve() == tmp_path / "new"


def test_remembering_never_hurts(tmp_path: Path) -> None:
    """A run at home needs no link, a real directory is never replaced, and an unusable home is passed over."""
    run = make(tmp_path / "home" / "a")
    remember(tmp_path / "home", run, "a")
    remember(tmp_path / "home", make(tmp_path / "b"), "a")
    assert (tmp_path / "home" / "a").is_dir()
    assert not (tmp_path / "home" / "a").is_symlink()
    (tmp_path / "file").touch()
    remember(tmp_path / "file", run, "x")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "home/20261130-07-b"),
        ("20261130-06-a", "home/20261130-06-a"),
        ("20261130-07", "home/20261130-07-b"),
        ("here", "here"),
        ("./here", "here"),
        ("here/events.jsonl", "here"),
        ("home/20261130-06-a", "home/20261130-06-a"),
    ],
)
def test_finding(tmp_path: Path, text: str | None, found: str) -> None:
    """A run is found as the newest, by id, by the beginning of one, or by path to its directory or its record."""
    make(tmp_path / "home" / "20261130-06-a", hour=6)
    make(tmp_path / "home" / "20261130-07-b", hour=7)
    make(tmp_path / "here", hour=8)
    assert find_run(text, tmp_path / "home", tmp_path).resolve() == tmp_path / found


@pytest.mark.parametrize("text", ["2026", "nosuch", "", " ", "empty", "a\0b", "x" * 5000, "*", "../home"])
def test_not_finding(tmp_path: Path, text: str) -> None:
    """What fits no run, or several, is refused in one sentence with the value, the home and the way out."""
    make(tmp_path / "home" / "20261130-06-a")
    make(tmp_path / "home" / "20261130-07-b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunNotFound) as refused:
        find_run(text, tmp_path / "home", tmp_path)
    words = str(refused.value)
    assert repr(text) in words
    assert str(tmp_path / "home") in words
    assert "goodrun runs" in words
    assert "\n" not in words


def test_no_run_at_all(tmp_path: Path) -> None:
    """Asked for the newest run where there is none, the answer names the home and how to come by one."""
    with pytest.raises(RunNotFound, match=r"no run in .*home yet: .*goodrun train.py"):
        find_run(None, tmp_path / "home", tmp_path)


def test_the_launcher_is_alive_or_not() -> None:
    """Alive is this very process: not one on another host (unknown), not a dead one, not one that inherited its number."""
    here, now = socket.gethostname(), datetime.now(timezone.utc).isoformat()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert launcher_alive(ev.RunStarted(node=here, pid=os.getpid(), wall=now)) is True
    assert launcher_alive(ev.RunStarted(node=here, pid=child.pid, wall=now)) is False
    assert launcher_alive(ev.RunStarted(node=here, pid=os.getpid(), wall="2020-01-01T00:00:00+00:00")) is False
    assert launcher_alive(ev.RunStarted(node=here + "-other", pid=os.getpid(), wall=now)) is None
    assert launcher_alive(ev.RunStarted(node=here, wall=now)) is None
