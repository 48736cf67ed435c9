"""The line at the bottom of the terminal: there while a run goes on, gone afterwards, and never in the way of what the ranks print."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading

import pyte
import pytest

from goodrun.elastic_runner import events as ev
from goodrun.elastic_runner.dashboard.board import Board
from goodrun.elastic_runner.exporting.status import BottomRow, words

COLUMNS, ROWS = 80, 12


class Terminal:
    """A terminal of its own: what programs write to `fd`, drawn by an emulator."""

    def __init__(self) -> None:
        self._master, self.fd = pty.openpty()
        self.screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000)
        self._stream = pyte.ByteStream(self.screen)
        self._raw = b""
        self.resize(COLUMNS, ROWS)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # nobody has it open any more
                return
            self._raw += data
            self._stream.feed(data)

    @property
    def bottom(self) -> str:
        return self.screen.display[-1].rstrip()

    @property
    def raw(self) -> bytes:
        return self._raw

    def close(self) -> None:
        """After this, everything that was written is drawn."""
        if self.fd >= 0:
            os.close(self.fd)
            self._thread.join(10)
            os.close(self._master)
            self.fd = -1


@pytest.fixture
def terminal():
    made = Terminal()
    yield made
    made.close()


def on(terminal, job, *options):
    """`goodrun bar.py` with its output on the terminal."""
    launcher = ("sh", "-c", 'exec "$@" >/proc/self/fd/$TTY_FD 2>&1', "sh")
    return job(
        *("--nproc-per-node", 2, *options, "bar.py"),
        prefix=launcher,
        env={"TERM": "xterm-256color", "TTY_FD": str(terminal.fd)},
        pass_fds=(terminal.fd,),
    )


def test_it_is_there_while_the_run_goes_on_and_gone_afterwards(job, terminal):
    """State and step are in the last row; what ranks print stands above it, whole; at the end all is as before."""
    j = on(terminal, job)
    seen = j.until(lambda: (m := re.fullmatch(r"goodrun training  step (\d+)  2 ranks  goodput .*", terminal.bottom)) and m)
    j.until(lambda: (m := re.match(r"goodrun training  step (\d+)", terminal.bottom)) and int(m[1]) > int(seen[1]))
    assert terminal.screen.margins == (0, ROWS - 2)
    (j.where / "enough").touch()
    j.ok()
    terminal.close()
    assert terminal.screen.margins is None
    assert not any("goodrun training" in line for line in terminal.screen.display)
    rows = ["".join(row[c].data for c in range(COLUMNS)).rstrip() for row in terminal.screen.history.top] + terminal.screen.display
    lines = [int(m[1]) for row in rows if (m := re.fullmatch(r"line (\d+)\s*", row))]
    assert lines and lines == [10 * (i + 1) for i in range(len(lines))]


@pytest.mark.parametrize("how", ["--no-status", "dumb"])
def test_who_wants_none_gets_none(job, terminal, how):
    """With --no-status, or on a terminal that cannot move its cursor, not one control sequence is written."""
    j = job("--nproc-per-node", 1, "bar.py", env={"TERM": "dumb"}) if how == "dumb" else on(terminal, job, how)
    text = (lambda: j.out) if how == "dumb" else (lambda: terminal.raw.decode())
    j.until(lambda: "line 60" in text())  # three seconds: it would be there
    (j.where / "enough").touch()
    j.ok()
    terminal.close()
    assert "\x1b" not in text() + j.err


def test_a_terminal_that_is_sized_anew(terminal):
    """The line moves to the new last row, and leaves none behind; a terminal that is too low has none."""
    row = BottomRow(terminal.fd)
    os.write(terminal.fd, b"hello")
    row.show("first")
    terminal.resize(60, 20)
    row.show("second\x1b[2J\n" + "x" * 100)
    terminal.resize(60, 4)
    row.show("third")
    row.give_back()
    terminal.close()
    assert b"third" not in terminal.raw and b"\x1b[20;1H\x1b[2K\x1b[7msecond [2J " + b"x" * 48 + b"\x1b[0m" in terminal.raw
    assert terminal.screen.margins is None


def test_what_it_says():
    """State, step, ranks of those asked for, goodput, restarts, the newest durable checkpoint; while recovering, the cause."""
    board = Board()
    for e in (
        ev.RunStarted(t=1.0, slots=(0, 1)),
        ev.AttemptStarted(t=2.0, world_size=2, slots=(0, 1)),
        ev.FirstStep(t=5.0, step=1, first_step_t=5.0),
        ev.RankProgress(t=10.0, steps=(8, 8), step_t=10.0, durable_step=5),
    ):
        board.add(e)
    assert words(board, 9) == "goodrun training  step 9  2 ranks  goodput 56 %  checkpoint 5"
    board.add(ev.Failed(t=10.0, kind="signal", rank=1, slot=1, step=8, cause="rank 1 killed by SIGKILL", fault_t=10.0))
    assert words(board, 9).startswith("goodrun recovering  step 9") and words(board, 9).endswith("rank 1 killed by SIGKILL")
    for e in (
        ev.Decided(t=10.0, action="restart without", slots=(0,), reason=""),
        ev.Stopped(t=10.1),
        ev.AttemptStarted(t=10.1, attempt=1, world_size=1, slots=(0,)),
    ):
        board.add(e)
    assert "1 of 2 ranks" in words(board, -1) and "1 restart" in words(board, -1)
