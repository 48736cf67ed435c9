"""`goodrun top`: finds the run, follows or replays it, and obeys the keys."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..events import Event
from ..goodput.command import goodput_as_dict
from ..runs import find_run, launcher_alive, runs_home
from .board import Board
from .follow import Follower

if TYPE_CHECKING:
    from rich.console import Console

REFRESH_S = 0.5
_REPLAY_S = 30.0
_LOG_BYTES = 8192


def main(argv: list[str]) -> int:
    """`goodrun top [RUN] [--replay [--speed X]]`."""
    from ..reading import answered, parser_of_run

    parser = parser_of_run("top", "Show a run as it stands: live while it runs, or as it was.")
    parser.add_argument("--replay", action="store_true", help="play a run back from its beginning")
    parser.add_argument("--speed", type=_speed, metavar="X", help="so many times as fast as it was (default: the whole in 30 s)")
    args = parser.parse_args(argv)

    def answer() -> str:
        follower = Follower(find_run(args.run, runs_home(os.environ), Path.cwd()))
        return _show(follower, args)

    return answered("top", answer)


def board_as_dict(board: Board) -> dict[str, Any]:
    """What the dashboard shows, in JSON's own types."""
    saved, durable = board.checkpoints
    return {
        "schema": 1,
        "run_id": board.run.run_id,
        "state": board.state,
        "world_size": board.world_size,
        "step": board.step,
        "ranks": [asdict(r) for r in board.ranks()],
        "saved_step": saved,
        "durable_step": durable,
        "upload": {"step": upload.step, "done": upload.done, "total": upload.total} if (upload := board.saved.upload) else None,
        "storage_trouble": board.saved.trouble,
        "restarts": board.history.restarts,
        "goodput": goodput_as_dict(board.goodput),
    }


def last_lines(board: Board, n: int = 30) -> list[str]:
    """What the rank that failed first wrote last, else its exception."""
    failed = board.failed
    if failed is None:
        return []
    try:
        with open(failed.log, "rb") as f:
            f.seek(max(os.fstat(f.fileno()).st_size - _LOG_BYTES, 0))
            lines = f.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    lines = [line for line in lines if line.strip()] or failed.message.splitlines()
    return ["".join(c if c.isprintable() else " " for c in line) for line in lines[-n:]]


def _show(follower: Follower, args: argparse.Namespace) -> str:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if args.json:
        return json.dumps(board_as_dict(_settled(Board().extend(follower.so_far()))), indent=2) + "\n"
    if not console.is_terminal or console.is_dumb_terminal:
        return _once(_settled(Board().extend(follower.so_far())), console)
    board = _Player(follower.so_far(), args.speed).play(console) if args.replay else _follow(follower, console)
    return _once(board, console)


def _once(board: Board, console: Console) -> str:
    from .screen import screen

    with console.capture() as caught:
        console.print(screen(board, console.width, max(console.height, 24), log=last_lines(board)))
    return caught.get()


def _settled(board: Board) -> Board:
    """A run whose launcher is gone without a word has died."""
    if board.state in ("starting", "training", "recovering", "stopping") and launcher_alive(board.run) is False:
        board.state = "died"
    return board


def _follow(follower: Follower, console: Console) -> Board:
    from rich.live import Live

    from .keys import Keys
    from .screen import screen

    board, scroll, paused, shown = Board().extend(follower.so_far()), 0, False, ""
    with Live(console=console, screen=True, auto_refresh=False) as live, Keys() as keys:
        key, drawn_at = "first", console.size
        while True:
            news = [] if paused else follower.news()
            state = _settled(board.extend(news)).state
            if news or key or console.size != drawn_at or state != shown:  # a picture takes time that the run may need
                drawn_at, shown = console.size, state
                footer = "q quit  p pause  ↑↓ attempts" + ("  [paused]" if paused else "")
                picture = screen(board, console.width, console.height - 1, footer=footer, log=last_lines(board), scroll=scroll)
                live.update(picture, refresh=True)
            match key := keys.wait(REFRESH_S):
                case "q":
                    return board
                case "p":
                    paused = not paused
                case "up":
                    scroll = max(scroll - 1, 0)
                case "down":
                    scroll += 1
                case _:
                    pass


class _Player:
    """Plays a list of events back at some speed."""

    def __init__(self, events: list[Event], speed: float | None) -> None:
        self._events = events
        self._at = _axis(events)
        whole = self._at[-1] if self._at else 0.0
        self._speed = speed or max(whole / _REPLAY_S, 1.0)
        self._whole = whole

    def until(self, position: float) -> Board:
        """The board as it stood so many seconds into the run."""
        return Board().extend(e for e, at in zip(self._events, self._at, strict=True) if at <= position)

    def play(self, console: Console) -> Board:
        """Play until the end or `q`; returns the board as it then stands."""
        from rich.live import Live

        from .keys import Keys
        from .screen import screen

        position, shown, paused, scroll = 0.0, 0, False, 0
        board = Board()
        with Live(console=console, screen=True, auto_refresh=False) as live, Keys() as keys:
            before = time.monotonic()
            while True:
                while shown < len(self._events) and self._at[shown] <= position:
                    board.add(self._events[shown])
                    shown += 1
                footer = f"replay {position:.0f} of {self._whole:.0f} s, {self._speed:.3g}x  q quit  p pause  ←→ jump" + (
                    "  [paused]" if paused else ""
                )
                picture = screen(board, console.width, console.height - 1, footer=footer, log=last_lines(board), scroll=scroll)
                live.update(picture, refresh=True)
                key = keys.wait(REFRESH_S / 2)
                now = time.monotonic()
                position += 0.0 if paused else (now - before) * self._speed
                before = now
                if key == "q" or (shown == len(self._events) and key == "" and not paused):
                    return board
                if key == "p":
                    paused = not paused
                elif key in ("left", "right"):
                    position = min(max(position + self._whole * (0.05 if key == "right" else -0.05), 0.0), self._whole)
                    if key == "left":
                        board = self.until(position)
                        shown = sum(at <= position for at in self._at)
                elif key in ("up", "down"):
                    scroll = max(scroll + (1 if key == "down" else -1), 0)


def _axis(events: Sequence[Event]) -> list[float]:
    """Seconds since the first event; a launcher's clock that begins anew goes on where the last one stopped."""
    at: list[float] = []
    offset, newest = (-events[0].t if events else 0.0), 0.0
    for e in events:
        if e.name == "run_started" or e.t + offset < newest - 60:
            offset = newest - e.t
        newest = max(newest, e.t + offset)
        at.append(newest)
    return at


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed: write 10 for ten times as fast")
    return value
