"""The dashboard shows a run as it stands, fits the terminal, follows a record that grows, and only ever reads."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from goodrun.elastic_runner import events as ev
from goodrun.elastic_runner.dashboard.board import Board
from goodrun.elastic_runner.dashboard.follow import Follower
from goodrun.elastic_runner.dashboard.screen import screen
from goodrun.elastic_runner.exporting import status
from goodrun.elastic_runner.journal import FILE_NAME, Journal
from goodrun.elastic_runner.reading import top_main


def at(t: float, event: ev.Event, attempt: int = 0) -> ev.Event:
    """The event as the journal would have stamped it."""
    return dataclasses.replace(event, t=t, wall=f"2026-11-30T06:{int(t) // 60:02}:{t % 60:06.3f}+00:00", node="n1", attempt=attempt)


def story(ranks: int = 4) -> list[ev.Event]:
    """A run whose rank 1 was killed at step 20, which then went on without it, starving for data."""
    slots = tuple(range(ranks))
    left = tuple(s for s in slots if s != 1)
    told = [
        at(0, ev.RunStarted(run_id="r1", script="jobs/train.py", slots=slots), -1),
        at(1, ev.AttemptStarted(world_size=ranks, slots=slots)),
        at(10, ev.FirstStep(step=1, first_step_t=10)),
        at(30, ev.RankProgress(steps=(20,) * ranks, step_t=30)),
        at(
            31,
            ev.Failed(
                kind="slot-lost", rank=1, slot=1, step=20, best_step=20, cause="rank 1 lost its slot", message="boom\ntrace", fault_t=30.5
            ),
        ),
        at(31, ev.Decided(action="restart without", slots=left, reason="slot 1 is lost")),
        at(32, ev.Stopped(seconds=1)),
        at(33, ev.AttemptStarted(world_size=ranks - 1, slots=left), 1),
        at(40, ev.Restored(step=15), 1),
        at(40, ev.FirstStep(step=16, first_step_t=40), 1),
    ]
    n = len(left)
    more = {"last_step_s": (0.5,) * n, "silent_s": (0.1,) * n, "phases": ("step",) * n, "saved_step": 50, "durable_step": 40}
    return [*told, at(80, ev.RankProgress(steps=(56,) * n, data_wait_s=(10.0,) * n, step_t=80, **more), 1)]


@pytest.mark.parametrize(
    ("news", "words"),
    [
        ([], "checkpoint step 40 durable, step 50 under way to storage"),
        ([ev.Saving(step=50, done=25_000_000, total=100_000_000)], "step 50 under way to storage: 25 % of 100 MB"),
        ([ev.Saving(step=50, total=1), ev.SaveEnded(step=50, fate="durable")], "checkpoint step 50 durable"),
        ([ev.Saving(step=50, trouble="bucket: 503 Slow Down; trying again")], "step 40 durable; bucket: 503 Slow Down; trying again"),
        ([ev.SaveEnded(step=50, fate="kept", why="storage is gone; it is kept at /k")], "storage is gone; it is kept at /k"),
        ([ev.SaveEnded(step=50, fate="failed", why="disk full"), ev.SaveEnded(step=55, fate="durable")], "checkpoint step 55 durable"),
        ([ev.SaveEnded(step=55, fate="skipped")], "step 55 skipped: storage is slower than the cadence"),
    ],
)
def test_the_way_of_a_checkpoint_is_shown(news, words):
    """How far it is on its way, what is in its way, and what became of it; the status line names trouble, too."""
    board = Board().extend([*story(), *(at(81 + i, e, 1) for i, e in enumerate(news))])
    [line] = [line.plain for line in screen(board, 110, 45).renderables if line.plain.startswith("checkpoint")]  # type: ignore[union-attr]
    assert words in line
    assert (board.saved.trouble in status.words(board, 50)) and bool(board.saved.trouble) == ("503" in words or "kept" in words)


def on_terminal(run_dir: Path, *options: str) -> tuple[int, int, list[object], subprocess.Popen[bytes]]:
    """`goodrun top` on a terminal of its own: both ends, how it was set before, and the process."""
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    code = "import sys; from goodrun.elastic_runner.reading import top_main; sys.exit(top_main(sys.argv[1:]))"
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    proc = subprocess.Popen([sys.executable, "-c", code, str(run_dir), *options], stdin=slave, stdout=slave, stderr=slave, env=env)
    return master, slave, before, proc


def drawn(board: Board, width: int, height: int, **more: object) -> list[str]:
    """The picture as lines of text."""
    console = Console(width=width, height=height, force_terminal=False, highlight=False)
    with console.capture() as caught:
        console.print(screen(board, width, height, **more))  # type: ignore[arg-type]
    return caught.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 45), (40, 12), (300, 80)])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    """Narrow or wide, small or large, with many ranks and a long log: no line is too long, no picture too high."""
    for ranks in (2, 64):
        lines = drawn(Board().extend(story(ranks)), width, height, footer="q quit", log=["x" * 500] * 50)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert lines[-1].startswith("q quit")


def test_what_it_shows() -> None:
    """State, world, step, goodput with its losses, ranks, checkpoints, restarts and the last lines of the rank that failed."""
    text = "\n".join(drawn(Board().extend(story()), 160, 45, log=["ValueError: no"]))
    for words in (
        *("r1", "train.py", "training", "world 3 of 4", "step 56", "goodput", "of capacity", "1 min", "lost to", "data wait"),
        *(
            "25 %",
            "step 40 durable",
            "step 50 under way",
            "rank 1 lost its slot",
            "restart without slot 1",
            "last lines of rank 1",
            "ValueError: no",
        ),
    ):
        assert words in text, words
    assert "×" in text and "▇" in text + "█▇"


def test_the_states() -> None:
    """What the run is at follows its events: starting, training, recovering, training, ended."""
    board, seen = Board(), []
    for e in [*story(), at(90, ev.RunEnded(outcome="succeeded"), 1)]:
        board.add(e)
        if not seen or seen[-1] != board.state:
            seen.append(board.state)
    assert seen == ["starting", "training", "recovering", "training", "succeeded"]


def test_a_hung_rank_is_shown_as_hung() -> None:
    """A rank that a detector named, and one whose process ended, are marked; the worst come first where not all fit."""
    told = [*story(64), at(81, ev.RankHung(rank=60, slot=61), 1), at(82, ev.RankExited(rank=7, code=-9), 1)]
    board = Board().extend(told)
    health = {r.rank: r.health for r in board.ranks()}
    assert (health[60], health[7], health[0]) == ("hung", "gone", "ok")
    text = "\n".join(drawn(board, 80, 24))
    assert "hung" in text and "gone" in text and "more, none of them worse" in text


def test_a_record_that_grows_is_followed(tmp_path: Path) -> None:
    """What is there comes first, then what is added; half a line waits until it is whole, and nothing comes twice."""
    journal = Journal(tmp_path)
    journal.write(ev.RunStarted(run_id="a"))
    with open(tmp_path / FILE_NAME, "ab") as f:
        f.write(b'{"event": "notice", "te')
        f.flush()
        follower = Follower(tmp_path)
        assert [e.name for e in follower.so_far()] == ["run_started"]
        assert follower.news() == []
        f.write(b'xt": "whole"}\n')
        f.flush()
    assert [e.text for e in follower.news() if isinstance(e, ev.Notice)] == ["whole"]
    journal.write(ev.Notice(text="more"))
    journal.close()
    assert len(follower.news()) == 1
    assert follower.news() == []


def test_without_a_terminal_it_prints_the_state_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Piped, `goodrun top` prints the final state and ends; `--json` gives the same in JSON; the record is left as it was."""
    lines = [json.dumps({"event": e.name, **dataclasses.asdict(e)}) + "\n" for e in story()]
    (tmp_path / FILE_NAME).write_text("".join(lines))
    before = (tmp_path / FILE_NAME).read_bytes()
    assert top_main([str(tmp_path)]) == 0
    assert "rank 1 lost its slot" in capsys.readouterr().out
    assert top_main([str(tmp_path), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["world_size"], body["step"], len(body["ranks"]), body["restarts"]) == (3, 56, 3, 1)
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert top_main([str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("options", "keys"),
    [((), b"q"), (("--replay", "--speed", "20"), b"p\x1b[C\x1b[D\x1b[A\x1b[Bpq"), (("--replay", "--speed", "1e6"), b"")],
)
def test_on_a_terminal(tmp_path: Path, options: tuple[str, ...], keys: bytes) -> None:
    """On a terminal it fills the screen, obeys its keys, ends by itself after a replay, and gives the terminal back as it was."""
    (tmp_path / FILE_NAME).write_text("".join(json.dumps({"event": e.name, **dataclasses.asdict(e)}) + "\n" for e in story()))
    master, slave, before, proc = on_terminal(tmp_path, *options)
    shown, waiting = b"", [keys[i : i + 3] if keys[i] == 27 else keys[i : i + 1] for i in range(len(keys)) if keys[i] not in b"[ABCD"]
    while proc.poll() is None or select.select([master], [], [], 0)[0]:
        if select.select([master], [], [], 0.05)[0]:
            shown += os.read(master, 65536)
        if waiting and b"q quit" in shown:
            os.write(master, waiting.pop(0))
    assert proc.wait(10) == 0, shown
    last = "rank 1 lost its slot" if b"p" not in keys else "attempts, newest first"
    assert b"\x1b[?1049l" in shown and shown.rfind(last.encode()) > shown.rfind(b"\x1b[?1049l")
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


def test_a_running_run_is_followed_on_a_terminal(tmp_path: Path) -> None:
    """What the launcher writes while the dashboard is open appears on it by itself."""
    journal = Journal(tmp_path)
    for e in story():
        journal.write(dataclasses.replace(e, t=0.0))
    master, slave, _, proc = on_terminal(tmp_path)
    shown, ended = b"", False
    while b"succeeded" not in shown:
        shown += os.read(master, 65536)
        if b"q quit" in shown and not ended:
            journal.write(ev.RunEnded(outcome="succeeded"))
            ended = True
    os.write(master, b"q")
    while proc.poll() is None:
        if select.select([master], [], [], 0.05)[0]:
            os.read(master, 65536)
    assert proc.returncode == 0
    journal.close()
    os.close(master)
    os.close(slave)
