"""The line at the bottom of the terminal while a run goes on: state, step, ranks, goodput, restarts, checkpoint.

The terminal's last row is taken out of what scrolls (DECSTBM), so what the ranks print, progress bars too, goes on above it as ever. Each
picture is one write that saves and restores the cursor.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from contextlib import suppress

from ...progress import Progress
from .. import events as ev
from ..dashboard.board import Board
from ..events import Event

_FIRST_AFTER_S, _EVERY_S = 2.0, 1.0
"""A run that is over sooner shows none."""
_LEAST_ROWS = 5
_SAVE, _RESTORE = "\x1b7", "\x1b8"


def words(board: Board, step: int) -> str:
    """What the line says of a run as it stands; `step`: the furthest finished, -1 for none."""
    asked, here = len(board.run.slots), len(board.slots)
    ranks = f"{board.world_size} of {asked} ranks" if here == board.world_size != asked else f"{board.world_size} ranks"
    parts = [f"goodrun {board.state}", f"step {step}" if step >= 0 else "", ranks if board.world_size else ""]
    parts.append(f"goodput {100 * board.goodput.time_goodput:.0f} %")
    if restarts := board.history.restarts:
        parts.append(f"{restarts} restart" + "s" * (restarts > 1))
    if (durable := board.checkpoints[1]) >= 0:
        parts.append(f"checkpoint {durable}")
    parts.append(board.saved.trouble)
    parts.append(board.cause)
    return "  ".join(p for p in parts if p)


class BottomRow:
    """The last row of the terminal behind a descriptor. Whoever sizes the terminal anew gets it anew."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rows = 0

    def show(self, text: str) -> None:
        """Put `text` there, cut to the width; nothing while the job is in the background or the terminal is too low or holds its output."""
        size = os.get_terminal_size(self._fd)
        if not self._ours() or size.lines < _LEAST_ROWS or not self._takes(0):
            return
        begin = "" if size.lines == self._rows else self._wiped() + _reserved(size.lines)
        self._rows = size.lines
        line = "".join(c if c.isprintable() else " " for c in text)[: size.columns - 1]
        os.write(self._fd, f"{begin}{_SAVE}\x1b[{size.lines};1H\x1b[2K\x1b[7m{line}\x1b[0m{_RESTORE}".encode())

    def give_back(self) -> None:
        """The terminal scrolls as before, and the row is empty."""
        if self._rows and self._takes(200):
            os.write(self._fd, self._wiped().encode())
        self._rows = 0

    def _wiped(self) -> str:
        return f"{_SAVE}\x1b[r\x1b[{self._rows};1H\x1b[2K{_RESTORE}" if self._rows else ""

    def _ours(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # a terminal, but not the one that controls this session: nobody has a prompt there
            return True

    def _takes(self, within_ms: int) -> bool:
        """Whether a write would not block: Ctrl-S must stop the picture, not the run."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(within_ms))


def _reserved(rows: int) -> str:
    """Leave the last row out of what scrolls. One line down and up again: a cursor that stands in it is moved out, in its column."""
    return f"\x1bD\x1bM{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}"


class StatusLine:
    """Draws the line from a thread of its own until the run has ended."""

    def __init__(self, row: BottomRow) -> None:
        self._row = row
        self._board = Board()
        self._step = -1
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="goodrun-status", daemon=True)
        self._thread.start()

    def add(self, e: Event) -> None:
        """Take one event; the last one of a run gives the row back before anything more is said."""
        with self._lock:
            self._board.add(e)
            if isinstance(e, ev.AttemptStarted):
                self._step = -1
        if isinstance(e, ev.RunEnded):
            self.close()

    def look(self, pages: Sequence[Progress]) -> None:
        """Where the ranks are now: events tell it only every few seconds."""
        self._step = max((p.step for p in pages), default=-1)

    def close(self) -> None:
        """Give the row back; more than once does no harm."""
        self._over.set()
        with self._lock, suppress(OSError):
            self._row.give_back()

    def _work(self) -> None:
        wait = _FIRST_AFTER_S
        while not self._over.wait(wait):
            wait = _EVERY_S
            with self._lock, suppress(OSError):  # the terminal is gone: so is the need
                if not self._over.is_set():
                    self._row.show(words(self._board, max(self._step, self._board.step)))
