"""Where runs live, what each came to, and how a run is found by what a person calls it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from random import Random

from . import events as ev
from .errors import UsageError
from .history import fold
from .journal import FILE_NAME, PROGRESS_LINE, parse_line

_CLOCK_SLACK_S = 60.0


class RunNotFound(UsageError, ValueError):
    """No run, or more than one, answers to what the user named: theirs to mend; exit status 2."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run in a list.

    `started` is when its newest life began (ISO). `outcome` is RunEnded's, else "running", "died" (the launcher is gone), "unknown"
    (it runs, or ran, on another host) or "unreadable".
    """

    id: str
    script: str
    started: str
    outcome: str
    restarts: int
    step: int
    path: str


def runs_home(env: Mapping[str, str]) -> Path:
    """The directory that holds the runs whose place was not given with --run-dir."""
    if own := env.get("GOODRUN_HOME"):
        return Path(own) / "runs"
    state = env.get("XDG_STATE_HOME", "")
    # the XDG specification has relative paths ignored
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "goodrun" / "runs"


def can_be_made(directory: Path) -> bool:
    """Whether `directory` could be made and written to, as far as the nearest parent that exists can tell."""
    while not directory.exists():
        directory = directory.parent
    return os.access(directory, os.W_OK | os.X_OK)


def new_run_id(now: datetime, random: Random) -> str:
    """A fresh id; ids sort by the time at which their runs began, to the second."""
    return f"{now:%Y%m%d-%H%M%S}-{random.getrandbits(16):04x}"


def remember(home: Path, run_dir: Path, run_id: str = "") -> None:
    """Let a run that lives elsewhere be found under its id (else its directory's name). Best effort: a full disk costs only this."""
    target, link = os.path.abspath(run_dir), home / (run_id or os.path.basename(os.path.abspath(run_dir)))
    if os.path.abspath(link) == target:
        return
    with suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink()
        link.symlink_to(target, target_is_directory=True)


def forget(home: Path, run_dir: Path) -> None:
    """Take a run that never came to be away again, with the link that `remember` made to it."""
    shutil.rmtree(run_dir, ignore_errors=True)
    with suppress(OSError):
        for link in home.iterdir():
            if link.is_symlink() and os.path.realpath(link) == os.path.realpath(run_dir):
                link.unlink()


def list_runs(home: Path, alive: Callable[[ev.RunStarted], bool | None] | None = None) -> list[RunSummary]:
    """All runs under `home`, newest first; `alive` says whether a launcher still runs (None: cannot be known from here)."""
    found = {os.path.realpath(path): path for path in _run_dirs(home)}  # an old id may lead to the same place as the newest
    runs = [summarize(path, alive) for path in found.values()]
    return sorted(runs, key=lambda r: (_moment(r.started), r.id), reverse=True)


def summarize(run_dir: Path, alive: Callable[[ev.RunStarted], bool | None] | None = None) -> RunSummary:
    """What one run came to, read from its record."""
    try:
        told = list(_telling(run_dir))
    except OSError:
        return RunSummary(id=run_dir.name, script="", started="", outcome="unreadable", restarts=0, step=-1, path=str(run_dir))
    history = fold(told)
    newest = next((e for e in reversed(told) if isinstance(e, ev.RunStarted)), None)
    outcome = history.outcome
    if outcome == "running":
        lives = (alive or launcher_alive)(newest) if newest else None
        outcome = "unknown" if lives is None else "running" if lives else "died"
    return RunSummary(
        id=history.run_id or run_dir.name,
        script=history.script,
        started=newest.wall if newest else history.started_wall,
        outcome=outcome,
        restarts=history.restarts,
        step=history.best_step,
        path=str(run_dir),
    )


def find_run(text: str | None, home: Path, cwd: Path) -> Path:
    """The directory of the run that `text` names: a path, an id or the unambiguous beginning of one; None is the newest run.

    Raises:
        RunNotFound: none does, or several do.
    """
    if text is None:
        if runs := list_runs(home):
            return Path(runs[0].path)
        raise RunNotFound(f"there is no run in {home} yet: name the directory of one, or start one with `goodrun train.py`")
    way_out = "`goodrun runs` lists those there are"
    if not text.strip():
        raise RunNotFound(f"the name of the run is empty ({text!r}), and {home} holds none by that name: {way_out}")
    place = cwd / text
    if _is_run(place):
        return place
    if place.name == FILE_NAME and os.path.isfile(place):
        return place.parent
    ids = {path.name: path for path in _run_dirs(home) if path.name.startswith(text)}
    if text in ids:
        return ids[text]
    if len({os.path.realpath(path) for path in ids.values()}) == 1:
        return next(iter(ids.values()))
    if ids:
        some = ", ".join(sorted(ids)[:3]) + (", …" if len(ids) > 3 else "")
        raise RunNotFound(f"{text!r} fits {len(ids)} runs in {home} ({some}): give more of the id; {way_out}")
    if os.path.isdir(place):
        raise RunNotFound(f"{text!r} is a directory without {FILE_NAME}, so no run, and {home} holds no run of that name: {way_out}")
    raise RunNotFound(f"no run is called {text!r}, neither as a path nor as an id in {home}: {way_out}")


def launcher_alive(run: ev.RunStarted) -> bool | None:
    """Whether the process that wrote `run` still lives; None if that was on another host or it did not say which."""
    if run.node != socket.gethostname() or run.pid <= 0:
        return None
    try:
        with open(f"/proc/{run.pid}/stat", "rb") as f:
            state, *rest = f.read().rpartition(b")")[2].split()
        with open("/proc/stat", "rb") as f:
            boot = next(float(line.split()[1]) for line in f if line.startswith(b"btime"))
        began = boot + int(rest[18]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return os.path.exists(f"/proc/{run.pid}")
    # a process that began well after the run did has only inherited the number
    return state not in (b"Z", b"X") and began <= _moment(run.wall) + _CLOCK_SLACK_S


def _is_run(path: Path) -> bool:
    return os.path.isfile(path / FILE_NAME)  # not Path.is_file: that raises for a name that is too long


def _run_dirs(home: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(home))
    except OSError:
        return
    yield from (home / name for name in names if _is_run(home / name))


def _telling(run_dir: Path) -> Iterator[ev.Event]:
    """The events of a run, but of successive progress lines, which are most of a long record, only the last."""
    progress: bytes | None = None
    with open(run_dir / FILE_NAME, "rb") as f:
        for line in f:
            if line.startswith(PROGRESS_LINE):
                progress = line
                continue
            for told in (progress, line):
                if told is not None and (event := parse_line(told)) is not None:
                    yield event
            progress = None
    if progress is not None and (event := parse_line(progress)) is not None:
        yield event


def _moment(wall: str) -> float:
    try:
        at = datetime.fromisoformat(wall)
    except ValueError:
        return 0.0
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()
